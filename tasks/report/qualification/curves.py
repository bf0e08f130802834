"""The curves of a qualification's page: bandwidth against the size of the message, and rates against machines.

Both axes are logarithms. How charts are drawn: tasks/report/charts.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from tasks.report.charts import Axis, Band, Line, Point, log_ticks, plot
from tasks.report.data import number
from tasks.report.qualification.data import size_text

LIMITS = ("norm", "warn", "fail", "ideal")
"""Lines of what is asked: without a measured one nothing is drawn."""
SPAN = 300.0


def curves(label: str, lines: Sequence[Line], band: Band | None = None, *, bytes_: bool = True) -> Markup:
    """Lines on common axes, down to 1 / SPAN of the highest point; nothing where none that was measured has a point above zero.

    Small messages below that are left out at the left; what falls below it later is drawn at the bottom.
    """
    finite = [[p for p in line.points if all(math.isfinite(v) and v > 0 for v in p)] for line in lines]
    kept = [(line, points) for line, points in zip(lines, finite, strict=True) if points]
    if all(line.style in LIMITS for line, _ in kept):
        return Markup()
    floor = max(y for _, points in kept for _, y in points) / SPAN
    left = min(x for _, points in kept for x, y in points if y >= floor)
    shapes: list[Line | Band] = []
    if band:
        shapes.append(Band("band", [(x, max(a, floor), max(b, floor)) for x, a, b in band.points if x >= left]))
    shapes += [
        Line(line.style, [(x, max(y, floor)) for x, y in points if x >= left], line.dots) for line, points in kept
    ]
    places: list[Point] = [p for shape in shapes if isinstance(shape, Line) for p in shape.points]
    places += [(x, y) for shape in shapes if isinstance(shape, Band) for x, *ys in shape.points for y in ys]
    xs, ys = [x for x, _ in places], [y for _, y in places]
    start, end = (min(xs), max(xs)) if max(xs) >= 2 * min(xs) else (min(xs) / 2, max(xs) * 2)
    low = min(ys) / 1.25
    high = max(max(ys) * 1.25, low * 4)
    marks = log_ticks(start, end) if bytes_ else [2.0**power for power in range(13) if start <= 2.0**power <= end]
    x = Axis(start, end, marks, text=size_text if bytes_ else number, log=True)
    y = Axis(low, high, log_ticks(low, high), text=_thousands, log=True, grid=True)
    return plot(label, shapes, x, y, style="curve")


def limit_steps(limits: Sequence[tuple[float, float]], until: float) -> tuple[Point, ...]:
    """A limit that holds from a size on, as a curve: up to the next size that has one, the last to the end."""
    ordered = sorted(limits)
    ends = [start for start, _ in ordered[1:]] + [max(until, ordered[-1][0] * 1.5)] if ordered else []
    return tuple(
        point for (start, value), end in zip(ordered, ends, strict=True) for point in ((start, value), (end, value))
    )


def _thousands(value: float) -> str:
    return f"{number(value / 1000)}k" if value >= 10_000 else number(value)
