"""Drift of files against files, from reading to the evidence: verdicts, too little data, corpora that are no corpora."""

import json
import os
import random
import subprocess
import sys
import time

import pytest
from waiting import limit

from tasks.config.revalidation import DriftConfig
from tasks.data.corpus.inputs import find_shards
from tasks.data.drift.comparison import COLUMNS, Corpus, drift_of

WORDS = [
    f"{a}{b}{c}" for a in ("ba", "to", "ri", "mu", "le") for b in ("n", "st", "rk", "l") for c in ("e", "o", "ing", "a")
]
KEYS = {
    "schema", "reference", "new", "verdict", "why", "false_alarm_rate", "splits", "p_value", "documents", "bytes", "columns",
    "classifier", "seconds",
}  # fmt: skip
COLUMN_KEYS = {
    "name", "title", "unit", "value", "threshold", "p_value", "verdict", "reference", "new", "moved", "histogram", "null",
}  # fmt: skip


def prose(seed, count, words=WORDS):
    dice = random.Random(seed)
    lines = lambda: " ".join(dice.choice(words) for _ in range(dice.randint(5, 20)))  # noqa: E731
    return ["\n".join(lines() for _ in range(dice.randint(1, 8))) for _ in range(count)]


@pytest.fixture
def compared(tmp_path):
    def make(old, new, **settings):
        number = len(list(tmp_path.glob("work-*")))
        corpora = []
        for name, texts in (("old", old), ("new", new)):
            path = tmp_path / f"{name}-{number}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            corpora.append(Corpus(name, tuple(find_shards([path]))))
        config = DriftConfig(**{"splits": 200, **settings})
        work = tmp_path / f"work-{number}"
        found = drift_of(*corpora, config, work, tokenizer=None, text_field="text", workers=2)
        assert set(found) == KEYS and json.loads(json.dumps(found, allow_nan=False)) == found
        assert {row["name"] for row in found["columns"]} == set(COLUMNS) and set(found["columns"][0]) == COLUMN_KEYS
        return found

    return make


def column(found, name):
    return next(row for row in found["columns"] if row["name"] == name)


def test_unchanged_text_is_told_as_unchanged(compared):
    found = compared(prose(1, 300), prose(2, 200))
    assert found["verdict"] == "none" and found["p_value"] > 0.05
    assert found["documents"] == {"reference": 300, "new": 200, "looked_at_reference": 300, "looked_at_new": 200}
    assert len(column(found, "length")["null"]) == 200


def test_other_words_are_found_and_named(compared):
    found = compared(prose(1, 300), [text.replace("muste", "kvasir") for text in prose(2, 300)])
    assert found["verdict"] == "drift" and column(found, "tokens")["verdict"] == "drift"
    assert found["classifier"]["features"][0]["feature"] == "kvasir"
    assert any("kvasir 0.0 % ->" in moved for moved in column(found, "tokens")["moved"])
    assert "kvasir" in found["why"] and "tokens" in found["why"]


@pytest.mark.long
def test_copies_are_found_however_many_documents_there_are(compared):
    found = compared(prose(1, 300), [*prose(2, 250), *prose(2, 50)])
    assert column(found, "duplicates")["verdict"] == "drift"
    assert "copies of earlier documents 0.0 % -> 16.7 %" in column(found, "duplicates")["moved"]


@pytest.mark.long
def test_a_corpus_of_another_size_has_not_more_copies_for_that(compared):
    """Documents from a few thousand: a tenfold window has many more chance copies."""
    texts = prose(1, 1500)
    drawn = random.Random(3)
    found = compared(drawn.choices(texts, k=2000), drawn.choices(texts, k=200))
    assert column(found, "duplicates")["verdict"] == "none"


@pytest.mark.long
def test_a_reference_that_is_the_new_data_has_not_drifted(compared):
    texts = prose(1, 200)
    found = compared(texts, list(reversed(texts)))
    assert found["verdict"] == "none" and found["p_value"] == 1.0 and column(found, "tokens")["value"] < 1e-6


def test_documents_that_are_all_one_are_drift_and_two_such_corpora_are_none(compared):
    found = compared(prose(1, 200), ["banana toste"] * 200)
    assert found["verdict"] == "drift" and column(found, "duplicates")["verdict"] == "drift"
    assert compared(["banana toste"] * 150, ["banana toste"] * 200)["verdict"] == "none"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [(300, 99, "the new data has 99"), (1, 0, "the reference data has 1 and the new data has 0")],
)
def test_too_little_data_is_insufficient_with_the_count_and_the_remedy(compared, old, new, said):
    found = compared(prose(1, old), prose(2, new))
    assert found["verdict"] == "insufficient" and found["p_value"] is None and found["classifier"] is None
    assert said in found["why"] and "needs 100 on either side" in found["why"] and "drift.min_documents" in found["why"]
    assert {row["verdict"] for row in found["columns"]} == {"insufficient"}


