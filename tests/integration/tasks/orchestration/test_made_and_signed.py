"""What a home signs is what its stage made, and made of: not what the store says of it a moment later."""

import json

import pytest

from tasks.artifacts import Checkpoint
from tasks.common.errors import IntegrityError
from tasks.compute.job import JobResult
from tasks.config.flows import RetrainConfig
from tasks.orchestration.promotion import sign
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage_context import Work, publish, working
from tasks.registry.versions import publish as publish_artifact
from tasks.security.signatures import require_signed
from tasks.storage import open_store
from tasks.storage.manifest import Provenance, manifest_bytes
from tasks.storage.signed import lineage_digest


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def job(home):
    """One that ended, with what it made."""
    folder = home / "jobs" / "train-1"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "model.safetensors").write_bytes(b"weights")
    return JobResult(id="train-1", folder=str(folder), submissions=1, attempts=1, adopted=False, result={})


def stage(job, *, then=lambda: None):
    """Publish and sign what the job made, as training does; `then` happens in between."""
    with lifecycle("retrain", RetrainConfig(), subject="m", stages=("train",), dry=True) as run:
        work = Work("train", "0" * 64, run, "", handed=[], context=["plan/m@" + "1" * 64], job=job)
        with working(work):
            made = publish(job.output, Checkpoint, name="m")
            then()
            sign(made)
            return work.made[made.ref]


def rewritten(home, **said):
    """The checkpoint's manifest in the store with another provenance; its bytes and its version are the same."""
    store = open_store(home)
    [manifest] = store.manifests("checkpoint")
    forged = manifest.model_copy(update={"provenance": manifest.provenance.model_copy(update=said)})
    [path] = (home / "store").glob("artifacts/checkpoint/m/*/manifest.json")
    path.chmod(0o644)
    path.write_bytes(manifest_bytes(forged))


def test_a_lineage_that_is_written_between_publishing_and_signing_is_not_signed(home, job):
    made = stage(job, then=lambda: rewritten(home, commit="f" * 40, inputs=("tokens/vetted@" + "a" * 64,)))
    store = open_store(home)
    assert require_signed(store, home, made).lineage == lineage_digest(made.provenance)
    [stored] = store.manifests("checkpoint")
    assert stored.version == made.version
    with pytest.raises(IntegrityError, match="made for something else"):
        require_signed(store, home, stored)


def test_bytes_that_are_there_already_with_a_lineage_that_nobody_signed_are_published_anew(home, job, tmp_path):
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "model.safetensors").write_bytes(b"weights")
    vetted = Provenance(name="m", commit="f" * 40)
    there = publish_artifact(open_store(home), tmp_path / "same", kind="checkpoint", inputs=(), provenance=vetted)
    made = stage(job)
    [stored] = open_store(home).manifests("checkpoint")
    assert (made.version, made.provenance.commit) == (there.version, stored.provenance.commit) != ("", "f" * 40)
    assert stored.provenance.stage == "train" and require_signed(open_store(home), home, stored)
    again = json.loads((home / "jobs" / "train-1" / "published-checkpoint.json").read_text())
    assert again == {"version": made.version, "lineage": lineage_digest(made.provenance)}
    stage(job)  # its folder is gone: the note says what was published
    rewritten(home, commit="f" * 40)
    with pytest.raises(IntegrityError, match="another lineage in the store"):
        stage(job)
