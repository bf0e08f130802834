"""A training in one picture for MLflow, as PNG: loss, learning rate, a step's parts, and what the time went to.

The page's own drawings are charts.py; a job's folder is read by data.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.report.charts import ACCENT, INK, STYLE, WARN, plain_numbers
from tasks.report.data import duration, percent
from tasks.report.published import LossPoint
from tasks.report.training.charts import CAUSES, PARTS, shares
from tasks.report.training.data import TrainingReport, read_training

FILE = "training.png"
INCHES = (12, 7.2)


def draw_training(job: Path, log: Path) -> Path | None:
    """Draw a job that is done into `pictures/` of its folder; `log` is its `training_log.jsonl`. None: one of them is gone."""
    payload = read_training(job)
    if payload is None or not log.exists():
        return None
    report = TrainingReport.model_validate(payload)
    points = [LossPoint.model_validate(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]
    path = job / "pictures" / FILE
    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        (loss, split), (rate, time) = figure.subplots(2, 2)
        _loss(loss, points, report)
        _line(rate, [(point.step, point.learning_rate or 0.0) for point in points], "Learning rate")
        _split(split, report)
        seconds = dict(report.time.seconds) if report.time else {}
        total = sum(seconds.values()) or 1.0
        for row, (name, (label, colour)) in enumerate(CAUSES.items()):
            value = seconds.get(name, 0.0)
            time.barh(row, value, color=colour, height=0.62)
            time.text(value, row, f"  {label}: {percent(value / total)}, {duration(value)}", va="center", color=INK)
        time.set_xlim(0, 1.6 * max(seconds.values(), default=1.0))
        time.set_ylim(len(CAUSES) - 0.5, -0.5)
        time.set_yticks([])
        time.set_title("What the time went to, all attempts together", loc="left")
        time.set_xlabel("seconds")
        figure.savefig(path, dpi=100, facecolor="white")
    return path


def _loss(axes: Any, points: Sequence[LossPoint], report: TrainingReport) -> None:
    _line(axes, [(point.step, point.loss) for point in points], "Training loss, nats a token")
    if report.heldout:
        beside = axes.twinx()
        values = [(point.step, point.heldout_bits_per_byte) for point in report.heldout]
        beside.plot(*zip(*values, strict=True), color=WARN, marker="o", markersize=4)
        beside.set_ylabel("held-out bits per byte")
        beside.set_ylim(bottom=0)


def _line(axes: Any, points: Sequence[tuple[int, float]], title: str) -> None:
    axes.plot(*zip(*points, strict=True), color=ACCENT, linewidth=1.4)
    _about(axes, title)


def _split(axes: Any, report: TrainingReport) -> None:
    parts = shares(report.steps)
    places = [point.step for point in report.steps]
    heights = [100 * parts[name] for name in PARTS]
    axes.stackplot(places, heights, colors=list(PARTS.values()), labels=list(PARTS), linewidth=0)
    axes.set_ylim(0, 100)
    axes.set_xlim(places[0], places[-1])
    _about(axes, "Where a step's time goes, percent")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, fontsize=10, labelcolor=INK)


def _about(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.grid(axis="y", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    plain_numbers(axes.xaxis, axes.yaxis)
