"""Of a qualification's page: pairs of machines, as a map and as a list, and the search for a fault among more of them."""

from __future__ import annotations

import base64
import statistics
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from html import escape

from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Sweep
from tasks.qualification.verdicts import PairVerdict
from tasks.report.data import number
from tasks.report.markup import Html, folded, grid, join, tag
from tasks.report.qualification.charts import size_text
from tasks.report.qualification.data import SIGN, STYLES, Found, by_number, count, finite, four

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
HOLE = (0, 0, 0, 0)


def pair_map(names: Sequence[str], pairs: Sequence[PairVerdict], reference: float, marked: frozenset[str]) -> Html:
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
        shapes += _written(cells, cell, left)
    text = f"Bus bandwidth of {len(cells):,} pairs of {count:,} machines; blue is {number(reference)} GB/s"
    size = f'viewBox="0 0 {left + side + 8:.0f} {side + 16}" style="max-width:{left + side + 8:.0f}px"'
    head = (
        f'<svg class="chart map" {size} role="img" aria-labelledby="pairs-t"><title id="pairs-t">{escape(text)}</title>'
    )
    return Html(f"{head}{''.join(shapes)}</svg>")


def scale(reference: float) -> Html:
    """What the colours mean."""
    texts = [f"{number(float(f'{reference * share:.3g}'))} GB/s" for share, _ in COLOURS]
    texts[0] += " and less"
    items = (
        tag("li", Html(f'<i style="background:rgb{colour}"></i>'), text)
        for text, (_, colour) in zip(texts, COLOURS, strict=True)
    )
    return tag("ul", *items, tag("li", Html('<i class="hole"></i>'), "not measured"), class_="legend")


@lru_cache
def colour(share: float) -> tuple[int, int, int]:
    """Of a share of the reference."""
    low = max((stop for stop in COLOURS if stop[0] <= share), default=COLOURS[0])
    high = min((stop for stop in COLOURS if stop[0] >= share), default=COLOURS[-1])
    part = (share - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low[1], high[1], strict=True))
    return red, green, blue


