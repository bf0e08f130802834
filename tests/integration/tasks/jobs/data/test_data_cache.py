"""Tokens behind a cache are the tokens themselves, whatever of them has come and whatever happened to it."""

import os

import numpy as np
import pytest

from tasks.common.errors import IntegrityError
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter, map_tokens
from tasks.jobs.data import sources
from tasks.jobs.data.samples import Mapped, open_samples
from tasks.jobs.data.sources import Cached, FileRanges, Place, open_cached, open_source

PIECE = 64
TOKENS = 500
CONFIG = TrainingConfig(sequence_length=9)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(sources, "PIECE", PIECE)


@pytest.fixture
def prefix(tmp_path):
    writer = TokenWriter(tmp_path / "train_text_document", 300)
    writer.add_document(np.random.default_rng(0).integers(300, size=TOKENS).tolist())
    writer.close()
    return tmp_path / "train_text_document"


def cached(prefix, folder, *, room=1 << 20, **place):
    return Cached(FileRanges(prefix.with_suffix(".bin")), np.dtype(np.uint16), Place(folder, room, **place))


def same(stream, prefix):
    """Whether every sample of every place is what the file holds."""
    starts = np.arange(TOKENS - 40, dtype=np.int64)
    return np.array_equal(stream.rows(starts, 40), Mapped(map_tokens(prefix)).rows(starts, 40))


def test_samples_are_the_same_while_pieces_come_and_when_all_are_there(prefix, tmp_path):
    stream = cached(prefix, tmp_path / "cache")
    assert same(stream, prefix)
    stream.wait()
    assert stream.held == stream.pieces == 16 and len(stream) == TOKENS
    prefix.with_suffix(".bin").write_bytes(b"")  # from here on nothing is read where it lies
    whole = stream.rows(np.array([0, 450]), 40)
    stream.close(done=False)
    again = cached_of(TOKENS, tmp_path / "cache")
    assert np.array_equal(again.rows(np.array([0, 450]), 40), whole)
    again.close(done=True)
    assert not (tmp_path / "cache").exists()


class Gone:
    """A file of which nothing can be read any more."""

    def __init__(self, size):
        self.size = size

    def read(self, start, length):
        raise OSError("the store does not answer")


def cached_of(tokens, folder):
    return Cached(Gone(2 * tokens), np.dtype(np.uint16), Place(folder, 1 << 20))


def test_what_has_no_room_is_read_where_it_lies(prefix, tmp_path):
    stream = cached(prefix, tmp_path / "cache", room=3 * PIECE + 5)
    stream.wait()
    assert stream.held == 3 and same(stream, prefix)
    assert (tmp_path / "cache" / "tokens.bin").stat().st_size == 2 * TOKENS
    stream.close(done=True)


def test_ranks_of_a_machine_divide_the_pieces_and_share_them(prefix, tmp_path):
    ranks = [cached(prefix, tmp_path / "cache", first=first, ranks=2) for first in (0, 1)]
    for stream in ranks:
        stream.wait()
    assert [stream.held for stream in ranks] == [16, 16] and all(same(stream, prefix) for stream in ranks)
    for stream in ranks:
        stream.close(done=True)


def test_half_of_the_pieces_is_what_one_of_two_ranks_brings(prefix, tmp_path):
    stream = cached(prefix, tmp_path / "cache", first=1, ranks=2)
    stream.wait()
    assert stream.held == 8 and same(stream, prefix)
    stream.close(done=True)


@pytest.mark.parametrize("at", [0, 3 * PIECE + 7, 2 * TOKENS - 1])
def test_a_flipped_byte_of_the_cache_is_never_trained_on(prefix, tmp_path, at):
    stream = cached(prefix, tmp_path / "cache")
    stream.wait()
    stream.close(done=False)
    with open(tmp_path / "cache" / "tokens.bin", "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))
    again = cached(prefix, tmp_path / "cache", room=PIECE - 1)
    assert same(again, prefix) and again.held == 15
    again.close(done=True)


def test_a_file_that_ends_early_is_an_error_and_not_zeros(prefix, tmp_path):
    stream = cached(prefix, tmp_path / "cache", room=1)
    os.truncate(prefix.with_suffix(".bin"), 2 * TOKENS - 10)
    with pytest.raises(IntegrityError, match="the tokens end at byte 990"):
        stream.rows(np.array([470]), 30)
    stream.close(done=True)


def test_a_store_that_does_not_answer_stops_the_cache_and_says_so(tmp_path, capsys):
    stream = cached_of(TOKENS, tmp_path / "cache")
    stream.wait()
    assert "filled no further: the store does not answer" in capsys.readouterr().out
    with pytest.raises(OSError, match="does not answer"):
        stream.rows(np.array([0]), 30)
    stream.close(done=True)


def test_a_job_keeps_its_cache_on_the_scratch_disk(prefix, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "tokens.json").write_text('{"vocab_size": 300, "eod_id": 0}')
    source = open_source({"tokens": tmp_path}, CONFIG, ExecutionConfig(cache_gib=0.1))
    plain = open_samples(tmp_path, CONFIG)
    assert np.array_equal(source.batch(3, 100), plain.batch(3, 100))
    [folder] = (tmp_path / "scratch").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    source.close(done=True)
    assert not folder.exists()


def test_a_changed_file_has_a_cache_of_its_own(prefix, tmp_path):
    environment = {"HEADWAY_SCRATCH": str(tmp_path / "scratch")}
    open_cached(prefix, room=1, environment=environment).close(done=False)
    prefix.with_suffix(".bin").write_bytes(bytes(2 * TOKENS))
    other = open_cached(prefix, room=1, environment=environment)
    assert other.rows(np.array([0]), 5).tolist() == [[0] * 5]
    other.close(done=False)
    assert len(list((tmp_path / "scratch").iterdir())) == 2


def test_a_cache_that_is_a_link_is_refused(prefix, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="somebody else's: delete it"):
        cached(prefix, tmp_path / "cache")
