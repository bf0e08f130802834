"""Tokens that stay in the store: the same samples as from a folder, by reading what they need, and nothing that was changed."""

import json
import zlib

import numpy as np
import pytest
from store_stand import put

from tasks.common.errors import IntegrityError
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.mmididx import BLOCK, TokenWriter, write_blocks
from tasks.jobs.data import sources
from tasks.jobs.data.samples import tokens_identity
from tasks.jobs.data.sources import open_source
from tasks.storage.blob.ranges import fetch_but, open_remote

FILES = {"train-00000_text_document": 61_000, "train-00001_text_document": 300_000, "train-00002_text_document": 8_000}
CONFIG = TrainingConfig(sequence_length=64, steps=50, global_batch_size=8, micro_batch_size=8)
pytestmark = pytest.mark.parametrize("stand", ["versions"], indirect=True)


@pytest.fixture
def folder(tmp_path):
    """An artifact of tokens in three files, as `preprocessing.shard_gib` makes them."""
    made, random = tmp_path / "tokens", np.random.default_rng(zlib.crc32(bytes(tmp_path)))
    made.mkdir()
    for name, tokens in FILES.items():
        writer = TokenWriter(made / name, 50_000)
        writer.add_document(random.integers(50_000, size=tokens).tolist())
        writer.close()
        write_blocks(made / name)
    (made / "tokens.json").write_text(json.dumps({"vocab_size": 50_000, "eod_id": 0, "files": {"train": list(FILES)}}))
    return made


def fetched(stand, folder, tmp_path):
    """The artifact as a machine has it that leaves `.bin` and `.idx` where they are; and its manifest."""
    store = stand.open()
    manifest = put(store, folder, name="large", kind="tokens")
    stay = {f"{name}.{ending}" for name in FILES for ending in ("bin", "idx")}
    return fetch_but(store, manifest, stay, tmp_path / "machine"), manifest


def bytes_of_tokens(stand, since):
    """What the service was asked for of the files that stayed, in bytes."""
    reads = [r for r in stand.relay.log[since:] if r.method == "GET" and r.place[1].endswith(".bin")]
    assert all("versionid" in request.query for request in reads), "the version that was published, not the newest"
    return sum(request.asked_bytes for request in reads)


def machine(monkeypatch, tmp_path, *, of=1):
    monkeypatch.setenv("HEADWAY_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("WORLD_SIZE", str(of))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


@pytest.mark.parametrize("room", [1 << 30, 4 * BLOCK])
def test_samples_are_those_of_a_folder_and_one_of_many_machines_reads_its_own(
    stand, folder, tmp_path, monkeypatch, room
):
    monkeypatch.setattr(sources, "PIECE", BLOCK)
    there, _ = fetched(stand, folder, tmp_path)
    machine(monkeypatch, tmp_path, of=50)
    assert sorted(path.name for path in there.glob("train*")) == sorted(f"{name}.blocks" for name in FILES)
    assert tokens_identity(there) == tokens_identity(folder)
    since, how = len(stand.relay.log), ExecutionConfig(cache_gib=room / 2**30)
    source, plain = (open_source({"tokens": f}, CONFIG, how) for f in (there, folder))
    source.tokens.wait()
    assert source.tokens.held == 0, "its samples are fewer bytes than the corpus"
    assert source.count == plain.count
    assert np.array_equal(source.batch(0, 8), plain.batch(0, 8))
    # A sample of 130 bytes lies in one block, or two; a read of the whole corpus would be 738,000 bytes.
    assert 8 * 130 <= bytes_of_tokens(stand, since) <= 2 * 8 * BLOCK
    source.close(done=True)
    plain.close(done=True)


def test_a_machine_that_reads_most_of_it_brings_it_once(stand, folder, tmp_path, monkeypatch):
    there, _ = fetched(stand, folder, tmp_path)
    machine(monkeypatch, tmp_path)
    source, plain = (open_source({"tokens": f}, CONFIG, ExecutionConfig(cache_gib=1)) for f in (there, folder))
    source.tokens.wait()
    since = len(stand.relay.log)
    for step in range(60):
        assert np.array_equal(source.batch(step * 100, 100), plain.batch(step * 100, 100))
    assert bytes_of_tokens(stand, since) == 0
    source.close(done=True)
    plain.close(done=True)


@pytest.mark.parametrize("at", [5, 2 * 60_999])
def test_what_was_changed_in_the_store_is_never_trained_on(stand, folder, tmp_path, at):
    there, _ = fetched(stand, folder, tmp_path)
    first = next(iter(FILES))
    stand.rot(
        (folder / f"{first}.bin").read_bytes()[:BLOCK] if at < BLOCK else tail(folder / f"{first}.bin"), at=at % BLOCK
    )
    tokens = open_remote(there, list(FILES))
    with pytest.raises(
        IntegrityError, match=f"{first}.bin is not what was published from byte {at // BLOCK * BLOCK} on"
    ) as refused:
        tokens.read(at, 2)
    assert "headway retrain --from" in refused.value.remedy
    assert tokens.read(3 * BLOCK, 10) == (folder / f"{first}.bin").read_bytes()[3 * BLOCK : 3 * BLOCK + 10]


def tail(path):
    data = path.read_bytes()
    return data[(len(data) - 1) // BLOCK * BLOCK :]


def test_reads_cross_from_file_to_file_and_end_with_the_last(stand, folder, tmp_path):
    there, _ = fetched(stand, folder, tmp_path)
    tokens = open_remote(there, list(FILES))
    whole = b"".join((folder / f"{name}.bin").read_bytes() for name in FILES)
    assert tokens.size == len(whole)
    for start, length in [(0, 1), (121_990, 20), (121_999, 610_000), (len(whole) - 3, 100), (len(whole), 5)]:
        assert tokens.read(start, length) == whole[start : start + length]


def test_digests_of_another_file_are_refused(stand, folder, tmp_path):
    there, _ = fetched(stand, folder, tmp_path)
    (there / "train-00001_text_document.blocks").write_bytes(b"x" * 48)
    with pytest.raises(
        IntegrityError, match="train-00001_text_document.blocks has 48 bytes; 600000 bytes of tokens have 37 blocks"
    ):
        open_remote(there, list(FILES))


def test_a_version_that_was_deleted_is_named(stand, folder, tmp_path):
    there, manifest = fetched(stand, folder, tmp_path)
    tokens = open_remote(there, list(FILES))
    stand.open().delete(manifest)
    with pytest.raises(IntegrityError, match="train-00000_text_document.bin is gone"):
        tokens.read(0, 10)
