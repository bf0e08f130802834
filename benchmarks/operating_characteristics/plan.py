"""How near a plan's goodput and interval are to what trainings come to, whose failures are drawn with a known rate.

A training is played save by save, apart from what tasks/planning simulates and computes: it saves at the end of a step, one
checkpoint is written at a time and a save that comes too early is left out; writes and restarts take now more and now less time;
a failure may hit any of it. Stated is what the stage `plan` says (`reckon`); measured is the share of useful steps' time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.operating_characteristics import Line
from tasks.artifacts import Cluster
from tasks.config.cluster import ClusterConfig
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.hardware.machines import machine_of_sku
from tasks.plan import reckon
from tasks.planning.checkpointing import (
    RESTART_SECONDS,
    CheckpointPlan,
    Recovery,
    Saving,
    checkpoint_bytes,
    chosen_interval,
    plan_checkpoints,
)
from tasks.planning.failures import failure_rates

SEED = 20
DAY = 86_400.0
DAYS = 60.0
"""Of the clock, that a training is played."""
VARY = 0.3
"""Standard deviation of the logarithm of a write's and a restart's time."""
SKU = "Standard_ND96isr_H100_v5"
NETWORK = NetworkConfig(
    layers=80, hidden_size=8192, heads=64, kv_heads=8, intermediate_size=28672, tie_embeddings=False
)
VOCAB = 128_256
NO_HOME = Path("/nonexistent")
FACTORS = (0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83)
"""Intervals that are tried around the chosen one."""


@dataclass(frozen=True)
class Training:
    """What is played. Seconds."""

    step: float
    every: int
    """Steps between two saves."""
    saving: Saving
    recovery: Recovery
    mean: float
    """Between two interruptions, in truth."""
    shape: float = 1.0
    """Weibull's, of the times between them: below 1 they come in bursts."""


@dataclass(frozen=True)
class Planned:
    """A training as the stage plans it."""

    truth: str
    goodput: float
    training: Training


def played(training: Training, dice: np.random.Generator, *, days: float = DAYS) -> float:
    """Useful seconds of all, from a first start until the days are over."""
    useful = clock = 0.0
    scale = training.mean / math.gamma(1 + 1 / training.shape)
    while clock < days * DAY:
        until = scale * dice.weibull(training.shape)
        clock += until + training.recovery.detection_seconds
        working = until - training.recovery.restart_seconds * _varied(dice)
        if working > 0:
            useful += _kept(training, working, dice)
    return useful / clock


def _kept(training: Training, working: float, dice: np.random.Generator) -> float:
    """Of a stretch of work that a failure ends: useful seconds in the last checkpoint that was written by then."""
    computing = training.every * training.step
    now = done = kept = written = 0.0
    while True:
        now, done = now + computing, done + computing
        if now >= working:
            return kept
        if now < written:
            continue  # the writer is busy: this save is left out
        now += training.saving.stall_seconds
        written = now + training.saving.lag_seconds * _varied(dice)
        if written < working:
            kept = done


def _varied(dice: np.random.Generator) -> float:
    """A factor of mean 1."""
    return float(math.exp(VARY * dice.standard_normal() - VARY**2 / 2))


def as_planned(machines: int, *, spot: bool = False, limits: PlanningConfig | None = None) -> Planned:
    """A network of 70 B parameters on machines of eight H100, by the stage's own sums. `limits` say what the stage is told."""
    shape = {"name": "nd", "backend": "slurm", "nodes": machines, "ranks_per_node": 8, "gpus_per_node": 8}
    on = Cluster(
        **{key: value for key, value in shape.items() if key != "gpus_per_node"},
        threads_per_rank=12,
        sku=SKU,
        allreduce_gigabytes_per_second=360.0,
        memory_bytes_per_node=1 << 41,
        config=ClusterConfig.model_validate({**shape, "preemptible": spot}),
    )
    training = TrainingConfig(
        network=NETWORK,
        precision="bf16",
        sequence_length=4096,
        global_batch_size=8 * machines,
        micro_batch_size=1,
        steps=1_000_000,
    )
    how, told = ExecutionConfig(parallel="fsdp", recompute="full"), limits or PlanningConfig()
    numbers, truth = (
        reckon(training, one, how, on, vocab_size=VOCAB, train_tokens=10**12, home=NO_HOME)
        for one in (told, PlanningConfig())
    )
    played_as = Training(
        step=numbers.step_seconds,
        every=numbers.checkpoint_every_steps,
        saving=numbers.rank.saving,
        recovery=Recovery(restart_seconds=RESTART_SECONDS + numbers.rank.reading_seconds),
        mean=truth.mean_seconds_between_failures,
    )
    kind = "Spot machines" if spot else "machines"
    said = f"{machines:,} {kind} of 8 H100, stopped every {played_as.mean / 3600:.2g} h"
    return Planned(said, numbers.goodput, played_as)


