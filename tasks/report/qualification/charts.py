"""The curves of a qualification's page as inline SVG: bandwidth against the size of the message, and rates against machines.

Both axes are logarithms. Colours are classes of the page's style, so that a chart follows the page into dark mode. Without
matplotlib: a page has two dozen of them, and a stage waits for it. The map of pairs is pairs.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tasks.report.data import number
from tasks.report.markup import Html

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 50.0, 448.0, 12.0, 216.0
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
MOST_TICKS = 8
SPAN = 300.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve, by the class that it is drawn with: out, in, slow, norm, warn, fail, ideal."""

    style: str
    points: tuple[Point, ...]
    dots: bool = False


@dataclass(frozen=True)
class Band:
    """Where many curves lie: the least and the largest at each place."""

    points: tuple[tuple[float, float, float], ...]


def chart(name: str, label: str, lines: Sequence[Line], band: Band | None = None, *, bytes_: bool = True) -> Html:
    """Curves on common axes, down to 1 / SPAN of the highest point; nothing where there is no point above zero.

    Small messages below that are left out at the left; what falls below it later is drawn at the bottom.
    """
    drawn = [line for line in map(_positive, lines) if line.points]
    if not drawn:
        return Html()
    floor = max(y for line in drawn for _, y in line.points) / SPAN
    left = min(x for line in drawn for x, y in line.points if y >= floor)
    drawn = [Line(line.style, _above(line.points, left, floor), line.dots) for line in drawn]
    around = tuple((x, max(low, floor), max(high, floor)) for x, low, high in band.points if x >= left) if band else ()
    places = [p for line in drawn for p in line.points] + [(x, y) for x, *ys in around for y in ys]
    if not any(line.style not in ("norm", "warn", "fail", "ideal") for line in drawn):
        return Html()
    axes = Axes.around(places)
    shapes = [*axes.grid(bytes_=bytes_)]
    if around:
        existing = [axes.at(x, high) for x, _, high in around] + [axes.at(x, low) for x, low, _ in reversed(around)]
        shapes.append(f'<path class="band" d="M{_path(existing)}Z"/>')
    shapes += [shape for line in drawn for shape in axes.line(line)]
    head = f'<svg class="chart curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t">'
    return Html(f'{head}<title id="{name}-t">{escape(label)}</title>{"".join(shapes)}</svg>')


def steps(limits: Sequence[tuple[float, float]], until: float) -> tuple[Point, ...]:
    """A limit that holds from a size on, as a curve: up to the next size that has one, the last to the end."""
    ordered = sorted(limits)
    ends = [start for start, _ in ordered[1:]] + [max(until, ordered[-1][0] * 1.5)] if ordered else []
    return tuple(
        point for (start, value), end in zip(ordered, ends, strict=True) for point in ((start, value), (end, value))
    )


def size_text(size: float) -> str:
    """Bytes for people: 16 MB is 16 x 10^6."""
    factor, unit = next((pair for pair in UNITS if size >= pair[0]), UNITS[-1])
    return f"{number(round(size / factor, 3 - len(str(int(size / factor)))))} {unit}"


@dataclass(frozen=True)
class Axes:
    """Ends of both axes."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def around(cls, points: Sequence[Point]) -> Axes:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        left, right = min(xs), max(xs)
        if right < left * 2:
            left, right = left / 2, right * 2
        low, high = min(ys) / 1.25, max(ys) * 1.25
        return cls((left, right), (low, max(high, low * 4)))

    def at(self, x: float, y: float) -> Point:
        return LEFT + (RIGHT - LEFT) * _share(x, *self.x), BOTTOM - (BOTTOM - TOP) * _share(y, *self.y)

    def grid(self, *, bytes_: bool) -> list[str]:
        shapes = []
        for value in _ticks(*self.y):
            y = self.at(self.x[0], value)[1]
            shapes.append(f'<path class="grid-line" d="M{LEFT:g},{y:.1f}H{RIGHT:g}"/>')
            shapes.append(f'<text x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{_brief(value)}</text>')
        for value in _ticks(*self.x) if bytes_ else _doubled(*self.x):
            x = self.at(value, self.y[0])[0]
            output = size_text(value) if bytes_ else number(value)
            shapes.append(f'<path class="grid-line" d="M{x:.1f},{BOTTOM:g}v4"/>')
            shapes.append(f'<text x="{x:.1f}" y="{BOTTOM + 19:g}" text-anchor="middle">{output}</text>')
        return shapes

    def line(self, line: Line) -> list[str]:
        existing = [self.at(*point) for point in line.points]
        dots = existing if line.dots or len(existing) == 1 else []
        shapes = [f'<path class="line {line.style}" d="M{_path(existing)}"/>'] if len(existing) > 1 else []
        return shapes + [f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots]


def _positive(line: Line) -> Line:
    kept = tuple(p for p in line.points if all(math.isfinite(v) and v > 0 for v in p))
    return Line(line.style, kept, line.dots)


def _above(points: Sequence[Point], left: float, floor: float) -> tuple[Point, ...]:
    return tuple((x, max(y, floor)) for x, y in points if x >= left)


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two, with 2 and 5 of each where there are few of them, every third where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]
    if len(few) <= MOST_TICKS:
        return few
    tens = [10.0**power for power in powers if low <= 10.0**power <= high]
    return tens if len(tens) <= MOST_TICKS else [value for value in tens if round(math.log10(value)) % 3 == 0]


def _brief(value: float) -> str:
    return f"{number(value / 1000)}k" if value >= 10_000 else number(value)


def _doubled(low: float, high: float) -> list[float]:
    return [2.0**power for power in range(13) if low <= 2.0**power <= high]
