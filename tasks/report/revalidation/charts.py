"""The drawings of a revalidation's page, as SVG in percent of their width: they fill a table's cell at any width, with round dots
and text of its own size. Colours are the page's CSS variables; what is told by colour is told by form too.

The pictures for MLflow are report.py, what stands beside a drawing is report.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tasks.report.data import number
from tasks.report.markup import Html
from tasks.report.revalidation.data import Column, Measured

BINS = 28
NOTHING = 1e-9
"""Values of which none is larger are rounding errors, and not drawn."""
HEIGHT, BASE = 40, 34
MARGIN = 3.0
"""Percent of the width on either side that nothing is drawn in, but for half a mark."""
TICKS = 5
FACTORS = (1, 2, 2.5, 5, 10)


def calibration(column: Column, name: str) -> Html:
    """Values after both sides were mixed and split at random as bars, the threshold dashed, this window's value as a mark."""
    null = [value for value in column.null if value is not None]
    marks = [value for value in (column.value, column.threshold) if value is not None]
    if not null or not marks or max(map(abs, [*null, *marks])) < NOTHING:
        return Html()
    low, high = _range([*null, *marks])
    shapes = [*_bars(null, low, high), _line(0, 100, BASE, "axis")]
    if column.threshold is not None:
        shapes.append(_upright(_at(column.threshold, low, high), "limit"))
    if column.value is not None:
        shapes.append(_mark(_at(column.value, low, high), BASE / 2, failed=column.found))
    return _svg(shapes, name=name, height=HEIGHT, title=f"{column.name}: calibration", text=_told(column, null))


def legend() -> Html:
    """What the marks of `calibration` mean."""
    marks = {
        "both sides mixed, split at random": '<rect x="4" y="3" width="18" height="11" class="null"/>',
        "threshold": '<line x1="13" x2="13" y1="0" y2="16" class="limit"/>',
        "this window, beyond the threshold": _mark(50, 8, failed=True),
        "this window, within": _mark(50, 8, failed=False),
    }
    items = (f'<li><svg class="strip" aria-hidden="true">{mark}</svg>{text}</li>' for text, mark in marks.items())
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def whisker(
    value: Measured,
    low: Measured,
    high: Measured,
    *,
    scale: tuple[float, float],
    name: str,
    text: str,
    zero: float | None = None,
    failed: bool = False,
) -> Html:
    """A dot with its interval on a scale; a failed one is a diamond. `zero` is drawn as an upright line."""
    if value is None:
        return Html()
    shapes = [_upright(_at(zero, *scale), "axis")] if zero is not None else []
    if low is not None and high is not None:
        left, right = _at(low, *scale), _at(high, *scale)
        shapes += [_line(left, right, 14, "whisker"), _cap(left), _cap(right)]
    shapes.append(_mark(_at(value, *scale), 14, failed=failed))
    return _svg(shapes, name=name, height=28, title=text, text="")


def axis(scale: tuple[float, float], *, name: str, share: bool = False, what: str) -> Html:
    """The numbers under a column of whiskers."""
    values = ticks(*scale)
    texts = [
        f"{value:+.0%}".replace("-", "\u2212") if share and value else "0" if share else number(value)
        for value in values
    ]
    places = [_at(value, *scale) for value in values]
    shapes = [
        f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="5" class="axis"/>'
        f'<text x="{x:.2f}%" y="19" text-anchor="{_anchor(x)}">{escape(text)}</text>'
        for x, text in zip(places, texts, strict=True)
    ]
    return _svg([_line(0, 100, 0.5, "axis"), *shapes], name=name, height=24, title=f"Scale: {what}", text="")


def scale_of(values: Sequence[Measured], *, zero: bool = False) -> tuple[float, float]:
    """The least and the largest of what was measured; never a single point."""
    known = [value for value in values if value is not None] + ([0.0] if zero else [])
    return _range(known) if known else (0.0, 1.0)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, at most TICKS + 1."""
    rough = (high - low) / TICKS
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    step = next(factor * power for factor in FACTORS if factor * power >= rough * 0.999)
    first = -int(-low // step)
    return [index * step for index in range(first, first + TICKS + 2) if low <= index * step <= high]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.02 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _at(value: float, low: float, high: float) -> float:
    """Place of a value, in percent of the width."""
    return MARGIN + (100 - 2 * MARGIN) * min(max((value - low) / (high - low), 0.0), 1.0)


def _bars(null: Sequence[float], low: float, high: float) -> list[str]:
    counts = [0] * BINS
    for value in null:
        counts[min(int((value - low) / (high - low) * BINS), BINS - 1)] += 1
    width = (100 - 2 * MARGIN) / BINS
    tall = [(MARGIN + index * width, count / max(counts) * (BASE - 4)) for index, count in enumerate(counts) if count]
    size = f'width="{width * 0.9:.2f}%" class="null"'
    return [f'<rect x="{x:.2f}%" y="{BASE - height:.1f}" height="{height:.1f}" {size}/>' for x, height in tall]


def _line(left: float, right: float, y: float, style: str) -> str:
    return f'<line x1="{left:.2f}%" x2="{right:.2f}%" y1="{y:g}" y2="{y:g}" class="{style}"/>'


def _upright(x: float, style: str) -> str:
    return f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="100%" class="{style}"/>'


def _cap(x: float) -> str:
    return f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="9" y2="19" class="whisker"/>'


def _mark(x: float, y: float, *, failed: bool) -> str:
    """A dot, or a diamond for what failed: in a nested drawing, for a path has no place in percent."""
    if failed:
        return f'<svg x="{x:.2f}%" y="{y:g}" overflow="visible" class="found"><path d="M0,-7 L7,0 L0,7 L-7,0 Z"/></svg>'
    return f'<circle cx="{x:.2f}%" cy="{y:g}" r="5" class="mark"/>'


def _anchor(x: float) -> str:
    return "start" if x < 8 else "end" if x > 92 else "middle"


def _told(column: Column, null: Sequence[float]) -> str:
    threshold = f"; threshold {number(column.threshold)}" if column.threshold is not None else ""
    value = number(column.value) if column.value is not None else "not measured"
    return (
        f"This window: {value}{threshold}. {len(null)} comparisons of the reference with itself lie between "
        f"{number(min(null))} and {number(max(null))}."
    )


def _svg(shapes: Sequence[str], *, name: str, height: int, title: str, text: str) -> Html:
    label = f'aria-labelledby="{name}-t{f" {name}-d" if text else ""}"'
    described = f'<desc id="{name}-d">{escape(text)}</desc>' if text else ""
    head = f'<svg class="strip" width="100%" height="{height}" role="img" {label}><title id="{name}-t">{escape(title)}</title>'
    return Html(f"{head}{described}{''.join(shapes)}</svg>")
