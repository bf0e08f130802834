"""What runs really took, beside their plans: machines and money, where their time went, what the next plan learns of it. Pure.

In go the events of a run's log (tasks/orchestration/run_log.py), the records of `metrics.jsonl` (tasks/jobs/training/
metrics_logger.py) and what earlier runs noted (tasks/train.py). What a training will cost is money.py, how long failures may make
it checkpointing.py. See docs/training-metrics.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tasks.config.training import TrainingConfig

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


def beside_plan(error: float) -> str:
    """How a time compares with the planned one; `error` is the difference, as a share of what was planned."""
    if error >= 1:
        return f"{1 + error:.1f} times as long as planned"
    if round(100 * abs(error)) == 0:
        return "as long as planned"
    return f"{100 * abs(error):.0f} % {'longer' if error > 0 else 'shorter'} than planned"


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
    """What to do with the machines of the next such training. What was not measured is None: no guess takes its place."""
    if use.out_of_memory:
        times = f"{use.out_of_memory} time{'s' * (use.out_of_memory > 1)}"
        return Judged("larger", (f"it ran out of memory {times}: more memory, or a smaller micro batch",))
    if use.memory is not None and use.memory > FULL:
        return Judged(
            "larger",
            (f"{use.memory:.0%} of the {use.device}'s memory was in use: more than {FULL:.0%} leaves no room",),
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
            took = 0.0 if outcome["status"] == "reused" else last - began
            ended = Timed(
                stage=str(outcome["name"]),
                status=str(outcome["status"]),
                seconds=took,
                machine_seconds=_held(jobs, last) if took else 0.0,
                job=str((outcome.get("job") or {}).get("folder") or ("?" if jobs else "")),
                metrics=outcome.get("metrics") or {},
            )
            results.append(ended)
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
    results = []
    for one in done:
        at = machines.get(one.job) if one.job else Machines("", 0.0)
        hours = one.machine_seconds / 3600 * (at.count if at else 0.0)
        hour = hour_of(at.name) if at and at.name else None
        unpaid = not one.machine_seconds or not one.job
        beside = planned_train_seconds if one.stage == "train" and one.status == "ran" else None
        stage = StageCost(
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
        results.append(stage)
    return results


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


def _held(jobs: Iterable[Mapping[str, Any]], ended: float) -> float:
    """Seconds in which a job had machines."""
    held, since = 0.0, None
    for event in jobs:
        if event["kind"] in PAID:
            since = float(event["time"]) if since is None else since
        elif event["kind"] in NOT_PAID and since is not None:
            held, since = held + float(event["time"]) - since, None
    return held + (ended - since if since is not None else 0.0)


STALLS = ("data_seconds", "checkpoint_seconds", "heldout_seconds", "profile_seconds")
"""Parts of a step in which its rank waits."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run, by cause."""

    useful: float = 0.0
    """Computing and communicating in steps that counted."""
    stalled: float = 0.0
    """Waiting for data, a checkpoint's snapshot, held-out text, a profile; and after the last step for its checkpoint."""
    lost: float = 0.0
    """Steps that did not stay: done again because no checkpoint had them, or left out for safety; and going back."""
    starting: float = 0.0
    """From the start of the first process to its first step: imports, meeting, building the network."""
    restarting: float = 0.0
    """The same of every later one: a checkpoint is verified and loaded, too."""
    idle: float = 0.0
    """Between the last step of an attempt and the start of the next one: noticing, waiting for machines, meeting anew."""

    @property
    def total(self) -> float:
        return self.useful + self.stalled + self.lost + self.starting + self.restarting + self.idle

    @property
    def share(self) -> float:
        """Useful seconds of all: the goodput."""
        return self.useful / self.total if self.total else 0.0

    @property
    def causes(self) -> dict[str, float]:
        """Shares of all time: useful, stall, lost_to_restart, start, idle."""
        seconds = {
            "useful": self.useful,
            "stall": self.stalled,
            "lost_to_restart": self.lost + self.restarting,
            "start": self.starting,
            "idle": self.idle,
        }
        return {cause: value / self.total if self.total else 0.0 for cause, value in seconds.items()}


