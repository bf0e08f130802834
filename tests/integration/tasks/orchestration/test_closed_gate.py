"""A stage whose gate closes inside of it: what it measured is judged once, and the next run measures anew. With a real job."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.artifacts import Check, Checkpoint, Cluster, require_checks
from tasks.common.errors import GateFailed
from tasks.config.flows import RetrainConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import run_job
from tasks.report.page import write_report
from tasks.serving.journal import remember_refused
from tasks.serving.known import require_accepted

PROGRAM = """
import sys
from tasks.jobs.node.runtime import main

def run(rank):
    with open(rank.folder.parent / "starts", "a") as file:
        file.write("x")
    return {"starts": (rank.folder.parent / "starts").stat().st_size}

if __name__ == "__main__":
    sys.exit(main(run))
"""


@stage(version=1, name="export")
def strict(seed: int, *, on: Cluster) -> Checkpoint:
    """Its job says how often it ran; once is not enough."""
    job = run_job(Program("testjobs.program", {}, {}, ranks=1, threads=on.threads_per_node), on=on)
    starts = job.result["starts"]
    require_checks(
        "export", (Check(name="starts", measured=starts, limit=">= 2", passed=starts >= 2, remedy="Again."),)
    )
    return Checkpoint(name="x", version="0" * 64, uri="")


def attempt(*, threads):
    on = Cluster(name="here", backend="local", nodes=1, ranks_per_node=1, threads_per_rank=threads)
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("export",)) as run:
        return strict._reuse_or_execute(run, run.outcome_for("export"), strict._call((7,), {"on": on}))


def test_what_closed_a_gate_is_measured_again_by_the_next_run_with_other_threads_too(tmp_path, monkeypatch):
    (tmp_path / "testjobs").mkdir()
    (tmp_path / "testjobs" / "__init__.py").touch()
    (tmp_path / "testjobs" / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    with pytest.raises(GateFailed, match="starts"):
        attempt(threads=1)
    assert attempt(threads=2).name == "x"
    assert (tmp_path / "home" / "jobs" / "starts").read_text() == "xx"


def page_of(run):
    """As flows/support/prefect_page.py writes it, which also tells Prefect."""
    about = {"title": "retrain", "status": run.status, "started": "2026-01-31T00:00:00+00:00", "seconds": 1.0}
    about |= dict.fromkeys(("commit", "dirty", "flow_run", "error", "endpoint", "champion"))
    about |= {"dataset": "", "config_digest": "1", "config": {}, "samples": []}
    stages = [outcome.plain() for outcome in run.outcomes.values()]
    path = write_report(run.home / "reports", "one", store=run.store, stages=stages, parts={}, run=about)
    run.result = replace(run.result, report=str(path))


def test_a_model_that_was_rolled_back_ends_the_run_with_a_closed_gate_and_a_page(tmp_path, monkeypatch):
    """Not with a mistake in the page: it reads the check of the error as it reads those of a stage."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    model, endpoint = f"model/tiny@{'a' * 64}", tmp_path / "endpoints" / "tiny"
    endpoint.mkdir(parents=True)
    remember_refused(endpoint, model, "it answers nonsense")
    flow = lifecycle("retrain", RetrainConfig(), subject="x", stages=("deploy",), at_end=page_of)
    with pytest.raises(GateFailed, match="was rolled back on endpoint/tiny") as caught, flow as run:
        run.outcome_for("deploy")
        require_accepted(tmp_path, "tiny", model)
    assert caught.value.exit_code == 3
    assert "promoted again by someone" in Path(run.result.report).read_text()
