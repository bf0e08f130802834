"""What every rank or machine measured, as a strip: a tick each, limits as dashed lines, what breaks one as a diamond.

In percent of the width, so that a strip fills a table's cell at any width. Thousands of ticks that fall together are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tasks.report.markup import Html

HEIGHT, MARGIN = 28, 2.5
GRAIN = 0.4
"""Percent of the width within which ticks are one."""
Marked = tuple[float, str]
"""A value, and warn or bad."""


def strip(values: Sequence[float], bad: Sequence[Marked], limits: dict[str, float], *, name: str, said: str) -> Html:
    """Values on a line from the least to the largest; `bad` are those that break a limit, limits are by norm, warn, fail."""
    every = [*values, *limits.values()]
    if not values:
        return Html()
    low, high = min(every), max(every)
    room = (high - low) * 0.03 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def at(value: float) -> float:
        return MARGIN + (100 - 2 * MARGIN) * (value - low) / (high - low)

    shapes = [f'<line x1="0" x2="100%" y1="{HEIGHT / 2}" y2="{HEIGHT / 2}" class="axis"/>']
    shapes += [f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="6" y2="22" class="tick"/>' for x in _thinned(map(at, values))]
    shapes += [
        f'<line x1="{at(value):.2f}%" x2="{at(value):.2f}%" y1="0" y2="100%" class="limit {kind}"/>'
        for kind, value in limits.items()
    ]
    shapes += [
        f'<svg x="{x:.2f}%" y="{HEIGHT / 2}" overflow="visible" class="found {style}"><path d="M0,-7 L6,0 L0,7 L-6,0 Z"/></svg>'
        for style in ("warn", "bad")
        for x in _thinned(at(value) for value, its in bad if its == style)
    ]
    head = f'<svg class="strip" width="100%" height="{HEIGHT}" role="img" aria-labelledby="{name}-t">'
    return Html(f'{head}<title id="{name}-t">{escape(said)}</title>{"".join(shapes)}</svg>')


def _thinned(places: Iterable[float]) -> list[float]:
    kept = {round(place / GRAIN): place for place in places}
    return [kept[grain] for grain in sorted(kept)]
