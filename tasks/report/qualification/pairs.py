"""Of a qualification's page: pairs of machines, as a map and as a list, and the search for a fault among more of them."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Sweep
from tasks.qualification.verdicts import PairVerdict
from tasks.report.charts import drawing, words
from tasks.report.data import number
from tasks.report.qualification.data import Found, by_number, count, finite, people, rate, size_text

# The map of pairs: the bus bandwidth between any two machines, as one picture at any number of machines.
#
# The squares are pixels of a PNG inside the page (512 machines have 262,144 of them), names and marks are SVG above it.
# Blue is what the pairs usually reach, orange and red are below; a pair without a value is a hole.

SIDE, LARGEST_CELL = 720, 120
"""Of the square, and of a pair in it, in units of the drawing."""


ALL_NAMED = 36
"""Machines up to which each row has its name."""


WRITTEN = 12
"""Machines up to which a square has its number."""


NAME_CHARACTERS, LETTER = 22, 8.6


MOST_MARKS = 30


SMALLEST_ROW = 15.0


COLOURS = (
    (0.0, (120, 12, 34)),
    (0.5, (203, 51, 45)),
    (0.75, (240, 150, 60)),
    (0.9, (150, 175, 214)),
    (1.0, (84, 133, 197)),
)
"""By the share of the reference. Orange against blue is told apart also by who does not see red from green."""


HOLE = 101


def pair_map(names: Sequence[str], pairs: Sequence[PairVerdict], reference: float, marked: frozenset[str]) -> Markup:
    """The map of machines in this order; `reference` is drawn as blue. Marked ones are named, up to MOST_MARKS of them."""
    count = len(names)
    place = {name: index for index, name in enumerate(names)}
    cells = {
        (place[pair.a], place[pair.b]): finite(pair.busbw_gb_s) for pair in pairs if pair.a in place and pair.b in place
    }
    named = list(names) if count <= ALL_NAMED else [name for name in names if name in marked][:MOST_MARKS]
    left = 14 + LETTER * max((len(_fit(name)) for name in named), default=0)
    side = min(SIDE, LARGEST_CELL * count)
    cell = side / count
    shapes = [
        f'<image x="{left:.1f}" y="8" width="{side}" height="{side}" preserveAspectRatio="none" class="pixels" '
        f'href="data:image/png;base64,{base64.b64encode(_png(count, cells, reference)).decode()}"/>',
        f'<rect x="{left:.1f}" y="8" width="{side}" height="{side}" class="frame"/>',
        *_names(named, place, cell, left, marked),
    ]
    if count <= WRITTEN:
        shapes += [
            words(left + (column + 0.5) * cell, 8 + (row + 0.5) * cell + 5, text, "middle", "value")
            for (a, b), value in cells.items()
            for text in ("–" if value is None else number(float(f"{value:.3g}")),)
            for row, column in ((a, b), (b, a))
        ]
    text = f"Bus bandwidth of {len(cells):,} pairs of {count:,} machines; blue is {number(reference)} GB/s"
    return drawing(text, (left + side + 8, side + 16), shapes, "map", most=left + side + 8)


def colour(share: float) -> tuple[int, int, int]:
    """Of a share of the reference."""
    low = max((stop for stop in COLOURS if stop[0] <= share), default=COLOURS[0])
    high = min((stop for stop in COLOURS if stop[0] >= share), default=COLOURS[-1])
    part = (share - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low[1], high[1], strict=True))
    return red, green, blue


def _png(count: int, cells: dict[tuple[int, int], float | None], reference: float) -> bytes:
    """A pixel for each square: its share in hundredths, as an index of the palette, or HOLE, which is transparent."""
    from PIL import Image

    image = Image.new("P", (count, count), HOLE)
    image.putpalette([part for share in range(HOLE + 1) for part in colour(share / 100)])
    for (a, b), value in cells.items():
        index = HOLE if value is None else min(round(100 * value / reference), 100)
        image.putpixel((a, b), index)
        image.putpixel((b, a), index)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True, transparency=HOLE)
    return data.getvalue()


def _names(named: Sequence[str], place: dict[str, int], cell: float, left: float, marked: frozenset[str]) -> list[str]:
    """Names left of their rows, moved apart where rows are thin; a mark at the row of each marked one."""
    shapes, last = [], -SMALLEST_ROW
    for name in named:
        middle = 8 + (place[name] + 0.5) * cell
        last = text = max(middle, last + SMALLEST_ROW)
        style = "bad" if name in marked else ""
        shapes.append(words(left - 10, text + 4, _fit(name), "end", style))
        if name in marked:
            shapes.append(f'<path class="mark" d="M{left - 8:.1f},{text:.1f} L{left - 1:.1f},{middle:.1f}"/>')
    return shapes


def _fit(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"…{name[1 - NAME_CHARACTERS :]}"


def pairs(result: Found) -> dict[str, Any]:
    """The map, what its colours mean, the pairs that are not healthy, slowest first, and what the search for a fault measured."""
    entries = result.verdict.pairs
    if not entries:
        return {}
    names = sorted({name for pair in entries for name in (pair.a, pair.b)}, key=by_number)
    blamed = {name for pair in entries for name, side in ((pair.a, "a"), (pair.b, "b")) if pair.blamed == side}
    marked = frozenset((blamed | set(result.verdict.named("failed", "unknown"))) & set(names))
    # What a pair should reach: the hardware's norm, else the median of each machine's best pair. 0: nobody knows.
    norms = [limit.norm for limit in bandwidths(result.sku, "all_reduce", "pair", 2) if limit.norm]
    best: dict[str, float] = {}
    for pair in entries:
        for name in (pair.a, pair.b):
            best[name] = max(best.get(name, 0.0), finite(pair.busbw_gb_s) or 0.0)
    reference = max(norms) if norms else statistics.median(best.values())
    bad = [pair for pair in entries if pair.verdict != "healthy"]
    texts = [f"{number(float(f'{reference * share:.3g}'))} GB/s" for share, _ in COLOURS]
    parts = sorted((sweep for sweep in result.measured.sweeps if sweep.scope == "part"), key=lambda sweep: sweep.round)
    return {
        "text": _summary(result, entries),
        "map": pair_map(names, entries, reference, marked) if reference else Markup(),
        "colours": [
            (f"{texts[0]} and less", COLOURS[0][1]),
            *zip(texts[1:], (rgb for _, rgb in COLOURS[1:]), strict=True),
        ],
        "bad": sorted(bad, key=lambda pair: finite(pair.busbw_gb_s) or -1.0),
        "parts": [_part(sweep) for sweep in parts],
    }


def _summary(result: Found, entries: Sequence[PairVerdict]) -> str:
    known = [value for pair in entries if (value := finite(pair.busbw_gb_s)) is not None]
    bad = sum(pair.verdict != "healthy" for pair in entries)
    if not known:
        return f"None of {count(len(entries), 'pair')} has a value."
    least, middle = rate(min(known)), rate(statistics.median(known))
    named = " Names are of machines that the verdict blames." if result.suspects else ""
    return f"{count(len(entries), 'pair')}, {len(entries) - bad:,} healthy. Median {middle} GB/s, least {least}.{named}"


def _part(sweep: Sweep) -> tuple[str, ...]:
    """A run of the bisection."""
    last = max(sweep.rows, key=lambda row: row.bytes, default=None)
    text = f"{rate(last.busbw)} GB/s at {size_text(last.bytes)}" if last and finite(last.busbw) is not None else ""
    return people(sweep.nodes, 8), sweep.collective, text or sweep.said or sweep.status
