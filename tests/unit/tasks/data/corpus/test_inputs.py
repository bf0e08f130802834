"""Which files a corpus is made of, and the units that they are cut into."""

import os
import random
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import limit

from tasks.data.corpus.inputs import Piece, cut, find_shards, kind_of, line_of

pytestmark = pytest.mark.unit


def write(path, data=b'{"text": "a"}\n'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(*patterns, **options):
    return [shard.name for shard in find_shards(patterns, **options)]


KINDS = {
    "a.jsonl": "jsonl",
    "A.NDJSON": "jsonl",
    "a.jsonl.gz": "jsonl.gz",
    "c4-train.00000-of-01024.json.gz": "jsonl.gz",
    "a.ndjson.zst": "jsonl.zst",
    "a.Parquet": "parquet",
    "a.py": "text",
    "README": "text",
    "parquet": "text",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_read_by_its_name(tmp_path, name):
    assert kind_of(tmp_path / name) == kind_of(tmp_path / name, named=False) == KINDS[name]


@pytest.mark.parametrize(("name", "kind"), [("a.json", "jsonl"), ("part.gz", "jsonl.gz"), ("part.zst", "jsonl.zst")])
def test_some_endings_mean_json_lines_only_of_a_file_that_was_named(tmp_path, name, kind):
    path = write(tmp_path / name)
    assert [shard.kind for shard in find_shards([path])] == [kind]
    assert [shard.kind for shard in find_shards([tmp_path])] == ["text"]
    assert [shard.kind for shard in find_shards([f"{tmp_path}/*"])] == [kind]


def test_shards_come_in_the_order_of_the_arguments_and_of_their_names_each_once(tmp_path):
    for name in ["b.jsonl", "a/2.jsonl", "a/10.jsonl", "a.jsonl", "z/deep/x.py", ".git/c.jsonl", ".hidden.jsonl"]:
        write(tmp_path / name)
    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "a/10.jsonl", "a/2.jsonl", "z/deep/x.py"]
    assert names(tmp_path, text=False) == ["a.jsonl", "b.jsonl", "a/10.jsonl", "a/2.jsonl"]
    assert names(tmp_path / "b.jsonl", tmp_path / "a", tmp_path, text=False) == [
        "b.jsonl",
        "10.jsonl",
        "2.jsonl",
        "a.jsonl",
    ]
    assert names(f"{tmp_path}/**/*.jsonl") == ["a.jsonl", "10.jsonl", "2.jsonl", "b.jsonl"]
    assert names(tmp_path / "b.jsonl", tmp_path / "b.jsonl") == ["b.jsonl"]


def test_shards_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for folder in ("one", "two"):
        write(tmp_path / folder / "x.jsonl")
    write(tmp_path / "one" / "y.jsonl")
    assert names(tmp_path / "one", tmp_path / "two") == [
        f"{tmp_path}/one/x.jsonl",
        "y.jsonl",
        f"{tmp_path}/two/x.jsonl",
    ]


def test_a_name_with_the_signs_of_a_glob_is_a_name_first(tmp_path):
    write(tmp_path / "a[1].jsonl")
    write(tmp_path / "a1.jsonl")
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_what_stands_for_nothing_is_said(tmp_path):
    write(tmp_path / "text" / "a.py")
    (tmp_path / "none").mkdir()
    for pattern, said in [
        (tmp_path / "no.jsonl", "does not exist and matches nothing"),
        (f"{tmp_path}/*.jsonl", "does not exist and matches nothing"),
        (tmp_path / "none", "none holds nothing to read; name files or folders of JSON lines, Parquet or text"),
        ("", "an empty name stands for no file"),
    ]:
        with pytest.raises(ValueError, match=said.replace("*", r"\*")):
            find_shards([pattern])
    with pytest.raises(ValueError, match="text holds nothing to read; name files or folders of JSON lines or Parquet$"):
        find_shards([tmp_path / "text"], text=False)


def test_a_link_to_nothing_is_not_passed_over_and_what_is_no_file_is(tmp_path):
    write(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert names(tmp_path) == ["a.jsonl"]
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"gone\.jsonl cannot be read: No such file"):
        find_shards([tmp_path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path):
    write(tmp_path / "shut" / "a.jsonl")
    (tmp_path / "shut").chmod(0)
    with pytest.raises(ValueError, match="shut cannot be read: Permission denied"):
        find_shards([tmp_path])


def test_thousands_of_small_files_make_few_units_in_little_time(tmp_path):
    for number in range(5000):
        (tmp_path / f"{number:05d}.py").write_bytes(b"x" * 100)
    begun = time.process_time()
    shards = find_shards([tmp_path])
    units = cut(shards, 50_000)
    assert time.process_time() - begun < limit(5)
    assert (len(shards), len(units)) == (5000, 10)
    assert [piece.shard.name for unit in units for piece in unit.pieces] == [f"{n:05d}.py" for n in range(5000)]
    assert [(unit.index, unit.bytes) for unit in units] == [(index, 50_000) for index in range(10)]


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_in_one_piece_and_pieces_begin_after_a_line_feed(tmp_path, seed):
    dice = random.Random(seed)
    for number in range(dice.randint(1, 4)):
        lines = [b"x" * dice.choice([0, 1, 5, 60, 700]) for _ in range(dice.randint(0, 60))]
        write(tmp_path / f"{number}.jsonl", b"\n".join(lines) + dice.choice([b"", b"\n"]))
    shards = find_shards([tmp_path])
    units = cut(shards, dice.choice([1, 2, 17, 100, 1000, 1 << 20]))
    read = {shard.name: b"" for shard in shards}
    for piece in (piece for unit in units for piece in unit.pieces):
        data = piece.shard.path.read_bytes()
        assert piece.start == len(read[piece.shard.name])
        assert piece.start == 0 or data[piece.start - 1 : piece.start] == b"\n"
        assert line_of(piece, 1) == 1 + data[: piece.start].count(b"\n")
        read[piece.shard.name] += data[piece.start : piece.stop]
    assert read == {shard.name: shard.path.read_bytes() for shard in shards}
    assert [unit.index for unit in units] == list(range(len(units)))
    assert sum(unit.bytes for unit in units) == sum(shard.size for shard in shards)


@pytest.mark.parametrize("unit_bytes", [1, 300, 1000, 1 << 20])
def test_parquet_is_cut_by_row_groups(tmp_path, unit_bytes):
    table = pa.table({"text": [f"document {number}" for number in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    (shard,) = find_shards([tmp_path])
    pieces = [piece for unit in cut([shard], unit_bytes) for piece in unit.pieces]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert (pieces[-1].stop, sum(piece.bytes for piece in pieces)) == (15, shard.size)
    assert [line_of(piece, 1) for piece in pieces] == [1 + 7 * piece.start for piece in pieces]


def test_a_unit_is_the_same_for_the_same_files(tmp_path):
    write(tmp_path / "a.jsonl", b'{"text": "a"}\n' * 100)
    assert cut(find_shards([tmp_path]), 200) == cut(find_shards([tmp_path]), 200)


def test_a_file_that_changed_since_it_was_found_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl")
    (shard,) = find_shards([path])
    shard.require_unchanged()
    status = path.stat()
    path.write_bytes(b'{"text": "b"}\n')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=r"^a\.jsonl was changed while it was being read: 14 bytes when it was found"):
        shard.require_unchanged()
    path.unlink()
    with pytest.raises(ValueError, match=r"^a\.jsonl was deleted while it was being read"):
        shard.require_unchanged()
    with pytest.raises(ValueError, match=r"a\.jsonl cannot be read: No such file"):
        cut([shard], 1)


def test_the_lines_before_a_piece_are_counted_once(tmp_path):
    path = write(tmp_path / "a.jsonl", b"x\n" * 50)
    (shard,) = find_shards([path])
    piece = Piece(shard, 60, 100, 40)
    assert line_of(piece, 1) == 31
    path.unlink()
    assert line_of(piece, 2) == 32
