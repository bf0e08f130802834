"""The scaling report in one picture, as PNG: the rate of a GPU by parameters, and of all by GPUs beside a straight line.

The form is that of Figure 3 of DeepSpeed on Azure, July 2022. The numbers are scaling.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tasks.report.charts import ACCENT, INK, STYLE, WARN, plain_numbers
from tasks.report.scaling import Curve, Point

INCHES = (11, 4.6)
ROOM = 1.2
"""Above the highest bar, for the legend."""


def draw_scaling(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture of at least one curve."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        sizes, ranks = figure.subplots(1, 2)
        _by_size(sizes, curves)
        _by_ranks(ranks, max(curves, key=lambda curve: (len(curve.points), curve.parameters)))
        figure.savefig(path, dpi=110, facecolor="white")


def size(parameters: float) -> str:
    """Parameters as people write them: 870K, 125M, 175B, 2T."""
    for least, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= least:
            return f"{parameters / least:.3g}{letter}"
    return f"{parameters:.0f}"


def _by_size(axes: Any, curves: Sequence[Curve]) -> None:
    """Of each curve, its most ranks."""
    shown = sorted((curve.points[-1] for curve in curves), key=lambda point: point.newest.parameters)
    places = range(len(shown))
    axes.bar(places, [point.newest.tflops for point in shown], color=ACCENT, width=0.6, label="measured")
    _planned(axes, list(places), shown, whole=False)
    axes.set_xticks(places, [f"{size(p.newest.parameters)}\n{p.newest.ranks} ranks" for p in shown])
    axes.set_xlabel(", ".join(dict.fromkeys(point.newest.hardware for point in shown)))
    axes.set_title("TFLOP/s of one GPU or rank, by parameters")
    axes.set_ylim(0, ROOM * max(max(p.newest.tflops, p.newest.planned_tflops or 0.0) for p in shown))
    axes.legend(frameon=False, ncols=2, loc="upper left")


def _by_ranks(axes: Any, curve: Curve) -> None:
    counts = [point.newest.ranks for point in curve.points]
    whole = [point.newest.tflops * point.newest.ranks for point in curve.points]
    straight = [curve.points[0].newest.tflops * count for count in counts]
    axes.plot(counts, straight, color=INK, linestyle=":", label="straight line from the fewest")
    axes.plot(counts, whole, color=ACCENT, marker="o", label="measured")
    _planned(axes, counts, curve.points, whole=True)
    for point, total in zip(curve.points, whole, strict=True):
        if point.fell:
            axes.annotate(
                f"-{point.fell:.0%}",
                (point.newest.ranks, total),
                (-6, -14),
                textcoords="offset points",
                ha="right",
                color=WARN,
            )
    axes.set_title(f"TFLOP/s of all, {size(curve.parameters)} on {curve.hardware}")
    axes.set_xlabel("GPUs or ranks")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    plain_numbers(axes.xaxis, axes.yaxis)


def _planned(axes: Any, places: Sequence[float], points: Sequence[Point], *, whole: bool) -> None:
    results = [
        (place, point.newest.planned_tflops * (point.newest.ranks if whole else 1))
        for place, point in zip(places, points, strict=True)
        if point.newest.planned_tflops
    ]
    if results:
        axes.plot(*zip(*results, strict=True), color=WARN, marker="x", linestyle="", markersize=8, label="planned")
