"""The profile of a planted corpus: every plant is counted, and named by row, shard and line, however the work is divided."""

import gzip
import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config.data import ValidationConfig
from tasks.data.corpus import parts
from tasks.data.corpus.inputs import cut, find_shards
from tasks.data.corpus.profile import SCHEMA, link, measure, merge, profile
from tasks.data.tokenizing.splits import split_of

CONFIG = ValidationConfig()
FRACTION = 0.1


def prose(number, sentences=12):
    """A document of its own words: no two of these are near each other."""
    return "\n".join(
        f"Chapter {number} part {part}: the {(number * 31 + part * 7) % 997} ships of harbour {number * part} sailed "
        f"past tower {number + part * part} carrying {number * 13 + part} barrels."
        for part in range(sentences)
    )


BENCHMARK = [
    "How many barrels did the second captain bring home when the long winter storm finally left the northern islands alone?",
    "Name the seven oldest bridges of Koenigsberg today.",
    "Too short here.",
]
EDITED = prose(5).replace("barrels", "crates", 1)
PLANTS = {
    "control": "\x00\x01ab\tc\r\n\x7f" + "x" * 6,
    "replacement": "caf\ufffd \ufffd!",
    "repeated": "same line\nother\nsame line\n   \n   \nsame line",
    "secret": "first\nkey = 'AKIAIOSFODNN7EXAMPLE'\n-----BEGIN RSA PRIVATE KEY-----\n",
    "personal": "Grüße an anna.meier@firma-nord.de, Karte 4111 1111 1111 1111, DE89 3704 0044 0532 0130 00",
    "contaminated": prose(900) + "\n" + BENCHMARK[0].upper(),
    "short contaminated": "Please: name the SEVEN oldest -- bridges of koenigsberg, today! Thanks.",
    "empty": "",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Shards of three kinds with plants among 200 sound documents; returns the folder and where each plant stands."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    folder.mkdir()
    plain = [prose(n) for n in range(100)]
    plain[60:60] = [PLANTS["control"], PLANTS["secret"], prose(3), EDITED]
    lines = [json.dumps({"text": text}).encode() for text in plain]
    lines[50:50] = [b"{half", b'{"other": 1}', b'{"text": "\xff"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    zipped = [prose(n) for n in range(100, 150)] + [PLANTS["replacement"], PLANTS["repeated"], prose(3)]
    packed = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in zipped) + "{half\n"
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(packed.encode(), mtime=0))
    rows = [prose(n) for n in range(150, 200)]
    rows += [None, PLANTS["personal"], PLANTS["contaminated"], PLANTS["short contaminated"], "", PLANTS["empty"]]
    pq.write_table(pa.table({"text": rows, "id": range(len(rows))}), folder / "c.parquet", row_group_size=20)
    benchmark = folder.parent / "benchmark"
    benchmark.mkdir()
    (benchmark / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in BENCHMARK))
    return folder


def run(folder, out, **options):
    benchmarks = {"other": folder.parent / "benchmark", "riddles": folder.parent / "benchmark"}
    return profile([folder], CONFIG, out, heldout_fraction=FRACTION, benchmarks=benchmarks, **options)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "profile"
    columns = run(corpus, out)
    assert columns == json.loads((out / "columns.json").read_text())
    return out


def read(out, name):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def table(out):
    return pq.read_table(out / "documents.parquet").to_pylist()


def content(out):
    """All that a profile says, but how long it took."""
    columns = json.loads((out / "columns.json").read_text())
    told = {name: value for name, value in columns.items() if name not in ("seconds", "speed")}
    shards = json.loads((out / "shards.json").read_text())
    return told, shards, table(out), read(out, "findings.jsonl"), read(out, "unreadable.jsonl")


def at(out, shard, line):
    names = [shard["name"] for shard in json.loads((out / "shards.json").read_text())]
    return next(row for row in table(out) if (names[row["shard"]], row["line"]) == (shard, line))


