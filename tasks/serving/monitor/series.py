"""Measures and accuracy of answers over time: a row a window of as many answers, the newest last. Pure; judges nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tasks.formats.answers import Answer, Label
from tasks.serving.monitor.measures import MEASURES, mean
from tasks.serving.monitor.reading import Told, ended


def series(told: Told, *, requests: int, windows: int) -> list[dict[str, Any]]:
    """The last windows of so many requests each: `begins`, `ends` (seconds since the epoch), means, `labels` and `accuracy`.

    The newest window may hold fewer. A label belongs to the window in which its request was asked: accuracy is that of the
    answers of a time, whenever callers said so.
    """
    cut = [told.answers[place : place + requests] for place in range(0, len(told.answers), requests)]
    edges = [window[0].time for window in cut[1:]] + [math.inf]
    rows = [_row(window, _asked_in(told.labels, window, edge)) for window, edge in zip(cut, edges, strict=False)]
    return rows[-windows:]


def _row(window: Sequence[Answer], labels: Sequence[Label]) -> dict[str, Any]:
    return {
        "begins": window[0].time,
        "ends": ended(window[-1]),
        "requests": len(window),
        **{measure.name: mean(measure, window) for measure in MEASURES},
        "labels": len(labels),
        "accuracy": fmean(label.right for label in labels) if labels else None,
    }


def _asked_in(labels: Sequence[Label], window: Sequence[Answer], edge: float) -> list[Label]:
    first = window[0].time
    return [label for label in labels if first <= label.asked < edge]
