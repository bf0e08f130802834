"""What is no document, and files that cannot be read: each is named with shard, line and remedy, and hides no neighbour."""

import gzip
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports.zstd import CompressionParameter, compress

from tasks.data.corpus import reading
from tasks.data.corpus.inputs import cut, find_shards, line_of
from tasks.data.corpus.reading import documents, read_strictly, read_unit

pytestmark = pytest.mark.unit

GOOD = b'{"text": "fine"}\n'


def read(path, fields=("text",), unit_bytes=1 << 20):
    """Texts with their lines, and what is bad with its line."""
    texts, bad = [], []
    for unit in cut(find_shards([path]), unit_bytes):
        for batch in read_unit(unit, fields):
            texts += zip(batch.texts, (line_of(batch.piece, line) for line in batch.lines), strict=True)
            bad += [(line_of(batch.piece, line), reason, raw) for line, reason, raw in batch.bad]
    return texts, bad


def strictly(path, unit_bytes=1 << 20):
    return list(documents(cut(find_shards([path]), unit_bytes), "text"))


BAD_LINES = {
    "half a line": (
        b'{"text": "abc',
        r"not a JSON line: Unterminated string starting at character 10 of 13; write one",
    ),
    "an object that is not closed": (
        b'{"text": "b"',
        "not a JSON line: Expecting ',' delimiter at its end, after 12 characters; write one whole object a line",
    ),
    "no JSON": (b"text", "not a JSON line: Expecting value at character 1 of 4; write one whole object a line"),
    "two values": (b'{"text": "a"} {"text": "b"}', "not a JSON line: Extra data at character 15"),
    "a blank line": (b"", "not a JSON line: it is blank; leave it out"),
    "a line of blanks": (b" \t", "not a JSON line: it is blank; leave it out"),
    "another field": (
        b'{"content": "abc", "id": 1}',
        r"no text in field 'text' \(there: content, id\); name the field",
    ),
    "no field": (b"{}", r"no text in field 'text' \(the object is empty\); name the field"),
    "a number": (b'{"text": 5}', r"no text in field 'text' \(it is a number\); name the field"),
    "null": (b'{"text": null}', r"no text in field 'text' \(it is null\); name the field"),
    "a list": (b'{"text": ["a"]}', r"no text in field 'text' \(it is a list\); name the field"),
    "an object": (b'{"text": {"text": "a"}}', r"no text in field 'text' \(it is an object\); name the field"),
    "no object but a list": (b'["abc"]', r"no text in field 'text' \(there: no object but a list\); name the field"),
    "no object but a string": (b'"text"', r"no text in field 'text' \(there: no object but a string\); name the field"),
    "a lone surrogate": (b'{"text": "abc\\ud83d"}', "a lone surrogate at character 3 is no text; give it decoded"),
    "an encoded surrogate": (b'{"text": "\xed\xa0\xbd"}', "not UTF-8 at byte 10 of the line: .*; give it decoded"),
    "Latin-1": (b'{"text": "gr\xfcn"}', "not UTF-8 at byte 12 of the line: invalid start byte; give it decoded"),
    "Latin-1 elsewhere": (
        b'{"text": "green", "name": "gr\xfcn"}',
        "not UTF-8 at byte 29 of the line: .*; give it decoded",
    ),
    "a NUL byte": (b'{"text": "a\0b"}', "not a JSON line: Invalid control character at character 12"),
    "nothing but NUL bytes": (b"\0" * 100, "not a JSON line: Expecting value at character 1 of 100"),
    "a byte order mark inside": (b'\xef\xbb\xbf{"text": "a"}', "not a JSON line: Unexpected UTF-8 BOM"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "not UTF-8 at byte 0 of the line: .*; give it decoded"),
    "too deep": (b"[" * 200_000, "not a JSON line: .*recursion.*; write one whole object a line"),
    "too deep elsewhere": (
        b'{"text": "a", "x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        "not a JSON line: .*recursion",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_by_shard_and_number_and_its_neighbours_are_read(tmp_path, name):
    bad, said = BAD_LINES[name]
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "shard.jsonl").write_bytes(GOOD * 2 + bad + b"\n" + GOOD)
    with pytest.raises(ValueError, match=rf"^shard\.jsonl:3: {said}"):
        strictly(tmp_path)
    for unit_bytes in (20, 1 << 20):
        texts, ((line, _, raw),) = read(tmp_path / "shard.jsonl", unit_bytes=unit_bytes)
        assert texts == [("fine", 1), ("fine", 2), ("fine", 4)]
        assert (line, raw) == (3, bad[:4096])


def test_a_blank_line_and_two_values_on_another_do_not_make_up_for_each_other(tmp_path):
    two = b'{"text": "a"} {"text": "b"}\n'
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n" + two + GOOD)
    texts, bad = read(tmp_path)
    assert (texts, [line for line, _, _ in bad]) == ([("fine", 1), ("fine", 4)], [2, 3])
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text":\n"a"}\n' + two + GOOD)
    texts, bad = read(tmp_path)
    assert (texts, [line for line, _, _ in bad]) == ([("fine", 1), ("fine", 5)], [2, 3, 4])


@pytest.mark.parametrize("name", ["another field", "half a line", "Latin-1 elsewhere"])
@pytest.mark.parametrize("neighbour", [b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", b'{"text": "a", "n": NaN}\n'])
def test_a_line_is_read_the_same_whatever_its_neighbours_are(tmp_path, name, neighbour):
    (tmp_path / "a.jsonl").write_bytes(neighbour)
    assert read(tmp_path) == ([("a", 1)], [])
    (tmp_path / "a.jsonl").write_bytes(neighbour + BAD_LINES[name][0] + b"\n")
    assert read(tmp_path)[0] == [("a", 1)]


def test_a_message_does_not_grow_with_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps({f"field {n}": n for n in range(10_000)}).encode())
    _, ((line, reason, raw),) = read(tmp_path)
    assert (line, len(raw), len(reason) < 400) == (1, 4096, True)


@pytest.mark.parametrize("block_bytes", [1, 100, 8 << 20])
@pytest.mark.parametrize("unit_bytes", [1, 2500, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_over_the_limit_is_told_and_passed_over(tmp_path, monkeypatch, name, unit_bytes, block_bytes):
    monkeypatch.setattr(reading, "LINE_LIMIT", 1000)
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    exact = json.dumps({"text": "x" * 988}).encode()
    assert len(exact) == 1000
    body = GOOD + exact + b"\n" + exact + b" \n" + GOOD + json.dumps({"text": "y" * 7000}).encode() + b"\n" + GOOD
    body += json.dumps({"text": "z" * 7000}).encode()
    (tmp_path / name).write_bytes(gzip.compress(body) if name.endswith("gz") else body)
    texts, bad = read(tmp_path, unit_bytes=unit_bytes)
    assert texts == [("fine", 1), ("x" * 988, 2), ("fine", 4), ("fine", 6)]
    assert [line for line, _, _ in bad] == [3, 5, 7]
    assert {reason for _, reason, _ in bad} == {"a line of more than 0 MiB; split the document"}
    assert [raw[9:11] for _, _, raw in bad] == [b'"x', b'"y', b'"z']


DICE = random.Random(0)
TEXTS = [f"document {number} {DICE.randbytes(9).hex()}" for number in range(2000)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def zstd(data):
    return compress(data, options={CompressionParameter.checksum_flag: 1})


BROKEN = {
    "cut.jsonl.gz": gzip.compress(LINES)[:3000],
    "cut-in-the-trailer.jsonl.gz": gzip.compress(LINES)[:-3],
    "cut-in-the-second.jsonl.gz": gzip.compress(LINES) + gzip.compress(LINES)[:-8],
    "cut-in-a-header.jsonl.gz": gzip.compress(LINES) + gzip.compress(LINES)[:5],
    "zeros-behind-it.jsonl.gz": gzip.compress(LINES) + bytes(4096),
    "nothing.jsonl.gz": b"",
    "plain.jsonl.gz": LINES,
    "tail.jsonl.gz": gzip.compress(LINES) + b"tail",
    "flipped.jsonl.gz": flip(gzip.compress(LINES), 3000),
    "flipped-checksum.jsonl.gz": flip(gzip.compress(LINES), -6),
    "cut.jsonl.zst": zstd(LINES)[:2000],
    "cut-in-the-trailer.jsonl.zst": zstd(LINES)[:-3],
    "cut-in-the-second.jsonl.zst": zstd(LINES) + zstd(LINES)[:-1],
    "nothing.jsonl.zst": b"",
    "plain.jsonl.zst": LINES,
    "tail.jsonl.zst": zstd(LINES) + b"tail",
    "flipped.jsonl.zst": flip(zstd(LINES), 2000),
    "flipped-checksum.jsonl.zst": flip(zstd(LINES), -2),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_named_after_its_last_sound_line(tmp_path, name):
    """Only gzip's checksum, behind the last line, tells of a flipped byte: a unit counts once it was read to its end."""
    (tmp_path / name).write_bytes(BROKEN[name])
    seen = []
    with pytest.raises(
        ValueError, match=rf"^{name}, after line (\d+): cannot be read: .+; give a sound file$"
    ) as raised:
        for document in documents(cut(find_shards([tmp_path])), "text"):
            seen.append(document)
    assert f"after line {len(seen)}:" in str(raised.value)
    assert name == "flipped.jsonl.gz" or [text for text, _, _ in seen] == (TEXTS * 2)[: len(seen)]
    if "second" in name or "tail" in name or name.startswith("cut.jsonl.gz"):
        assert seen


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_no_cut_of_a_compressed_file_goes_unseen(tmp_path, pack):
    whole = pack(LINES[:2400])
    path = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl.zst")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match="cannot be read: (the file ends before its compressed data does|Not a gzipped file)"
        ):
            strictly(path)


def test_text_that_is_none_is_named(tmp_path, monkeypatch):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(
        ValueError, match=r"^picture\.png:1: not UTF-8 at byte 0: invalid start byte; give it decoded, or"
    ):
        strictly(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"a" * 2000)
    monkeypatch.setattr(reading, "LINE_LIMIT", 1000)
    with pytest.raises(ValueError, match=r"^picture\.png:1: a document of more than 0 MiB; split it"):
        strictly(tmp_path)


def parquet(path, column, **options):
    pq.write_table(pa.table({"id": range(len(column)), "text": column}), path, **options)


def test_bad_rows_of_parquet_are_named_and_their_neighbours_read(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")]
    )
    parquet(tmp_path / "utf8.parquet", broken)
    parquet(tmp_path / "bytes.parquet", pa.array([b"ok", b"\xff"]))
    parquet(tmp_path / "null.parquet", pa.array(["ok", None]))
    for name, said in [
        ("utf8", "not UTF-8 at byte 0 of the text: invalid start byte; give it decoded"),
        ("bytes", "not UTF-8 at byte 0 of the text: invalid start byte; give it decoded"),
        ("null", "no text in field 'text' (it is null); name the field that holds the text"),
    ]:
        path = tmp_path / f"{name}.parquet"
        assert read(path) == ([("ok", 1)], [(2, said, b"")])
        with pytest.raises(ValueError, match=rf"^{name}\.parquet:2: "):
            strictly(path)


@pytest.mark.parametrize(
    ("column", "said"), [([1, 2], "a number"), ([["a"], ["b"]], "a list"), ([{"a": 1}] * 2, "an object")]
)
def test_a_column_of_another_type_is_no_text(tmp_path, column, said):
    parquet(tmp_path / "a.parquet", pa.array(column))
    with pytest.raises(ValueError, match=rf"^a\.parquet:1: no text in field 'text' \(it is {said}\)"):
        strictly(tmp_path)


def test_the_row_of_a_later_group_is_counted_from_the_beginning(tmp_path):
    parquet(tmp_path / "a.parquet", pa.array(["x"] * 25 + [None] + ["x"] * 4), row_group_size=4)
    with pytest.raises(ValueError, match=r"^a\.parquet:26: "):
        strictly(tmp_path, unit_bytes=1)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_missing_column_is_named_also_of_a_file_without_rows(tmp_path, rows):
    parquet(tmp_path / "a.parquet", pa.array(["x"] * rows, pa.string()))
    assert len(strictly(tmp_path)) == rows
    (unit,) = cut(find_shards([tmp_path]))
    with pytest.raises(ValueError, match=r"^a\.parquet: no column 'content' \(there: id, text\); name the column"):
        list(read_strictly(unit, ("content",)))


def test_two_columns_of_one_name_are_told(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"^a\.parquet: two columns 'text'; name"):
        strictly(tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, pa.array([f"document {n}" * 50 for n in range(2000)]), compression="zstd", use_dictionary=False)
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[: len(whole) // 2], whole[:-1], LINES):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"^a\.parquet: is no Parquet file: .+; give a sound file"):
            cut(find_shards([tmp_path]))
    damaged = bytearray(whole)
    middle = len(whole) // 2
    damaged[middle : middle + 4000] = bytes(4000)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"^a\.parquet, after row \d+: cannot be read: .+; give a sound file"):
        strictly(tmp_path)


def emptied(path):
    path.write_bytes(b"")


def grown(path):
    path.write_bytes(path.read_bytes() * 2)


def shortened(path):
    os.truncate(path, path.stat().st_size // 2 + 3)


CHANGES = {
    "emptied": (emptied, "was changed"),
    "grown": (grown, "was changed"),
    "shortened": (shortened, "was changed"),
    "deleted": (lambda path: path.unlink(), "was deleted"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_told_as_that(tmp_path, monkeypatch, name, change):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1000)
    path = tmp_path / name
    pack = {"gz": gzip.compress, "st": zstd}.get(name[-2:], lambda data: data)
    if name.endswith("parquet"):
        parquet(path, pa.array(["x" * 40_000] * 1000), row_group_size=500, compression="none", use_dictionary=False)
    else:
        path.write_bytes(pack(LINES))
    act, said = CHANGES[change]
    (unit,) = cut(find_shards([path]), 1 << 30)
    batches = read_strictly(unit, ("text",))
    assert next(batches).texts
    act(path)
    with pytest.raises(ValueError, match=rf"^{name} {said} while it was being read.*start again"):
        list(batches)
