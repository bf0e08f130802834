"""A dataset's folder made of files of every condition: what is copied, what becomes documents, what is left out."""

import gzip
import json
import os

import pytest

from tasks.data.corpus.inputs import cut as cut_up
from tasks.data.corpus.inputs import find_shards
from tasks.data.corpus.packing import pack
from tasks.data.corpus.reading import documents


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
