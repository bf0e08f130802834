"""What an evaluation is handed: the other corpora of a mixture and what suites read, in its key only where there are any."""

import pytest

from flows.support.planned_jobs import planned_job
from tasks.artifacts import Checkpoint, Dataset, Tokens
from tasks.config.evaluation import EvaluationConfig
from tasks.config.flows import RetrainConfig
from tasks.config.training import TrainingConfig
from tasks.evaluate import evaluate
from tasks.registry.versions import publish
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

SUBJECT = Checkpoint(name="code", version="0" * 64, uri="")
OWN, OTHER = (Tokens(name=name, version=digit * 64, uri="") for name, digit in (("code", "1"), ("prose", "2")))
WORDS = Dataset(name="words", version="3" * 64, uri="")


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "tokens.json").write_text("{}")
    store = open_store(tmp_path / "home")
    publish(store, folder, kind="tokens", inputs=(), provenance=Provenance(name="prose"))
    publish(store, folder, kind="dataset", inputs=(), provenance=Provenance(name="words"))
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))


def test_the_job_is_handed_every_corpus_and_every_file_by_its_name(home):
    config = RetrainConfig(
        training=TrainingConfig(mixture={"code": 2.0, "prose": 1.0}), evaluation=EvaluationConfig(toxic_words="words")
    )
    planned = planned_job("evaluate", "code", config)
    assert set(planned.job.inputs) == {"checkpoint", "tokens", "tokens-prose", "files-words"}
    assert planned.job.artifacts["files-words"].startswith("dataset/words@")
    assert planned.job.settings["source"] == "code"
    alone = planned_job("evaluate", "code", RetrainConfig())
    assert set(alone.job.inputs) == {"checkpoint", "tokens"} and "source" not in alone.job.settings


def key(mixed, files):
    return evaluate._call((SUBJECT, OWN, EvaluationConfig(), mixed, files), {"on": None})


def test_what_is_handed_is_in_the_key_and_changes_no_other_key():
    assert list(key((), ()).arguments["arguments"]) == ["checkpoint", "tokens", "config"]
    assert list(key((OTHER,), ()).arguments["arguments"])[3:] == ["mixed"]
    assert list(key((), (WORDS,)).arguments["arguments"])[3:] == ["mixed", "files"]
    assert key((OTHER,), (WORDS,)).handed == [SUBJECT, OWN, OTHER, WORDS]
    newer = WORDS.model_copy(update={"version": "4" * 64})
    assert len({key(*given).key for given in [((), ()), ((OTHER,), ()), ((), (WORDS,)), ((), (newer,))]}) == 4
