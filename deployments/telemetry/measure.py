"""All figures of one moment: of runs, jobs and alerts, the totals of the ledger, and the machine. Where they go is export.py.

Of the machine, psutil asks the kernel. What is not there is not told: a missing figure is no zero."""

from __future__ import annotations

import os
import shutil
import subprocess
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from deployments.telemetry import instruments as of
from deployments.telemetry.instruments import SECONDS, Instrument, Point
from deployments.telemetry.runs import JobView, Key, RunView, read_object
from deployments.telemetry.trace_builder import Span

COUNTED = {instrument.name: instrument for instrument in (of.RUNS, of.GATES, of.STAGES, of.RESTARTS)}
WRONG = ("failed", "gate_closed", "died")


def counts(spans: Iterable[Span]) -> dict[Key, float]:
    """What these spans add to the totals."""
    result: dict[Key, float] = {}

    def add(instrument: Instrument, labels: tuple[str, ...], value: float = 1.0, part: str = "") -> None:
        key = (instrument.name, labels, part)
        result[key] = result.get(key, 0.0) + value

    for span in spans:
        flow, subject, stage = (
            str(span.attributes.get(f"headway.{name}", "")) for name in ("flow", "subject", "stage")
        )
        if span.kind == "run":
            add(of.RUNS, (flow, subject, span.status))
            if span.status == "gate_closed":
                add(of.GATES, (flow, subject, stage))
        else:
            labels, seconds = (flow, stage, span.status), max(span.end - span.start, 0.0)
            add(of.STAGES, labels, seconds, "sum")
            add(of.STAGES, labels, part=str(bisect_left(SECONDS, seconds)))
    return result


def totals(kept: Mapping[Key, float]) -> Iterator[Point]:
    """The ledger's totals as points; those of a metric that is no more are left out."""
    buckets: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for (name, labels, part), value in kept.items():
        instrument = COUNTED.get(name)
        if instrument is None or len(labels) != len(instrument.labels):
            continue
        if instrument.kind == "counter":
            yield Point(instrument, labels, value)
        elif part != "sum":
            buckets.setdefault((name, labels), [0] * (len(SECONDS) + 1))[int(part)] = int(value)
    for (name, labels), counted in buckets.items():
        yield Point(COUNTED[name], labels, kept.get((name, labels, "sum"), 0.0), tuple(counted))


def of_runs(runs: Iterable[RunView]) -> Iterator[Point]:
    """What is at work, how far it is, and what went wrong without a later success."""
    running: dict[tuple[str, str], int] = {}
    for run in (view for view in runs if view.status == "running"):
        running[run.flow, run.subject] = running.get((run.flow, run.subject), 0) + 1
        if run.stage and not run.waiting:
            labels = (run.flow, run.subject, run.stage)
            yield Point(of.MOVED, labels, run.moved)
            if run.share is not None:
                yield Point(of.SHARE, labels, run.share)
    for key, count in running.items():
        yield Point(of.RUNNING, key, float(count))
    for run in failing(runs):
        yield Point(of.FAILING, (run.flow, run.subject, run.status), run.last_sign)


def failing(runs: Iterable[RunView]) -> list[RunView]:
    """Of every flow, subject and way of going wrong: the newest run that did so, while none has succeeded since."""
    good: dict[tuple[str, str], float] = {}
    bad: dict[tuple[str, str, str], RunView] = {}
    for run in runs:
        status, key = run.status, (run.flow, run.subject)
        if status == "completed":
            good[key] = max(good.get(key, 0.0), run.last_sign)
        elif status in WRONG:
            before = bad.get((*key, status))
            bad[*key, status] = run if before is None or run.last_sign > before.last_sign else before
    return [run for run in bad.values() if run.last_sign > good.get((run.flow, run.subject), 0.0)]


def of_training(jobs: Iterable[JobView]) -> Iterator[Point]:
    """The last step of the newest training of every model."""
    newest: dict[str, JobView] = {}
    for job in jobs:
        name = job.subject or job.identity
        if name not in newest or job.prepared > newest[name].prepared:
            newest[name] = job
    for name, job in newest.items():
        for instrument, key in ((of.LOSS, "loss"), (of.SPEED, "tokens_per_second"), (of.STEP, "step")):
            if isinstance(job.last.get(key), int | float):
                yield Point(instrument, (name,), float(job.last[key]))


