"""The charts of all pages as inline SVG: values in, markup out; equal values give equal text.

Colours are classes of the page's style, so that a chart follows the page into dark mode, and text stays text. Matplotlib, which
draws the pictures for MLflow (pictures.py), takes a tenth of a second a chart: a page has two dozen, and a stage waits for it.

Drawings that fill a table's cell are SVG in percent of its width, with round marks and text of its own size at any width. What
is told by colour is told by form too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from tasks.report.data import number
from tasks.report.published import Interval

BINS = 28
STRIP_HEIGHT, BASE = 40, 34
MARGIN = 3.0
"""Percent of the width on either side that nothing is drawn in, but for half a mark."""
GRAIN = 0.4
"""Percent of the width within which ticks are one."""
NOTHING = 1e-9
"""Values of which none is larger are rounding errors, and not drawn."""
Measured = float | None
Scale = tuple[float, float]


def histogram(
    null: Sequence[float], value: Measured, threshold: Measured, *, failed: bool, name: str, title: str
) -> Markup:
    """Values under no change as bars, the threshold dashed, what was measured as a mark."""
    marks = [one for one in (value, threshold) if one is not None]
    if not null or not marks or max(map(abs, [*null, *marks])) < NOTHING:
        return Markup()
    scale = spread([*null, *marks], 0.02)
    counts = [0] * BINS
    for one in null:
        counts[min(int((one - scale[0]) / (scale[1] - scale[0]) * BINS), BINS - 1)] += 1
    width = (100 - 2 * MARGIN) / BINS
    tall = [(MARGIN + index * width, count / max(counts) * (BASE - 4)) for index, count in enumerate(counts) if count]
    size = f'width="{width * 0.9:.2f}%" class="null"'
    shapes = [f'<rect x="{x:.2f}%" y="{BASE - height:.1f}" height="{height:.1f}" {size}/>' for x, height in tall]
    shapes.append(_level(0, 100, BASE, "axis"))
    if threshold is not None:
        shapes.append(_upright(_at(threshold, scale), "limit"))
    if value is not None:
        shapes.append(_mark(_at(value, scale), BASE / 2, failed=failed))
    limit = f"; threshold {number(threshold)}" if threshold is not None else ""
    text = (
        f"This window: {'not measured' if value is None else number(value)}{limit}. {len(null)} comparisons of the reference "
        f"with itself lie between {number(min(null))} and {number(max(null))}."
    )
    return _svg(shapes, name=name, height=STRIP_HEIGHT, title=title, text=text)


def whisker(
    value: Measured,
    low: Measured,
    high: Measured,
    *,
    scale: Scale,
    name: str,
    text: str,
    zero: float | None = None,
    failed: bool = False,
) -> Markup:
    """A dot with its interval on a scale; a failed one is a diamond. `zero` is drawn as an upright line."""
    if value is None:
        return Markup()
    shapes = [_upright(_at(zero, scale), "axis")] if zero is not None else []
    if low is not None and high is not None:
        left, right = _at(low, scale), _at(high, scale)
        shapes.append(_level(left, right, 14, "whisker"))
        shapes += [_upright(end, "whisker", "9", "19") for end in (left, right)]
    shapes.append(_mark(_at(value, scale), 14, failed=failed))
    return _svg(shapes, name=name, height=28, title=text)


def axis(scale: Scale, *, name: str, share: bool = False, what: str) -> Markup:
    """The numbers under a column of whiskers."""
    shapes = [_level(0, 100, 0.5, "axis")]
    for value in round_ticks(*scale):
        x = _at(value, scale)
        text = number(value) if not share else f"{value:+.0%}".replace("-", "\u2212") if value else "0"
        anchor = "start" if x < 8 else "end" if x > 92 else "middle"
        shapes.append(_upright(x, "axis", "0", "5"))
        shapes.append(f'<text x="{x:.2f}%" y="19" text-anchor="{anchor}">{escape(text)}</text>')
    return _svg(shapes, name=name, height=24, title=f"Scale: {what}")


def scale_of(values: Sequence[Measured], *, zero: bool = False) -> Scale:
    """The least and the largest of what was measured; never a single point."""
    known = [value for value in values if value is not None] + ([0.0] if zero else [])
    return spread(known, 0.02) if known else (0.0, 1.0)


def ticked(
    values: Sequence[float], bad: Sequence[tuple[float, str]], limits: Mapping[str, float], *, name: str, text: str
) -> Markup:
    """A tick a value, those that fall together as one; `bad` are values that break a limit, with warn or bad, drawn as diamonds.

    `limits` are dashed lines, by norm, warn, fail.
    """
    if not values:
        return Markup()
    scale = spread([*values, *limits.values()], 0.03)
    shapes = [_level(0, 100, 14, "axis")]
    shapes += [_upright(x, "tick", "6", "22") for x in _apart(_at(value, scale) for value in values)]
    shapes += [_upright(_at(value, scale), f"limit {kind}") for kind, value in limits.items()]
    for style in ("warn", "bad"):
        places = _apart(_at(value, scale) for value, its in bad if its == style)
        shapes += [_mark(x, 14, failed=True, style=f"found {style}") for x in places]
    return _svg(shapes, name=name, height=28, title=text)


def stacked(shares: Mapping[str, float]) -> Markup:
    """Shares of a whole as one bar, each an area by the class of its name."""
    left, shapes = 0.0, []
    for name, share in shares.items():
        wide = 100 * min(max(share, 0.0), 1.0)
        shapes.append(f'<rect x="{left:.2f}%" width="{wide:.2f}%" height="14" class="area {name}"/>')
        left += wide
    return Markup(f'<svg class="shares" width="100%" height="14" aria-hidden="true">{"".join(shapes)}</svg>')


def _at(value: float, scale: Scale) -> float:
    """Place of a value, in percent of the width."""
    return MARGIN + (100 - 2 * MARGIN) * min(max((value - scale[0]) / (scale[1] - scale[0]), 0.0), 1.0)


def _apart(places: Iterable[float]) -> list[float]:
    kept = {round(place / GRAIN): place for place in places}
    return [kept[grain] for grain in sorted(kept)]


def _level(left: float, right: float, y: float, style: str) -> str:
    return f'<line x1="{left:.2f}%" x2="{right:.2f}%" y1="{y:g}" y2="{y:g}" class="{style}"/>'


def _upright(x: float, style: str, top: str = "0", bottom: str = "100%") -> str:
    return f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{bottom}" class="{style}"/>'


def _mark(x: float, y: float, *, failed: bool, style: str = "found") -> str:
    """A dot, or a diamond for what failed: in a nested drawing, for a path has no place in percent."""
    if failed:
        diamond = '<path d="M0,-7 L7,0 L0,7 L-7,0 Z"/>'
        return f'<svg x="{x:.2f}%" y="{y:g}" overflow="visible" class="{style}">{diamond}</svg>'
    return f'<circle cx="{x:.2f}%" cy="{y:g}" r="5" class="mark"/>'


def _svg(shapes: Sequence[str], *, name: str, height: int, title: str, text: str = "") -> Markup:
    label = f'aria-labelledby="{name}-t{f" {name}-d" if text else ""}"'
    described = f'<desc id="{name}-d">{escape(text)}</desc>' if text else ""
    head = f'<svg class="strip" width="100%" height="{height}" role="img" {label}><title id="{name}-t">{escape(title)}</title>'
    return Markup(f"{head}{described}{''.join(shapes)}</svg>")


WIDTH, HEIGHT = 460, 250
"""Of a drawing, in its own units: it is shown as wide as its column."""
RIGHT, TOP = 12, 12
CHARACTER, BOLD = 6.7, 7.3
"""Most widths of a letter of a chart's text, in the same units."""
ROW, BAR = 30, 18
LABEL_CHARACTERS = 24
MOST_TICKS = 8
FACTORS = (1, 2, 2.5, 5, 10)
AREAS = ("band", "bar", "area")
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """The ends of an axis, where it has numbers, and how they are written."""

    low: float
    high: float
    ticks: Sequence[float]
    text: Callable[[float], str] = number
    label: str = ""
    log: bool = False
    grid: bool = False
    """Whether a line runs across the chart at each number."""

    def share(self, value: float) -> float:
        """The place of a value from 0, the lower end, to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Frame:
    """Where the axes lie in a drawing, in its units."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float

    def at(self, x: float, y: float) -> Point:
        right, up = self.x.share(x), self.y.share(y)
        return self.left + (self.right - self.left) * right, self.bottom - (self.bottom - self.top) * up


