"""The training job on two real ranks: its result, a kill and what comes after it, and what it refuses.

The kill and the resumption are launched by torchrun, as shipped. The other runs start the same program by forking a process
that has already imported torch and transformers (8 s of CPU a rank): one process a rank, torchrun's environment, gloo.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import content, error, result, said_by, write_job
from waiting import limit, until

from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.jobs.checkpoint.files import digest, manifests
from tasks.jobs.data.samples import open_samples
from tasks.jobs.node.elastic import SAVED_AND_STOPPED, newcomers_seed

STEPS, EVERY = 48, 4
LEFT_AT, ASKED_AT = 42, 36
"""The step after which the runs that are gone on from were left, and in which a rank of the elastic one is asked to stop."""
ROOT = Path(__file__).parents[5]
CONFIG = TrainingConfig(
    network=NetworkConfig(layers=1, hidden_size=32, heads=2, kv_heads=1, intermediate_size=64),
    sequence_length=32,
    global_batch_size=8,
    micro_batch_size=2,
    steps=STEPS,
    warmup_steps=4,
    learning_rate=1e-2,
)
LEAVES = f"""
import os
from tasks.jobs.train import Training
advance = Training._advance
def until(self):
    self.saves.room(wait=True)  # no save is left out for being slow: which checkpoints there are is known
    if self.step == {LEFT_AT}:
        os._exit(9)
    return advance(self)
Training._advance = until
"""
ASKS = f"""
import os, signal
from tasks.jobs.train import Training
advance = Training._advance
def until(self):
    if self.step == {ASKED_AT} and self.rank.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return advance(self)
Training._advance = until
"""


def write_config(job, tokens, config=CONFIG, every=EVERY, **more):
    return write_job(job, tokens, config, every, **more)


@pytest.fixture(scope="module")
def unbroken(forks, tokens, tmp_path_factory):
    job = write_config(tmp_path_factory.mktemp("jobs") / "unbroken", tokens)
    assert forks(job) == [0, 0], said_by(job)
    return job


def lines_of(job):
    log = job / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def torchrun(job, attempt):
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tasks.jobs.train",
    ]
    own = {"HEADWAY_JOB": str(job), "HEADWAY_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, env={**os.environ, **own}, cwd=ROOT, start_new_session=True)


@pytest.fixture
def killed(tokens, tmp_path):
    """A job of torchrun whose rank 1 was killed after the first checkpoint and before the last one."""
    job = write_config(tmp_path / "killed", tokens)
    launcher = torchrun(job, 1)
    try:
        while launcher.poll() is None and lines_of(job) <= EVERY:
            time.sleep(0.001)
        rank = json.loads((job / "ranks" / "1.json").read_text())["pid"]
        os.kill(
            rank, signal.SIGSTOP
        )  # it is in a step; the writers of the first checkpoint have all the time that they need
        until(lambda: manifests(job / "checkpoints"))
        os.kill(rank, signal.SIGKILL)
        assert launcher.wait(limit(60)) != 0
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    assert not (job / "result.json").exists()
    return job


@pytest.fixture(scope="module")
def left(forks, tokens, tmp_path_factory):
    """A job whose ranks were gone shortly before the end: two checkpoints, and steps after the newer one."""
    job = write_config(tmp_path_factory.mktemp("jobs") / "left", tokens)
    assert forks(job, fault=LEAVES) == [9, 9], said_by(job)
    assert [step_of(path.parent) for path in manifests(job / "checkpoints")][:2] == [40, 36]
    return job


@pytest.fixture
def left_over(left, tmp_path):
    """A copy of what that job left behind."""
    return Path(shutil.copytree(left, tmp_path / "job"))


def records(job):
    """What must not depend on interruptions: of every step, the last record's numbers."""
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["learning_rate"], line["grad_norm"]) for line in lines}


def newest(job):
    return manifests(job / "checkpoints")[0].parent


def step_of(checkpoint):
    return int(checkpoint.parent.name.removeprefix("step-"))


