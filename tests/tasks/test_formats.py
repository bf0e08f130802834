"""Documents from files of every condition, and Megatron's token files: written, read, and refused when broken."""

import gzip
import json
import os
import struct

import numpy as np
import pytest

from tasks.corpus.inputs import cut as cut_up
from tasks.corpus.inputs import find_shards
from tasks.corpus.packing import pack
from tasks.corpus.reading import documents
from tasks.errors import IntegrityError
from tasks.formats.mmididx import TokenWriter, open_tokens


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def lines(*texts, field="text"):
    return "".join(json.dumps({field: text}) + "\n" for text in texts)


def texts(folder):
    return [document.text for document in documents(cut_up(find_shards([folder])), "text")]


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


COMPRESSED = gzip.compress(lines(*(f"document {number}" * 20 for number in range(200))).encode())
BROKEN = {
    "cut.jsonl.gz": COMPRESSED[: len(COMPRESSED) // 2],
    "cut-in-the-trailer.jsonl.gz": COMPRESSED[:-3],
    "empty-but-not-gzip.jsonl.gz": lines("plain").encode(),
    "a-flipped-block.jsonl.gz": flip(COMPRESSED, 12),
    "a-flipped-byte.jsonl.gz": flip(COMPRESSED, len(COMPRESSED) // 2),
    "a-flipped-checksum.jsonl.gz": flip(COMPRESSED, len(COMPRESSED) - 6),
    "latin.jsonl": lines("x").encode() + '{"text": "ä"}\n'.encode("latin-1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_not_packed(tmp_path, name):
    path = write(tmp_path / "in" / name, BROKEN[name])
    if name == "latin.jsonl":  # a line is validation's to judge, and to set aside
        assert pack([path], tmp_path / "out").documents == 2
        return
    with pytest.raises(ValueError, match=rf"{name} cannot be read: .*; publish a sound file"):
        pack([path], tmp_path / "out")


def test_packing_copies_json_lines_byte_for_byte_and_makes_documents_of_text(tmp_path):
    data = (lines("one") + '{"text":"two","more":1}\r\n').encode()
    write(tmp_path / "in" / "a.jsonl", data)
    compressed = gzip.compress(lines("three").encode())
    write(tmp_path / "in" / "deep" / "b.jsonl.gz", compressed)
    write(tmp_path / "in" / "deep" / "c.py", "print('ä')\r\n")
    packed = pack([tmp_path / "in"], tmp_path / "out")
    assert (packed.documents, packed.bytes, packed.skipped) == (4, len("print('ä')\r\n".encode()), {})
    assert (tmp_path / "out" / "a.jsonl").read_bytes() == data
    assert (tmp_path / "out" / "b.jsonl.gz").read_bytes() == compressed
    assert texts(tmp_path / "out") == ["one", "two", "three", "print('ä')\r\n"]
    (line,) = (tmp_path / "out" / "shard-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["path"] == "deep/c.py"


def test_files_of_one_name_do_not_replace_each_other(tmp_path):
    for number, name in enumerate(["a/x.jsonl", "b/x.jsonl", "c/x.jsonl", "a/1-x.jsonl", "a/shard-00000.jsonl"]):
        write(tmp_path / "in" / name, lines(f"document {number}"))
    write(tmp_path / "in" / "z.txt", "text")
    packed = pack([tmp_path / "in"], tmp_path / "out")
    assert packed.documents == 6
    assert sorted(texts(tmp_path / "out")) == [f"document {number}" for number in range(5)] + ["text"]


def test_the_same_tree_is_packed_to_the_same_bytes_in_whatever_order_it_was_written(tmp_path):
    names = ["b/2.txt", "a.txt", "b/1.txt", "b.txt", "B.txt", "b/x.jsonl", "x.jsonl", "ä.txt"]
    for place, order in (("one", names), ("two", names[::-1])):
        for name in order:
            write(tmp_path / place / name, lines(name) if name.endswith("l") else name)
        pack([tmp_path / place], tmp_path / f"{place}-out")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("one-out", "two-out"))
    assert one == two
    paths = [json.loads(line)["path"] for line in one["shard-00000.jsonl"].decode().splitlines()]
    assert paths == ["B.txt", "a.txt", "b/1.txt", "b/2.txt", "b.txt", "ä.txt"]


def test_what_is_no_text_is_left_out_and_named(tmp_path):
    tree = tmp_path / "in"
    write(tree / "fine.txt", "text")
    left_out = {
        "picture.png": (b"\x89PNG\0\0", "binary: NUL bytes"),
        "latin.txt": ("grün".encode("latin-1"), "not UTF-8 at byte 2"),
        "empty.txt": (b"", "empty"),
        "blank.txt": (b" \n\t\n", "empty"),
    }
    for name, (data, _) in left_out.items():
        write(tree / name, data)
    packed = pack([tree], tmp_path / "out")
    assert packed.documents == 1
    assert packed.skipped == {str(tree / name): reason for name, (_, reason) in left_out.items()}


def test_include_exclude_and_what_is_never_taken(tmp_path):
    tree = tmp_path / "in"
    for name in ["a.py", "a.txt", "test/b.py", "test_c.py", ".git/d.py", ".e.py", "__pycache__/f.py", "x/site/g.py"]:
        write(tree / name, name)
    write(tmp_path / "outside.py", "outside")
    (tree / "link.py").symlink_to(tmp_path / "outside.py")
    (tree / "linked").symlink_to(tmp_path)
    pack([tree], tmp_path / "out", include="*.py", exclude=("test*", "site"))
    assert texts(tmp_path / "out") == ["a.py"]
    pack([tree], tmp_path / "all", include="*.py")
    assert texts(tmp_path / "all") == ["a.py", "test/b.py", "test_c.py", "x/site/g.py"]


def test_a_file_name_that_is_no_text_does_not_stop_the_others(tmp_path):
    tree = tmp_path / "in"
    write(tree / "a.txt", "one")
    try:
        write(tree / os.fsdecode(b"caf\xe9.txt"), "two")
    except OSError:
        pytest.skip("this file system takes no such names")
    assert pack([tree], tmp_path / "out").documents == 2
    assert texts(tmp_path / "out") == ["one", "two"]


def test_nothing_to_pack_is_said(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        pack([tmp_path / "none"], tmp_path / "out")
    write(tmp_path / "in" / "picture.png", b"\0")
    with pytest.raises(
        ValueError, match=r"no text found under .*1 file\(s\) left out, the first .*picture\.png \(binary"
    ):
        pack([tmp_path / "in"], tmp_path / "out")


def test_shards_do_not_grow_without_end(tmp_path):
    for number in range(5):
        write(tmp_path / "in" / f"{number}.txt", chr(97 + number) * (10 << 20))
    pack([tmp_path / "in"], tmp_path / "out")
    shards = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in shards] == ["shard-00000.jsonl", "shard-00001.jsonl"]
    assert [text[0] for text in texts(tmp_path / "out")] == list("abcde")


DOCUMENTS = [[1, 2, 3], [], [65_498], [7] * 10]


def token_files(prefix, documents=DOCUMENTS, vocab_size=65_499):
    writer = TokenWriter(prefix, vocab_size)
    for document in documents:
        writer.add_document(document)
    return writer.close()


def test_tokens_come_back_with_their_documents(tmp_path):
    assert token_files(tmp_path / "t") == (4, 14)
    found = open_tokens(tmp_path / "t")
    assert found.tokens.dtype == np.uint16
    assert found.document_count == 4
    edges = found.boundaries
    documents = [found.tokens[edges[n] : edges[n + 1]].tolist() for n in range(4)]
    assert documents == DOCUMENTS


def test_the_index_is_megatrons_byte_for_byte(tmp_path):
    """The layout, written out by hand after indexed_dataset.py: an empty document has no sequence."""
    token_files(tmp_path / "t", [[1, 2], [], [3]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<4q", 0, 1, 1, 2)
    assert (tmp_path / "t.idx").read_bytes() == expected
    assert (tmp_path / "t.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (200_000, np.int32)])
def test_the_width_of_a_token_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    token_files(tmp_path / "t", [[0, vocab_size - 1]], vocab_size)
    found = open_tokens(tmp_path / "t")
    assert found.tokens.dtype == dtype
    assert found.tokens.tolist() == [0, vocab_size - 1]


def test_a_token_that_does_not_fit_is_not_written(tmp_path):
    writer = TokenWriter(tmp_path / "t", 512)
    with pytest.raises(OverflowError):
        writer.add_document([70_000])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_no_tokens_at_all_can_be_opened(tmp_path, documents):
    token_files(tmp_path / "t", documents)
    found = open_tokens(tmp_path / "t")
    assert (found.document_count, len(found.tokens)) == (len(documents), 0)


def test_a_killed_writer_leaves_nothing_to_open(tmp_path):
    TokenWriter(tmp_path / "t", 512).add_document([1, 2])
    with pytest.raises(FileNotFoundError):
        open_tokens(tmp_path / "t")


def patched(offset, data):
    def change(prefix):
        path = prefix.with_suffix(".idx")
        index = bytearray(path.read_bytes())
        index[offset : offset + len(data)] = data
        path.write_bytes(index)

    return change


def cut(suffix, size):
    def change(prefix):
        path = prefix.with_suffix(suffix)
        path.write_bytes(path.read_bytes()[:size])

    return change


def grown(prefix):
    with open(prefix.with_suffix(".bin"), "ab") as file:
        file.write(b"\0\0")


HEADER, SEQUENCES = 34, 3
POINTERS = HEADER + 4 * SEQUENCES
MARKS = HEADER + 12 * SEQUENCES
INDEX_DAMAGES = {
    "an empty index": (cut(".idx", 0), "is truncated: 0 bytes"),
    "half a header": (cut(".idx", 20), "is truncated: 20 bytes"),
    "an index without its end": (cut(".idx", -8), "need others"),
    "wrong magic": (patched(0, b"X"), "no Megatron index: magic b'XMIDIDX"),
    "another version": (patched(9, struct.pack("<Q", 2)), "no Megatron index"),
    "an unknown type": (patched(17, b"\x63"), "dtype code 99"),
    "a type of another width": (patched(17, b"\x04"), r"\.bin has 28 bytes, its index says 56"),
    "more sequences than there are": (patched(18, struct.pack("<Q", 2**60)), "need others"),
    "tokens without their end": (cut(".bin", -2), r"\.bin has 26 bytes, its index says 28"),
    "no tokens": (cut(".bin", 0), r"\.bin has 0 bytes"),
    "tokens too many": (grown, r"\.bin has 30 bytes"),
    "a pointer elsewhere": (patched(POINTERS + 8, struct.pack("<q", 4)), "a pointer is not the sum"),
    "a negative pointer": (patched(POINTERS, struct.pack("<q", -2)), "a pointer is not the sum"),
    "another length": (patched(HEADER, struct.pack("<i", 4)), r"its index says 30"),
    "a negative length": (
        lambda prefix: [
            patched(HEADER, struct.pack("<3i", 5, -1, 10))(prefix),
            patched(POINTERS, struct.pack("<3q", 0, 10, 8))(prefix),
        ],
        "a length is negative",
    ),
    "marks that do not begin at 0": (patched(MARKS, struct.pack("<q", 1)), "do not run from 0"),
    "marks that do not end at the end": (patched(MARKS + 8 * 4, struct.pack("<q", 2)), "do not run from 0 to 3"),
    "marks that go back": (patched(MARKS + 8, struct.pack("<q", 3)), "do not run from 0"),
}


@pytest.mark.parametrize("name", INDEX_DAMAGES)
def test_damaged_token_files_are_refused(tmp_path, name):
    token_files(tmp_path / "t")
    damage, said = INDEX_DAMAGES[name]
    damage(tmp_path / "t")
    with pytest.raises(IntegrityError, match=said):
        open_tokens(tmp_path / "t")
