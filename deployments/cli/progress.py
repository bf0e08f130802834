"""What a person sees while a run goes on: one line a stage with progress and an estimate; lines in a log elsewhere.

Everything goes to stderr. On a terminal the running stage moves; when stderr is a file, a line comes every ten seconds.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deployments.cli.output import harmless, visible
from tasks.orchestration.observers import Outcome
from tasks.orchestration.run import Lifecycle

LINE_EVERY_SECONDS = 10.0
PASSING = ("submitted", "running")
"""What every job goes through: shown while it holds, and not kept."""
BAR = 24
MARKS = {
    "ran": ("✓", "green"),
    "reused": ("=", "cyan"),
    "failed": ("✗", "red"),
    "gate_closed": ("▣", "red"),
    "pending": ("·", "dim"),
    "not_run": ("·", "dim"),
}


class Progress:
    """An observer that draws. `run` is the lifecycle that it watches, for whoever asks afterwards."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.run: Lifecycle | None = None
        self._live: Live | None = None
        self.began = self._last_line = 0.0
        self._estimate: float | None = None
        self._said: tuple[str, float, float, str, float | None] = ("", 0.0, 0.0, "", None)

    def opened(self, run: Lifecycle) -> None:
        self.run = run

    def started(self, stage: str, estimate: float | None) -> None:
        self.began, self._last_line, self._estimate = time.monotonic(), time.monotonic(), estimate
        if self.console.is_terminal:
            self._said = (stage, 0.0, 0.0, "", None)
            self._live = Live(
                get_renderable=lambda: self._line(*self._said),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.start()

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        self._said = (stage, done, total, visible(text), seconds_left)
        if not self._live and time.monotonic() - self._last_line > LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(self._line(*self._said), soft_wrap=True)

    def happened(self, stage: str, kind: str, text: str) -> None:
        """Show what became of the stage's job: kept as a line, unless every job goes through it."""
        text = visible(text)  # as a scheduler said it
        self._said = (stage, 0.0, 0.0, "" if kind == "running" else text, None)
        if kind not in PASSING:
            self.console.print(Text.assemble(("~ ", "yellow"), text), soft_wrap=True)

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        self.quiet()
        flow_run = (self.run.flow_run or {}) if self.run else {}
        self.console.print(f"? {harmless(question)}", soft_wrap=True, markup=False)
        self.console.print(f"  Waiting for {reason}: {flow_run.get('url', '')}", soft_wrap=True, markup=False)
        answer = f"headway approve {flow_run.get('id', '')[:8]}.{key} --approve --reason '...'"
        self.console.print(f"  or, in another terminal: {answer}", markup=False)

    def quiet(self) -> None:
        """Stop moving: somebody is asked a question, or the stage is over."""
        if self._live:
            self._live.stop()
            self._live = None

    def ended(self, outcome: Outcome) -> None:
        self.quiet()
        mark, colour = MARKS[outcome.status]
        name = "champion" if self.run and outcome in self.run.asides else outcome.name
        text = f"{name:<11}{outcome.status.replace('_', ' '):<12}{outcome.seconds:7.1f} s  {brief(outcome)}"
        self.console.print(Text.assemble((f"{mark} ", colour), text), soft_wrap=True)

    def closed(self, run: Lifecycle) -> None:
        self.quiet()

    def _line(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> Text:
        passed = time.monotonic() - self.began
        share = min(done / total, 1.0) if total else 0.0
        left = passed / share - passed if share > 0.02 else (self._estimate or 0) - passed
        left = left if seconds_left is None else seconds_left
        bar = "━" * int(share * BAR) + "─" * (BAR - int(share * BAR))
        eta = f"about {_duration(left)} left" if left > 0.5 else ""
        return Text(f"  {stage:<11}{bar} {share:4.0%}  {_duration(passed)}  {eta}  {text}")


def console() -> Console:
    """Where progress goes."""
    return Console(stderr=True, file=sys.stderr, highlight=False)


def brief(outcome: Outcome) -> str:
    """The few numbers of a stage that people look for."""
    failed = [check["name"] for check in outcome.checks if not check.get("passed")]
    if failed:
        return "closed by " + "; ".join(failed)
    return outcome.shown.text(outcome.metrics)


def summary(outcomes: list[Outcome]) -> Table:
    """The stages of a finished run."""
    table = Table("stage", "result", "seconds", "", box=None, pad_edge=False)
    for outcome in outcomes:
        _, colour = MARKS[outcome.status]
        word = outcome.status.replace("_", " ")
        why = outcome.why if outcome.status in ("reused", "pending") else ""
        table.add_row(outcome.name, Text(word, colour), f"{outcome.seconds:.1f}", brief(outcome) or why)
    return table


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
