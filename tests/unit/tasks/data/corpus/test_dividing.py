"""A corpus divided: what stays is byte for byte what it was, in every container, and what went is told with its reasons."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from tasks.data.corpus.dividing import Division, Marked, divide_shard, write_marks

pytestmark = pytest.mark.unit

LINES = [
    b'{"text": "one"}\n',
    '{"text":"zwei \u00e4"}\r\n'.encode(),
    b"no json\n",
    b'{"text": "' + b"x" * 3_000_000 + b'", "id": 4}\n',
    b'{"text": "last, without a line feed"}',
]
PACKED = {
    "jsonl": (lambda data: data, lambda data: data),
    "jsonl.gz": (gzip.compress, gzip.decompress),
    "jsonl.zst": (
        zstd.compress,
        zstd.decompress,
    ),
}


def division(tmp_path, target, without, *, left=True):
    """The work of dividing tmp_path/in, not begun; `without` are lines by shard."""
    names, marks = sorted(without), tmp_path / f"{target} marks"
    marked = (Marked(names.index(name), line, ("a rule",), "why") for name in names for line in sorted(without[name]))
    assert write_marks(marks, names, marked) == sum(map(len, without.values()))
    work = tmp_path / f"{target} work"
    work.mkdir(exist_ok=True)
    return Division(tmp_path / "in", marks, work / "parts", work / "left" if left else None)


def divided(tmp_path, target, without):
    """The folder with what is left, and the quarantine's lines."""
    work = division(tmp_path, target, without)
    for name in work.files:
        work.do(name)
        assert work.done(name)
    work.finish(tmp_path / f"{target} aside")
    return work.left, lines_of(tmp_path / f"{target} aside")


def lines_of(aside):
    return [json.loads(line) for line in (aside / "quarantine.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("without", [(1,), (2, 3), (4,), (5,), (1, 2, 3, 4)], ids=str)
def test_the_bytes_of_what_stays_are_not_touched(tmp_path, ending, without):
    pack, unpack = PACKED[ending]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"a.{ending}").write_bytes(pack(b"".join(LINES)))
    (left, aside), (again, _) = (divided(tmp_path, target, {f"a.{ending}": without}) for target in ("out", "again"))
    stays = (left / f"a.{ending}").read_bytes()
    assert unpack(stays) == b"".join(line for number, line in enumerate(LINES, 1) if number not in without)
    assert (again / f"a.{ending}").read_bytes() == stays
    assert [each["line"] for each in aside] == list(without)


def test_other_shards_are_taken_over_and_empty_ones_left_out(tmp_path):
    odd = gzip.compress(b"".join(LINES), compresslevel=1)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "kept.jsonl.gz").write_bytes(odd)
    (tmp_path / "in" / "gone.jsonl").write_bytes(LINES[0] + LINES[1])
    (tmp_path / "in" / "gone.txt").write_text("a plain file is one document")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "in" / "gone.parquet")
    gone = {"gone.jsonl": [1, 2], "gone.txt": [1], "gone.parquet": [1, 2]}
    left, _ = divided(tmp_path, "out", gone)
    assert [p.relative_to(left).as_posix() for p in left.rglob("*") if p.is_file()] == ["deep/kept.jsonl.gz"]
    assert (left / "deep" / "kept.jsonl.gz").read_bytes() == odd
    told = json.loads((tmp_path / "out aside" / "quarantine.json").read_text())
    assert told == {
        "documents": 5,
        "rules": {"a rule": 5},
        "shards": {"gone.jsonl": 2, "gone.parquet": 2, "gone.txt": 1},
    }


def test_rows_leave_a_parquet_file_and_its_schema_stays(tmp_path):
    schema = pa.schema(
        [pa.field("text", pa.large_string()), pa.field("n", pa.int8()), pa.field("tags", pa.list_(pa.string()))]
    )
    table = pa.table({"text": [f"text {n}" for n in range(10)], "n": range(10), "tags": [["a"]] * 10}, schema=schema)
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=3, compression="zstd")
    without = {1, 4, 5, 6, 10}  # the second row group is gone as a whole
    left, _ = divided(tmp_path, "out", {"a.parquet": without})
    stays = pq.ParquetFile(left / "a.parquet")
    assert stays.schema_arrow == schema and stays.metadata.row_group(0).column(0).compression == "ZSTD"
    assert stays.read().to_pylist() == [row for number, row in enumerate(table.to_pylist(), 1) if number not in without]
    assert list(divide_shard(tmp_path / "in" / "a.parquet", [4, 10], None)) == [
        (4, {"text": "text 3", "n": 3, "tags": ["a"]}),
        (10, {"text": "text 9", "n": 9, "tags": ["a"]}),
    ]


@pytest.mark.parametrize("ending", PACKED)
def test_lines_are_set_aside_as_their_values(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(PACKED[ending][0](b"".join(LINES)))
    values = dict(divide_shard(path, {2, 3, 4, 5}, None))
    assert values[2] == {"text": "zwei \u00e4"} and values[3] is None
    assert values[4] == json.loads(LINES[3]) and values[5] == json.loads(LINES[4])
    assert list(values) == [2, 3, 4, 5]


def test_several_that_share_it_and_one_that_died_leave_what_one_leaves(tmp_path, monkeypatch):
    """Two machines take every second file; one dies in the middle of a file and begins again: not what is done already."""
    (tmp_path / "in").mkdir()
    for name in "abcd":
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(b"".join(name.encode() + b" " + line for line in LINES))
    gone = {"a.jsonl": [1, 5], "b.jsonl": [2], "d.jsonl": [1, 2, 3, 4, 5]}
    alone, aside = divided(tmp_path, "alone", gone)
    work = division(tmp_path, "shared", gone)
    for name in work.files[1::2]:
        work.do(name)
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(
            "tasks.data.corpus.dividing.write_json", lambda path, value: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        work.do("a.jsonl")
    assert not work.done("a.jsonl")
    times = {name: (work.left / name).stat().st_mtime_ns for name in ("b.jsonl",)}
    again = division(tmp_path, "shared", gone)
    for name in again.files:
        again.do(name)
    again.finish(tmp_path / "shared aside")
    assert {name: (again.left / name).stat().st_mtime_ns for name in times} == times, "it was done again"
    content = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (alone, again.left)]
    assert content[0] == content[1] and set(content[0]) == {"a.jsonl", "b.jsonl", "c.jsonl"}
    assert lines_of(tmp_path / "shared aside") == aside and len(aside) == 8


def test_where_nothing_is_to_stay_only_what_went_is_written(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(b"".join(LINES))
    work = division(tmp_path, "closed", {"b.jsonl": [1]}, left=False)
    assert work.files == ["b.jsonl"]
    work.do("b.jsonl")
    work.finish(tmp_path / "aside")
    assert lines_of(tmp_path / "aside") == [
        {"shard": "b.jsonl", "line": 1, "rules": ["a rule"], "detail": "why", "raw": {"text": "one"}}
    ]
    assert not (tmp_path / "closed work" / "left").exists()