def _png(count: int, cells: dict[tuple[int, int], float | None], reference: float) -> bytes:
    """Red, green, blue and opacity of each square, eight bits each (PNG specification, colour type 6)."""
    pixels = bytearray(count * (4 * count + 1))
    for (a, b), value in cells.items():
        rgba = HOLE if value is None else (*colour(round(value / reference, 2)), 255)
        for row, column in ((a, b), (b, a)):
            start = row * (4 * count + 1) + 1 + 4 * column
            pixels[start : start + 4] = bytes(rgba)
    header = struct.pack(">IIBBBBB", count, count, 8, 6, 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(bytes(pixels), 9)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _names(named: Sequence[str], place: dict[str, int], cell: float, left: float, marked: frozenset[str]) -> list[str]:
    """Names left of their rows, moved apart where rows are thin; a mark at the row of each marked one."""
    shapes, last = [], -SMALLEST_ROW
    for name in named:
        middle = 8 + (place[name] + 0.5) * cell
        last = text = max(middle, last + SMALLEST_ROW)
        style = ' class="bad"' if name in marked else ""
        x, y = f"{left - 10:.1f}", f"{text + 4:.1f}"
        shapes.append(f'<text x="{x}" y="{y}" text-anchor="end"{style}>{escape(_fit(name))}</text>')
        if name in marked:
            shapes.append(f'<path class="mark" d="M{left - 8:.1f},{text:.1f} L{left - 1:.1f},{middle:.1f}"/>')
    return shapes


def _written(cells: dict[tuple[int, int], float | None], cell: float, left: float) -> list[str]:
    return [
        f'<text class="value" x="{left + (column + 0.5) * cell:.1f}" y="{8 + (row + 0.5) * cell + 5:.1f}" '
        f'text-anchor="middle">{"–" if value is None else number(float(f"{value:.3g}"))}</text>'
        for (a, b), value in cells.items()
        for row, column in ((a, b), (b, a))
    ]


def _fit(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"…{name[1 - NAME_CHARACTERS :]}"


PAIRS_LISTED = 20
NAMES_SHOWN = 8


def pairs(result: Found) -> Html:
    """The map, the pairs that are not healthy, and what the search for a fault measured."""
    verdict = result.verdict.pairs
    if not verdict:
        return Html()
    names = sorted({name for pair in verdict for name in (pair.a, pair.b)}, key=by_number)
    blamed = {name for pair in verdict for name, side in ((pair.a, "a"), (pair.b, "b")) if pair.blamed == side}
    marked = frozenset((blamed | set(result.verdict.named("failed", "unknown"))) & set(names))
    output, reference = tag("p", _said(result, verdict)), _reference(result, verdict)
    drawn = pair_map(names, verdict, reference, marked) if reference else Html()
    meaning = scale(reference) if reference else Html()
    return join(output, meaning, tag("div", drawn, class_="scroll"), _bad_pairs(verdict), _parts(result))


def _reference(result: Found, entries: Sequence[PairVerdict]) -> float:
    """What a pair should reach: the hardware's norm, else the median of each machine's best pair. 0: nobody knows."""
    norms = [limit.norm for limit in bandwidths(result.sku, "all_reduce", "pair", 2) if limit.norm]
    best: dict[str, float] = {}
    for pair in entries:
        for name in (pair.a, pair.b):
            best[name] = max(best.get(name, 0.0), finite(pair.busbw_gb_s) or 0.0)
    return max(norms) if norms else statistics.median(best.values())


def _said(result: Found, entries: Sequence[PairVerdict]) -> str:
    known = [value for pair in entries if (value := finite(pair.busbw_gb_s)) is not None]
    bad = sum(pair.verdict != "healthy" for pair in entries)
    if not known:
        return f"None of {count(len(entries), 'pair')} has a value."
    least, middle = number(four(min(known))), number(four(statistics.median(known)))
    named = " Names are of machines that the verdict blames." if result.suspects else ""
    return f"{count(len(entries), 'pair')}, {len(entries) - bad:,} healthy. Median {middle} GB/s, least {least}.{named}"


def _bad_pairs(entries: Sequence[PairVerdict]) -> Html:
    """The slowest pairs that are not healthy."""
    bad = sorted(
        (pair for pair in entries if pair.verdict != "healthy"), key=lambda pair: finite(pair.busbw_gb_s) or -1.0
    )
    whose = {
        "a": "the first machine",
        "b": "the second machine",
        "link": "the link between them",
        "network": "the network",
        "": "",
    }
    rows = [
        (
            pair.a,
            pair.b,
            "nothing measured" if finite(pair.busbw_gb_s) is None else f"{number(four(pair.busbw_gb_s or 0))} GB/s",
            tag("span", f"{SIGN[pair.verdict]} {pair.verdict}", class_=STYLES[pair.verdict]),
            join(tag("span", whose[pair.blamed]), tag("small", pair.said)),
        )
        for pair in bad[:PAIRS_LISTED]
    ]
    more = f", the first {PAIRS_LISTED} of {len(bad):,}" if len(bad) > PAIRS_LISTED else ""
    heads = ("One", "Other", "Bus bandwidth", "Verdict", "Blamed")
    return folded(f"Pairs that are not healthy{more}", grid(heads, rows))


def _parts(result: Found) -> Html:
    """Runs of the bisection, in their order."""
    parts = sorted((sweep for sweep in result.measured.sweeps if sweep.scope == "part"), key=lambda sweep: sweep.round)
    return folded("Search by bisection", grid(("Machines", "Collective", "Bus bandwidth"), [*map(_part, parts)]))


def _part(sweep: Sweep) -> tuple[str, ...]:
    more = f" and {len(sweep.nodes) - NAMES_SHOWN:,} more" if len(sweep.nodes) > NAMES_SHOWN else ""
    last = max(sweep.rows, key=lambda row: row.bytes, default=None)
    rate = finite(last.busbw) if last else None
    text = (
        f"{number(four(rate))} GB/s at {size_text(last.bytes)}"
        if last and rate is not None
        else sweep.said or sweep.status
    )
    return (", ".join(sweep.nodes[:NAMES_SHOWN]) + more, sweep.collective, text)