def goodputs(training: Training, trials: int, *, days: float = DAYS) -> np.ndarray:
    """Of so many trainings; the same dice for each that is asked about."""
    return np.array([played(training, np.random.default_rng([SEED, trial]), days=days) for trial in range(trials)])


def loss_of_interval(training: Training, trials: int) -> float:
    """Goodput that the best interval of a grid has more than the planned one; none is shorter than a write."""
    shortest = math.ceil(training.saving.lag_seconds / training.step)
    tried = {max(shortest, round(training.every * factor)) for factor in FACTORS}
    found = {every: float(goodputs(replace(training, every=every), trials).mean()) for every in tried}
    return max(found.values()) - found[max(shortest, training.every)]


def _checkpoints(parameters: int, gpus: int) -> CheckpointPlan:
    machine = machine_of_sku(SKU)
    rates = failure_rates(machine.gpu, gpus, per_machine=machine.gpus)
    return plan_checkpoints(checkpoint_bytes(parameters), machine, rates)


def covered(trials: int, *, days: float = 30.0) -> float:
    """Share of trainings whose goodput is within the plan's low and high; their rate is drawn from the published range."""
    plan = _checkpoints(70 * 10**9, 4096)
    rates, dice = plan.rates.together, np.random.default_rng(SEED)
    inside = 0
    for _ in range(trials):
        mean = math.exp(dice.uniform(math.log(rates.low), math.log(rates.high)))
        training = Training(10.0, max(1, round(plan.interval_seconds / 10)), plan.cost, plan.recovery, mean)
        inside += plan.goodput.low <= played(training, dice, days=days) <= plan.goodput.high
    return inside / trials


def hard_pressed() -> Training:
    """2 T parameters on 100,000 H100: a write takes seven minutes, and a failure comes every nineteen."""
    plan = _checkpoints(2 * 10**12, 100_000)
    mean = plan.rates.together.mid
    interval = chosen_interval(plan.cost, plan.recovery, mean).seconds
    return Training(10.0, math.ceil(interval / 10), plan.cost, plan.recovery, mean)


def rows(quick: bool) -> Iterator[Line]:
    """The table. Quick: fewer trainings of each kind."""
    trials = 20 if quick else 200
    plans = [as_planned(2), as_planned(128), as_planned(2048), as_planned(64, spot=True)]
    for plan in plans:
        yield _goodput("plan: goodput", plan, trials)
    day = PlanningConfig(mean_hours_between_failures=24.0)
    for plan in (as_planned(2048, limits=day), as_planned(64, spot=True, limits=day)):
        yield _goodput("plan: goodput, 24 h assumed (as before)", plan, trials)
    for shape in (0.7, 1.5):
        plan = plans[2]
        shaped = replace(plan.training, shape=shape)
        said = f"{plan.truth}, times between them Weibull {shape}"
        yield _goodput("plan: goodput", Planned(said, plan.goodput, shaped), trials)
    stated = "the best of 7 has at most 0.005 more goodput"
    for plan in plans[1:]:
        lost = loss_of_interval(plan.training, trials)
        yield Line("plan: interval", stated, f"{lost:.4f} more", plan.truth, SEED, trials)
    pressed = hard_pressed()
    lost = loss_of_interval(pressed, trials)
    truth = "100,000 H100, 2 T parameters, stopped every 0.32 h, a write takes 0.12 h"
    yield Line("plan: interval", stated, f"{lost:.4f} more", truth, SEED, trials)
    twice = replace(pressed, every=2 * math.ceil(pressed.saving.lag_seconds / pressed.step))
    lost = loss_of_interval(twice, trials)
    yield Line("plan: interval, twice a write (as before)", stated, f"{lost:.4f} more", truth, SEED, trials)
    many = 10 * trials
    truth = "4,096 H100 for 30 days, the rate drawn from the published range"
    yield Line("plan: goodput's range", "low to high", f"{covered(many):.1%} within", truth, SEED, many)


def _goodput(judgement: str, plan: Planned, trials: int) -> Line:
    found = goodputs(plan.training, trials)
    error = found.std(ddof=1) / math.sqrt(trials)
    return Line(judgement, f"{plan.goodput:.3f}", f"{found.mean():.3f} +- {error:.3f}", plan.truth, SEED, trials)