def running(job):
    """Processes that were started for a job and still run."""
    named = subprocess.run(["ps", "-e", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in named.splitlines() if str(job) in line and "checkpoint_writer" in line]


def test_an_unbroken_run_learns_and_tells_how_it_went(unbroken):
    losses = [loss for loss, *_ in records(unbroken).values()]
    assert list(records(unbroken)) == list(range(1, STEPS + 1))
    assert abs(losses[0] - np.log(64)) < 0.3
    assert losses[-1] < losses[0] - 1.0
    told = result(unbroken)
    assert told["metrics"]["loss"] == losses[-1]
    assert (told["metrics"]["steps"], told["metrics"]["tokens"]) == (STEPS, STEPS * 8 * 32)
    assert told["metrics"]["tokens_per_second"] > 0 and told["checkpoint_stall_seconds"] > 0
    assert told["resumed_from_step"] is None
    assert json.loads((unbroken / "progress.json").read_text())["done"] == STEPS
    assert not running(unbroken)


def test_rank_0_saves_what_all_ranks_share_and_the_others_their_own_only(unbroken):
    shared, own = (load_file(newest(unbroken) / f"shard-{rank}.safetensors") for rank in (0, 1))
    assert set(own) == {"rng.torch"}
    weights = {name.removeprefix("weight.") for name in shared if name.startswith("weight.")}
    published = load_file(unbroken / "out" / "model.safetensors")
    assert weights == set(published)
    assert all(torch.equal(shared[f"weight.{name}"], published[name]) for name in weights)
    state = {f"optimizer.{key}.{name}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(shared) == state | {f"weight.{name}" for name in weights} | {"rng.torch"}
    assert {float(shared[f"optimizer.step.{name}"]) for name in weights} == {STEPS}
    manifest = json.loads((newest(unbroken) / "manifest.json").read_text())
    assert manifest["consumed_samples"] == STEPS * CONFIG.global_batch_size
    assert manifest["world_size"] == 2 and "world_size" not in manifest["identity"]


def test_what_it_publishes_loads_and_counts(unbroken, tokens):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(unbroken / "out")
    logits = network(torch.arange(63)[None]).logits
    assert logits.shape == (1, 63, 64) and torch.isfinite(logits).all()
    known = [(token * 5 + 3) % 63 for token in range(63)]
    assert (logits[0].argmax(-1) == torch.tensor(known)).float().mean() > 0.5
    assert network.config.eos_token_id == 63
    assert network.config.max_position_embeddings == 32, "the context that was trained"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (unbroken / "out" / name).read_bytes() == (tokens / "tokenizer" / name).read_bytes()
    about = json.loads((unbroken / "out" / "training.json").read_text())
    assert about["parameters"] == network.num_parameters() == result(unbroken)["metrics"]["parameters"]
    assert (about["steps"], about["seed"], about["sequence_length"]) == (STEPS, CONFIG.seed, 32)


def test_a_killed_run_goes_on_bit_for_bit(unbroken, killed):
    done, saved = max(records(killed)), step_of(newest(killed))
    assert EVERY <= saved <= done < STEPS
    assert not running(killed), "the writers died with their ranks"
    with open(killed / "metrics.jsonl", "a") as log:
        log.write('{"step": 17, "lo')
    launcher = torchrun(killed, 2)
    try:
        assert launcher.wait(limit(120)) == 0, said_by(killed)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    assert result(killed)["resumed_from_step"] == saved
    assert records(killed) == records(unbroken)
    assert content(killed / "out") == content(unbroken / "out")
    attempts = [json.loads(line)["attempt"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}


def rewrite(folder, change, rank=0, **updates):
    """Change a committed checkpoint so that it still verifies."""
    shard = folder / f"shard-{rank}.safetensors"
    save_file(change(load_file(shard)), shard)
    manifest = json.loads((folder / "manifest.json").read_text())
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    manifest["files"][rank] = {"path": shard.name, "size": shard.stat().st_size, "sha256": sha256}
    manifest.update({key: update(manifest[key]) for key, update in updates.items()})
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest(manifest)}))


def zeroed(part):
    return lambda tensors: {name: torch.zeros_like(t) if part in name else t for name, t in tensors.items()}


SABOTAGE = {
    "weights": {"change": zeroed("weight.model.layers.0.mlp")},
    "first moment": {"change": zeroed("optimizer.exp_avg.")},
    "second moment": {"change": zeroed("optimizer.exp_avg_sq.")},
    "optimizer's step": {"change": zeroed("optimizer.step.")},
    "position in the data": {"change": zeroed("nothing"), "consumed_samples": lambda samples: samples + 8},
}


