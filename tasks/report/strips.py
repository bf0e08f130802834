"""Drawings that fill a table's cell: SVG in percent of its width, with round marks and text of its own size at any width.

Colours are classes of the page's style; what is told by colour is told by form too. Charts on axes are charts.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from markupsafe import Markup

from tasks.report.charts import round_ticks, spread
from tasks.report.data import number

BINS = 28
HEIGHT, BASE = 40, 34
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
    return _svg(shapes, name=name, height=HEIGHT, title=title, text=text)


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
