"""What became of each stage, and who watches a lifecycle: the terminal, Prefect's page, the run's own log.

Values and a protocol only; the frame that calls them is tasks/orchestration/run.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tasks.common.errors import Cancelled, GateFailed, Superseded

Status = Literal["ran", "reused", "failed", "gate_closed", "cancelled", "pending", "not_run"]


@dataclass(frozen=True)
class Shown:
    """What people see of a stage beside its result; the stage declares it (`@stage`), and nobody else asks for its name."""

    line: str = ""
    """Its few numbers in the terminal, as a format of its metrics."""
    unless_zero: Mapping[str, str] = field(default_factory=dict)
    """What follows in that line when a metric is not 0, by the metric."""
    metrics: tuple[str, ...] = ()
    """Those that stand in Prefect's pages."""
    headlines: tuple[str, ...] = ()
    """Those that stand on the flow's run in MLflow as well; all are on the stage's own."""
    part: str = ""
    """A file of its last output that the run's report has a part of its own for."""
    pages: str = ""
    """Pattern of the pages that it leaves in the home, with the first 16 digits of its key as `{key}`: linked from the report,
    Prefect's page and its run in MLflow, also where its result is reused."""
    table: str = ""
    """A JSON file of its last output that holds a table by columns: MLflow's page shows it as results of an evaluation."""

    def text(self, metrics: dict[str, float]) -> str:
        """The line with its numbers; empty where one of them is not known."""
        try:
            further = [form.format_map(metrics) for name, form in self.unless_zero.items() if metrics.get(name)]
            return ", ".join([self.line.format_map(metrics), *further])
        except KeyError:
            return ""


@dataclass
class Outcome:
    """What became of one stage."""

    name: str
    status: Status = "not_run"
    seconds: float = 0.0
    key: str | None = None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    job: dict[str, Any] | None = None
    why: str = ""
    """Why it would run, or is reused; for people."""
    shown: Shown = Shown()
    run: str = ""
    """Its run in the flow's spool, by the spool's own identity."""

    def pages(self, home: Path) -> list[Path]:
        """The pages about it that lie in the home; of one name the newest, by the name of its folder."""
        pattern = self.shown.pages.format(key=self.key[:16]) if self.key else ""
        pages = sorted(home.glob(pattern), key=lambda page: page.parent.name) if pattern else []
        return sorted({page.name: page for page in pages}.values())

    def plain(self) -> dict[str, Any]:
        """What is written down; how it is shown is declared in the code, and the spool knows its runs."""
        return {name: value for name, value in asdict(self).items() if name not in ("shown", "run")}


class Observer(Protocol):
    """Who watches a lifecycle. `run` is the `Lifecycle` that is watched."""

    def opened(self, run: Any) -> None: ...

    def started(self, stage: str, estimate: float | None) -> None:
        """A stage began; the estimate is what it took last time, in seconds."""
        ...

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None: ...

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Records of the stage's job came, as metrics.jsonl of its folder has them: in training one a step."""
        ...

    def happened(self, stage: str, kind: str, text: str) -> None:
        """Something happened to the stage's job: `kind` as tasks/compute/polling.py names it, and a sentence."""
        ...

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        """The run waits for a person: `reason` is "approval"; since when, in seconds since the epoch.

        `exercises` is the right that an answer exercises: promote, where it deploys. An answer names the question by its `key`.
        """
        ...

    def ended(self, outcome: Outcome) -> None: ...

    def closed(self, run: Any) -> None:
        """The run is over; `run.error` says how."""
        ...


class Unobserved:
    """An observer that looks away; a base for those that look at some things only."""

    def opened(self, run: Any) -> None:
        return None

    def started(self, stage: str, estimate: float | None) -> None:
        return None

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        return None

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        return None

    def happened(self, stage: str, kind: str, text: str) -> None:
        return None

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        return None

    def ended(self, outcome: Outcome) -> None:
        return None

    def closed(self, run: Any) -> None:
        return None


@dataclass(frozen=True)
class Observers:
    """Several observers as one."""

    all: Sequence[Observer]

    def opened(self, run: Any) -> None:
        for one in self.all:
            one.opened(run)

    def started(self, stage: str, estimate: float | None) -> None:
        for one in self.all:
            one.started(stage, estimate)

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        for one in self.all:
            one.progress(stage, done, total, text, seconds_left)

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        for one in self.all:
            one.measured(stage, records)

    def happened(self, stage: str, kind: str, text: str) -> None:
        for one in self.all:
            one.happened(stage, kind, text)

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        for one in self.all:
            one.waiting(reason, question, since, exercises, key)

    def ended(self, outcome: Outcome) -> None:
        for one in self.all:
            one.ended(outcome)

    def closed(self, run: Any) -> None:
        for one in self.all:
            one.closed(run)


SIGNALS = ("KeyboardInterrupt", "Terminated", "TerminationSignal")
"""What Ctrl-C and SIGTERM raise: Python's, the command line's, Prefect's."""


def status_of(error: BaseException | None) -> str:
    """How a run ended, in a word: completed, gate_closed, cancelled or failed."""
    return "completed" if error is None else stopped_as(error)


def stopped_as(error: BaseException) -> Literal["gate_closed", "failed", "cancelled"]:
    """How what ended a run, or one of its stages, is shown."""
    if interrupted(error):
        return "cancelled"
    return "gate_closed" if isinstance(error, GateFailed) else "failed"


def interrupted(error: BaseException) -> bool:
    """Whether somebody stopped the run, and it did not fail: Ctrl-C, SIGTERM, a cancelled flow run, or another host that has it.

    A signal may come while an extension calls Python: it raises an error of its own then, with the signal's as its cause. That of
    pydantic's serializer has it in its words alone.
    """
    if isinstance(error, Cancelled | Superseded) or not isinstance(error, Exception):
        return True
    if type(error).__name__ == "PydanticSerializationError" and any(f"{name}: " in str(error) for name in SIGNALS):
        return True
    return type(error.__cause__).__name__ in SIGNALS
