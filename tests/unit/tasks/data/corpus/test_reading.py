"""Every document of every format, exactly and in order, wherever a file is cut."""

import gzip
import json
import random
import tracemalloc
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from tasks.data.corpus import reading
from tasks.data.corpus.inputs import cut, find_shards
from tasks.data.corpus.reading import documents, read_strictly, read_unit

pytestmark = pytest.mark.unit

ODD = ["", "\r\n", "a\u2028b\u0085c\x0bd", "\ufffd\ufeff", "\0", "\U0001f600", " tail ", '"}\n{"', "\\"]


def lines(*texts, field="text", ascii=True):
    return "".join(json.dumps({field: text}, ensure_ascii=ascii) + "\n" for text in texts).encode()


def found(path, field="text", unit_bytes=1 << 20):
    return list(documents(cut(find_shards([path]), unit_bytes), field))


def texts(path, field="text", unit_bytes=1 << 20):
    return [document.text for document in found(path, field, unit_bytes)]


FORMATS = {
    "a.jsonl": lambda data: data,
    "one.jsonl.gz": gzip.compress,
    "members.jsonl.gz": lambda data: gzip.compress(data[:31]) + gzip.compress(b"", mtime=0) + gzip.compress(data[31:]),
    "one.jsonl.zst": zstd.compress,
    "frames.jsonl.zst": lambda data: zstd.compress(data[:31]) + SKIPPED + zstd.compress(data[31:]),
}
SKIPPED = bytes.fromhex("502a4d18") + b"\4\0\0\0abcd"
"""A frame that zstd says to pass over: pzstd and seekable files have them."""


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_text_comes_back_exactly_from_every_format(tmp_path, name, ascii):
    (tmp_path / name).write_bytes(FORMATS[name](lines(*ODD, ascii=ascii)))
    assert found(tmp_path) == [(text, name, line) for line, text in enumerate(ODD, 1)]


LAYOUTS = {
    "CRLF": b'{"text": "one"}\r\n{"text": "two"}\r\n',
    "no last line feed": b'{"text": "one"}\n{"text": "two"}',
    "a byte order mark": b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n',
    "blanks around": b'\t{ "text" : "one" } \n {"text":\r"two"}\r',
    "an escaped name": b'{"te\\u0078t": "one"}\n{"t\\u0065xt": "two"}\n',
    "the last of two": b'{"text": "zero", "text": "one"}\n{"text": "two"}\n',
    "other fields": b'{"id": 1.5, "text": "one", "meta": {"text": 5}}\n{"a": [null], "text": "two"}\n',
    "what JSON has not": b'{"text": "one", "score": NaN}\n{"text": "two", "score": -Infinity}\n',
    "a long number": b'{"text": "one", "n": ' + b"9" * 5000 + b'}\n{"text": "two"}\n',
    "half a pair in another field": b'{"text": "one", "x": "\\ud83d"}\n{"text": "two"}\n',
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_json_lines_are_read_however_they_were_laid_out(tmp_path, name):
    (tmp_path / "a.jsonl").write_bytes(LAYOUTS[name])
    assert texts(tmp_path) == ["one", "two"]
    (tmp_path / "a.jsonl").write_bytes(LAYOUTS[name].rstrip() + b'\n{"text": "three", "x": NaN}\n')
    assert texts(tmp_path) == ["one", "two", "three"]


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(15, 40))])
def test_every_line_comes_once_in_order_with_its_number_wherever_a_file_is_cut(tmp_path, monkeypatch, seed):
    dice = random.Random(seed)
    monkeypatch.setattr(reading, "BLOCK_BYTES", dice.choice([1, 50, 1000, 8 << 20]))
    end = dice.choice([b"\n", b"\r\n"])
    expected = {}
    for number in range(dice.randint(1, 3)):
        name = f"{number}{dice.choice(['.jsonl', '.jsonl', '.jsonl.gz', '.jsonl.zst'])}"
        expected[name] = [dice.choice(["", "x", "ä\n", "long " * 300]) + str(n) for n in range(dice.randint(0, 80))]
        body = end.join(lines(text).rstrip() for text in expected[name]) + dice.choice([b"", end])
        pack = {"z": gzip.compress, "t": zstd.compress}.get(name[-1], lambda data: data)
        (tmp_path / name).write_bytes(pack(body if expected[name] else b""))
    units = cut(find_shards([tmp_path]), dice.choice([1, 40, 700, 1 << 20]))
    everything = [(text, name, line) for name in sorted(expected) for line, text in enumerate(expected[name], 1)]
    assert list(documents(units, "text")) == everything


