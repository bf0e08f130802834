"""Faults of reliability.md, section 8, that a checkpoint's protocol answers: replay, full disks, pins, scrub, folders."""

import errno
import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_material import IDENTITY, Ranks, small_training
from safetensors.torch import load_file, save_file

from tasks.common.errors import IntegrityError
from tasks.jobs.checkpoint.choice import choose
from tasks.jobs.checkpoint.files import claim_attempt, digest, manifests, place_of, read_manifest, verify
from tasks.jobs.checkpoint.pieces import Piece, read_into, shards_of
from tasks.jobs.checkpoint.retention import pin, retain
from tasks.jobs.checkpoint.snapshot import FolderSaver, restore, training_tensors
from tasks.jobs.checkpoint.writer import scrub
from tasks.planning.checkpointing import corrected_every_steps


@pytest.fixture
def root(tmp_path):
    claim_attempt(tmp_path / "checkpoints", 1)
    return tmp_path / "checkpoints"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of steps 10, 20 and 30, of two ranks."""
    root = tmp_path_factory.mktemp("made") / "checkpoints"
    claim_attempt(root, 1)
    ranks = Ranks(root, training_tensors(*small_training(1)), keep=3)
    ranks.save(10, 20, 30)
    ranks.close()
    return root


@pytest.fixture
def saved(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "checkpoints"))


def steps_in(root):
    return [int(path.parts[-3].removeprefix("step-")) for path in manifests(root)]


def resealed(path, **changes):
    """Change a manifest as one who may write there can: its own sha256 fits again."""
    value = {**json.loads(path.read_text()), **changes}
    del value["sha256"]
    path.write_text(json.dumps({**value, "sha256": digest(value)}))


def test_each_manifest_names_the_one_before(saved):
    chain = [read_manifest(path).previous for path in manifests(saved)]
    assert [named and named["step"] for named in chain] == [20, 10, None]


@pytest.mark.parametrize("renamed", [False, True], ids=["as it is", "with its step changed"])
def test_an_old_checkpoint_that_is_put_to_a_newer_step_is_refused(saved, renamed):
    shutil.copytree(place_of(saved, 10, 1), place_of(saved, 40, 1))
    if renamed:
        resealed(place_of(saved, 40, 1) / "manifest.json", step=40)
    assert choose(saved, IDENTITY).step == 30
    said = json.loads((place_of(saved, 40, 1) / "quarantined.json").read_text())["reason"]
    assert "it was put there" in said or "an old one was put there" in said


def test_a_manifest_that_was_replaced_is_not_the_one_that_the_next_one_names(saved):
    resealed(place_of(saved, 20, 1) / "manifest.json", consumed_samples=1)
    (place_of(saved, 30, 1) / "shard-0.safetensors").unlink()
    assert choose(saved, IDENTITY).step == 10
    assert "committed after" in (place_of(saved, 20, 1) / "quarantined.json").read_text()


def test_a_manifest_that_names_a_file_elsewhere_is_refused(saved):
    path = manifests(saved)[0]
    resealed(path, files=[{"path": "../../attempts/1", "size": 1, "sha256": ""}])
    with pytest.raises(IntegrityError, match="not in its folder"):
        verify(path)


def test_every_block_of_a_shard_is_checked(saved):
    shard = place_of(saved, 30, 1) / "shard-0.safetensors"
    good = shard.read_bytes()
    for place in range(0, len(good), len(good) // 12):
        shard.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(IntegrityError, match="block 0"):
            verify(manifests(saved)[0])


def test_a_checkpoint_of_the_release_before_is_read(saved):
    """Schema 1: no chain, one sha256 of the whole file, the world size in the identity, settings that came later not in it."""
    folder = place_of(saved, 30, 1)
    before = {**load_file(folder / "shard-0.safetensors")}
    save_file(before, folder / "shard-0.safetensors")
    value = json.loads((folder / "manifest.json").read_text())
    files = [_of_schema_1(folder / entry["path"]) for entry in value["files"]]
    training = {
        key: item for key, item in value["identity"]["training"].items() if key not in ("safety", "lora", "schedule")
    }
    identity = {**value["identity"], "training": training, "world_size": 2}
    old = {key: value[key] for key in ("step", "attempt", "consumed_samples")}
    old |= {"identity": identity, "identity_digest": digest(identity), "files": files, "schema": "headway/checkpoint/1"}
    (folder / "manifest.json").write_text(json.dumps({**old, "sha256": digest(old)}))
    found = choose(saved, IDENTITY)
    assert (found.step, found.schema) == (30, "headway/checkpoint/1")
    pieces = training_tensors(*small_training(2))
    restore(saved, found, rank=1, pieces=pieces)
    assert all(torch.equal(piece.tensor, before[name]) for name, piece in pieces.items())


def _of_schema_1(path):
    return {"path": path.name, "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def cut(whole, parts):
    """Each of so many ranks' pieces of a tensor, along its first dimension, as FSDP2 cuts."""
    chunks, begin, pieces = whole.chunk(parts), 0, []
    for rank in range(parts):
        part = chunks[rank].clone() if rank < len(chunks) else whole[:0].clone()
        offset = (begin, *[0] * (whole.dim() - 1))
        pieces.append(Piece(part, tuple(whole.shape), offset, divided=True))
        begin += len(part)
    return pieces


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_pieces_of_two_ranks_are_put_together_for_any_number(root, ranks):
    wholes = {"a": torch.randn(7, 4, 3), "b": torch.randn(5), "c": torch.randn(1, 2)}
    written = {name: cut(whole, 2) for name, whole in wholes.items()}
    two = Ranks(root, [{name: pieces[rank] for name, pieces in written.items()} for rank in (0, 1)])
    two.save(10)
    two.close()
    shards = list(shards_of(root, choose(root, IDENTITY)))
    tensors = [[saved for saved in shard if saved.name != "rng.torch"] for shard in shards]
    for rank in range(ranks):
        wanted = {name: cut(whole, ranks)[rank] for name, whole in wholes.items()}
        expected = {name: piece.tensor.clone() for name, piece in wanted.items()}
        for piece in wanted.values():
            piece.tensor.zero_()
        read_into(wanted, tensors, where="here")
        assert all(torch.equal(wanted[name].tensor, expected[name]) for name in wholes)
    with pytest.raises(IntegrityError, match="do not hold all of"):
        read_into({name: cut(whole, 1)[0] for name, whole in wholes.items()}, tensors[:1], where="here")


