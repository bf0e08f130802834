"""Charts of a training: where its steps' time goes, how fast they are, held-out text, and the time of the whole run by cause.

As in tasks/report/charts.py: values in, inline SVG out, equal values give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from tasks.report.charts import ACCENT, BAD, INK, LINE, MUTED, ROUND, SOFT, WARN, WIDTH, Bar, bars, plain_numbers, svg
from tasks.report.data import duration, number, percent
from tasks.report.training.data import HeldoutPoint, StepTime, TimeReport

PARTS = {"compute": ACCENT, "communication": SOFT, "data": WARN, "checkpoint": BAD, "rest": LINE}
"""Of a step, in the order in which they are drawn."""
CAUSES = {
    "useful": ("useful steps", ACCENT),
    "stalled": ("standing still", MUTED),
    "lost": ("steps that did not stay", BAD),
    "restarting": ("starting again", WARN),
    "starting": ("starting", SOFT),
    "idle": ("nothing ran", LINE),
}
SIZE = (WIDTH, 210)


def split_chart(steps: Sequence[StepTime]) -> str:
    """Shares of a step by its parts, against the step."""
    if len(steps) < 2:
        return ""
    parts = shares(steps)

    def draw(axes: Any) -> None:
        heights = [100 * parts[name] for name in PARTS]
        places = [point.step for point in steps]
        axes.stackplot(places, heights, colors=list(PARTS.values()), labels=list(PARTS), linewidth=0)
        axes.set_xlim(places[0], places[-1])
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
        _below(axes)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=5, labelcolor=INK, fontsize=10, handlelength=1)

    text = ", ".join(f"{name} {percent(float(parts[name].mean()))}" for name in PARTS)
    return svg("split", SIZE, f"Shares of a step: {text}", draw)


def shares(steps: Sequence[StepTime]) -> dict[str, NDArray[np.float64]]:
    """Of each step the share of each part, what is in none included; shape [steps]."""
    whole = np.array([max(point.step_seconds, 1e-12) for point in steps])
    known = [name for name in PARTS if name != "rest"]
    result = {name: np.array([getattr(point, f"{name}_seconds") for point in steps]) / whole for name in known}
    return {**result, "rest": np.clip(1 - sum(result.values()), 0, 1)}


def speed_chart(steps: Sequence[StepTime]) -> str:
    """Tokens a second against the step."""
    points = [(point.step, point.tokens_per_second) for point in steps if point.tokens_per_second > 0]
    return _line("speed", points, "Tokens a second, all ranks, against the step", zero=True)


def heldout_chart(points: Sequence[HeldoutPoint]) -> str:
    """Bits per byte of held-out text against the step."""
    values = [(point.step, point.heldout_bits_per_byte) for point in points]
    return _line("heldout", values, "Bits per byte of held-out text against the step", dots=len(values) <= 40)


def time_chart(time: TimeReport) -> str:
    """Seconds of the whole run by cause; causes that cost nothing are left out."""
    total = sum(time.seconds.values())
    rows = [
        Bar(
            label,
            time.seconds[name],
            f"{percent(time.seconds[name] / total)}, {duration(time.seconds[name])}",
            colour=c,
        )
        for name, (label, c) in CAUSES.items()
        if total and time.seconds.get(name)
    ]
    return bars("time", rows, label="What the time of training went to", room=1.5)


def _line(name: str, points: Sequence[tuple[int, float]], label: str, *, zero: bool = False, dots: bool = False) -> str:
    if not points:
        return ""

    def draw(axes: Any) -> None:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=ACCENT, linewidth=1.6, marker="o" if dots else None, markersize=3.5)
        if zero:
            axes.set_ylim(0, max(values) * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        plain_numbers(axes.yaxis)
        _below(axes)

    text = f"{label}: {number(points[0][1])} at step {points[0][0]}, {number(points[-1][1])} at step {points[-1][0]}"
    return svg(name, SIZE, text, draw)


def _below(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.grid(axis="y", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND))
    plain_numbers(axes.xaxis)