def goodput(records: Iterable[Mapping[str, Any]], *, ended: float | None = None) -> Goodput:
    """What the records of a run add up to; `ended` is when it was all over, in seconds since 1970.

    Records without `step_seconds`, such as those of another release, count for nothing.
    """
    steps = [record for record in records if "step_seconds" in record]
    counted = {record["step"]: number for number, record in enumerate(steps)}
    useful = stalled = lost = 0.0
    for number, record in enumerate(steps):
        back = float(record.get("rollback_seconds", 0.0))
        seconds = float(record["step_seconds"]) - back
        waited = min(sum(float(record.get(part, 0.0)) for part in STALLS), seconds)
        if counted[record["step"]] != number or record.get("skipped"):
            lost += seconds + back
            continue
        lost += back
        useful, stalled = useful + seconds - waited, stalled + waited
    last = max(0.0, ended - float(steps[-1]["time"])) if ended and steps else 0.0
    starting = float(steps[0].get("start_seconds", 0.0)) if steps else 0.0
    # Before the first step of each attempt but the first.
    restarting = idle = 0.0
    for before, record in pairwise(steps):
        if record["attempt"] != before["attempt"]:
            start = float(record.get("start_seconds", 0.0))
            # By the clock of the machine of rank 0 at that time
            began = float(record["time"]) - float(record["step_seconds"])
            gap = max(0.0, began - float(before["time"]))
            restarting, idle = restarting + min(start, gap), idle + max(0.0, gap - start)
    return Goodput(
        useful=useful, stalled=stalled + last, lost=lost, starting=starting, restarting=restarting, idle=idle
    )


LATEST = 5
"""Runs that count: a machine's software and its neighbours change."""
ALIKE = 4.0
"""Networks of up to so many times more or fewer parameters count: efficiency changes with size."""
MOST = 4.0
"""A correction is within 1/MOST and MOST: what is further off is another kind of run, or a machine with other work."""
DIVISION = ("tp", "pp", "cp", "zero")


class Kind(NamedTuple):
    """What runs must share for one to tell of the other."""

    engine: str
    sku: str
    precision: str
    ranks: int
    tp: int
    pp: int
    cp: int
    zero: int
    sequence_length: int
    parameters: int
    """Need not be equal, as the others must: ALIKE."""


class Correction(NamedTuple):
    """`factor` times the formulas' time is planned; from so many `runs`, 0 for none: then it is 1."""

    factor: float = 1.0
    runs: int = 0
    said: str = ""
    """Why earlier runs do not count, where there are some and none does."""


def kind_of(training: TrainingConfig, division: Mapping[str, Any], *, sku: str, ranks: int, parameters: int) -> Kind:
    """The kind of a training on so many ranks, divided by `tp`, `pp`, `cp` and `zero`."""
    return Kind(
        engine=training.engine,
        sku=sku,
        precision=training.precision,
        ranks=ranks,
        **{name: int(division[name]) for name in DIVISION},
        sequence_length=training.sequence_length,
        parameters=parameters,
    )


def measured_on(cluster: str) -> str:
    """Where it is noted what runs on a cluster took."""
    return f"planned/{cluster}"


def measured(kind: Kind, *, formula_seconds: float, seconds: float) -> dict[str, Any]:
    """What is kept of a run that ended: seconds a step, by the formulas alone and as it was."""
    return {**kind._asdict(), "formula_seconds": formula_seconds, "seconds": seconds}


def correction(past: Iterable[Mapping[str, Any]], kind: Kind) -> Correction:
    """The median of measured over planned of the latest runs of the same kind; `past` is in the order of time."""
    ended = [one for one in past if one["formula_seconds"] > 0 and one["seconds"] > 0]
    ratios = [one["seconds"] / one["formula_seconds"] for one in ended if not _unlike(one, kind)][-LATEST:]
    if not ended:
        return Correction()
    if not ratios:
        runs = (
            f"none of {len(ended)} earlier runs on this cluster counts"
            if len(ended) > 1
            else "the earlier run does not count"
        )
        return Correction(said=f"{runs}: the latest had {', '.join(_unlike(ended[-1], kind))}")
    return Correction(min(max(statistics.median(ratios), 1 / MOST), MOST), len(ratios))


def _unlike(one: Mapping[str, Any], kind: Kind) -> list[str]:
    """What a run has otherwise, in words. Of a run that was noted without its division nobody knows it: it is unlike."""
    names = [name for name in Kind._fields if name != "parameters"]
    results = [
        f"{name} {one.get(name, 'unknown')}, not {getattr(kind, name)}"
        for name in names
        if one.get(name) != getattr(kind, name)
    ]
    if not 1 / ALIKE <= one["parameters"] / max(kind.parameters, 1) <= ALIKE:
        results.append(f"{one['parameters']:.3g} parameters, not {kind.parameters:.3g}")
    return results