def test_two_cuts_in_other_dimensions_are_put_together(root):
    """Shared matrices: rows over ranks when it was saved, columns when it is read."""
    whole = torch.randn(6, 5)
    ranks = Ranks(root, [{"a": piece} for piece in cut(whole, 2)])
    ranks.save(10)
    ranks.close()
    shards = list(shards_of(root, choose(root, IDENTITY)))
    column = Piece(torch.zeros(6, 2), (6, 5), (0, 3), divided=True)
    read_into({"a": column}, [[saved for saved in shard if saved.name == "a"] for shard in shards], where="here")
    assert torch.equal(column.tensor, whole[:, 3:])


def test_checkpoints_of_every_so_many_steps_are_kept_for_good(root):
    ranks = Ranks(root, training_tensors(*small_training(1)), keep_every=20)
    ranks.save(10, 20, 30, 40, 50, 60, 70)
    ranks.close()
    assert steps_in(root) == [70, 60, 40, 20]
    assert choose(root, IDENTITY).step == 70
    for path in manifests(root)[:2]:
        (path.parent / "shard-1.safetensors").unlink()
    assert choose(root, IDENTITY).step == 40


def test_what_a_newer_attempt_goes_on_from_is_not_deleted_by_an_older_one(saved):
    pin(place_of(saved, 10, 1), 2)
    retain(saved, 1, attempt=1)
    assert steps_in(saved) == [30, 10]
    retain(saved, 1, attempt=2)
    assert steps_in(saved) == [30], "its own writer deletes it: by then all ranks have read"


def test_choosing_pins_before_it_verifies(saved):
    choose(saved, IDENTITY, attempt=5)
    assert (place_of(saved, 30, 1) / "read-by-5").exists()


def test_a_delete_that_fails_does_not_stop_the_next_save(root, capfd):
    ranks = Ranks(root, training_tensors(*small_training(1)))
    ranks.save(10, 20)
    old = place_of(root, 10, 1)
    old.rename(root / "elsewhere")
    old.symlink_to(root / "elsewhere")  # shutil.rmtree refuses it, for whoever runs the test
    ranks.save(30)
    ranks.close()
    assert "could not delete" in capfd.readouterr().err
    assert steps_in(root) == [30, 20] and not any(saver.failure for saver in ranks.savers)


