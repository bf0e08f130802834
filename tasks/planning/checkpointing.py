"""What checkpoints cost and save: bytes, seconds to each storage, what stands still, how often, and the goodput that is left.

Pure; seconds and bytes. How often trainings fail is in failures.py; Young's and Daly's formulas are in interval.py; a whole
training is played through in simulation/, which agrees with `expected_goodput`. See docs/planning.md, "Failures".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.hardware.machine import Machine
from tasks.planning.case import Engine, Precision
from tasks.planning.failures import Range
from tasks.planning.interval import daly_interval, useful_share, with_time_to_write, young_interval
from tasks.planning.storages import Storage, bandwidth_of

BYTES_PER_PARAMETER: Mapping[Precision, int] = {"bf16": 14, "fp16": 14, "fp8": 14, "fp32": 12}
"""2 of the weights in 16 bits, 4 of those in 32, 8 of Adam's two moments; fp32 has no first ones; gradients are not saved.
BLOOM: 176.2 G parameters, 2.3 TB whole and 329 GB of weights alone as printed, which are TiB and GiB (bigscience.notion.site);
Azure's GPT-3 175B, 2.3 TiB;
llm-foundry, float32, mpt-30b 336 GiB. fp8 is of matmuls only: weights are kept in bf16 (Transformer Engine)."""
OWN_ENGINE_BYTES = 12
"""Of engine torch in any precision: its weights are float32 and autocast (tasks/jobs/training)."""

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


def checkpoint_bytes(parameters: int, *, precision: Precision = "bf16", engine: Engine = "megatron") -> int:
    """Of one that training goes on from: weights and optimizer."""
    if parameters < 1:
        raise ValueError(f"{parameters} parameters: give a number above 0")
    return parameters * (OWN_ENGINE_BYTES if engine == "torch" else BYTES_PER_PARAMETER[precision])


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


def saving(snapshot: float, write: float, *, asynchronous: bool = True) -> Saving:
    """What stalls training: the snapshot, and the write goes on beside; or the whole write."""
    return Saving(snapshot, write) if asynchronous else Saving(write)


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
    does the lag. How long the writer needs, `with_time_to_write` says (interval.py).
    """
    mean = mean_seconds_between_failures
    if cost.stall_seconds == 0:
        if not cost.lag_seconds:
            raise ValueError("saving that costs nothing has no best interval: give one")
        seconds = _written(0.0, cost, mean)
        return Interval(seconds, "writer", "saving does not stall: as often as it can be written", {"daly": 0.0})
    every = {
        "young": young_interval(cost.stall_seconds, mean),
        "daly": daly_interval(cost.stall_seconds, mean),
        "availability": availability_interval(cost.stall_seconds, mean, recovery_seconds=recovery.seconds),
    }
    if cost.stall_seconds >= 2 * mean:
        return Interval(every["daly"], "daly", "a save takes longer than twice the time between failures", every)
    seconds = _written(every["daly"], cost, mean)
    if seconds > every["daly"]:
        times = "twice the" if seconds > cost.lag_seconds else "the"
        reason = f"{times} {cost.lag_seconds:.0f} s of writing; Daly's formula would say {every['daly']:.0f} s"
        return Interval(seconds, "writer", reason, every)
    others = f"Young's formula says {every['young']:.0f} s, the availability form {every['availability']:.0f} s"
    return Interval(every["daly"], "daly", f"Daly's optimum, which counts failures in a save too; {others}", every)


def _written(seconds: float, cost: Saving, mean: float) -> float:
    _require_above(cost.lag_seconds + cost.stall_seconds, mean)
    return with_time_to_write(
        seconds,
        save_seconds=cost.stall_seconds,
        write_seconds=cost.lag_seconds,
        mean_seconds_between_failures=mean,
    )


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
