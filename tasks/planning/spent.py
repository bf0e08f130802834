"""What a run really took of machines, stage by stage, and what that cost, beside its plan. Pure: in go the events of its log.

The log is tasks/orchestration/run_log.py; prices come in. What a training will cost is money.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# Whether what a training ran on was too small, too large or right, by what it used of it. Pure.
#
# What is judged was measured while it trained (tasks/jobs/training/metrics_logger.py); what was not measured is None,
# and no guess takes its place. Which division and how many machines would be best is search.py.


Advice = Literal["smaller", "larger", "keep", "unknown"]

FULL = 0.92
"""Of the memory: above it the next longer text or fragment ends in out of memory."""
HALF_FITS = 0.45
"""Of the memory: in half of it there would still be a tenth free."""
IDLE = 0.4
"""Busy share below which half as fast a device would nearly do."""
WAITS = 0.2
"""Share of a step that waits for data, from which on the data is the matter and not the machine."""
TALKS = 0.4
"""Share of a step that ranks spend communicating, from which on fewer machines waste less."""


@dataclass(frozen=True)
class Use:
    """What a training used, as shares of what was there. None was not measured."""

    device: Literal["gpu", "cpu"]
    memory: float | None = None
    """The most, of the device's memory: the GPU's, else the machine's."""
    busy: float | None = None
    """The mean of its counter of utilisation."""
    data: float | None = None
    """Of a step's time, waiting for data; so the next ones."""
    communication: float | None = None
    checkpoint: float | None = None
    mfu: float | None = None
    out_of_memory: int = 0
    """Times that it ran out of memory."""
    machines: float = 1.0


@dataclass(frozen=True)
class Judged:
    """The advice, and what says so."""

    advice: Advice
    reasons: tuple[str, ...]


def judge(use: Use) -> Judged:
    """What to do with the machines of the next such training."""
    if use.out_of_memory:
        times = f"{use.out_of_memory} time{'s' * (use.out_of_memory > 1)}"
        return Judged("larger", (f"it ran out of memory {times}: more memory, or a smaller micro batch",))
    if use.memory is not None and use.memory > FULL:
        return Judged(
            "larger", (f"{use.memory:.0%} of the {use.device}'s memory was in use: more than {FULL:.0%} is no room",)
        )
    if use.communication is not None and use.communication > TALKS and use.machines > 1:
        text = (
            f"{use.communication:.0%} of a step is communication on {use.machines:g} machines: fewer would waste less"
        )
        return Judged("smaller", (text,))
    missing = [name for name, value in (("its memory", use.memory), ("how busy it was", use.busy)) if value is None]
    if missing:
        return Judged("unknown", (f"not measured: {' and '.join(missing)} of the {use.device}", *_beside(use)))
    assert use.memory is not None and use.busy is not None
    text = f"at most {use.memory:.0%} of the {use.device}'s memory and {use.busy:.0%} of its time were used"
    if use.data is not None and use.data > WAITS:
        waits = f"{use.data:.0%} of a step waits for data: faster storage, a cache or more prefetching first"
        return Judged("keep", (waits, text))
    if use.memory <= HALF_FITS and use.busy < IDLE:
        return Judged("smaller", (f"{text}: half as much would do", *_beside(use)))
    return Judged("keep", (text, *_beside(use)))


def _beside(use: Use) -> tuple[str, ...]:
    """What else was measured; it decides nothing here."""
    known = (("MFU", use.mfu), ("waiting for data", use.data), ("communication", use.communication))
    entries = [f"{name} {value:.0%}" for name, value in known if value is not None]
    return (", ".join(entries),) if entries else ()


PAID = ("starting", "running", "adopted")
"""A job has its machines from here on: they boot, or work."""
NOT_PAID = ("submitted", "queued", "retrying")
"""It has none, or none any more."""


