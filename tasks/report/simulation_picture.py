"""A simulation's picture as PNG: where the time goes by failure rate, and the goodput by interval with the formula beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.planning.simulation_bands import Band
from tasks.report.pictures import ACCENT, BAD, INK, LINE, MUTED, SOFT, WARN, picture

CAUSES = {
    "useful": ("useful", ACCENT),
    "stalled": ("saving", SOFT),
    "lost": ("work lost", BAD),
    "detecting": ("not noticed yet", "#8a5a44"),
    "waiting": ("waiting for a machine", "#5b4b8a"),
    "restarting": ("restarting", WARN),
    "slowed": ("stragglers", MUTED),
    "shrunk": ("fewer machines", LINE),
}
"""Cause -> in words, colour; in the order in which they are drawn."""
LEVELS = {"low": "fails most", "mid": "as expected", "high": "fails least"}
SHOWN = 0.002
"""A cause with less of all time is not named."""
ROOM = 1.3
"""How much longer an interval is than the one before, to have a number of its own."""


def draw(path: Path, title: str, bands: Mapping[str, Band], sweep: Sequence[tuple[float, Band]]) -> Path:
    """Write the picture. `bands` as LEVELS; `sweep` by rising interval, empty where none was made."""
    with picture(path, (11, 4.6), dots=150) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15)) if sweep else (figure.subplots(), None)
        named = [cause for cause in CAUSES if any(item.shares[cause] >= SHOWN for item in bands.values())]
        # A bar of all time for each rate; from the least useful share on, so that small causes are seen.
        floor = max(0.0, min(item.shares["useful"] for item in bands.values()) - 0.12)
        for place, item in enumerate(bands.values()):
            bottom = 0.0
            for cause, (words, colour) in CAUSES.items():
                label = words if not place and cause in named else None
                left.bar(place, item.shares[cause], bottom=bottom, color=colour, width=0.62, linewidth=0, label=label)
                bottom += item.shares[cause]
            q = item.goodput
            left.plot([place] * 2, [q.p5, q.p95], color=INK, linewidth=1.6, marker="_", markersize=9)
            left.text(place, floor + (1 - floor) * 0.03, f"{q.p50:.1%}", ha="center", color="white", fontweight="bold")
        left.set_ylim(floor, 1)
        left.set_xticks(range(len(bands)), [f"{LEVELS[level]}\n{_hours(bands[level].mean_seconds)}" for level in bands])
        left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        left.set_title("all time, and goodput with p5 to p95", loc="left", fontsize=10, color=INK)
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=9)
        if right is not None:
            _swept(right, sweep)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return path


def _swept(axes: Any, sweep: Sequence[tuple[float, Band]]) -> None:
    minutes = [interval / 60 for interval, _ in sweep]
    axes.fill_between(
        minutes, [f.goodput.p5 for _, f in sweep], [f.goodput.p95 for _, f in sweep], color=SOFT, alpha=0.5, linewidth=0
    )
    axes.plot(minutes, [f.goodput.p50 for _, f in sweep], "o-", color=ACCENT, label="simulated, median; p5 to p95")
    axes.plot(minutes, [f.expected for _, f in sweep], "--", color=INK, linewidth=1.3, label="by formula")
    best = max(sweep, key=lambda row: row[1].goodput.p50)[0] / 60
    axes.axvline(best, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    wide = [local for before, local in zip([0.0, *minutes], minutes, strict=False) if local > ROOM * before]
    axes.set_xticks(wide, [f"{value:.3g}" for value in wide])
    axes.xaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.set_xlabel("minutes of computing between two saves")
    axes.set_title(
        f"goodput by interval, rate as expected; best {best:.3g} minutes", loc="left", fontsize=10, color=INK
    )
    axes.legend(loc="lower center", fontsize=9)


def _hours(seconds: float) -> str:
    return f"one in {seconds / 3600:.3g} h" if seconds < 1e8 else "none"