@pytest.mark.parametrize("what", ["nothing", *SABOTAGE])
def test_each_part_of_a_checkpoint_is_needed_for_the_same_losses(unbroken, left_over, forks, what):
    rewrite(newest(left_over), **SABOTAGE.get(what, {"change": zeroed("nothing")}))
    assert forks(left_over, attempt=2) == [0, 0], said_by(left_over)
    assert result(left_over)["resumed_from_step"] == 40
    assert (records(left_over) == records(unbroken)) == (what == "nothing")


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own_generator_back(unbroken, left_over, forks, rank):
    """Training draws nothing at random after the start, so the losses cannot show it: the last checkpoint does."""
    mark = torch.Generator().manual_seed(99).get_state()
    rewrite(newest(left_over), lambda tensors: {**tensors, "rng.torch": mark}, rank=rank)
    assert forks(left_over, attempt=2) == [0, 0], said_by(left_over)
    for each in (0, 1):
        name = f"shard-{each}.safetensors"
        same = torch.equal(
            load_file(newest(left_over) / name)["rng.torch"], load_file(newest(unbroken) / name)["rng.torch"]
        )
        assert same == (each != rank)
    assert torch.equal(load_file(newest(left_over) / f"shard-{rank}.safetensors")["rng.torch"], mark)


@pytest.mark.parametrize("part", ["optimizer.exp_avg.", "rng.torch"])
def test_a_checkpoint_that_lacks_a_part_is_refused(left_over, forks, part):
    before = (left_over / "metrics.jsonl").read_bytes()
    rewrite(newest(left_over), lambda tensors: {name: t for name, t in tensors.items() if not name.startswith(part)})
    assert 0 not in forks(left_over, attempt=2)
    assert error(left_over)["class"] == "integrity" and "do not hold the tensors" in error(left_over)["message"]
    assert (left_over / "metrics.jsonl").read_bytes() == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_costs_one_checkpoint_and_no_bit(unbroken, left_over, forks):
    bad, before = newest(left_over), step_of(manifests(left_over / "checkpoints")[1].parent)
    flip(bad / "shard-0.safetensors")
    assert forks(left_over, attempt=2) == [0, 0], said_by(left_over)
    assert result(left_over)["resumed_from_step"] == before
    assert records(left_over) == records(unbroken)
    assert (bad / "quarantined.json").exists()


def test_when_all_are_bad_the_job_stops(left_over, forks):
    before = (left_over / "metrics.jsonl").read_bytes()
    for path in manifests(left_over / "checkpoints"):
        flip(path.parent / "shard-1.safetensors")
    for attempt in (2, 3):
        assert 0 not in forks(left_over, attempt=attempt)
        assert error(left_over)["class"] == "integrity" and "all checkpoints" in error(left_over)["message"]
        assert error(left_over)["remedy"]
    assert (left_over / "metrics.jsonl").read_bytes() == before


def test_another_configuration_is_refused_with_what_differs(left_over, forks, tokens):
    write_config(left_over, tokens, CONFIG.model_copy(update={"learning_rate": 2e-2}))
    assert 0 not in forks(left_over, attempt=2)
    assert error(left_over)["class"] == "user"
    assert "training.learning_rate is 0.01 in the checkpoint, 0.02 now" in error(left_over)["message"]


def test_another_number_of_ranks_goes_on(unbroken, left_over, forks):
    assert forks(left_over, attempt=2, ranks=1) == [0], said_by(left_over)
    found, wanted = records(left_over), records(unbroken)
    assert list(found) == list(wanted)
    assert all(found[step] == pytest.approx(wanted[step], rel=1e-3) for step in wanted)