def test_empty_documents_are_documents(compared):
    assert compared([""] * 120, [" \n"] * 120)["verdict"] == "drift"
    assert compared([""] * 120, [""] * 120)["verdict"] == "none"


@pytest.mark.long
def test_trifles_that_a_classifier_can_see_are_not_told_by_it(compared):
    old, new = prose(1, 600), [text + " wodan" * (n % 10 == 0) for n, text in enumerate(prose(2, 600))]
    strict = compared(old, new, min_auc=0.5)
    assert strict["classifier"]["auc"] < 0.6
    assert column(compared(old, new, min_auc=0.9), "domain")["verdict"] == "none"


def kept(made):
    """Evidence without how long it took."""
    return {name: value for name, value in made.items() if name != "seconds"}


@pytest.fixture(scope="module")
def several_units(tmp_path_factory):
    """18 MB of new data, of three units, and a unit of reference data."""
    folder = tmp_path_factory.mktemp("units")
    for name, seed, size in (("reference", 1, 3_000_000), ("new", 2, 18_000_000)):
        (folder / name).mkdir()
        texts = prose(seed, 400)
        with open(folder / name / "a.jsonl", "w") as file:
            number = 0
            while file.tell() < size:
                file.write(json.dumps({"text": f"{number} {texts[number % 400]}"}) + "\n")
                number += 1
    return folder


def drift_job(folder, data, *, threads=1):
    folder.mkdir()
    inputs = {name: str(data / name) for name in ("reference", "new")}
    settings = {"reference": "dataset/a@" + "0" * 64, "new": "dataset/b@" + "1" * 64, "drift": {"splits": 200}}
    settings |= {"text_field": "text", "threads": threads}
    (folder / "config.json").write_text(json.dumps({"settings": settings, "inputs": inputs}))
    return folder


def drift_rank(folder, rank, world):
    environment = {**os.environ, "HEADWAY_JOB": str(folder), "RANK": str(rank), "WORLD_SIZE": str(world)}
    return subprocess.Popen([sys.executable, "-m", "tasks.jobs.drift"], env=environment)


def test_ranks_that_share_the_reading_say_what_one_says_and_read_no_unit_twice(several_units, tmp_path):
    alone, shared = drift_job(tmp_path / "alone", several_units), drift_job(tmp_path / "shared", several_units)
    assert drift_rank(alone, 0, 1).wait(limit(120)) == 0
    assert drift_rank(shared, 1, 2).wait(limit(120)) == 0, "it waits for nobody"
    read = {path: path.stat().st_ino for path in shared.glob("parts/*/totals.json")}
    assert len(read) == 2
    first = drift_rank(shared, 0, 2)
    while first.poll() is None:
        for path, inode in read.items():
            try:
                assert path.stat().st_ino == inode, "a unit was read again"
            except FileNotFoundError:
                break  # compared, and cleared up
        time.sleep(0.02)
    assert first.returncode == 0
    one, two = (json.loads((job / "out/drift/drift.json").read_text()) for job in (alone, shared))
    assert kept(one) == kept(two) and one["documents"]["new"] > 10_000
    assert not (shared / "parts").exists()


def test_the_program_of_the_stage_writes_the_evidence(tmp_path):
    for name, texts in (("reference", prose(1, 150)), ("new", prose(2, 150, WORDS[:40]))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = tmp_path / "job"
    job.mkdir()
    inputs = {name: str(tmp_path / name) for name in ("reference", "new")}
    refs = {"reference": "dataset/a@" + "0" * 64, "new": "dataset/b@" + "1" * 64}
    settings = {**refs, "drift": {"splits": 200}, "text_field": "text", "threads": 2}
    (job / "config.json").write_text(json.dumps({"settings": settings, "inputs": inputs}))
    subprocess.run([sys.executable, "-m", "tasks.jobs.drift"], env={**os.environ, "HEADWAY_JOB": str(job)}, check=True)
    result, made = (json.loads((job / name).read_text()) for name in ("result.json", "out/drift/drift.json"))
    assert made["reference"] == refs["reference"] and made["verdict"] == result["verdict"] == "drift"
    assert set(result["metrics"]) == {"documents", "p_value", "domain_auc", "token_divergence"}
    assert result["metrics"]["token_divergence"] == column(made, "tokens")["value"] > 0.1
    assert json.loads((job / "progress.json").read_text())["text"] == "documents are compared"
    assert not (job / "work").exists()
