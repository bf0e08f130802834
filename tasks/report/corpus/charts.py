"""The charts of the data: lengths, classes of characters, drift, what was set aside. How charts are made:
tasks/report/charts.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from tasks.report.charts import ACCENT, BAD, ROUND, SOFT, WARN, WIDTH, Bar, bars, brief, plain_numbers, svg
from tasks.report.data import number, percent
from tasks.report.published import ColumnDrift, Histogram

LEAST_SHARE = 0.0005
"""Classes of characters below it, now and before, are not drawn."""


def lengths_chart(histogram: Histogram) -> str:
    """Counts as columns of equal width, for edges that grow by factors; the last bin may be open."""
    counts, edges = histogram.counts, histogram.edges
    if not counts:
        return ""

    def draw(axes: Any) -> None:
        axes.bar([i + 0.5 for i in range(len(counts))], counts, width=0.92, color=ACCENT)
        every = math.ceil(len(edges) / 10)
        axes.set_xticks(range(0, len(edges), every), [brief(edge) for edge in edges[::every]])
        axes.tick_params(length=0)
        axes.set_ylabel("documents")
        axes.grid(axis="y", linewidth=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=ROUND))
        plain_numbers(axes.yaxis)

    return svg("lengths", (WIDTH, 200), "Histogram of document lengths in characters", draw)


def classes_chart(classes: Mapping[str, float], before: Mapping[str, float]) -> str:
    """Share of each class of characters, the largest on top, with its share in the version before."""
    shown = [name for name, share in classes.items() if max(share, before.get(name, 0.0)) >= LEAST_SHARE]
    rows = [
        Bar(name.replace("_", ", "), classes[name], _change(classes[name], before.get(name)), before=before.get(name))
        for name in sorted(shown, key=lambda name: -classes[name])
    ]
    return bars("classes", rows, label="Character classes", room=1.5 if before else 1.22)


def drift_chart(drift: Sequence[ColumnDrift], warn: float | None, most: float | None) -> str:
    """Distance of each column to the version before, coloured by the two limits."""
    rows = [
        Bar(
            each.column.replace("_", " "),
            each.distance,
            f"{each.distance:.3f}",
            colour=_colour(each.distance, warn, most),
        )
        for each in drift
        if each.distance is not None
    ]
    limits = [(text, value) for text, value in (("told", warn), ("gate closes", most)) if value is not None]
    return bars("drift", rows, label="Drift of each column", references=[(f"{t} {number(v)}", v) for t, v in limits])


def counts_chart(name: str, counts: Mapping[str, int], label: str) -> str:
    """How many of each kind, the most on top."""
    order = sorted(counts, key=lambda kind: -counts[kind])
    return bars(name, [Bar(kind, counts[kind], number(counts[kind])) for kind in order if counts[kind]], label=label)


def _change(share: float, before: float | None) -> str:
    return percent(share) if before is None else f"{percent(share)}, was {percent(before)}"


def _colour(distance: float, warn: float | None, most: float | None) -> str:
    if most is not None and distance > most:
        return BAD
    return WARN if warn is not None and distance >= warn else SOFT
