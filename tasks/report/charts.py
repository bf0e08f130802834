"""The report's charts as inline SVG: values in, text out; with tasks/report/corpus/charts.py the only file that needs matplotlib.

Headings and captions do not live here (page.py). Colours become the page's CSS variables, so that a chart
follows the page into dark mode; ids begin with the chart's name, so that several charts live in one page; text stays
text. Equal values give equal bytes.
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

from tasks.report.data import number
from tasks.report.published import Champion, EvaluationReport, Interval, LossPoint, QualificationReport

INK, MUTED, LINE, ACCENT, SOFT = "#1b2430", "#5b6675", "#dde2e9", "#1f5fbf", "#a9bfdf"
WARN, BAD, PANEL = "#8a5a00", "#b3261e", "#ffffff"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    ACCENT: "accent",
    SOFT: "soft",
    WARN: "warn",
    BAD: "bad",
    PANEL: "panel",
}
WIDTH = 460
MAX_POINTS = 1000
RANKS_SHOWN = 16
ROUND = (1, 2, 2.5, 5, 10)
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
    colour: str = SOFT
    """Any but SOFT stands out."""
    before: float | None = None
    """An earlier value, drawn as a line across the bar."""


def loss_chart(points: Sequence[LossPoint], resumed: Sequence[int]) -> str:
    """Loss against the step with a running mean; `resumed` are steps at which a job went on from a checkpoint."""
    losses = [(point.step, point.loss) for point in points]
    label = f"Training loss from {number(losses[0][1])} at step {losses[0][0]} to {number(losses[-1][1])} at the end"
    return _lines("loss", losses, label=label, size=(520, 318), smooth=True, resumed=resumed)


def rate_chart(points: Sequence[LossPoint]) -> str:
    """Learning rate against the step."""
    rates = [(point.step, point.learning_rate) for point in points if point.learning_rate is not None]
    return _lines("rate", rates, label="Learning rate against the step")


def norm_chart(points: Sequence[LossPoint]) -> str:
    """L2 norm of the gradient against the step."""
    norms = [(point.step, point.grad_norm) for point in points if point.grad_norm is not None]
    return _lines("norm", norms, label="Gradient norm against the step")


def ranks_chart(cluster: QualificationReport) -> str:
    """GFLOP/s of each rank, or of the slowest RANKS_SHOWN ones, against the baseline."""
    slowest = sorted(cluster.ranks, key=lambda rank: rank.matmul_gflops)[:RANKS_SHOWN]
    rows = [
        Bar(f"rank {rank.rank} {rank.host}".strip(), rank.matmul_gflops, number(rank.matmul_gflops))
        for rank in sorted(slowest, key=lambda rank: rank.rank)
    ]
    references = _reference(cluster.baseline.name, cluster.baseline.matmul_gflops_per_rank)
    return bars("ranks", rows, label="GFLOP/s of each rank", references=references)


def allreduce_chart(cluster: QualificationReport) -> str:
    """Bus bandwidth of the all-reduce in GB/s against the baseline; empty where none was measured."""
    if not cluster.allreduce or cluster.allreduce.gigabytes_per_second is None:
        return ""
    rate, floor = cluster.allreduce.gigabytes_per_second, cluster.baseline.allreduce_gigabytes_per_second
    bar = Bar(f"{number(cluster.allreduce.megabytes)} MB", rate, number(rate))
    references = _reference(cluster.baseline.name, floor)
    return bars("allreduce", [bar], label="Bus bandwidth of the all-reduce in GB/s", references=references)


def _reference(name: str, floor: float | None) -> list[tuple[str, float]]:
    return [] if floor is None else [(f"{name} {number(floor)}", floor)]


def scores_chart(scores: EvaluationReport, champion: Champion | None) -> str:
    """Bits per byte of the baselines, the champion and this model with its interval."""
    others = (("unigram", scores.unigram), ("Kneser-Ney bigram", scores.bigram), ("champion", champion))
    rows = [Bar(name, one.bits_per_byte, f"{one.bits_per_byte:.3f}") for name, one in others if one]
    value = scores.bits_per_byte
    rows.append(Bar("this model", value, f"{value:.3f}", interval=scores.interval, colour=ACCENT))
    return bars("scores", rows, label="Bits per byte, lower is better")


def _lines(
    name: str,
    points: Sequence[tuple[int, float]],
    *,
    label: str,
    size: tuple[int, int] = (400, 165),
    smooth: bool = False,
    resumed: Sequence[int] = (),
) -> str:
    finite = np.array([point for point in points if math.isfinite(point[1])], dtype=float).reshape(-1, 2)
    if not len(finite):
        return ""

    def draw(axes: Any) -> None:
        _curve(axes, finite, smooth=smooth)
        for step in resumed:
            axes.axvline(step, color=WARN, linewidth=1.2, linestyle=(0, (4, 3)))
            middle = (finite[0, 0] + finite[-1, 0]) / 2
            side, shift = ("left", 5) if step <= middle else ("right", -5)
            anchor = {"xy": (step, 0.5), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(f"resumed from step {step}", xytext=(shift, 0), ha=side, va="bottom", color=WARN, **anchor)
        axes.set_xlabel("step")
        axes.grid(axis="y", linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        plain_numbers(axes.xaxis, axes.yaxis)

    return svg(name, size, label, draw)


def bars(
    name: str, rows: Sequence[Bar], *, label: str, references: Sequence[tuple[str, float]] = (), room: float = 1.22
) -> str:
    """Horizontal bars from zero, first on top; `references` are texts and values of dashed lines.

    `room` is the width of the drawing by the longest bar's: what the texts at the ends need.
    """
    if not rows:
        return ""
    ends = [max(row.value, row.before or 0.0, *(row.interval or (0.0,))) for row in rows]
    right = max(*ends, *(value for _, value in references), 1e-12)

    def draw(axes: Any) -> None:
        for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
            text_at = end + right * 0.015
            axes.barh(place, row.value, height=0.62, color=row.colour)
            if row.before is not None:
                axes.plot([row.before] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=1.8)
            if row.interval:
                low, high = row.interval
                axes.plot([low, high], [place, place], color=INK, linewidth=1.4, marker="|", markersize=9)
            paper = {"facecolor": PANEL, "edgecolor": "none", "pad": 1.5}
            axes.text(
                text_at,
                place,
                row.text,
                bbox=paper,
                va="center",
                color=INK,
                weight="normal" if row.colour == SOFT else "bold",
            )
        for text, value in references:
            line = {"color": WARN, "linewidth": 1.4, "linestyle": (0, (4, 3)), "zorder": 2.5}
            axes.plot([value] * 2, [-0.5, len(rows) - 0.5], **line)
            axes.annotate(
                text,
                (value, -0.62),
                ha="left" if value < right / 5 else "center" if value < right * 0.8 else "right",
                va="bottom",
                color=WARN,
            )
        axes.set_yticks(range(len(rows)), [_fit(row.label) for row in rows], color=INK)
        axes.set_ylim(len(rows) - 0.5, -1.1 if references else -0.5)
        axes.set_xlim(0, right * room)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)

    message = ", ".join(f"{row.label} {row.text}" for row in rows) + "".join(f"; {text}" for text, _ in references)
    return svg(name, (WIDTH, 30 * (len(rows) + bool(references)) + 10), f"{label}: {message}", draw)


def _curve(axes: Any, points: NDArray[np.float64], *, smooth: bool) -> None:
    window = max(1, len(points) // 40)
    thin = points[:: math.ceil(len(points) / MAX_POINTS)]
    smooth = smooth and window > 1
    marker = "o" if len(points) == 1 else None
    axes.plot(
        thin[:, 0],
        thin[:, 1],
        color=SOFT if smooth else ACCENT,
        linewidth=1.0 if smooth else 1.4,
        marker=marker,
        label="each step",
    )
    if smooth:
        mean = np.stack([np.convolve(column, np.full(window, 1 / window), "valid") for column in points.T], axis=1)
        mean = mean[:: math.ceil(len(mean) / MAX_POINTS)]
        axes.plot(mean[:, 0], mean[:, 1], color=ACCENT, linewidth=1.8, label=f"mean of {window} steps")
        axes.legend(loc="upper right", labelcolor=INK)


def plain_numbers(*axis: Any) -> None:
    for one in axis:
        one.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def brief(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def _fit(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"


def svg(name: str, size: tuple[int, int], label: str, draw: Callable[[Any], None]) -> str:
    """Draw on fresh axes and hand out the figure as an element of a page."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(
        buffer.getvalue(), name, f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label)}"'
    )


def _inline(svg: str, name: str, attributes: str) -> str:
    """The inside of a stand-alone SVG as an inline element: own ids, no style for the page, no namespace."""
    inside = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg[svg.index(">", svg.index("<svg")) + 1 :], flags=re.DOTALL)
    inside = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", inside.replace("xlink:href", "href"))
    for colour, variable in VARIABLES.items():
        inside = inside.replace(colour, f"var(--{variable})")
    return f'<svg {attributes} class="chart">{inside}'