def test_a_finished_run_that_is_started_again_only_publishes_again(unbroken, forks, tmp_path):
    job = Path(shutil.copytree(unbroken, tmp_path / "job"))
    shutil.rmtree(job / "out")
    assert forks(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == STEPS
    assert content(job / "out") == content(unbroken / "out")
    assert (job / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()


def test_what_is_due_while_a_save_runs_is_skipped_and_counted_but_never_the_last(unbroken, forks, tokens, tmp_path):
    job = write_config(tmp_path / "often", tokens, every=1)
    assert forks(job) == [0, 0], said_by(job)
    told = result(job)
    assert told["checkpoints"] + told["checkpoints_skipped"] == STEPS
    assert json.loads((job / "checkpoints" / "LATEST").read_text())["step"] == STEPS
    assert newest(job).parent.name == f"step-{STEPS:08d}"
    assert records(job) == records(unbroken)
    assert content(job / "out") == content(unbroken / "out"), "two runs publish the same bytes"


def test_a_loss_that_is_no_number_is_an_error_that_names_the_step(forks, tokens, tmp_path):
    job = write_config(tmp_path / "job", tokens, CONFIG.model_copy(update={"learning_rate": 1e38, "warmup_steps": 0}))
    assert forks(job, ranks=1) == [1]
    said = error(job)
    assert said["type"] == "FloatingPointError" and said["message"].startswith("step 2: the loss is nan")
    assert list(records(job)) == [1]


def test_too_few_tokens_are_the_users_mistake(forks, tokens, tmp_path):
    job = write_config(tmp_path / "job", tokens, CONFIG.model_copy(update={"sequence_length": 50_000}))
    assert forks(job) == [1, 1]
    assert {error(job, rank)["class"] for rank in (0, 1)} == {"user"}
    assert "sequence_length" in error(job)["message"]


@pytest.fixture(scope="module")
def stopped(forks, tokens, tmp_path_factory):
    """An elastic job of two ranks; rank 1 was asked to stop on the way."""
    job = write_config(tmp_path_factory.mktemp("jobs") / "stopped", tokens, every=STEPS, elastic=True)
    codes = forks(job, fault=ASKS)
    assert codes == [SAVED_AND_STOPPED, SAVED_AND_STOPPED], said_by(job)
    return job


def position(job):
    """Of each step: the samples consumed after it, and the checksum of those that it read."""
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["consumed"], line["samples_crc32"]) for line in lines}


def test_ranks_that_are_asked_to_stop_lose_no_step(stopped):
    done = max(records(stopped))
    assert ASKED_AT <= done < STEPS and step_of(newest(stopped)) == done
    manifest = json.loads((newest(stopped) / "manifest.json").read_text())
    assert "world_size" not in manifest["identity"] and len(manifest["files"]) == 2
    assert not (stopped / "errors").exists() and not running(stopped)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_elastic_job_goes_on_with_another_number_of_ranks(unbroken, stopped, forks, tokens, tmp_path, ranks):
    """What is read does not depend on their number, and a rank that was not there gets a seed of its own."""
    job, done = Path(shutil.copytree(stopped, tmp_path / "job")), max(records(stopped))
    assert forks(job, attempt=2, ranks=ranks) == [0] * ranks, said_by(job)
    told = result(job)
    assert told["resumed_from_step"] == done
    assert [(change["step"], change["world_size"]) for change in told["standstills"]] == [(done + 1, ranks)]
    assert list(position(job).items())[:done] == list(position(stopped).items())
    assert position(job) == in_order(tokens)
    found, wanted = records(job), records(unbroken)
    assert all(found[step] == pytest.approx(wanted[step], rel=1e-3) for step in wanted)
    assert ranks != 2 or found == wanted
    assert set(json.loads((job / "out" / "training_log.jsonl").read_text().splitlines()[0])) == {
        "step",
        "loss",
        "learning_rate",
        "grad_norm",
    }
    generators = [load_file(newest(job) / f"shard-{rank}.safetensors")["rng.torch"] for rank in range(ranks)]
    kept = [load_file(newest(stopped) / f"shard-{rank}.safetensors")["rng.torch"] for rank in (0, 1)]
    seeds = [newcomers_seed(CONFIG.seed, done, rank) for rank in (2, 3)]
    new = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(generators, [*kept, *new], strict=False))
    assert len({rng.numpy().tobytes() for rng in generators}) == ranks


def in_order(tokens):
    """What `position` is of a run that reads each sample once, in the order of the seed."""
    samples, size = open_samples(tokens, CONFIG), CONFIG.global_batch_size
    read = [samples.batch(size * step, size) for step in range(STEPS)]
    sums = [sum(zlib.crc32(row[:-1].tobytes()) for row in batch) for batch in read]
    assert len(set(sums)) == STEPS
    return {step: (size * step, crc32) for step, crc32 in enumerate(sums, 1)}


def test_a_smaller_batch_goes_on_from_the_same_checkpoint(unbroken, left_over, forks, tokens):
    write_config(left_over, tokens, smaller_batches=1)
    assert forks(left_over, attempt=2) == [0, 0], said_by(left_over)
    assert result(left_over)["resumed_from_step"] == 40
    found, wanted = records(left_over), records(unbroken)
    assert all(found[step] == pytest.approx(wanted[step], rel=1e-3) for step in wanted) and found != wanted
