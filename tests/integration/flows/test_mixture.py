"""Which other corpora a run on a mixture is handed, and what that does to the key of training."""

import pytest

from flows.support.inputs import mixed_in, others
from flows.support.planned_jobs import planned_job
from tasks.artifacts import Checkpoint, Tokens
from tasks.common.errors import Unknown
from tasks.config.flows import RetrainConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.registry.versions import publish
from tasks.storage import open_store
from tasks.storage.manifest import Provenance
from tasks.train import train

MIXTURE = {"code": 2.0, "prose": 1.0}
OWN = Tokens(name="code", version="0" * 64, uri="")
BASE = Checkpoint(name="base", version="1" * 64, uri="")
OTHER = Tokens(name="prose", version="2" * 64, uri="")


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "tokens.json").write_text("{}")
    publish(open_store(tmp_path / "home"), folder, kind="tokens", inputs=(), provenance=Provenance(name="prose"))
    return tmp_path / "home"


def test_the_others_are_found_and_what_there_is_not_is_named(home):
    [found] = mixed_in(open_store(home), "code", TrainingConfig(mixture=MIXTURE), heldout_fraction=0.02)
    assert found.name == "prose" and len(found.version) == 64
    version = {"code": 1.0, f"tokens/prose@{found.version[:12]}": 1.0}
    own = f"dataset/code@{'a' * 64}"
    assert mixed_in(open_store(home), own, TrainingConfig(mixture=version), heldout_fraction=0.02) == (found,)
    assert mixed_in(open_store(home), "code", TrainingConfig(), heldout_fraction=0.02) == ()
    with pytest.raises(Unknown, match="tokens/verse"):
        verse = TrainingConfig(mixture={**MIXTURE, "verse": 1.0})
        mixed_in(open_store(home), "code", verse, heldout_fraction=0.02)


def test_corpora_that_hold_out_another_fraction_are_refused_by_name(home, tmp_path):
    (tmp_path / "tokens" / "tokens.json").write_text('{"vocab_size": 1}')
    made = Provenance(name="prose", config={"preprocessing": {"heldout_fraction": 0.05}})
    publish(open_store(home), tmp_path / "tokens", kind="tokens", inputs=(), provenance=made)
    mixed = TrainingConfig(mixture=MIXTURE)
    said = "dataset/code, which holds out 0.02 .*dataset/prose, which holds out 0.05.*heldout_fraction = 0.05, or preprocess"
    with pytest.raises(ValueError, match=said):
        mixed_in(open_store(home), "code", mixed, heldout_fraction=0.02)
    assert len(mixed_in(open_store(home), "code", mixed, heldout_fraction=0.05)) == 1


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ({"prose": 1.0, "verse": 1.0}, "no share for the run's own tokens: add code"),
        ({**MIXTURE, "tokens/prose": 1.0}, "names tokens/prose twice"),
        ({"code": 1.0, "checkpoint/prose": 1.0}, "is not a reference to a tokens"),
    ],
)
def test_a_mixture_that_is_none_is_refused(mixture, said):
    with pytest.raises(ValueError, match=said):
        others("code", TrainingConfig(mixture=mixture))


def test_the_job_is_handed_every_corpus_by_its_name(home, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    planned = planned_job("train", "code", RetrainConfig(training=TrainingConfig(mixture=MIXTURE)))
    assert set(planned.job.inputs) == {"tokens", "tokens-prose"}
    assert planned.job.artifacts["tokens-prose"].startswith("tokens/prose@")


def key(base, mixed):
    around = {"how": ExecutionConfig(), "under": None, "on": None}
    return train._call((OWN, TrainingConfig(), base, mixed), around)


def test_what_is_mixed_in_is_in_the_key_and_in_the_lineage_and_changes_no_other_key():
    assert list(key(None, ()).arguments["arguments"]) == ["tokens", "config"]
    assert list(key(BASE, ()).arguments["arguments"]) == ["tokens", "config", "base"]
    assert key(None, (OTHER,)).handed == [OWN, OTHER] and key(BASE, (OTHER,)).handed == [OWN, BASE, OTHER]
    newer = OTHER.model_copy(update={"version": "3" * 64})
    assert len({key(*given).key for given in [(None, ()), (None, (OTHER,)), (None, (newer,)), (BASE, (OTHER,))]}) == 4
