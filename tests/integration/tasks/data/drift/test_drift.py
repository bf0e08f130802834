"""Distances between columns: their ends, their noise, and what they say of corpora whose drift is known."""

import json
import math
import random
from pathlib import Path

import pytest
from support import STDLIB

from tasks.config.data import ValidationConfig
from tasks.data.corpus.profile import profile
from tasks.data.drift.histograms import distance, distributions, drifts, moved, outliers

CONFIG = ValidationConfig(near_duplicates=False)
RUSSIAN = [
    "в", "начале", "было", "слово", "и", "слово", "было", "долгим", "как", "зимняя", "дорога",
    "через", "лес", "где", "никто", "не", "ходил", "с", "тех", "пор", "как", "ушли",
    "люди", "дом", "стоит", "у", "реки", "вода", "темная", "рыба", "спит", "подо", "льдом",
    "а", "мы", "читаем", "старые", "письма", "и", "думаем", "о", "лете", "которое", "вернется",
]  # fmt: skip


def profiled(folder, texts):
    """columns.json of documents, as the real program writes it."""
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return profile([folder], CONFIG, folder.with_suffix(".profile"), heldout_fraction=0.0)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The standard library's files in two random halves."""
    files = sorted(
        path for path in STDLIB.rglob("*.py") if "site-packages" not in path.parts and "idlelib" not in path.parts
    )
    texts = [path.read_text(errors="ignore") for path in files]
    random.Random(4).shuffle(texts)
    folder = tmp_path_factory.mktemp("drift")
    return texts, folder, [profiled(folder / str(n), texts[n::2]) for n in range(2)]


def worst(now, before):
    found = {drift.column: drift.distance or 0.0 for drift in drifts(now, before, fewest=100)}
    return max(found, key=found.get), max(found.values())


def russian(count, size):
    draw = random.Random(5)
    return [" ".join(draw.choices(RUSSIAN, k=round(size * 4 ** draw.uniform(-2, 1)))) for _ in range(count)]


def test_the_distance_is_0_for_equal_shares_and_1_where_nothing_is_common():
    many = {"a": 3e6, "b": 1e6}
    assert distance(many, {"a": 6e6, "b": 2e6}) == 0.0
    assert distance(many, {"c": 5e6}) == pytest.approx(1.0, abs=1e-5)
    assert distance(many, {"a": 1e6, "b": 3e6}) == distance({"a": 1e6, "b": 3e6}, many)
    # half of the mass has moved: 1 - H(1/4) + H(1/2) / 2 ... by hand, with p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4)
    by_hand = (math.log2(4 / 3) + (math.log2(2 / 3) + math.log2(2)) / 2) / 2
    assert distance({"a": 8e6}, {"a": 4e6, "b": 4e6}) == pytest.approx(by_hand, abs=1e-5)


def test_nothing_against_nothing_is_equal_and_against_something_is_all():
    assert (distance({}, {}), distance({}, {"a": 1}), distance({"a": 1}, {})) == (0.0, 1.0, 1.0)


def test_chance_alone_is_not_told_as_distance():
    draw = random.Random(1)
    found = []
    for _ in range(50):
        one, two = ([draw.randrange(30) for _ in range(100)] for _ in range(2))
        found.append(distance({n: one.count(n) for n in range(30)}, {n: two.count(n) for n in range(30)}))
    assert sum(found) / 50 < 0.03  # 0.11 if it were


def test_what_moved_is_named_with_both_shares():
    assert moved({"latin": 70, "cyrillic": 30}, {"latin": 100}) == (
        "cyrillic 0.0% -> 30.0%",
        "latin 100.0% -> 70.0%",
    )
    assert moved({"latin": 7}, {"latin": 9}) == ()


def test_two_halves_of_one_corpus_do_not_drift(halves):
    (column, far), sizes = worst(*halves[2]), [half["documents"] for half in halves[2]]
    assert far < CONFIG.warn_drift, column
    found = {drift.column: drift.distance for drift in drifts(*halves[2], fewest=min(sizes) // 10)}
    assert found["words"] < CONFIG.warn_drift


def test_a_third_of_another_language_is_told(halves):
    texts, folder, (half, _) = halves
    own = texts[1::2]
    count = round(len(own) * 0.3 / 0.7)
    size = sum(map(len, own)) // len(own) // 6  # words, so that a document is about as long
    mixed = profiled(folder / "mixed", [*own, *russian(count, size)])
    found = {drift.column: drift for drift in drifts(mixed, half, fewest=80)}
    assert found["classes"].distance > CONFIG.warn_drift and found["words"].distance > CONFIG.warn_drift
    assert any(label.startswith("cyrillic 0.0% ->") for label in found["classes"].moved)


def test_too_few_documents_and_unknown_columns_are_not_measured(halves):
    one, two = halves[2]
    assert all(drift.distance is None for drift in drifts(one, two, fewest=one["documents"] + 1))
    some = {drift.column: drift.distance for drift in drifts(one, two, fewest=one["documents"] // 2)}
    assert some["words"] is None and some["classes"] is not None
    fewer = {**two, "histograms": {name: two["histograms"][name] for name in ("characters", "control")}}
    found = {drift.column: drift.distance for drift in drifts(one, fewer, fewest=100)}
    assert found["characters"] is not None and found["repeated"] is None
    assert found.keys() == distributions(one).keys()


def test_the_shard_of_another_kind_is_named(halves):
    texts, folder, _ = halves
    corpus = folder / "shards"
    corpus.mkdir()
    for number in range(3):
        write(corpus / f"{number}.jsonl", texts[number * 100 : number * 100 + 100])
    write(corpus / "strange.jsonl", russian(100, 300))
    write(corpus / "tiny.jsonl", russian(5, 300))
    profile([corpus], CONFIG, folder / "shards.profile", heldout_fraction=0.0)
    shards = json.loads((folder / "shards.profile" / "shards.json").read_text())
    found = outliers(shards, fewest=100)
    assert sorted(found) == ["0.jsonl", "1.jsonl", "2.jsonl", "strange.jsonl"]
    assert [name for name, drift in found.items() if drift.distance > CONFIG.max_shard_divergence] == ["strange.jsonl"]
    assert found["strange.jsonl"].column == "classes" and "cyrillic" in "".join(found["strange.jsonl"].moved)
    assert outliers(shards[:1], fewest=1) == {}


def write(path: Path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
