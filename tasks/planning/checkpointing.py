"""What checkpoints cost and save: bytes, seconds to each storage, what stands still, how often, and the goodput that is left.

Pure; seconds and bytes. How checkpoints are written is tasks/jobs/checkpoint/snapshot.py. How often trainings fail is in
failures.py; a whole training is played through in simulation.py, which agrees with `expected_goodput`. See docs/failures.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tasks.config.engines.registry import ENGINES
from tasks.config.training import EngineName
from tasks.planning.case import Precision
from tasks.planning.failures import SPOT_NOTICE_SECONDS, Range, Rates
from tasks.planning.storages import GIB, STORAGES, TIB, Storage, bandwidth_of, capacity_for, storage_named

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine

MIN_CHECKPOINTS = 10
"""A run is saved at least this often, however rare failures are: people stop runs too."""

WRITER_SHARE = 2.0
"""So many times as long as writing takes an interval is where that costs hardly anything: the writer takes processors, memory and
disk from training (two cores: a step of 4.9 ms took 9.5 ms while a save was written)."""
WORTH = 0.005
"""Share of useful time that shorter intervals must bring for the writer to be at work for more than half of the time."""


def young_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """T = sqrt(2 C M) (Young 1974): first-order optimum of the computing time between two saves."""
    if save_seconds <= 0 or mean_seconds_between_failures <= 0:
        raise ValueError(
            f"a save of {save_seconds} s and {mean_seconds_between_failures} s between failures: both must be above 0"
        )
    return math.sqrt(2 * save_seconds * mean_seconds_between_failures)


def daly_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Daly 2006, equation 37: Young's with two further terms; holds where saving is not small against M.

    T = sqrt(2 C M) [1 + sqrt(C / 2M) / 3 + (C / 2M) / 9] - C for C < 2M, else T = M.
    """
    young = young_interval(save_seconds, mean_seconds_between_failures)
    share = save_seconds / (2 * mean_seconds_between_failures)
    if share >= 1:
        return mean_seconds_between_failures
    return young * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def useful_share(interval_seconds: float, save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Share of useful time where failures are exponential, and recovery and writing beside training cost nothing.

    T / M / (e^((T + C) / M) - 1), Daly 2006, equation 20, without its restart: that multiplies it (checkpointing.py).
    """
    cycle = (interval_seconds + save_seconds) / mean_seconds_between_failures
    return interval_seconds / mean_seconds_between_failures * math.exp(-cycle) / -math.expm1(-cycle)


def with_time_to_write(
    interval_seconds: float, *, save_seconds: float, write_seconds: float, mean_seconds_between_failures: float
) -> float:
    """The interval that is wanted, made as long as the writer needs.

    Never shorter than a write, for one checkpoint is written at a time; and WRITER_SHARE times as long, unless that costs more
    than WORTH of the time.
    """
    shortest, spared = max(interval_seconds, write_seconds), max(interval_seconds, WRITER_SHARE * write_seconds)
    if spared == shortest:
        return shortest
    lost = useful_share(shortest, save_seconds, mean_seconds_between_failures) - useful_share(
        spared, save_seconds, mean_seconds_between_failures
    )
    return spared if lost <= WORTH else shortest


def checkpoint_every_steps(
    steps: int, step_seconds: float, *, save_seconds: float, mean_seconds_between_failures: float
) -> int:
    """Steps between checkpoints by Daly's interval; at least 1, and at most a tenth of the run where it has ten steps.

    `save_seconds` is the time that training stands still for one save.
    """
    wanted = round(daly_interval(save_seconds, mean_seconds_between_failures) / step_seconds)
    return max(1, min(wanted, steps // MIN_CHECKPOINTS))


def corrected_every_steps(
    steps: int, step_seconds: float, *, stall_seconds: float, write_seconds: float, mean_seconds_between_failures: float
) -> int:
    """`checkpoint_every_steps` by what was measured: the time that training stood still, and the time until it was committed.

    Not oftener than `with_time_to_write` lets.
    """
    result = checkpoint_every_steps(
        steps, step_seconds, save_seconds=stall_seconds, mean_seconds_between_failures=mean_seconds_between_failures
    )
    seconds = with_time_to_write(
        result * step_seconds,
        save_seconds=stall_seconds,
        write_seconds=write_seconds,
        mean_seconds_between_failures=mean_seconds_between_failures,
    )
    return min(max(result, math.ceil(seconds / step_seconds)), max(1, steps))


KEPT = 3
"""Checkpoints that there is room for: two that are kept and the one that is written."""
CANDIDATES = ("blob-hot", "lustre-40", "lustre-125", "lustre-250", "lustre-500")
"""What all machines see and what outlives them, the slowest a TiB first; a faster tier of a file system costs more a TiB."""
WRITES_AN_INTERVAL = 4.0
"""A file system whose bandwidth grows with its size is ordered so large that a write takes a quarter of the best interval."""


@dataclass(frozen=True)
class CheckpointPlan:
    """Where checkpoints go and what that makes of the time."""

    bytes: int
    storage: Storage
    tib: float | None
    """To order; None: it needs no order."""
    cost: Saving
    recovery: Recovery
    write_seconds: float
    interval: Interval
    rates: Rates
    goodput: Shares
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def gib(self) -> float:
        return self.bytes / GIB

    @property
    def interval_seconds(self) -> float:
        return self.interval.seconds


def plan_checkpoints(size: int, machine: Machine, rates: Rates, *, storage: str = "") -> CheckpointPlan:
    """Where to save and how often; `storage` empty: the first of CANDIDATES that costs no more than WORTH of goodput.

    `size` is of one checkpoint, in bytes. Raises ValueError when the machines cannot write to the storage at all.
    """
    names = (storage,) if storage else CANDIDATES
    results = [_to(storage_named(name), size, machine, rates) for name in names]
    plans = [plan for plan in results if plan is not None]
    if not plans:
        raise ValueError(
            f"checkpoints to {storage or 'any storage'}: {machine.name} cannot write there, or it is not available as large "
            f"as {KEPT * size / TIB:.1f} TiB; give one of {', '.join(STORAGES)}"
        )
    best = max(plan.goodput.mid for plan in plans)
    taken = next(plan for plan in plans if plan.goodput.mid >= best - WORTH)
    more = best - taken.goodput.mid
    others = f"; a faster one would bring {more:.1%} more goodput" if more >= 0.0005 else ""
    tib = f", {taken.tib:g} TiB" if taken.tib and math.isfinite(taken.tib) else ""
    return replace(taken, reason=f"{taken.storage.said}{tib}: written in {taken.write_seconds:.0f} s{others}")


def _to(storage: Storage, size: int, machine: Machine, rates: Rates) -> CheckpointPlan | None:
    snapshot = snapshot_seconds(size, machine, rates.gpus)
    quick = daly_interval(snapshot, rates.together.mid) / WRITES_AN_INTERVAL
    tib: float | None = None
    least = KEPT * size / TIB
    if storage.step:  # as large as there is room to need, and as fast as it should be; else the largest that there is
        tib = capacity_for(storage, least, size / quick) or (storage.largest if least <= storage.largest else None)
    write = write_seconds(size, storage, machine, rates.machines, tib=tib)
    if write is None or (storage.step and tib is None):
        return None
    cost = Saving(snapshot, write)
    recovery = Recovery(restart_seconds=RESTART_SECONDS + write)
    interval = chosen_interval(cost, recovery, rates.together.mid)
    goodput = goodput_range(interval.seconds, cost, recovery, rates.together)
    warnings = [*rates.warnings]
    if not storage.durable:
        warnings.append(
            f"{storage.name} goes with its machine: copy checkpoints elsewhere, or a lost machine takes them along"
        )
    seconds = cost.stall_seconds + cost.lag_seconds
    if rates.evictions and seconds > SPOT_NOTICE_SECONDS:
        warnings.append(
            f"a save takes {seconds:.0f} s, an eviction's notice is {SPOT_NOTICE_SECONDS:.0f} s: work is lost each time"
        )
    if goodput.low < 0.5:
        warnings.append(f"with failures as frequent as they may be, only {goodput.low:.0%} of the time is useful")
    return CheckpointPlan(
        size, storage, tib, cost, recovery, write, interval, rates, goodput, interval.reason, tuple(warnings)
    )


BYTES_PER_PARAMETER: Mapping[Precision, int] = {"bf16": 14, "fp16": 14, "fp8": 14, "fp32": 12}
"""2 of the weights in 16 bits, 4 of those in 32, 8 of Adam's two moments; fp32 has no first ones; gradients are not saved.
BLOOM: 176.2 G parameters, 2.3 TB whole and 329 GB of weights alone as printed, which are TiB and GiB (bigscience.notion.site);
Azure's GPT-3 175B, 2.3 TiB;
llm-foundry, float32, mpt-30b 336 GiB. fp8 is of matmuls only: weights are kept in bf16 (Transformer Engine)."""
OWN_ENGINE_BYTES = 12
"""Of engine torch in any precision: its weights are float32 and autocast (tasks/jobs/training)."""
OVERHEAD_BYTES = 1_000_000
"""safetensors headers, the state of the random generators, manifest and receipts."""

SNAPSHOT_OVERHEAD_SECONDS = 6.0
"""What an asynchronous save stands still beside copying. Cautious: 7 B parameters stood still for 6.3 s where writing took
148.8 s (pytorch.org/blog/reducing-checkpointing-times), all of it taken for overhead. A measured stall replaces it."""
DETECTION_SECONDS = 120.0
RESTART_SECONDS = 480.0
"""From the failure until it is known, and from then until training goes on, without reading the checkpoint. Together 600 s: the
worked example at changlan.org. More than 90 % of Llama 3's time was effective with 3.09 h between failures: no more than 18.5
minutes are lost in each, checkpoints included. Where nobody watches at night, it is hours (OPT-175B, BLOOM)."""


@dataclass(frozen=True)
class Saving:
    """What one checkpoint costs."""

    stall_seconds: float
    """Training stands still."""
    lag_seconds: float = 0.0
    """From then until it can be come back to: the write, where it goes on beside training."""

    def __post_init__(self) -> None:
        _require(self.stall_seconds, "stall_seconds")
        _require(self.lag_seconds, "lag_seconds")


@dataclass(frozen=True)
class Recovery:
    """What an interruption costs beside the work that is lost."""

    detection_seconds: float = DETECTION_SECONDS
    restart_seconds: float = RESTART_SECONDS

    def __post_init__(self) -> None:
        _require(self.detection_seconds, "detection_seconds")
        _require(self.restart_seconds, "restart_seconds")

    @property
    def seconds(self) -> float:
        return self.detection_seconds + self.restart_seconds


@dataclass(frozen=True)
class Interval:
    """How often to save: seconds of computing between two saves."""

    seconds: float
    formula: str
    """young, daly, availability; or what holds it up: writer."""
    reason: str
    all: Mapping[str, float]
    """What each formula says."""


@dataclass(frozen=True)
class Shares:
    """Goodput, useful seconds of all: with most failures, as expected, with fewest."""

    low: float
    mid: float
    high: float


def checkpoint_bytes(parameters: int, *, precision: Precision = "bf16", engine: EngineName = "megatron") -> int:
    """Of one that training goes on from: weights and optimizer."""
    if parameters < 1:
        raise ValueError(f"{parameters} parameters: give a number above 0")
    own = ENGINES[engine].planned.state_bytes
    return parameters * (BYTES_PER_PARAMETER[precision] if own else OWN_ENGINE_BYTES)


def resumable_bytes(trained: int) -> int:
    """Of one that engine torch goes on from, as a whole folder: float32 weights, two Adam moments, and what lies beside them."""
    return checkpoint_bytes(trained, engine="torch") + OVERHEAD_BYTES


def snapshot_seconds(size: float, machine: Machine, gpus: int, *, overhead: float = SNAPSHOT_OVERHEAD_SECONDS) -> float:
    """Copying a checkpoint to the hosts' memory. `gpus` are those that hold different parts of it: all, with ZeRO 1 and up."""
    if gpus < 1 or machine.host_bandwidth <= 0:
        raise ValueError(f"{gpus} GPUs at {machine.host_bandwidth} B/s to their host: both must be above 0")
    return overhead + size / (gpus * machine.host_bandwidth)


def write_seconds(
    size: float, storage: Storage, machine: Machine, machines: int, *, tib: float | None = None
) -> float | None:
    """Writing a checkpoint of `size` bytes from all machines at once; None: the machines have no such disk, or no network."""
    rate = bandwidth_of(storage, machine, machines, tib=tib)
    return size / rate if rate > 0 else None


def availability_interval(
    save_seconds: float, mean_seconds_between_failures: float, *, recovery_seconds: float
) -> float:
    """Saxena et al., arXiv 2410.18124: Tc = Ts + sqrt(2 (Tf + Tr) Ts + Ts^2); computing time, so Tc less the save itself.

    It makes (1 - Ts / Tc) Tf / (Tf + Tr + Tc / 2) largest: nothing fails while it recovers, and half of Tc is done again.
    """
    _require(recovery_seconds, "recovery_seconds")
    _require_above(save_seconds, mean_seconds_between_failures)
    return math.sqrt(2 * (mean_seconds_between_failures + recovery_seconds) * save_seconds + save_seconds**2)


def chosen_interval(cost: Saving, recovery: Recovery, mean_seconds_between_failures: float) -> Interval:
    """Daly's, unless the writer needs longer.

    Daly's holds where a failure may also hit a save or a restart, as they do; what recovery takes does not move that optimum, nor
    does the lag. How long the writer needs, `with_time_to_write` says (checkpointing.py).
    """
    mean = mean_seconds_between_failures

    def written(seconds: float) -> float:
        _require_above(cost.lag_seconds + cost.stall_seconds, mean)
        return with_time_to_write(
            seconds, save_seconds=cost.stall_seconds, write_seconds=cost.lag_seconds, mean_seconds_between_failures=mean
        )

    if cost.stall_seconds == 0:
        if not cost.lag_seconds:
            raise ValueError("saving that costs nothing has no best interval: give one")
        return Interval(written(0.0), "writer", "saving does not stall: as often as it can be written", {"daly": 0.0})
    every = {
        "young": young_interval(cost.stall_seconds, mean),
        "daly": daly_interval(cost.stall_seconds, mean),
        "availability": availability_interval(cost.stall_seconds, mean, recovery_seconds=recovery.seconds),
    }
    if cost.stall_seconds >= 2 * mean:
        return Interval(every["daly"], "daly", "a save takes longer than twice the time between failures", every)
    seconds = written(every["daly"])
    if seconds > every["daly"]:
        times = "twice the" if seconds > cost.lag_seconds else "the"
        reason = f"{times} {cost.lag_seconds:.0f} s of writing; Daly's formula would say {every['daly']:.0f} s"
        return Interval(seconds, "writer", reason, every)
    others = f"Young's formula says {every['young']:.0f} s, the availability form {every['availability']:.0f} s"
    return Interval(every["daly"], "daly", f"Daly's optimum, which counts failures in a save too; {others}", every)


def expected_goodput(interval_seconds: float, cost: Saving, recovery: Recovery, mean: float) -> float:
    """Share of useful time in the long run, when times between failures are exponential with this mean; exact.

    T e^-((w + R) / M) / ((e^((T + C) / M) - 1) (M + D)), by the renewal at each return to work. T interval, C stall, w lag,
    R restart, which a failure begins anew, D detection. With w = D = 0 it is Daly 2006, equation 20. See docs/planning.md.
    """
    _require_above(interval_seconds, mean)
    late = math.exp(-(cost.lag_seconds + recovery.restart_seconds) / mean)
    return useful_share(interval_seconds, cost.stall_seconds, mean) * late * mean / (mean + recovery.detection_seconds)


def goodput_range(interval_seconds: float, cost: Saving, recovery: Recovery, mean_seconds: Range) -> Shares:
    """`expected_goodput` over a range of rates, with the same interval: nobody knows the rate beforehand."""
    means = (mean_seconds.low, mean_seconds.mid, mean_seconds.high)
    return Shares(*(expected_goodput(interval_seconds, cost, recovery, mean) for mean in means))


def _require(seconds: float, name: str) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name} {seconds}: give seconds, 0 or more")


def _require_above(first: float, mean: float) -> None:
    if not (math.isfinite(first) and first > 0 and math.isfinite(mean) and mean > 0):
        raise ValueError(f"{first} s and {mean} s between failures: both must be above 0")