@dataclass(frozen=True)
class Line:
    """A curve, by the classes that it is drawn with; of a single point, a dot."""

    style: str
    points: Sequence[Point]
    dots: bool = False

    def draw(self, frame: Frame) -> str:
        places = [frame.at(*point) for point in self.points]
        dots = places if self.dots or len(places) == 1 else []
        path = f'<path class="line {self.style}" d="M{path_of(places)}"/>' if len(places) > 1 else ""
        return path + "".join(f'<circle class="dot {self.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots)


@dataclass(frozen=True)
class Band:
    """An area from a lower to an upper value at each place."""

    style: str
    points: Sequence[tuple[float, float, float]]

    def draw(self, frame: Frame) -> str:
        around = [frame.at(x, high) for x, _, high in self.points]
        around += [frame.at(x, low) for x, low, _ in reversed(self.points)]
        return f'<path class="{self.style}" d="M{path_of(around)}Z"/>' if around else ""


@dataclass(frozen=True)
class Columns:
    """Upright bars from the lower end, each from a left to a right place."""

    style: str
    bars: Sequence[tuple[float, float, float]]

    def draw(self, frame: Frame) -> str:
        corners = [(frame.at(left, value), frame.at(right, value)[0]) for left, right, value in self.bars]
        return "".join(
            f'<rect class="bar {self.style}" x="{x:.1f}" y="{y:.1f}" width="{end - x:.1f}" height="{frame.bottom - y:.1f}"/>'
            for (x, y), end in corners
        )


@dataclass(frozen=True)
class Upright:
    """A dashed line at a place, with words beside it."""

    value: float
    text: str

    def draw(self, frame: Frame) -> str:
        x = frame.at(self.value, frame.y.low)[0]
        right = self.value <= (frame.x.low + frame.x.high) / 2
        line = f'<path class="line warn" d="M{x:.1f},{frame.top:g}V{frame.bottom:g}"/>'
        middle = (frame.top + frame.bottom) / 2
        return line + words(x + (5 if right else -5), middle, self.text, "start" if right else "end", "warn")


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with its label on the left and `text` at its end."""

    label: str
    value: float
    text: str
    interval: Interval | None = None
    """Drawn as a whisker."""
    style: str = "soft"
    """Any but soft stands out."""
    before: float | None = None
    """An earlier value, drawn as a line across the bar."""

    @property
    def end(self) -> float:
        """How far anything of it reaches; never zero."""
        return max(self.value, self.before or 0.0, *(self.interval or (0.0,)), 1e-12)


def plot(
    label: str,
    shapes: Sequence[Line | Band | Columns | Upright],
    x: Axis,
    y: Axis,
    *,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    style: str = "",
) -> Markup:
    """Shapes on common axes, the first at the back."""
    names = [y.text(tick) for tick in y.ticks]
    left = 16 + CHARACTER * max(map(len, names), default=0) + (18 if y.label else 0)
    frame = Frame(x, y, left, size[0] - RIGHT, TOP, size[1] - (41 if x.label else 24))
    parts = []
    for tick, name in zip(y.ticks, names, strict=True):
        place = frame.at(x.low, tick)[1]
        parts.append(f'<path class="grid-line" d="M{left:.1f},{place:.1f}H{frame.right:g}"/>' if y.grid else "")
        parts.append(words(left - 7, place + 4, name, "end"))
    for tick in x.ticks:
        place = frame.at(tick, y.low)[0]
        line = f"{frame.top:g}V{frame.bottom:g}" if x.grid else f"{frame.bottom:g}v4"
        parts.append(f'<path class="grid-line" d="M{place:.1f},{line}"/>')
        parts.append(words(place, frame.bottom + 18, x.text(tick), "middle"))
    parts.append(f'<path class="grid-line" d="M{left:.1f},{TOP}V{frame.bottom:g}H{frame.right:g}"/>')
    parts += [shape.draw(frame) for shape in shapes]
    parts.append(words((left + frame.right) / 2, size[1] - 4, x.label, "middle") if x.label else "")
    middle = (frame.top + frame.bottom) / 2
    turned = f'<text transform="translate(13,{middle:g}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>'
    return drawing(label, size, [*parts, turned if y.label else ""], style)


def bars(label: str, rows: Sequence[Bar], references: Sequence[tuple[str, float]] = ()) -> Markup:
    """Horizontal bars from zero, first on top, as long as their texts leave room; `references` are dashed lines with words."""
    if not rows:
        return Markup()
    names, above = [fit(row.label) for row in rows], ROW if references else 0
    left, room = 10 + CHARACTER * max(map(len, names)), float(WIDTH - 12)
    scale = min((room - left - BOLD * len(row.text)) / row.end for row in rows)
    scale = min([scale, *((room - left) / max(value, 1e-12) for _, value in references)])
    parts = []
    for place, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = above + 5 + ROW * place + ROW / 2
        parts.append(words(left - 7, y + 4, name, "end", "name"))
        size = f'width="{scale * max(row.value, 0.0):.2f}" height="{BAR}"'
        parts.append(f'<rect class="bar {row.style}" x="{left:.1f}" y="{y - BAR / 2:g}" {size}/>')
        if row.before is not None:
            parts.append(f'<path class="line ink" d="M{left + scale * row.before:.1f},{y - 12:g}v24"/>')
        if row.interval:
            low, high = (left + scale * value for value in row.interval)
            caps = "".join(f"M{x:.1f},{y - 5:g}v10" for x in (low, high))
            parts.append(f'<path class="line ink thin" d="M{low:.1f},{y:g}H{high:.1f}{caps}"/>')
        strong = "value" if row.style == "soft" else "value strong"
        parts.append(words(left + scale * row.end + 6, y + 4, row.text, "start", strong))
    for text, value in references:
        x = left + scale * value
        parts.append(f'<path class="line warn" d="M{x:.1f},{above:g}V{above + 5 + ROW * len(rows):g}"/>')
        anchor = "start" if x < left + (room - left) / 5 else "middle" if x < left + (room - left) * 0.75 else "end"
        parts.append(words(x, above - 6, text, anchor, "warn"))
    message = ", ".join(f"{row.label} {row.text}" for row in rows) + "".join(f"; {text}" for text, _ in references)
    return drawing(f"{label}: {message}", (WIDTH, above + ROW * len(rows) + 10), parts)


def legend(entries: Mapping[str, str]) -> Markup:
    """What colours and dashes mean: words by the class that a shape is drawn with, areas beginning with one of AREAS."""
    keys = {
        style: f'<rect y="1" width="26" height="12" class="{style}"/>'
        if style.startswith(AREAS)
        else f'<path class="line {style}" d="M0,7H26"/>'
        for style in entries
    }
    items = (
        f'<li><svg class="key" width="26" height="14" aria-hidden="true">{keys[style]}</svg>{escape(text)}</li>'
        for style, text in entries.items()
    )
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')


def drawing(label: str, size: tuple[float, float], parts: Sequence[str], style: str = "", most: float = 0.0) -> Markup:
    """An element of a page, named for who does not see it; as wide as its column, or at most `most` pixels."""
    limit = f' style="max-width:{most:.0f}px"' if most else ""
    head = f'<svg class="{f"chart {style}".strip()}" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}"{limit} role="img"'
    return Markup(f'{head} aria-label="{escape(label)}">{"".join(parts)}</svg>')


def words(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    """Text in a drawing; `anchor` is which of its ends, or its middle, lies at x."""
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def path_of(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def fit(label: str, most: int = LABEL_CHARACTERS) -> str:
    """A label that is cut where it is too long."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def spread(values: Sequence[float], room: float = 0.05) -> tuple[float, float]:
    """The least and the largest with that share of room on either side; never a single point."""
    low, high = min(values), max(values)
    more = (high - low) * room or abs(high) * 0.05 or 1.0
    return low - more, high + more


def round_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers between two, at most `most` and one; `whole`: integers alone."""
    rough = (high - low) / most
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    step = next(factor * power for factor in FACTORS if factor * power >= rough * 0.999)
    first = -int(-low // step)
    ticks = [index * step for index in range(first, first + most + 2) if low <= index * step <= high]
    return [tick for tick in ticks if tick == int(tick)] if whole else ticks


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two, with 2 and 5 of each where there are few of them, every third where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]
    if len(few) <= MOST_TICKS:
        return few
    tens = [10.0**power for power in powers if low <= 10.0**power <= high]
    return tens if len(tens) <= MOST_TICKS else [value for value in tens if round(math.log10(value)) % 3 == 0]


def brief(value: float) -> str:
    """A number in few letters: 16, 2k, 1.5M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"
