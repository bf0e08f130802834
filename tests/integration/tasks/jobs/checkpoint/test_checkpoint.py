"""Checkpoints on disk, with the real writer processes: two ranks' savers in one process, no network between them."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_material import CONFIG, IDENTITY, Ranks, small_training
from safetensors.torch import load_file

from tasks.common.errors import IntegrityError
from tasks.config.training import TrainingConfig
from tasks.jobs.checkpoint.choice import choose, identity
from tasks.jobs.checkpoint.files import claim_attempt, digest, manifests, verify
from tasks.jobs.checkpoint.retention import clean, delete, retain
from tasks.jobs.checkpoint.snapshot import restore, training_tensors
from tasks.jobs.training.network import build_optimizer
from tasks.jobs.training.schedule import learning_rate


@pytest.fixture
def root(tmp_path):
    claim_attempt(tmp_path / "checkpoints", 1)
    return tmp_path / "checkpoints"


@pytest.fixture
def ranks(root):
    ranks = Ranks(root, training_tensors(*small_training(1)))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    claim_attempt(root, 1)
    ranks = Ranks(root, training_tensors(*small_training(1)))
    ranks.save(10, 20)
    ranks.close()
    return root


@pytest.fixture
def saved(written, tmp_path):
    """Checkpoints of steps 10 and 20: a copy of those that were written once."""
    return Path(shutil.copytree(written, tmp_path / "saved"))


def newest(root) -> Path:
    return manifests(root)[0].parent


def test_what_is_restored_is_what_was_saved_and_each_rank_gets_its_own_generator(root):
    network, optimizer = small_training(1)
    ranks = Ranks(root, training_tensors(network, optimizer))
    generators = []
    for saver in ranks.savers:
        torch.randn(7)
        generators.append(torch.get_rng_state())
        saver.save(step=10, consumed_samples=80)
    ranks.close()
    found = choose(root, IDENTITY)
    assert (found.step, found.attempt, found.consumed_samples) == (10, 1, 80)
    assert not torch.equal(*generators)
    for rank in (0, 1):
        other = training_tensors(*small_training(2))
        restore(root, found, rank=rank, pieces=other)
        for name, tensor in training_tensors(network, optimizer).items():
            assert torch.equal(other[name].tensor, tensor.tensor), name
        assert torch.equal(torch.get_rng_state(), generators[rank])


def test_a_snapshot_is_of_the_moment_and_not_of_what_training_does_next(root, ranks):
    weight = ranks.tensors[0]["weight.0.weight"].tensor
    weight.add_(1)
    before = weight.clone()
    ranks.savers[0].save(step=10, consumed_samples=80)
    weight.zero_()
    ranks.savers[1].save(step=10, consumed_samples=80)
    ranks.savers[0].wait()
    assert torch.equal(load_file(newest(root) / "shard-0.safetensors")["weight.0.weight"], before)


def test_nothing_is_committed_before_every_rank_has_written(root, ranks):
    ranks.savers[0].save(step=10, consumed_samples=80)
    time.sleep(0.3)
    assert ranks.savers[0].busy() and not manifests(root) and not (root / "LATEST").exists()
    ranks.savers[1].save(step=10, consumed_samples=80)
    ranks.savers[0].wait()
    assert not ranks.savers[0].busy() and len(manifests(root)) == 1
    names = {path.name for path in newest(root).iterdir()}
    assert names == {"manifest.json", "receipt-0.json", "receipt-1.json", "shard-0.safetensors", "shard-1.safetensors"}


def truncate(folder):
    os.truncate(folder / "shard-0.safetensors", (folder / "shard-0.safetensors").stat().st_size - 1)


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


BROKEN = {
    "truncated": (truncate, "bytes, its manifest says"),
    "flipped": (lambda folder: flip_last_byte(folder / "shard-0.safetensors"), "sha256"),
    "flipped on rank 1": (lambda folder: flip_last_byte(folder / "shard-1.safetensors"), "sha256"),
    "shard missing": (lambda folder: (folder / "shard-1.safetensors").unlink(), "is missing"),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), "is not a manifest"),
    "manifest of something else": (lambda folder: (folder / "manifest.json").write_text("[1]"), "is not a manifest"),
    "edited manifest": (
        lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"consumed_samples": 160', '"consumed_samples": 161')
        ),
        "was changed after it was written",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_bad_checkpoint_is_quarantined_and_the_one_before_is_taken(saved, how):
    break_it, reason = BROKEN[how]
    folder = newest(saved)
    break_it(folder)
    assert choose(saved, IDENTITY).step == 10
    assert reason in json.loads((folder / "quarantined.json").read_text())["reason"]
    marked = (folder / "quarantined.json").stat().st_mtime_ns
    assert choose(saved, IDENTITY).step == 10
    assert (folder / "quarantined.json").stat().st_mtime_ns == marked


def test_without_its_manifest_a_checkpoint_does_not_exist(saved):
    folder = newest(saved)
    (folder / "manifest.json").unlink()
    assert choose(saved, IDENTITY).step == 10
    assert not (folder / "quarantined.json").exists()
    clean(saved, 1)
    assert folder.exists(), "an attempt that may still run is not cleaned"
    clean(saved, 2)
    assert not folder.exists() and choose(saved, IDENTITY).step == 10


@pytest.mark.parametrize("advice", ["\x00garbage", '{"step": 10, "attempt": 1}', None])
def test_latest_decides_nothing(saved, advice):
    (saved / "LATEST").unlink()
    if advice:
        (saved / "LATEST").write_text(advice)
    assert choose(saved, IDENTITY).step == 20


def test_when_all_are_bad_there_is_no_silent_start_from_zero_now_or_later(saved):
    for path in manifests(saved):
        truncate(path.parent)
    for _ in range(2):
        with pytest.raises(
            IntegrityError, match="all checkpoints under .* are bad: .*step-00000020.*step-00000010"
        ) as said:
            choose(saved, IDENTITY)
        assert "delete" in said.value.remedy


def test_when_all_manifests_are_gone_latest_still_says_that_there_were_some(saved):
    for path in manifests(saved):
        path.unlink()
    with pytest.raises(IntegrityError, match="LATEST names one"):
        choose(saved, IDENTITY)


def test_no_checkpoint_at_all_is_a_start_from_zero(root):
    assert choose(root, IDENTITY) is None


def test_another_run_is_refused_with_what_differs(saved):
    other = identity(CONFIG.model_copy(update={"learning_rate": 0.5}), {"tokens.json": "1" * 64})
    with pytest.raises(ValueError, match="cannot continue") as said:
        choose(saved, other)
    assert "training.learning_rate is 0.004 in the checkpoint, 0.5 now" in str(said.value)
    assert "tokens.tokens.json is '000" in str(said.value)
    assert "training.seed" not in str(said.value)


def test_a_checkpoint_of_another_release_is_refused_and_not_quarantined(saved):
    path = manifests(saved)[0]
    path.write_text(json.dumps({"schema": "headway/checkpoint/3", "sha256": "x"}))
    with pytest.raises(IntegrityError, match="was changed"):
        verify(path)
    ours = {"schema": "headway/checkpoint/3"}
    path.write_text(json.dumps({**ours, "sha256": digest(ours)}))
    with pytest.raises(ValueError, match="headway/checkpoint/3"):
        choose(saved, IDENTITY)
    assert not (path.parent / "quarantined.json").exists()


def test_another_network_is_refused(saved):
    network = torch.nn.Linear(6, 5)
    tensors = training_tensors(network, build_optimizer(network, CONFIG))
    with pytest.raises(IntegrityError, match="do not hold the tensors"):
        restore(saved, choose(saved, IDENTITY), rank=0, pieces=tensors)


def steps_in(root):
    return [int(path.parts[-3].removeprefix("step-")) for path in manifests(root)]


def test_the_newest_k_are_kept_and_latest_changes_with_each_commit(root, ranks):
    advice = []
    for step in (10, 20, 30, 40):
        ranks.save(step)
        advice.append((root / "LATEST").read_text())
    assert steps_in(root) == [40, 30]
    assert len(set(advice)) == 4
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000030", "step-00000040"]


def test_the_newest_that_verifies_is_never_deleted(root):
    ranks = Ranks(root, training_tensors(*small_training(1)), keep=3)
    ranks.save(10, 20, 30)
    ranks.close()
    good = (newest(root) / "shard-0.safetensors").read_bytes()
    for path in manifests(root)[:2]:
        truncate(path.parent)
    retain(root, 2)
    assert steps_in(root) == [30, 20, 10], "10 is the only good one"
    (newest(root) / "shard-0.safetensors").write_bytes(good)
    retain(root, 2)
    assert steps_in(root) == [30, 20]


def test_a_block_that_is_not_as_it_was_written_keeps_the_older_ones(root):
    ranks = Ranks(root, training_tensors(*small_training(1)), keep=3)
    ranks.save(10, 20, 30)
    ranks.close()
    for path in manifests(root)[:2]:
        shard = path.parent / "shard-0.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    retain(root, 2)
    assert steps_in(root) == [30, 20, 10]


def test_what_is_quarantined_does_not_count_as_kept(root, ranks):
    ranks.save(10, 20)
    truncate(newest(root))
    assert choose(root, IDENTITY).step == 10
    ranks.save(30)
    assert steps_in(root) == [30, 20, 10]


def test_a_delete_that_fails_is_said_and_stops_nothing(tmp_path, capfd):
    delete(tmp_path / "step-00000010" / "attempt-1")
    assert "could not delete" in capfd.readouterr().err


def test_a_stale_attempt_may_not_commit(root, ranks):
    ranks.save(10)
    assert claim_attempt(root, 1) == 2
    with pytest.raises(OSError, match="a newer attempt than 1 has taken this job over"):
        ranks.save(20)
    assert steps_in(root) == [10]


def test_a_name_is_never_used_again(root, ranks):
    ranks.save(10)
    before = (newest(root) / "shard-0.safetensors").read_bytes()
    for saver in ranks.savers:
        saver.save(step=10, consumed_samples=80)
        saver.wait()
        assert "File exists" in saver.failure
    assert (newest(root) / "shard-0.safetensors").read_bytes() == before


def test_a_dead_writer_is_a_save_that_failed_and_the_next_one_has_a_new_writer(root):
    ranks = Ranks(root, training_tensors(*small_training(1)))
    ranks.savers[0].save(step=10, consumed_samples=80)
    ranks.savers[0]._process.kill()
    ranks.savers[0].wait()
    assert "writer of rank 0 died with code -9" in ranks.savers[0].failure
    ranks.save(20)
    ranks.close()
    assert steps_in(root) == [20] and not ranks.savers[0].failure


def test_the_writer_needs_the_standard_library_only():
    program = "import sys, tasks.jobs.checkpoint.writer; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def test_the_schedule_warms_up_to_its_peak_and_ends_at_its_share():
    config = TrainingConfig(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == [step / 10 for step in range(1, 11)]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)
    cold = config.model_copy(update={"warmup_steps": 0})
    assert learning_rate(cold, 1) < 1.0 and learning_rate(cold, 100) == pytest.approx(0.1)