def test_documents_stand_in_the_order_of_the_corpus_with_shard_and_line(whole):
    found = table(whole)
    assert [(row["shard"], row["line"]) for row in found] == [
        *((0, line) for line in range(1, 108) if line not in (51, 52, 53)),
        *((1, line) for line in range(1, 54)),
        *((2, row) for row in range(1, 57) if row != 51),
    ]
    assert pq.read_schema(whole / "documents.parquet").names == list(SCHEMA)
    assert found[7]["characters"] == len(prose(7)) == found[7]["bytes"]


def test_shares_of_characters_are_those_of_the_planted_documents(whole):
    assert at(whole, "a.jsonl", 64)["control"] == pytest.approx(3 / len(PLANTS["control"]))
    assert at(whole, "b.jsonl.gz", 51)["replacement"] == pytest.approx(2 / len(PLANTS["replacement"]))
    assert at(whole, "b.jsonl.gz", 52)["repeated"] == pytest.approx(18 / 32)
    for name, planted in (("control", 1), ("replacement", 1), ("repeated", 1)):
        assert sum(row[name] > 0 for row in table(whole)) == planted, name


def test_secrets_and_personal_data_are_counted_and_placed_and_not_copied(whole):
    secret, personal = at(whole, "a.jsonl", 65), at(whole, "c.parquet", 52)
    assert (secret["secrets"], secret["personal"]) == (2, 0)
    assert (personal["secrets"], personal["personal"]) == (0, 3)
    found = read(whole, "findings.jsonl")
    assert [(each["row"], each["shard"], each["line"], each["kind"]) for each in found] == [
        *[(61, "a.jsonl", 65, "secret")] * 2,
        *[(table(whole).index(personal), "c.parquet", 52, "personal")] * 3,
    ]
    texts = {"secret": PLANTS["secret"], "personal": PLANTS["personal"]}
    assert [texts[each["kind"]][slice(*each["characters"])] for each in found] == [
        "AKIAIOSFODNN7EXAMPLE", "BEGIN RSA PRIVATE KEY",
        "anna.meier@firma-nord.de", "4111 1111 1111 1111", "DE89 3704 0044 0532 0130 00",
    ]  # fmt: skip
    assert "AKIA" not in (whole / "findings.jsonl").read_text()
    columns = json.loads((whole / "columns.json").read_text())
    assert columns["secret_types"] == {"AWS Access Key": 1, "Private Key": 1}
    assert columns["personal_types"] == {"IBAN": 1, "e-mail address": 1, "payment card": 1}


def test_copies_name_the_first_of_them_and_edited_ones_the_original(whole):
    found = table(whole)
    exact = {number: row["exact_of"] for number, row in enumerate(found) if row["exact_of"] >= 0}
    first = {(row["shard"], row["line"]): number for number, row in enumerate(found)}
    empty = first[2, 55], first[2, 56]
    assert exact == {first[0, 66]: 3, first[1, 53]: 3, empty[1]: empty[0]}
    near = {number: row["near_of"] for number, row in enumerate(found) if row["near_of"] >= 0}
    assert near == {first[0, 67]: 5}
    assert 0.8 <= found[first[0, 67]]["near_similarity"] < 1


def test_what_holds_a_benchmark_document_is_contaminated(whole):
    found = table(whole)
    marked = {(row["shard"], row["line"]): row["benchmark"] for row in found if row["benchmark"] >= 0}
    assert marked == {(2, 53): 0, (2, 54): 0}  # of two equal benchmarks the first
    assert json.loads((whole / "columns.json").read_text())["benchmark_documents_too_short"] == 2


def test_what_is_no_document_is_told_with_shard_line_and_reason(whole):
    bad = read(whole, "unreadable.jsonl")
    places = [("a.jsonl", 51), ("a.jsonl", 52), ("a.jsonl", 53), ("b.jsonl.gz", 54), ("c.parquet", 51)]
    assert [(each["shard"], each["line"]) for each in bad] == places
    assert "not a JSON line" in bad[0]["reason"] and bad[0]["raw"] == "{half"
    assert "no text in field 'text'" in bad[1]["reason"]
    assert "not UTF-8" in bad[2]["reason"] and "\ufffd" in bad[2]["raw"]


