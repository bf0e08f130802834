"""The report's charts as inline SVG: values in, text out; the only file of the report that needs matplotlib.

What is drawn for which part of a run is chosen in page.py. Colours become the page's CSS variables, so that a chart follows
the page into dark mode; ids are prefixed with the chart's name, so that several charts live in one page; text stays text.
Equal values give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from tasks.report.data import Histogram, Interval, number

INK, MUTED, LINE, ACCENT, SOFT, WARN = "#1b2430", "#5b6675", "#dde2e9", "#1f5fbf", "#a9bfdf", "#8a5a00"
VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", ACCENT: "accent", SOFT: "soft", WARN: "warn"}
WIDTH = 460
MAX_POINTS = 1000
LABEL_CHARACTERS = 24
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with its label on the left and `text` at its end."""

    label: str
    value: float
    text: str
    interval: Interval | None = None
    """Drawn as a whisker."""
    accent: bool = False


def line_chart(
    name: str,
    points: Sequence[tuple[int, float]],
    *,
    label: str,
    unit: str,
    height: int = 150,
    smooth: bool = False,
    marks: Sequence[int] = (),
) -> str:
    """A value against the step; `marks` are steps at which training was resumed. Empty where no value is finite."""
    finite = np.array([point for point in points if math.isfinite(point[1])], dtype=float).reshape(-1, 2)
    if not len(finite):
        return ""

    def draw(axes: Any) -> None:
        _curve(axes, finite, unit, smooth=smooth)
        for step in marks:
            _mark(axes, step, finite)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(axis="y", linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        _format(axes.xaxis, axes.yaxis)

    return _svg(name, height, label, draw)


def histogram_chart(name: str, histogram: Histogram, *, label: str, unit: str, height: int = 210) -> str:
    """Counts as columns of equal width, for edges that grow by factors; the last bin may be open. Empty without counts."""
    counts, edges = histogram.counts, histogram.edges
    if not counts:
        return ""

    def draw(axes: Any) -> None:
        axes.bar([i + 0.5 for i in range(len(counts))], counts, width=0.92, color=ACCENT)
        every = math.ceil(len(edges) / 12)
        axes.set_xticks(range(0, len(edges), every), [_brief(edge) for edge in edges[::every]])
        axes.tick_params(length=0)
        axes.set_xlabel(unit)
        axes.set_ylabel("documents")
        axes.grid(axis="y", linewidth=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _format(axes.yaxis)

    return _svg(name, height, label, draw)


def bars_chart(name: str, bars: Sequence[Bar], *, label: str, reference: tuple[str, float] | None = None) -> str:
    """Horizontal bars from zero, first on top; `reference` is the text and value of a dashed line. Empty without bars."""
    if not bars:
        return ""
    ends = [max(bar.value, *(bar.interval or ())) if bar.interval else bar.value for bar in bars]
    right = max(*ends, reference[1] if reference else 0.0, 1e-12)

    def draw(axes: Any) -> None:
        for row, (bar, end) in enumerate(zip(bars, ends, strict=True)):
            _bar(axes, row, bar, end + right * 0.015)
        if reference:
            axes.axvline(reference[1], color=WARN, linewidth=1.4, linestyle=(0, (4, 3)))
            axes.annotate(reference[0], (reference[1], -0.62), ha=_side(reference[1], right), va="bottom", color=WARN)
        axes.set_yticks(range(len(bars)), [_fit(bar.label) for bar in bars], color=INK)
        axes.set_ylim(len(bars) - 0.5, -1.1 if reference else -0.5)
        axes.set_xlim(0, right * 1.22)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)

    return _svg(name, 30 * (len(bars) + bool(reference)) + 10, label, draw)


def _curve(axes: Any, points: NDArray[np.float64], unit: str, *, smooth: bool) -> None:
    window = max(1, len(points) // 40)
    thin = points[:: math.ceil(len(points) / MAX_POINTS)]
    smooth = smooth and window > 1
    marker = "o" if len(points) == 1 else None
    axes.plot(thin[:, 0], thin[:, 1], color=SOFT if smooth else ACCENT, linewidth=1.0, marker=marker, label=unit)
    if smooth:
        mean = np.stack([np.convolve(column, np.full(window, 1 / window), "valid") for column in points.T], axis=1)
        mean = mean[:: math.ceil(len(mean) / MAX_POINTS)]
        axes.plot(mean[:, 0], mean[:, 1], color=ACCENT, linewidth=1.8, label=f"mean of {window} steps")
        axes.legend(loc="upper right", labelcolor=INK)


def _mark(axes: Any, step: int, points: NDArray[np.float64]) -> None:
    axes.axvline(step, color=WARN, linewidth=1.2, linestyle=(0, (4, 3)))
    middle = (points[0, 0] + points[-1, 0]) / 2
    side, shift = ("left", 5) if step <= middle else ("right", -5)
    anchor = {"xy": (step, 0.5), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(f"resumed from step {step}", xytext=(shift, 0), ha=side, va="bottom", color=WARN, **anchor)


def _bar(axes: Any, row: int, bar: Bar, text_at: float) -> None:
    axes.barh(row, bar.value, height=0.62, color=ACCENT if bar.accent else SOFT)
    if bar.interval:
        low, high = bar.interval
        axes.plot([low, high], [row, row], color=INK, linewidth=1.4, marker="|", markersize=9)
    axes.text(text_at, row, bar.text, va="center", color=INK, weight="bold" if bar.accent else "normal")


def _side(value: float, right: float) -> str:
    return "left" if value < right / 5 else "center" if value < right * 0.8 else "right"


def _format(*axis: Any) -> None:
    for one in axis:
        one.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _brief(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def _fit(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"


def _svg(name: str, height: int, label: str, draw: Callable[[Any], None]) -> str:
    """Draw on fresh axes of WIDTH x `height` units and hand out the figure as an element of a page."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), name, f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"')


def _inline(svg: str, name: str, attributes: str) -> str:
    """The inside of a stand-alone SVG as an inline element: own ids, no style for the page, no namespace, no comment."""
    inside = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg[svg.index(">", svg.index("<svg")) + 1 :], flags=re.DOTALL)
    inside = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", inside.replace("xlink:href", "href"))
    for colour, variable in VARIABLES.items():
        inside = inside.replace(colour, f"var(--{variable})")
    return f'<svg {attributes} class="chart">{inside}'
