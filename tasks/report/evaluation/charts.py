"""Charts of an evaluation for a run's page: bits per byte by slice, the loss to the champion by slice, the reliability curve.

As in tasks/report/charts.py: values in, inline SVG out, equal values give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from tasks.report.charts import ACCENT, INK, LABEL_CHARACTERS, MUTED, ROUND, SOFT, WARN, WIDTH, Bar, bars, svg
from tasks.report.data import number
from tasks.report.evaluation.data import Calibration, ComparedSlice, PositionScore, SliceScore
from tasks.report.evaluation.messages import signed

ROW = 30
TOKENS_HIGH = 0.25
"""Height of the fullest bin's bar, by that of the drawing."""


def slices_chart(slices: Sequence[SliceScore]) -> str:
    """Bits per byte of each slice, with its interval; a slice with too few documents has none."""
    rows = [
        Bar(each.slice, each.bits_per_byte, f"{each.bits_per_byte:.3f}", interval=each.interval)
        for each in slices
        if each.bits_per_byte is not None
    ]
    return bars("slices", rows, label="Bits per byte by slice, lower is better")


def losses_chart(rows: Sequence[ComparedSlice]) -> str:
    """The relative loss to the champion of the whole and of each slice: right of the line is worse."""
    known = [(row.slice, row.loss) for row in rows if row.loss]
    if not known:
        return ""

    def draw(axes: Any) -> None:
        axes.axvline(0.0, color=MUTED, linewidth=1.2)
        for place, (_, loss) in enumerate(known):
            axes.plot(
                [loss.low * 100, loss.high * 100], [place] * 2, color=INK, linewidth=1.4, marker="|", markersize=9
            )
            axes.plot([loss.estimate * 100], [place], "o", color=ACCENT, markersize=7, zorder=3)
        names = [name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}…" for name, _ in known]
        axes.set_yticks(range(len(known)), names, color=INK)
        axes.set_ylim(len(known) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        axes.grid(axis="x", linewidth=0.8)
        axes.tick_params(length=0)

    text = ", ".join(f"{name} {signed(loss.estimate)}" for name, loss in known)
    return svg("losses", (WIDTH, ROW * len(known) + 40), f"Relative loss to the champion: {text}", draw)


def positions_chart(positions: Sequence[PositionScore]) -> str:
    """Bits a token against how many tokens were read before it, up to the context; hollow where documents were joined for it."""
    known = [(each, each.bits_per_token) for each in positions if each.bits_per_token is not None]
    if not known:
        return ""

    def draw(axes: Any) -> None:
        lasts = [each.last for each, _ in known]
        axes.plot(lasts, [bits for _, bits in known], color=ACCENT, linewidth=1.6)
        for each, bits in known:
            if each.interval:
                axes.plot([each.last] * 2, each.interval, color=INK, linewidth=1.2)
            axes.plot([each.last], [bits], "o", color=ACCENT, markerfacecolor="none" if each.joined else ACCENT)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("tokens read before, up to")
        axes.set_ylabel("bits a token")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.8)

    (first, first_bits), (last, last_bits) = known[0], known[-1]
    text = f"Bits a token by position: {number(first_bits)} up to {first.last}, {number(last_bits)} up to {last.last}"
    return svg("positions", (WIDTH, 260), text, draw)


def reliability_chart(calibration: Calibration) -> str:
    """Share of tokens that were right against the probability that the model gave them; on the line it knows what it knows."""
    if not calibration.bins:
        return ""

    def draw(axes: Any) -> None:
        sure = [each.probability for each in calibration.bins]
        most = max(each.tokens for each in calibration.bins)
        heights = [TOKENS_HIGH * each.tokens / most for each in calibration.bins]
        axes.bar(sure, heights, width=0.045, color=SOFT, label="tokens, relative to the fullest bin")
        axes.plot([0, 1], [0, 1], color=WARN, linewidth=1.4, linestyle=(0, (4, 3)), label="as sure as right")
        axes.plot(sure, [each.accuracy for each in calibration.bins], color=ACCENT, marker="o", label="this model")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("probability of the likeliest token")
        axes.set_ylabel("share right")
        axes.grid(axis="y", linewidth=0.8)
        axes.legend(loc="upper left", labelcolor=INK, fontsize=10)

    text = f"Reliability curve; expected calibration error {number(calibration.error)}"
    return svg("reliability", (WIDTH, 260), text, draw)
