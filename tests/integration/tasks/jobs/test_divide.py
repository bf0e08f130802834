"""A corpus divided by a job: ranks share its files, and a stage has the machines do it when the corpus is large."""

import json
import os
import subprocess
import sys

from data_material import divided_of, write_every_tenth
from waiting import limit

from tasks import validate
from tasks.artifacts import Cluster, Dataset
from tasks.config.data import ValidationConfig
from tasks.config.flows import RetrainConfig
from tasks.orchestration.run import lifecycle
from tasks.storage.manifest import Provenance


def write_corpus(folder, shards=4):
    """100 documents a shard, every tenth of which is the first one again."""
    folder.mkdir()
    for shard in range(shards):
        texts = [f"def f{shard}_{n if n % 10 else 0}():\n    return {n if n % 10 else 0}" for n in range(100)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def divided_by(ranks, corpus, marks, job):
    job.mkdir()
    settings = {"marks": str(marks), "left": True, "threads": 1}
    (job / "config.json").write_text(json.dumps({"settings": settings, "inputs": {"dataset": str(corpus)}}))
    environment = {**os.environ, "HEADWAY_JOB": str(job), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "tasks.jobs.divide"]
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        assert [process.wait(timeout=limit(60)) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    assert not (job / "parts").exists()
    return divided_of(job)


def test_ranks_that_share_the_files_leave_what_one_leaves(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    marks = write_every_tenth(corpus, tmp_path / "marks")
    one, three = (divided_by(ranks, corpus, marks, tmp_path / f"job-{ranks}") for ranks in (1, 3))
    assert one == three and len(one["left/0.jsonl"].splitlines()) == 90
    assert one["left/3.jsonl"] == (corpus / "3.jsonl").read_bytes()
    assert len(one["aside/quarantine.jsonl"].splitlines()) == 30


def judged(corpus, home):
    """The verdict on a corpus in a home of its own, and the jobs that it took."""
    on = Cluster(name="here", backend="local", nodes=1, ranks_per_node=1, threads_per_rank=2)
    with lifecycle("validate", RetrainConfig(), subject="text", stages=("validate",)) as run:
        made = run.store.publish(corpus, kind="dataset", inputs=(), provenance=Provenance(name="text"))
        dataset = Dataset(name="text", version=made.version, uri=run.store.uri_of(made))
        config = ValidationConfig(min_characters=1, max_duplicate_share=1.0)
        call = validate.validate._call((dataset, config, None, None, ()), {"on": on})
        validate.validate._reuse_or_execute(run, run.outcome_for("validate"), call)
        versions = {(manifest.content.kind, manifest.version) for manifest in run.store.manifests()}
    return versions, sorted(path.name.rpartition("-")[0] for path in (home / "jobs").iterdir() if path.is_dir())


def test_a_large_corpus_is_divided_by_the_machines_that_profiled_it_with_the_same_versions(tmp_path, monkeypatch):
    corpus, made = write_corpus(tmp_path / "corpus"), {}
    for where, here in (("launcher", validate.DIVIDED_HERE), ("machines", 0)):
        monkeypatch.setattr(validate, "DIVIDED_HERE", here)
        monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / where))
        made[where] = judged(corpus, tmp_path / where)
    assert made["launcher"][0] == made["machines"][0]
    assert sorted(kind for kind, _ in made["launcher"][0]) == ["dataset", "dataset", "quarantine", "validation"]
    assert made["launcher"][1] == ["validate"] and made["machines"][1] == ["validate", "validate-divide"]
