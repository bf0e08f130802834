"""Shards without some of their lines: what stays is byte for byte what it was, in every container."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from tasks.data.corpus.quarantine import rewrite, set_aside

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


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("without", [(1,), (2, 3), (4,), (5,), (1, 2, 3, 4)], ids=str)
def test_the_bytes_of_what_stays_are_not_touched(tmp_path, ending, without):
    pack, unpack = PACKED[ending]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"a.{ending}").write_bytes(pack(b"".join(LINES)))
    for target in ("out", "again"):
        assert rewrite(tmp_path / "in", tmp_path / target, {f"a.{ending}": without}) == 1
    found = (tmp_path / "out" / f"a.{ending}").read_bytes()
    assert unpack(found) == b"".join(line for number, line in enumerate(LINES, 1) if number not in without)
    assert (tmp_path / "again" / f"a.{ending}").read_bytes() == found


def test_other_shards_are_taken_over_and_empty_ones_left_out(tmp_path):
    odd = gzip.compress(b"".join(LINES), compresslevel=1)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "kept.jsonl.gz").write_bytes(odd)
    (tmp_path / "in" / "gone.jsonl").write_bytes(LINES[0] + LINES[1])
    (tmp_path / "in" / "gone.txt").write_text("a plain file is one document")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "in" / "gone.parquet")
    gone = {"gone.jsonl": [1, 2], "gone.txt": [1], "gone.parquet": [1, 2]}
    assert rewrite(tmp_path / "in", tmp_path / "out", gone) == 1
    assert [p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()] == [
        "deep/kept.jsonl.gz"
    ]
    assert (tmp_path / "out" / "deep" / "kept.jsonl.gz").read_bytes() == odd


def test_rows_leave_a_parquet_file_and_its_schema_stays(tmp_path):
    schema = pa.schema(
        [pa.field("text", pa.large_string()), pa.field("n", pa.int8()), pa.field("tags", pa.list_(pa.string()))]
    )
    table = pa.table({"text": [f"text {n}" for n in range(10)], "n": range(10), "tags": [["a"]] * 10}, schema=schema)
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=3, compression="zstd")
    without = {1, 4, 5, 6, 10}  # the second row group is gone as a whole
    assert rewrite(tmp_path / "in", tmp_path / "out", {"a.parquet": without}) == 1
    found = pq.ParquetFile(tmp_path / "out" / "a.parquet")
    assert found.schema_arrow == schema and found.metadata.row_group(0).column(0).compression == "ZSTD"
    assert found.read().to_pylist() == [row for number, row in enumerate(table.to_pylist(), 1) if number not in without]
    assert list(set_aside(tmp_path / "in" / "a.parquet", [4, 10])) == [
        (4, {"text": "text 3", "n": 3, "tags": ["a"]}),
        (10, {"text": "text 9", "n": 9, "tags": ["a"]}),
    ]


@pytest.mark.parametrize("ending", PACKED)
def test_lines_are_set_aside_as_their_values(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(PACKED[ending][0](b"".join(LINES)))
    found = dict(set_aside(path, {2, 3, 4, 5}))
    assert found[2] == {"text": "zwei \u00e4"} and found[3] is None
    assert found[4] == json.loads(LINES[3]) and found[5] == json.loads(LINES[4])
    assert list(found) == [2, 3, 4, 5]
