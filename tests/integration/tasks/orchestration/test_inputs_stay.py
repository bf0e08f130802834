"""What passes through the machine that submits a job: its inputs only where the job's machines share a folder with it."""

from functools import partial

import pytest
from scripted_backend import ScriptedBackend, done

from tasks.artifacts import Checkpoint, Cluster, Dataset
from tasks.common.errors import IntegrityError
from tasks.config.cluster import ClusterConfig
from tasks.config.flows import RetrainConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import files_of, run_job
from tasks.storage.manifest import Provenance

APART = ClusterConfig.model_validate({"backend": "ssh", "ssh": {"hosts": ["a"]}, "mirror": {}})


@stage(version=1, name="train")
def reads(dataset: Dataset, *, on: Cluster) -> Checkpoint:
    with files_of(dataset, "about.json", "not there") as folder:
        assert [path.name for path in folder.iterdir()] == ["about.json"]
    run_job(Program("testjobs.program", {}, {"dataset": dataset}), on=on)
    return Checkpoint(name="x", version="0" * 64, uri="")


@pytest.mark.parametrize(("config", "passes"), [(APART, False), (ClusterConfig(), True)])
def test_a_job_on_machines_that_share_no_folder_is_given_references(tmp_path, monkeypatch, config, passes):
    """The text is damaged where it lies, so that whoever reads it notices."""
    backend = ScriptedBackend(done)
    monkeypatch.setattr("tasks.orchestration.stage_context.open_backend", lambda config: backend)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    for name in ("about.json", "text.jsonl"):
        (tmp_path / "data" / name).write_text("{}")
    on = Cluster(name="x", backend=config.backend, nodes=1, ranks_per_node=1, threads_per_rank=1, config=config)
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("train",)) as run:
        store = run.store
        made = store.publish(tmp_path / "data", kind="dataset", inputs=(), provenance=Provenance(name="text"))
        text = store.fetch(made) / "text.jsonl"
        text.chmod(0o644)
        text.write_text("[]")
        dataset = Dataset(name="text", version=made.version, uri=store.uri_of(made))
        call = partial(reads._reuse_or_execute, run, run.outcome_for("train"), reads._call((dataset,), {"on": on}))
        if passes:
            with pytest.raises(IntegrityError, match=r"text\.jsonl"):
                call()
        else:
            call()
            assert backend.jobs[0].inputs == {"dataset": dataset.uri}
            assert backend.jobs[0].artifacts == {"dataset": dataset.ref}