def test_units_can_be_read_by_themselves_and_in_any_order(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(*(f"document {n}" for n in range(100))))
    units = cut(find_shards([tmp_path]), 200)
    assert len(units) > 10
    again = [document for unit in reversed(units) for document in reversed(list(documents([unit], "text")))]
    assert again[::-1] == [(f"document {n}", "a.jsonl", n + 1) for n in range(100)]


def test_several_fields_are_read_side_by_side(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"b": "2", "a": "1"}\n{"a": "1"}\n{"a": "3", "b": "4", "c": 0}\n')
    pq.write_table(pa.table({"b": ["2", None, "4"], "a": ["1", "1", "3"]}), tmp_path / "b.parquet")
    (unit,) = cut(find_shards([tmp_path]))
    for batch in read_unit(unit, ("a", "b")):
        assert (batch.columns, batch.lines) == ({"a": ["1", "3"], "b": ["2", "4"]}, [1, 3])
        assert [bad.line for bad in batch.bad] == [2]
        assert batch.texts == ["1", "3"]


def test_a_plain_file_is_one_document_whatever_the_field_is_called(tmp_path):
    for name, data in {"a.py": b"print('\xc3\xa4')\r\n", "b": b"", "c.txt": b"\xef\xbb\xbfx", "d.json": b"{"}.items():
        (tmp_path / name).write_bytes(data)
    assert texts(tmp_path, "content") == ["print('ä')\r\n", "", "x", "{"]


COLUMNS = {
    "string": pa.array(ODD, pa.string()),
    "large": pa.array(ODD, pa.large_string()),
    "binary": pa.array([text.encode() for text in ODD], pa.binary()),
    "dictionary": pa.array(ODD, pa.string()).dictionary_encode(),
    "view": pa.array(ODD, pa.string_view()),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_parquet_texts_come_back_exactly_with_their_rows(tmp_path, name, unit_bytes):
    table = pa.table({"id": range(len(ODD)), "text": COLUMNS[name]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert found(tmp_path, unit_bytes=unit_bytes) == [(text, "a.parquet", row) for row, text in enumerate(ODD, 1)]


def test_batches_of_a_row_group_are_bounded_and_add_up(tmp_path):
    table = pa.table({"text": ["x" * 30_000] * 1000 + ["y"] * 5000})
    pq.write_table(table, tmp_path / "a.parquet")
    (unit,) = cut(find_shards([tmp_path]))
    batches = list(read_strictly(unit, ("text",)))
    assert [sum(map(len, batch.texts)) < (40 << 20) for batch in batches] == [True] * len(batches)
    assert sum(len(batch.texts) for batch in batches) == 6000
    assert sum(batch.bytes for batch in batches) == (tmp_path / "a.parquet").stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 18)
    pack = {"z": partial(gzip.compress, compresslevel=1), "t": zstd.compress}.get(name[-1], lambda data: data)
    (tmp_path / name).write_bytes(pack(lines(*(random.Random(n).randbytes(10_000).hex() for n in range(800)))))
    (unit,) = cut(find_shards([tmp_path]), 1 << 30)
    tracemalloc.start()
    count = sum(len(batch.texts) for batch in read_strictly(unit, ("text",)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 800
    assert peak < 4 << 20 < (tmp_path / name).stat().st_size


@pytest.mark.parametrize(("name", "data"), [("a.jsonl", b""), ("a.jsonl.gz", gzip.compress(b"", mtime=0))])
def test_a_file_may_hold_no_document(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert texts(tmp_path) == []


def test_a_batch_says_what_was_read_from_disk_for_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(*map(str, range(1000))))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(*map(str, range(1000)))))
    units = cut(find_shards([tmp_path]), 1000)
    for unit in units:
        assert sum(batch.bytes for batch in read_strictly(unit, ("text",))) == unit.bytes
