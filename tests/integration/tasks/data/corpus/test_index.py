"""A corpus compared with earlier ones through their indices: what is planted is found, by any number of ranks, nothing else."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from waiting import limit

from tasks.config.data import ValidationConfig
from tasks.data.corpus import duplicates, index
from tasks.data.corpus.index import ABOUT, open_index, publishable
from tasks.data.corpus.measures import Texts
from tasks.data.corpus.profile import profile
from tasks.data.corpus.quarantine import Places, Profile
from tasks.data.corpus.tokens import ngrams, read_words

FRESH, COPIES, EDITED = 300, 40, 50


def written(folder, texts):
    folder.mkdir(parents=True)
    half = len(texts) // 2
    for name, part in (("a.jsonl", texts[:half]), ("b.jsonl", texts[half:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


def original(rng):
    return [f"w{rng.randrange(20_000)}" for _ in range(120)]


def edited(rng, text):
    words = text.split(" ")
    words[rng.randrange(5, 115)] = "edited"
    return " ".join(words)


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    """Two earlier corpora with an index each, the first without its documents 100 to 149, and a new corpus that repeats some."""
    base, rng = tmp_path_factory.mktemp("index"), random.Random(4)
    first, second = ([" ".join(original(rng)) for _ in range(400)] for _ in range(2))
    second[7] = first[7]
    indices = {}
    for name, texts in (("first", first), ("second", second)):
        config = ValidationConfig(index=True)
        profile([written(base / name, texts)], config, base / f"{name}-profile", heldout_fraction=0.1)
        gone = np.zeros(400, bool)
        gone[100:150] = name == "first"
        left = publishable(base / f"{name}-profile" / "index", base / f"{name}-index", gone=gone, shards=["a", "b"])
        assert left == 400 - gone.sum()
        indices[name] = base / f"{name}-index"
    fresh = [" ".join(original(rng)) for _ in range(FRESH)]
    copies = [first[row] for row in range(COPIES)] + [first[row] for row in range(100, 150)]
    near = [edited(rng, second[row + 200]) for row in range(EDITED)]
    within = [fresh[0], edited(rng, fresh[1])]
    new = written(base / "new", fresh + copies + near + within)
    return base, indices, new


def columns_of(folder):
    return pq.read_table(folder / "documents.parquet").to_pydict()


def test_what_is_planted_is_found_with_its_place_and_nothing_else(stand, tmp_path):
    _, indices, new = stand
    columns = profile([new], ValidationConfig(), tmp_path / "p", heldout_fraction=0.1, against=indices)
    made, documents = columns_of(tmp_path / "p"), columns["documents"]
    copies, aside = range(FRESH, FRESH + COPIES), range(FRESH + COPIES, FRESH + COPIES + 50)
    near = range(aside.stop, aside.stop + EDITED)
    expected_exact = {row: documents + row - FRESH for row in copies} | {near.stop: 0}
    assert {row: of for row, of in enumerate(made["exact_of"]) if of >= 0} == expected_exact
    expected_near = {row: documents + 350 + 200 + row - near.start for row in near} | {near.stop + 1: 1}
    assert {row: of for row, of in enumerate(made["near_of"]) if of >= 0} == expected_near
    assert columns["known"] == COPIES + EDITED
    known = Profile(tmp_path / "p")
    places = Places(known, [*expected_exact.values(), *expected_near.values()])
    assert places[documents + 3] == "first: a:4" and places[expected_near[near[0]]] == "second: b:1"
    assert places[0] == "a.jsonl:1"


def test_an_index_finds_what_the_text_of_the_earlier_corpus_would(stand, tmp_path):
    """The same links as in one corpus of both; an index of which nothing was left out."""
    base, indices, new = stand
    profile([base / "second", new], ValidationConfig(), tmp_path / "both", heldout_fraction=0.1)
    profile([new], ValidationConfig(), tmp_path / "new", heldout_fraction=0.1, against={"second": indices["second"]})
    both, alone = columns_of(tmp_path / "both"), columns_of(tmp_path / "new")
    count = len(alone["line"])

    def global_row(of):
        return -1 if of < 0 else of - count if of >= count else of + 400

    for name in ("exact_of", "near_of"):
        assert [global_row(of) for of in alone[name]] == both[name][400:], name
    assert alone["near_similarity"] == both["near_similarity"][400:]


def test_ranks_and_pieces_do_not_change_what_is_found(stand, tmp_path, monkeypatch):
    _, indices, new = stand
    profile([new], ValidationConfig(), tmp_path / "p", heldout_fraction=0.1, against=indices)
    folder = tmp_path / "job"
    folder.mkdir()
    settings = {
        "validation": ValidationConfig().model_dump(mode="json"), "heldout_fraction": 0.1, "benchmarks": [], "threads": 1,
        "against": list(indices),
    }  # fmt: skip
    inputs = {"dataset": str(new), **{f"index-{name}": str(path) for name, path in indices.items()}}
    (folder / "config.json").write_text(json.dumps({"settings": settings, "inputs": inputs}))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.profile"],
            env={**os.environ, "HEADWAY_JOB": str(folder), "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(limit(60)) for rank in ranks] == [0, 0]
    assert columns_of(folder / "out" / "profile") == columns_of(tmp_path / "p")
    assert (folder / "out" / "profile" / "known.jsonl").read_text() == (tmp_path / "p" / "known.jsonl").read_text()
    monkeypatch.setattr(index, "PIECE", 37)
    profile([new], ValidationConfig(), tmp_path / "pieces", heldout_fraction=0.1, against=indices)
    assert columns_of(tmp_path / "pieces") == columns_of(tmp_path / "p")


def test_without_near_duplicates_only_equal_documents_are_known(stand, tmp_path):
    _, indices, new = stand
    config = ValidationConfig(near_duplicates=False)
    columns = profile([new], config, tmp_path / "p", heldout_fraction=0.1, against=indices)
    assert (columns["known"], columns["near"]) == (COPIES, 0)


@pytest.mark.parametrize("change", [{"seed": 7}, {"form": 2}, {"documents": 10}])
def test_an_index_that_was_made_in_another_way_is_refused_by_name(stand, tmp_path, change):
    _, indices, _ = stand
    folder = tmp_path / "index"
    folder.mkdir()
    for path in indices["first"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    about = json.loads((folder / ABOUT).read_text())
    (folder / ABOUT).write_text(json.dumps({**about, **change}))
    with pytest.raises(ValueError, match="index first .* validate its dataset again with validation.index"):
        open_index("first", folder)
    assert replace(open_index("first", indices["first"]), name="x").documents == 350


def simulated(similarity, threshold, *, draws=20_000):
    """Share of pairs found, were every hash equal with a chance of the similarity, independently: what MinHash promises."""
    per_band = duplicates.rows_per_band(threshold)
    equal = np.random.default_rng(1).random((draws, duplicates.HASHES)) < similarity
    bands = equal.reshape(draws, -1, per_band).all(axis=2).any(axis=1)
    return float((bands & (equal.mean(axis=1) >= threshold)).mean())


@pytest.mark.parametrize(
    ("words", "edits", "threshold"),
    [
        (300, 8, 0.8),
        (300, 20, 0.5),
        *(pytest.param(300, edits, 0.8, marks=pytest.mark.long) for edits in (16, 6, 3)),
    ],
)
def test_pairs_are_found_as_often_as_their_similarity_promises(tmp_path, words, edits, threshold):
    """400 pairs of a known similarity; the documented error rates are those of the simulation."""
    pairs, rng = 400, random.Random(edits)
    earlier, later = [], []
    for pair in range(pairs):
        text = [f"p{pair}w{number}" for number in range(words)]
        changed = list(text)
        for place in range(words // (2 * edits), words, words // edits)[:edits]:
            changed[place] = f"p{pair}x{rng.randrange(10**9)}"
        earlier.append(" ".join(text))
        later.append(" ".join(changed))
    made = Texts.of([earlier[0], later[0]])
    shingles = ngrams(read_words(made.buffer, made.starts), duplicates.SHINGLE)
    one, other = (set(shingles.hashes[shingles.bounds[i] : shingles.bounds[i + 1]].tolist()) for i in (0, 1))
    similarity = len(one & other) / len(one | other)
    config = ValidationConfig(near_duplicate_similarity=threshold)
    profile([written(tmp_path / "corpus", earlier + later)], config, tmp_path / "p", heldout_fraction=0.1)
    near_of = columns_of(tmp_path / "p")["near_of"]
    assert near_of[:pairs] == [-1] * pairs
    assert all(of in (-1, row) for row, of in enumerate(near_of[pairs:])), "a pair that is none"
    share, promised = sum(of >= 0 for of in near_of[pairs:]) / pairs, simulated(similarity, threshold)
    deviation = (max(promised * (1 - promised), 0.001) / pairs) ** 0.5
    assert abs(share - promised) < 4 * deviation, (similarity, share, promised)
