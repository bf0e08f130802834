"""A proof on real machines: steps one after another, each with a time limit, and the page that says what each of them showed.

`make gpu` (gpu.py) and `make azure` (azure.py) are made of it. A step that cannot run here raises `Skipped` with the reason, one
that shows that something is wrong raises `Failed`; the steps after it still run, unless they need what it was to make.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

GRACE_SECONDS = 5.0
"""For a command to end by itself when its time is over."""
LINES = 15
"""Of a command's output, in the reason of a failure."""


class Skipped(Exception):
    """A step cannot run here, for the reason that the message gives."""


class Failed(Exception):
    """A step ran, and what it saw is wrong; the message says what."""


@dataclass(frozen=True)
class Step:
    """One step of a proof."""

    name: str
    proves: str
    run: Callable[[float], str]
    """Takes the seconds that it may use; returns what it saw, in words."""
    seconds: float
    """Time limit."""
    cost: str = ""
    """What it is expected to cost, in words; empty where nobody pays for a step."""


@dataclass(frozen=True)
class Verdict:
    """What became of a step."""

    step: Step
    status: str
    """passed, failed or skipped."""
    seen: str
    seconds: float

    @property
    def row(self) -> str:
        paid = [self.step.cost] if self.step.cost else []
        cells = (self.step.name, self.status, f"{self.seconds:.0f} s", *paid, self.seen, self.step.proves)
        return f"| {' | '.join(one.replace('|', '/').replace(chr(10), ' ') for one in cells)} |"


@dataclass
class Proof:
    """The steps so far. State: the verdicts, and the time that is left."""

    seconds: float
    """Time limit of all steps together."""
    verdicts: list[Verdict] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._began)

    @property
    def failed(self) -> list[str]:
        return [one.step.name for one in self.verdicts if one.status == "failed"]

    def take(self, step: Step) -> Verdict:
        """Run a step within its time, and say what it saw."""
        began, status, seen = time.monotonic(), "failed", "interrupted"
        print(f"{step.name}: {step.proves} ...", file=sys.stderr, flush=True)
        try:
            if self.left <= 0:
                raise Skipped(f"the {self.seconds / 60:.0f} minutes of all steps together are over")
            status, seen = "passed", step.run(min(step.seconds, self.left))
        except Skipped as reason:
            status, seen = "skipped", str(reason)
        except Failed as reason:
            status, seen = "failed", str(reason)
        except Exception as error:  # noqa: BLE001 a step's own mistake costs that step alone: time on these machines is dear
            status, seen = "failed", f"{type(error).__name__}: {error}"
        finally:
            verdict = Verdict(step, status, seen, time.monotonic() - began)
            self.verdicts.append(verdict)
            print(f"{step.name}: {status} after {verdict.seconds:.0f} s: {seen}", file=sys.stderr, flush=True)
        return verdict

    def page(self, title: str, introduction: str, facts: Mapping[str, str]) -> str:
        """A page of Markdown: when, where, what each step saw, and what was skipped and why."""
        now = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
        lines = [f"# {title}", "", introduction, "", "| | |", "| --- | --- |", f"| date | {now} |"]
        lines += [f"| {name} | {value} |" for name, value in facts.items()]
        paid = ["costs"] if any(one.step.cost for one in self.verdicts) else []
        heads = ["step", "verdict", "time", *paid, "seen", "proves"]
        lines += ["", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(one.row for one in self.verdicts)]
        if skipped := [one for one in self.verdicts if one.status == "skipped"]:
            lines += ["", "## Not proven", ""]
            lines += [f"- {one.step.name}: {one.seen}" for one in skipped]
        return "\n".join(lines) + "\n"


def command(
    words: Sequence[str | Path],
    *,
    seconds: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    until: Callable[[], bool] = lambda: False,
) -> int | None:
    """Run a command with its output in a file; returns its exit code, or None when `until` was true first and it was killed.

    It is ended when its time is over, and when this process is interrupted. Raises Failed for a time that was not enough.
    """
    with log.open("ab") as output:
        running = subprocess.Popen(
            [str(word) for word in words],
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + seconds
    try:
        while running.poll() is None:
            if until():
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
                return None
            if time.monotonic() > deadline:
                raise Failed(f"not done after {seconds:.0f} s: {tail(log)}")
            time.sleep(0.05)
        return running.returncode
    finally:
        end(running)


def end(running: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """End a process and its group, by force after a while."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, GRACE_SECONDS)):
        if running.poll() is not None:
            break
        try:
            os.killpg(running.pid, number)
            running.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def tail(*logs: Path) -> str:
    """The last lines of some files, in one line."""
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
    return " / ".join(line.strip() for line in lines[-LINES:] if line.strip()) or "it printed nothing"
