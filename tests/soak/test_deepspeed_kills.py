"""Training with ZeRO-2 and ZeRO-3 that is killed at random moments has the losses of an unbroken run: `make soak N=30 SEED=1`.

Each round kills one rank, both ranks or a checkpoint writer with SIGKILL, one to three times, at a random moment of a random
step: in the backward pass, between steps, while DeepSpeed writes its files, while they are hashed. What is left is gone on from.
"""

import os
import random
import signal
import sys
import time

import pytest
from training_runs import CONFIG, Forks, all_lines, numbers, result, said_by, write_job, write_tokens

from tasks.common.process import descendants
from tasks.config.engines.deepspeed import ds_config
from tasks.config.training import DeepspeedConfig, ExecutionConfig

ROUNDS, SEED = int(os.environ.get("N", "2")), int(os.environ.get("SEED", "1"))
STEPS, EVERY = 40, 4
TOLERANCE = 1e-6
"""In nats a token. Measured: 0, for gloo sums in the same order with the same number of ranks."""
IMPORTS = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed.runtime.zero.muon.muon_optimizer
"""


@pytest.fixture(scope="module")
def launch():
    forks = Forks(IMPORTS)
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def job_of(folder, tokens, stage):
    execution = ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=stage))
    config = CONFIG.model_copy(update={"engine": "deepspeed", "steps": STEPS})
    settings = {"execution": execution.model_dump(mode="json"), "deepspeed": ds_config(config, execution)}
    return write_job(folder, tokens, config, EVERY, **settings)


@pytest.fixture(scope="module")
def unbroken(launch, tokens, tmp_path_factory):
    """By stage: the numbers of a run that nothing happened to."""
    found = {}
    for stage in (2, 3):
        job = job_of(tmp_path_factory.mktemp("unbroken") / "job", tokens, stage)
        assert launch(job) == [0, 0], said_by(job)
        found[stage] = numbers(job)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_kills_change_no_loss(launch, tokens, unbroken, tmp_path, number):
    dice = random.Random(f"{SEED}-{number}")
    stage = 2 + number % 2
    job, attempt, killed = job_of(tmp_path / "job", tokens, stage), 0, []
    for _ in range(dice.randrange(1, 4)):
        if (job / "result.json").exists():
            break
        attempt += 1
        plan = {
            "what": dice.choice(("rank", "ranks", "writer")),
            "after": dice.randrange(1, 8),
            "late": dice.random() * 0.3,
        }
        launch.beside(
            job,
            lambda plan=plan: killed.append(kill(job, launch.server.pid, **plan)),
            attempt=attempt,
        )
    while not (job / "result.json").exists():
        attempt += 1
        assert attempt < 10, said_by(job)
        launch(job, attempt=attempt)
    print(
        f"\nround {number}: ZeRO-{stage}, killed {', '.join(killed)}, resumed from {result(job)['resumed_from_step']}",
        file=sys.stderr,
    )
    ours, theirs = numbers(job), unbroken[stage]
    assert list(ours) == list(theirs)
    assert max(abs(ours[step][0] - theirs[step][0]) for step in ours) <= TOLERANCE


def kill(job, server, *, what, after, late):
    """Some steps and a moment after this attempt's first one, kill; a run that is over by then is left alone."""
    begun, deadline = len(all_lines(job)), time.monotonic() + 60
    while len(all_lines(job)) < begun + after:
        assert time.monotonic() < deadline, said_by(job)
        if (job / "result.json").exists():
            return "nothing"
        time.sleep(0.005)
    time.sleep(late)
    below = descendants(server)
    writers = [pid for pid in below if b"checkpoint_writer" in said(pid)]
    ranks = [pid for pid in below if pid not in writers]
    step = max(numbers(job))
    for pid in {"rank": ranks[:1], "ranks": ranks, "writer": writers[:1]}[what]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return f"{what} at step {step}"


def said(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
