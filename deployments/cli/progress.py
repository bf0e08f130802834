"""What the terminal shows during a run: the running stage with its progress, its losses, and what is still to come.

Everything goes to stderr. On a terminal the last lines move, and each finished stage leaves one line. Elsewhere lines come: one
a finished stage, and one whenever nothing else came for ten seconds. rich leaves colours out for NO_COLOR.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deployments.cli.output import harmless, visible
from deployments.services import prefect_server
from tasks.orchestration.observers import Outcome
from tasks.orchestration.run import Lifecycle
from tasks.orchestration.run_log import logged_runs

LINE_EVERY_SECONDS = 10.0
PASSING = ("submitted", "running")
"""What every job goes through: shown while it holds, and not kept."""
BAR = 24
CURVE = 48
"""Most columns of the curve of losses."""
LEVELS = "▁▂▃▄▅▆▇█"
PAST_RUNS = 20
"""Runs that are looked through for how long stages took."""
MARKS = {
    "ran": ("✓", "green"),
    "reused": ("=", "cyan"),
    "failed": ("✗", "red"),
    "gate_closed": ("▣", "red"),
    "cancelled": ("■", "dark_orange3"),
    "pending": ("·", "dim"),
    "not_run": ("·", "dim"),
}


class Progress:
    """An observer that draws. `run` is the lifecycle that it watches, for whoever asks afterwards."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.run: Lifecycle | None = None
        self._live: Live | None = None
        self._over: threading.Event | None = None
        self.began = self._last_line = 0.0
        self._estimate: float | None = None
        self._state: tuple[str, float, float, str, float | None] = ("", 0.0, 0.0, "", None)
        self._part, self._parts = 0.0, 1
        """Since when the part of the stage lasts whose share is shown, and how many there were: each counts from 0."""
        self._full: float | None = None
        """Since when the bar has been full: what a job does after its last step may last as well."""
        self._losses: list[float] = []
        self._past: dict[str, float] = {}

    def opened(self, run: Lifecycle) -> None:
        self.run = run
        for past in islice(logged_runs(run.home), PAST_RUNS):
            if (past.handle.get("flow"), past.handle.get("subject")) == (run.flow, run.subject):
                ended = [event["outcome"] for event in past.events if event["event"] == "ended"]
                seconds = {one["name"]: one["seconds"] for one in ended if one["status"] == "ran"}
                self._past = seconds | self._past  # the newest run that did a stage is first

    def started(self, stage: str, estimate: float | None) -> None:
        self.quiet()
        self.began, self._last_line, self._estimate = time.monotonic(), time.monotonic(), estimate
        self._part, self._parts = self.began, 1
        self._state, self._losses, self._full = (stage, 0.0, 0.0, "", None), [], None
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.view, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
        else:
            self._over = threading.Event()
            threading.Thread(target=self._keep_telling, args=(self._over,), daemon=True).start()

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        if total and self._state[2] and done / total < self._state[1] / self._state[2]:
            self._part, self._parts = time.monotonic(), self._parts + 1
        self._state = (stage, done, total, visible(text), seconds_left)
        full = bool(total) and done >= total
        self._full = (self._full or time.monotonic()) if full else None

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep the losses of a training, for their curve."""
        self._losses += [float(loss) for one in records if isinstance(loss := one.get("loss"), int | float)]

    def _keep_telling(self, over: threading.Event) -> None:
        """Print where the stage is whenever nothing was printed for a while: a log that stands still looks like a hang."""
        while not over.wait(1.0):
            if time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
                self._print(self._line(*self._state))

    def _print(self, text: Text | str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, soft_wrap=True, markup=False)

    def happened(self, stage: str, kind: str, text: str) -> None:
        """Show what became of the stage's job: kept as a line, unless every job goes through it."""
        text = visible(text)  # as a scheduler said it
        self._state, self._full = (stage, 0.0, 0.0, "" if kind == "running" else text, None), None
        if kind not in PASSING:
            self._print(Text.assemble(("~ ", "dark_orange3"), text))

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        self.quiet()
        flow_run = (self.run.flow_run or {}) if self.run else {}
        self.console.print(f"? {harmless(question)}", soft_wrap=True, markup=False)
        page = f"{flow_run['url']}{prefect_server.login_of(self.run.home)}" if self.run and flow_run else ""
        self.console.print(f"  Waiting for {reason}: {page}", soft_wrap=True, markup=False)
        answer = f"headway approve {flow_run.get('id', '')[:8]}.{key} --approve --reason '...'"
        self.console.print(f"  or, in another terminal: {answer}", markup=False)

    def quiet(self) -> None:
        """Stop moving: somebody is asked a question, or the stage is over."""
        if self._over:
            self._over.set()
        if self._live:
            self._live.stop()
        self._live = self._over = None

    def ended(self, outcome: Outcome) -> None:
        self.quiet()
        mark, colour = MARKS[outcome.status]
        name = "champion" if self.run and outcome in self.run.asides else outcome.name
        text = f"{name:<11}{outcome.status.replace('_', ' '):<12}{outcome.seconds:7.1f} s  {brief(outcome)}"
        self._print(Text.assemble((f"{mark} ", colour), text))
        if self.run and self.run.error is None:  # what is between two stages, and after the last, may last as well
            self.started("", None)

    def closed(self, run: Lifecycle) -> None:
        self.quiet()

    def _line(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> Text:
        now = time.monotonic()
        passed = now - self.began
        share = min(done / total, 1.0) if total else 0.0
        if seconds_left is not None:
            left = seconds_left
        elif share > 0.02:
            left = (now - self._part) * (1 / share - 1)
        else:
            left = (self._estimate or 0) - passed
        bar = "━" * int(share * BAR) + "─" * (BAR - int(share * BAR))
        eta = f"about {_duration(left)} left{' of this part' if self._parts > 1 else ''}" if left > 0.5 else ""
        finishing = f"finishing for {_duration(now - self._full)}" if self._full and now - self._full > 2.0 else ""
        parts = [f"{bar} {share:4.0%}" if total else "", _duration(passed), eta, finishing, text]
        return Text(f"  {stage or 'next':<11}{'  '.join(part for part in parts if part)}")

    def view(self) -> Group:
        """The lines that move: the running stage, its losses, and what comes after it, each cut at the terminal's edge."""
        lines = [self._line(*self._state)]
        if len(self._losses) > 1:
            drawn = curve(self._losses, min(CURVE, self.console.width - 30))
            lines += [Text(f"  {'loss':<11}{self._losses[0]:.2f} {drawn} {self._losses[-1]:.2f}")]
        outcomes = self.run.outcomes if self.run else {}
        # Of a run that stops earlier, only what it goes on to.
        to_come = [name for name in outcomes if self.run and name not in self.run.called and not self.run.beyond(name)]
        if to_come:
            known = sum(self._past.get(name, 0.0) for name in to_come)
            estimate = f"  (about {_duration(known)}, by earlier runs)" if known > 0.5 else ""
            text = f"  {'then':<11}{', '.join(to_come)}{estimate}"
            lines += [Text(text, style="dim")]
        cost = outcomes["plan"].metrics.get("cost") if "plan" in outcomes else None
        if cost and self._state[0] == "train" and self._state[2]:
            left = cost * (1 - min(self._state[1] / self._state[2], 1.0))
            lines += [Text(f"  {'cost':<11}about {left:,.2f} of {cost:,.2f} left, as planned")]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)


def curve(values: Sequence[float], width: int) -> str:
    """A line of bars, at most `width`: each the mean of as many values as fall to it, between the least and the greatest mean."""
    count = max(1, min(width, len(values)))
    edges = [round(k * len(values) / count) for k in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    least, span = min(means), max(means) - min(means) or 1.0
    return "".join(LEVELS[round((mean - least) / span * (len(LEVELS) - 1))] for mean in means)


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