@dataclass(frozen=True)
class Timed:
    """One execution of a stage."""

    stage: str
    status: str
    """As outcomes have it; `died` where the log ends in the middle."""
    seconds: float
    """From its start to its end, waiting in queues included."""
    machine_seconds: float
    """That its job had machines: of one machine, while it had all of them."""
    job: str = ""
    """Folder of its job; empty where it ran beside the orchestrator."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Machines:
    """What a job ran on."""

    name: str
    count: float


@dataclass(frozen=True)
class StageCost:
    """What a stage took and cost; None is not known."""

    stage: str
    status: str
    seconds: float
    machine: str
    machines: float
    machine_hours: float
    hour: float | None
    cost: float | None
    planned_seconds: float | None = None
    planned_cost: float | None = None
    goodput: float | None = None
    currency: str = ""
    """Of hour, cost and planned_cost; empty where no price is known."""

    @property
    def over(self) -> float | None:
        """By how much it took longer than planned: 0.1 is a tenth."""
        return self.seconds / self.planned_seconds - 1 if self.planned_seconds else None


def timed(events: Iterable[Mapping[str, Any]]) -> list[Timed]:
    """Every execution of a stage in a run's log, in order. What was reused took nothing."""
    results: list[Timed] = []
    open_: dict[str, tuple[float, list[Mapping[str, Any]]]] = {}
    last = 0.0
    for event in events:
        last = float(event["time"])
        stage = str(event.get("stage") or "")
        if event["event"] == "started":
            open_[stage] = (last, [])
        elif event["event"] == "job" and stage in open_:
            open_[stage][1].append(event)
        elif event["event"] == "ended":
            outcome = event["outcome"]
            began, jobs = open_.pop(outcome["name"], (last, []))
            results.append(_ended(outcome, began, last, jobs))
    for stage, (began, jobs) in open_.items():
        results.append(Timed(stage, "died", last - began, _held(jobs, last), job="?" if jobs else ""))
    return results


def costs(
    done: Iterable[Timed],
    machines: Mapping[str, Machines],
    hour_of: Callable[[str], float | None],
    *,
    planned_train_seconds: float | None = None,
    currency_of: Callable[[str], str | None] = lambda name: "",
) -> list[StageCost]:
    """What each execution cost; `machines` by folder of the job, `hour_of` and `currency_of` a machine by its name.

    A plan tells the seconds of training alone, so only there is something beside.
    """
    return [_cost(one, machines, hour_of, planned_train_seconds, currency_of) for one in done]


def total(stages: Sequence[StageCost]) -> float | None:
    """None when a stage's cost is not known, and where costs are in several currencies: no rate of exchange is known."""
    known = [stage.cost for stage in stages]
    if None in known or len(known_costs(stages)) > 1:
        return None
    return math.fsum(cost for cost in known if cost is not None)


def known_costs(stages: Iterable[StageCost]) -> dict[str, float]:
    """What is known of the costs, by currency; what cost nothing needs none."""
    result: dict[str, float] = {}
    for stage in stages:
        if stage.cost:
            result[stage.currency] = result.get(stage.currency, 0.0) + stage.cost
    return result


def _cost(
    one: Timed,
    machines: Mapping[str, Machines],
    hour_of: Callable[[str], float | None],
    planned: float | None,
    currency_of: Callable[[str], str | None],
) -> StageCost:
    at = machines.get(one.job) if one.job else Machines("", 0.0)
    hours = one.machine_seconds / 3600 * (at.count if at else 0.0)
    hour = hour_of(at.name) if at and at.name else None
    unpaid = not one.machine_seconds or not one.job
    beside = planned if one.stage == "train" and one.status == "ran" else None
    return StageCost(
        stage=one.stage,
        status=one.status,
        seconds=one.seconds,
        machine=at.name if at else "",
        machines=at.count if at else 0.0,
        machine_hours=hours,
        hour=hour,
        cost=0.0 if unpaid else None if hour is None or at is None else hours * hour,
        planned_seconds=beside,
        planned_cost=beside / 3600 * at.count * hour if beside and at and hour is not None else None,
        goodput=one.metrics.get("goodput") if one.status == "ran" else None,
        currency=(currency_of(at.name) or "") if at and hour is not None else "",
    )


def _ended(outcome: Mapping[str, Any], began: float, ended: float, jobs: list[Mapping[str, Any]]) -> Timed:
    took = 0.0 if outcome["status"] == "reused" else ended - began
    return Timed(
        stage=str(outcome["name"]),
        status=str(outcome["status"]),
        seconds=took,
        machine_seconds=_held(jobs, ended) if took else 0.0,
        job=str((outcome.get("job") or {}).get("folder") or ("?" if jobs else "")),
        metrics=outcome.get("metrics") or {},
    )


def _held(jobs: Iterable[Mapping[str, Any]], ended: float) -> float:
    """Seconds in which a job had machines."""
    held, since = 0.0, None
    for event in jobs:
        if event["kind"] in PAID:
            since = float(event["time"]) if since is None else since
        elif event["kind"] in NOT_PAID and since is not None:
            held, since = held + float(event["time"]) - since, None
    return held + (ended - since if since is not None else 0.0)