def test_a_save_that_finds_no_room_leaves_its_room_to_the_next_and_the_old_ones_alone(root):
    """A limit on the size of the writer's files, as a full disk is: the write raises OSError there."""
    ranks = Ranks(root, training_tensors(*small_training(1)))
    ranks.save(10)
    full = ranks.savers[0]
    resource.prlimit(full._process.pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    ranks.save(20)
    assert "File too large" in full.failure and not list(place_of(root, 20, 1).glob("shard-0*"))
    assert steps_in(root) == [10]
    resource.prlimit(full._process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ranks.save(30)
    ranks.close()
    assert steps_in(root) == [30, 10] and not (root / "step-00000020").exists() and not full.failure


def test_the_newest_is_read_again_and_quarantined_when_it_is_bad(saved):
    assert scrub(saved) is True and json.loads((saved / "SCRUBBED").read_text())["step"] == 30
    (place_of(saved, 30, 1) / "shard-1.safetensors").write_bytes(b"")
    assert scrub(saved) is False
    assert json.loads((saved / "SCRUBBED").read_text())["good"] is False
    assert choose(saved, IDENTITY).step == 20


def test_there_is_nothing_to_read_again_without_a_checkpoint(root):
    assert scrub(root) is None and not (root / "SCRUBBED").exists()


class Folders:
    """Two ranks of an engine that writes its own files."""

    def __init__(self, root, *, fail=()):
        constants = {"root": str(root), "world_size": 2, "attempt": 1, "keep": 2, "identity": IDENTITY, "log": ""}
        self.fail = fail
        self.savers = [FolderSaver(lambda path, r=rank: self.write(path, r), rank=rank, **constants) for rank in (0, 1)]

    def write(self, folder, rank):
        if rank in self.fail:
            raise OSError(errno.ENOSPC, "No space left on device")
        for name in (f"rank-{rank}/state.pt", f"rank_{rank}.pt"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(os.urandom(5000))

    def save(self, *steps):
        for step in steps:
            for saver in self.savers:
                saver.save(step=step, consumed_samples=8 * step)
            for saver in self.savers:
                saver.wait()

    def close(self):
        for saver in self.savers:
            saver.close()


def test_an_engines_own_files_are_hashed_by_all_ranks_and_a_flipped_byte_is_refused(root):
    folders = Folders(root)
    folders.save(10, 20)
    folders.close()
    found = choose(root, IDENTITY)
    names = {entry["path"] for entry in found.files}
    assert names == {"own/rank-0/state.pt", "own/rank-1/state.pt", "own/rank_0.pt", "own/rank_1.pt"}
    assert all(
        len(json.loads((place_of(root, 20, 1) / f"receipt-{rank}.json").read_text())["files"]) == 2 for rank in (0, 1)
    )
    path = place_of(root, 20, 1) / "own/rank_1.pt"
    data = bytearray(path.read_bytes())
    data[2500] ^= 1
    path.write_bytes(data)
    assert choose(root, IDENTITY).step == 10


def test_what_an_engine_cannot_write_is_a_save_that_failed(root):
    folders = Folders(root, fail=(0, 1))
    folders.save(10)
    assert all("No space left" in saver.failure for saver in folders.savers)
    folders.fail = ()
    folders.save(20)
    folders.close()
    assert steps_in(root) == [20]


def test_the_interval_is_corrected_by_what_saving_takes():
    said = {"mean_seconds_between_failures": 3600.0}
    quick = corrected_every_steps(1000, 1.0, stall_seconds=0.1, write_seconds=1.0, **said)
    slow = corrected_every_steps(1000, 1.0, stall_seconds=0.1, write_seconds=20.0, **said)
    hard_pressed = corrected_every_steps(1000, 1.0, stall_seconds=0.1, write_seconds=90.0, **said)
    dear = corrected_every_steps(1000, 1.0, stall_seconds=5.0, write_seconds=1.0, **said)
    assert quick == 27 and slow == 40 and dear == 100, "Daly; twice the time to write; a tenth of the run"
    assert hard_pressed == 90, "one write, for twice that would lose a hundredth of the time"
    assert corrected_every_steps(10, 1.0, stall_seconds=0.1, write_seconds=600.0, **said) == 10
