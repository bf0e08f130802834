"""Whole training runs on mixtures, masked documents and cached tokens: what is read never depends on how, or on interruptions."""

import json
import shutil

import pytest
from training_runs import CONFIG, content, error, last_lines, said_by, write_job, write_tokens

STEPS = 12
MIXED = CONFIG.model_copy(
    update={"steps": STEPS, "mixture": {"own": 2.0, "other": 1.0}, "mask_documents": True, "sequence_length": 24}
)
KILLED_AFTER_6 = """
import os
from tasks.jobs.node.runtime import Rank
told = Rank.metrics
def metrics(self, **values):
    told(self, **values)
    if values["step"] == 6:
        os._exit(9)
Rank.metrics = metrics
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two corpora of one tokenizer."""
    found = {"tokens": tmp_path_factory.mktemp("own"), "tokens-other": tmp_path_factory.mktemp("other")}
    for folder in found.values():
        write_tokens(folder)
    return found


def mixed_job(job, folders, config=MIXED, **more):
    write_job(job, folders["tokens"], config, **more)
    spec = json.loads((job / "config.json").read_text())
    spec["inputs"] = {name: str(folder) for name, folder in folders.items()}
    (job / "config.json").write_text(json.dumps(spec))
    return job


@pytest.fixture(scope="module")
def unbroken(forks, folders, tmp_path_factory):
    job = mixed_job(tmp_path_factory.mktemp("jobs") / "unbroken", folders)
    assert forks(job) == [0, 0], said_by(job)
    return job


def published(job):
    return {name: data for name, data in content(job / "out").items() if name != "README.md"}


def test_a_mixture_goes_on_bit_for_bit_after_a_kill_with_tokens_behind_a_cache(forks, folders, unbroken, tmp_path):
    scratch = f"import os; os.environ['HEADWAY_SCRATCH'] = {str(tmp_path / 'scratch')!r}\n"
    job = mixed_job(tmp_path / "job", folders, execution={"cache_gib": 0.01, "prefetch_steps": 5})
    assert forks(job, fault=scratch + KILLED_AFTER_6)[0] == 9
    assert forks(job, attempt=2, fault=scratch) == [0, 0], said_by(job)
    assert published(job) == published(unbroken)
    assert not list((tmp_path / "scratch").iterdir())


def test_masking_and_mixing_change_the_model(forks, folders, unbroken, tmp_path):
    losses = {"all": [line["loss"] for line in last_lines(unbroken).values()]}
    for name, change in {"unmasked": {"mask_documents": False}, "unmixed": {"mixture": {}}}.items():
        job = mixed_job(tmp_path / name, folders, MIXED.model_copy(update={**change, "steps": 5}))
        assert forks(job) == [0, 0], said_by(job)
        losses[name] = [line["loss"] for line in last_lines(job).values()]
    assert losses["all"][0] not in (losses["unmasked"][0], losses["unmixed"][0])


def test_another_corpus_under_the_same_name_is_refused(forks, folders, unbroken, tmp_path):
    other = shutil.copytree(folders["tokens-other"], tmp_path / "other")
    (other / "tokens.json").write_text((other / "tokens.json").read_text().replace("}", " }"))
    job = mixed_job(shutil.copytree(unbroken, tmp_path / "job"), {**folders, "tokens-other": other})
    assert forks(job, attempt=2) == [1, 1]
    assert "other" in error(job)["message"]