def of_alerts(home: Path) -> Iterator[Point]:
    """Every alert that fires, from the file that deployments/watch/alerts.py keeps."""
    for alert in read_object(home / "platform" / "alerts.json").get("firing") or []:
        yield Point(of.ALERT, (str(alert.get("alert")), str(alert.get("severity")), str(alert.get("instance"))), 1.0)


def added(points: Iterable[Point], before: Mapping[tuple[str, tuple[str, ...]], Point]) -> list[Point]:
    """The same figures, but of totals only what was added since; a total that is smaller than before began anew."""
    result = []
    for point in points:
        then = before.get((point.instrument.name, point.labels))
        if then is not None and point.instrument.kind != "gauge" and point.value >= then.value:
            buckets = tuple(new - old for new, old in zip(point.buckets, then.buckets, strict=True))
            point = Point(point.instrument, point.labels, point.value - then.value, buckets)
        result.append(point)
    return result


def written(points: Iterable[Point]) -> list[list[Any]]:
    """Totals as JSON."""
    grown = (point for point in points if point.instrument.kind != "gauge")
    return [[point.instrument.name, point.labels, point.value, point.buckets] for point in grown]


def read_points(rows: Iterable[list[Any]]) -> dict[tuple[str, tuple[str, ...]], Point]:
    """Totals out of JSON, by metric and labels."""
    known = {instrument.name: instrument for instrument in of.ALL}
    result = (Point(known[name], tuple(ls), value, tuple(bs)) for name, ls, value, bs in rows if name in known)
    return {(point.instrument.name, point.labels): point for point in result}


MIB = 1024.0 * 1024.0
ASKED = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
FIGURES: tuple[tuple[Instrument, float], ...] = (
    (of.GPU, 0.01),
    (of.GPU_MEMORY, MIB),
    (of.GPU_LIMIT, MIB),
    (of.GPU_HEAT, 1.0),
    (of.GPU_POWER, 1.0),
)


class Host:
    """This machine. State: the CPU clock of the last look, which psutil keeps, and a question to nvidia-smi."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._smi: subprocess.Popen[str] | None = None
        psutil.cpu_percent()

    def look(self) -> list[Point]:
        """What the machine does now; CPU is the mean since the last look."""
        memory = psutil.virtual_memory()
        points = [
            Point(of.CPU, (), psutil.cpu_percent() / 100),
            Point(of.LOAD, (), os.getloadavg()[0]),
            Point(of.CORES, (), float(psutil.cpu_count() or 1)),
            Point(of.MEMORY, ("used",), float(memory.total - memory.available)),
            Point(of.MEMORY, ("available",), float(memory.available)),
        ]
        if disk := free_room(self.home):
            points += [Point(of.DISK, ("used",), float(disk[1])), Point(of.DISK, ("free",), float(disk[0]))]
        if disks := psutil.disk_io_counters():  # none in containers without /proc/diskstats
            points += [Point(of.DISK_IO, ("read",), float(disks.read_bytes))]
            points += [Point(of.DISK_IO, ("write",), float(disks.write_bytes))]
        cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
        if cards:
            points += [Point(of.NETWORK, ("receive",), float(sum(card.bytes_recv for card in cards)))]
            points += [Point(of.NETWORK, ("transmit",), float(sum(card.bytes_sent for card in cards)))]
        return [*points, *self._gpus()]

    def _gpus(self) -> list[Point]:
        """The answer to the last question, and the next question: nvidia-smi takes up to a second, for which nothing waits."""
        points: list[Point] = []
        if self._smi is not None:
            if self._smi.poll() is None:
                return points
            points = list(parse_smi(self._smi.communicate()[0])) if self._smi.returncode == 0 else []
            self._smi = None
        program = shutil.which("nvidia-smi")
        if program:
            asked = [program, f"--query-gpu={ASKED}", "--format=csv,noheader,nounits"]
            self._smi = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return points


def parse_smi(text: str) -> Iterator[Point]:
    """The figures of nvidia-smi's CSV. `[N/A]` and `[Not Supported]` are left out, as are lines of another shape."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(ASKED.split(",")):
            continue
        for (instrument, factor), cell in zip(FIGURES, cells[2:], strict=True):
            try:
                yield Point(instrument, (cells[0], cells[1]), float(cell) * factor)
            except ValueError:
                continue


def free_room(home: Path) -> tuple[int, int] | None:
    """Bytes free for us and bytes in use on the disk that holds a folder; None when it cannot be asked."""
    try:
        usage = shutil.disk_usage(home)
    except OSError:
        return None
    return usage.free, usage.used
