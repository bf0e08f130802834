"""Which documents are looked at: the same ones however files are divided, copies as documents, totals of all."""

import json

import numpy as np
import pytest

from tasks.data.corpus.inputs import find_shards
from tasks.data.drift import sampling
from tasks.data.drift.sampling import draw, earlier_copies


def write(folder, texts, name="a.jsonl"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture
def drawn(tmp_path):
    def make(*folders, most=50, seed=1, workers=2):
        made = tmp_path / f"work-{len(list(tmp_path.glob('work-*')))}"
        shards = [find_shards([folder]) for folder in folders]
        return draw(shards, made, text_field="text", most=most, seed=seed, workers=workers)

    return make


@pytest.fixture
def texts():
    return [f"document {number} says {number * 7919}" for number in range(500)]


def test_the_same_documents_are_drawn_in_any_order_and_division(drawn, texts, tmp_path, monkeypatch):
    whole = write(tmp_path / "whole", texts)
    parts = tmp_path / "parts"
    for part in range(7):
        write(parts, list(reversed(texts))[part::7], f"{part}.jsonl")
    monkeypatch.setattr(sampling, "UNIT", 2000)
    one, other = drawn(whole, parts)
    assert one.heads == other.heads and len(one.heads) == 50
    assert one.documents == other.documents == 500
    assert one.bytes == sum(map(len, texts)) and one.classes.sum() == one.bytes


def test_another_seed_draws_others_and_none_is_preferred(drawn, texts, tmp_path):
    folder = write(tmp_path / "whole", texts)
    found = [drawn(folder, seed=seed)[0].heads for seed in range(8)]
    assert len({tuple(heads) for heads in found}) == 8
    places = [texts.index(text) for heads in found for text in heads]
    assert 200 < np.mean(places) < 300


def test_a_corpus_that_is_smaller_is_looked_at_whole(drawn, texts, tmp_path):
    (found,) = drawn(write(tmp_path / "few", texts[:20]))
    assert sorted(found.heads) == sorted(texts[:20])


def test_what_is_there_a_thousand_times_is_a_thousand_documents(drawn, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "UNIT", 4000)
    folder = write(tmp_path / "copies", [*texts, *(["the same text again"] * 500)])
    (found,) = drawn(folder, most=200)
    same = sum(head == "the same text again" for head in found.heads)
    assert 75 <= same <= 125
    assert ((found.earlier > 0) == [head == "the same text again" for head in found.heads]).sum() >= 199


def test_a_corpus_of_one_text_is_drawn_too_and_little_is_kept_of_it(drawn, tmp_path):
    (found,) = drawn(write(tmp_path / "one", ["the same"] * 5000), most=100)
    assert found.heads == ["the same"] * 100 and len(np.unique(found.earlier)) == 100
    kept = sum(path.stat().st_size for path in tmp_path.glob("work-*/*/heads"))
    assert kept < 8 * 3000


def test_copies_before_are_counted_across_all_files(drawn, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "UNIT", 1000)
    monkeypatch.setattr(sampling, "CHUNK", 7)
    order = [*texts[:60], *texts[:30], *texts[:10]]
    folder = tmp_path / "many"
    for part in range(10):
        write(folder, order[part * 10 : part * 10 + 10], f"{part}.jsonl")
    (found,) = drawn(folder, most=100)
    assert sorted(found.earlier.tolist()) == [0] * 60 + [1] * 30 + [2] * 10
    assert earlier_copies(np.array([5, 7, 5, 5, 7], np.uint64)).tolist() == [0, 0, 1, 2, 1]


def test_heads_are_cut_and_lengths_are_whole(drawn, tmp_path):
    (found,) = drawn(write(tmp_path / "long", ["é" * 9000, ""]))
    by_length = dict(zip(found.lengths.tolist(), found.heads, strict=True))
    assert by_length == {9000: "é" * sampling.HEAD, 0: ""}


def test_lines_that_are_no_document_are_counted(drawn, texts, tmp_path):
    folder = write(tmp_path / "bad", texts[:5])
    with open(folder / "a.jsonl", "a") as file:
        file.write("{half a line\n")
    (found,) = drawn(folder)
    assert found.documents == 5 and found.unreadable == 1