def test_the_corpus_and_its_shards_add_up(whole):
    columns, shards, found, _, _ = content(whole)
    assert columns["documents"] == len(found) == sum(shard["documents"] for shard in shards) == 212
    assert (columns["unreadable"], [shard["unreadable"] for shard in shards]) == (5, [3, 1, 1])
    assert columns["bytes"] == sum(row["bytes"] for row in found)
    assert columns["tokens"] == round(columns["bytes"] / CONFIG.bytes_per_token)
    assert sum(columns["classes"].values()) == columns["characters"] == sum(row["characters"] for row in found)
    assert (columns["exact"], columns["near"], columns["contaminated"]) == (3, 1, 2)
    assert [shard["duplicates"] for shard in shards] == [1, 1, 1]
    for histogram in columns["histograms"].values():
        assert sum(histogram["counts"]) == 212 and len(histogram["counts"]) == len(histogram["edges"])
    assert sum(columns["words"]) > 0 and len(columns["words"]) == 4096


def test_the_heldout_split_is_the_one_of_preprocessing_and_its_near_copies_are_counted(whole):
    found = table(whole)
    assert [row["heldout"] for row in found[:100]] == [
        split_of(text, (1 - FRACTION, FRACTION)) == 1
        for text in [*(prose(n) for n in range(60)), PLANTS["control"], PLANTS["secret"], prose(3), EDITED]
        + [prose(n) for n in range(60, 96)]
    ]
    crosses = sum(row["near_of"] >= 0 and row["heldout"] != found[row["near_of"]]["heldout"] for row in found)
    assert json.loads((whole / "columns.json").read_text())["heldout_contaminated"] == crosses


@pytest.mark.parametrize(("workers", "unit_bytes"), [(1, 3000), (2, 20_000)])
def test_the_profile_is_the_same_however_the_work_is_divided(corpus, whole, tmp_path, workers, unit_bytes):
    assert len(cut(find_shards([corpus]), unit_bytes)) > 2
    run(corpus, tmp_path / "profile", workers=workers, unit_bytes=unit_bytes)
    assert content(tmp_path / "profile") == content(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_units_with_a_receipt_are_not_read_again(corpus, whole, tmp_path):
    benchmarks = {"other": corpus.parent / "benchmark", "riddles": corpus.parent / "benchmark"}
    work = parts.Work(tuple(find_shards([corpus])), CONFIG, FRACTION, benchmarks)
    units = cut(work.shards, 20_000)
    measure(units[:2], work, tmp_path / "parts")
    (tmp_path / "parts" / ".unit-000002").mkdir()  # what a killed rank leaves behind
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("unit-*/*")}
    measure(units, work, tmp_path / "parts")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    link(units, work, tmp_path / "parts")
    merge(units, work, tmp_path / "parts", tmp_path / "profile", began=time.perf_counter())
    assert content(tmp_path / "profile") == content(whole)


def test_a_part_of_other_settings_or_other_data_is_made_again(corpus, tmp_path):
    shards = tuple(find_shards([corpus]))
    work = parts.Work(shards, CONFIG, FRACTION)
    (unit,) = cut(shards)
    measure([unit], work, tmp_path)
    assert parts.receipt(tmp_path, unit, work)
    for other in (
        parts.Work(shards, CONFIG, 0.2),
        parts.Work(shards, CONFIG.model_copy(update={"near_duplicates": False}), FRACTION),
        parts.Work((*shards, *find_shards([corpus.parent / "benchmark"])), CONFIG, FRACTION),
    ):
        assert parts.receipt(tmp_path, unit, other) is None


def test_without_near_duplicates_no_words_are_read(corpus, tmp_path):
    config = CONFIG.model_copy(update={"near_duplicates": False})
    columns = profile([corpus], config, tmp_path / "profile", heldout_fraction=FRACTION)
    assert (columns["exact"], columns["near"], columns["contaminated"]) == (3, 0, 0)
    assert "words" not in columns["seconds"]
