"""A qualification for people: its page and the same in short, both from `qualification.json`.

What templates/qualification.html shows of pairs of machines is worked out below, of what they measured alone by rates.py; what
`qualification.json` holds is data.py, and what the report of a run says of it published.py of tasks/report. Who measures and
judges does not live here. See docs/qualification.md.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from tasks.common.redaction import redact
from tasks.config.qualification import COLLECTIVES, Verdict
from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Sweep, TrainingPoint
from tasks.qualification.sweeps import Merged, merged
from tasks.qualification.verdicts import PairVerdict, Reason
from tasks.report.charts import Band, Line, drawing, legend, stacked, words
from tasks.report.data import duration, number, percent
from tasks.report.pages import SIGNS, render, write_page
from tasks.report.qualification.data import (
    STYLES,
    Found,
    brief,
    by_number,
    count,
    finite,
    found,
    people,
    rate,
    size_text,
    until,
)
from tasks.report.qualification.rates import curves, limit_steps, missing, rates, said_in_words, versions

FILE = "qualification.html"
SENTENCES_SHOWN = 20
SCOPES = {"all": "All machines together", "node": "Within a machine", "pair": "Between two machines"}
SHARES = {"compute": "compute_share", "communication": "communication_share", "data": "data_share"}
TILES_FROM = 9
TILE, TILES_A_ROW = 20, 48
MEANS: dict[Verdict, str] = {
    "healthy": "The machines that are used showed what their hardware must show. The gate is open.",
    "degraded": "The machines that are used are slower than they should be, and above what is asked at least. The gate is open.",
    "failed": "The machines that are left do not show what they must. The gate is closed: nothing is trained on them.",
    "unknown": "Something that must be known is not known. Silence is not health: the gate is closed.",
}


def write_qualification(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Write the page, whole or not at all. Raises ValueError when `payload` is no qualification."""
    return write_page(folder / FILE, redact(qualification_page(found(payload))))


def qualification_markdown(payload: Mapping[str, Any]) -> str:
    """The same in short, in Markdown, of at most 30 lines."""
    result = found(payload)
    verdict, measured = result.verdict, result.measured
    machines = ", ".join(
        f"{len(names)} {kind}"
        for kind in ("healthy", "degraded", "failed", "unknown")
        if (names := [node for node in result.nodes if node.verdict == kind])
    )
    entries = [f"- {_plain(reason.sentence)}. {_plain(reason.remedy)}".strip() for reason in result.reasons]
    more = f"- and {len(entries) - SENTENCES_SHOWN} more" if len(entries) > SENTENCES_SHOWN else ""
    answered = f"{result.answered} of {count(measured.expected_nodes, 'machine')} answered"
    parts = [
        f"# Qualification: {verdict.verdict}",
        MEANS[verdict.verdict],
        f"Judged as `{result.sku.name}`: {answered}; {machines or 'no machine has a verdict'}. {duration(measured.seconds)}.",
        "\n".join([*entries[:SENTENCES_SHOWN], more]).strip(),
        "\n".join(f"- {_plain(one)}" for one in sentences(result)),
    ]
    return redact("\n\n".join(part for part in parts if part))


def _plain(text: str) -> str:
    """On one line, and no markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'").replace("[", "\\[")


def qualification_page(result: Found) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    known = (point for point in result.measured.training if finite(point.tflops_per_rank))
    training = sorted(known, key=lambda point: point.ranks)
    machines = Counter(node.verdict for node in result.nodes)
    machines["unknown"] += result.absent
    measured = result.measured
    entries = (
        f"judged as {result.sku.name}",
        f"{result.answered:,} of {count(measured.expected_nodes, 'machine')} answered",
        measured.seconds and f"{duration(measured.seconds)} of measuring",
        measured.seconds and f"{measured.seconds * measured.expected_nodes / 3600:.3g} machine hours",
        result.expires and f"holds until {until(result.expires)}",
    )
    return render(
        "qualification",
        title=f"Qualification of {result.name or 'a cluster'}",
        about=" · ".join(part for part in entries if part),
        verdict=result.verdict.verdict,
        means=MEANS[result.verdict.verdict],
        machines=machines,
        held=[reason for reason in result.reasons if result.holds(reason)],
        left_out=[reason for reason in result.reasons if not result.holds(reason)],
        follows=sentences(result),
        hosts={report.node: report.host for report in result.measured.ranks},
        ranks=Counter(report.node for report in result.measured.ranks),
        tiles=_tiles(result) if len(result.nodes) >= TILES_FROM else "",
        bandwidth=_bandwidth(result),
        pairs=pairs(result),
        rates=rates(result),
        training=training,
        scaling=_scaling(training),
        words=said_in_words(result),
        versions=versions(result),
        missing=missing(result),
        **{
            "result": result,
            "STYLES": STYLES,
            "count": count,
            "brief": brief,
            "rate": rate,
            "size": size_text,
            "finite": finite,
        },
        **{"value_of": _value, "evidence_of": _evidence, "shares_of": _shares, "stacked": stacked, "legend": legend},
        indented=lambda body: json.dumps(body, indent=1),
    )


def _value(reason: Reason) -> str:
    """What was measured, with its unit; where nothing was, what is said of that."""
    if reason.measured is None:
        return reason.said or "nothing was measured"
    return f"{brief(reason.measured)} {reason.unit}".strip()


def _evidence(result: Found, reason: Reason) -> str:
    """The source of a limit, what is said of what was measured, and what to do."""
    parts = (
        f"({result.source(reason.source)})",
        reason.said if reason.measured is not None else "",
        reason.remedy,
    )
    return ". ".join(part.rstrip(".") for part in parts if part)


def sentences(result: Found) -> list[str]:
    """What was done with the machines."""
    entries = []
    if result.usable and result.open:
        entries.append(f"Jobs run on {count(len(result.usable), 'machine')}: {named(result.usable)}.")
    if result.excluded:
        entries.append(f"Left out of the jobs to come: {named(result.excluded)}.")
    if done := [node for node, done, _ in result.drained if done]:
        entries.append(f"Drained, until headway qualify --resume puts them back: {named(done)}.")
    entries += [f"{node} was not drained: {why}." for node, done, why in result.drained if not done]
    return entries


def named(names: Iterable[str]) -> str:
    """The first of them by their numbers, and how many more."""
    return people(sorted(names, key=by_number), 24)


def _tiles(result: Found) -> Markup:
    """A square a machine, in the order of names; a sign in those that are not healthy."""
    shapes = []
    for place, node in enumerate(sorted(result.nodes, key=lambda node: by_number(node.name))):
        x, y = TILE * (place % TILES_A_ROW), TILE * (place // TILES_A_ROW)
        sign = SIGNS[STYLES[node.verdict]] if node.verdict != "healthy" else ""
        text = words(x + TILE / 2 - 1, y + 14, sign, "middle") if sign else ""
        square = f'<rect x="{x}" y="{y}" width="{TILE - 2}" height="{TILE - 2}" rx="3"/>'
        title = f"<title>{escape(node.name)}: {node.verdict}</title>"
        shapes.append(f'<g class="{STYLES[node.verdict]}">{title}{square}{text}</g>')
    wide, rows = min(len(result.nodes), TILES_A_ROW) * TILE, -(-len(result.nodes) // TILES_A_ROW)
    return drawing("Verdicts of machines", (wide, rows * TILE), shapes, "tiles", most=wide)


def _bandwidth(result: Found) -> dict[str, list[tuple[Markup, str, str]]]:
    """A figure a collective, by the words for a scope: drawing, heading, caption."""
    # Best rounds by scope and collective. Of runs over several numbers of machines, the one over those that are used.
    merges: dict[tuple[str, str], list[Merged]] = defaultdict(list)
    for sweep in merged(result.measured.sweeps):
        if sweep.points:
            merges[sweep.scope, sweep.collective].append(sweep)
    used = set(result.usable)
    for key, several in merges.items():
        if key[0] == "all":
            merges[key] = [max(several, key=lambda sweep: (set(sweep.nodes) <= used, len(sweep.nodes)))]
    parts = dict[str, list[tuple[Markup, str, str]]]()
    for scope, heading in SCOPES.items():
        if scope == "node" and parts and len(merges["all", COLLECTIVES[0]][0].nodes) == 1:
            continue  # the same as all machines together
        figures = [_figure(result, sweeps) for one in COLLECTIVES if (sweeps := merges[scope, one])]
        if any(drawing for drawing, *_ in figures):
            parts[heading] = figures
    return parts


def _figure(result: Found, sweeps: Sequence[Merged]) -> tuple[Markup, str, str]:
    """Of one collective and scope: the median of all, where they lie, and the slowest one that is blamed."""
    first = sweeps[0]
    limits = bandwidths(result.sku, first.collective, first.scope, len(first.nodes))
    until = max(point.bytes for sweep in sweeps for point in sweep.points)
    lines = [
        Line(kind, limit_steps([(one.bytes, value) for one in limits if (value := getattr(one, kind))], until))
        for kind in ("norm", "warn", "fail")
    ]
    # Of several sweeps the one with the least at the end, where the verdict blames a machine of it
    suspects = [sweep for sweep in sweeps if result.suspects & set(sweep.nodes) and _points(sweep, "busbw")]
    slowest = min(suspects, key=lambda sweep: _points(sweep, "busbw")[-1][1]) if suspects and len(sweeps) > 1 else None
    slow, middle = slowest, _middle(sweeps, "busbw")
    lines += [Line("slow", _points(slow, "busbw"))] if slow else []
    lines += [Line("in", _middle(sweeps, "in_place")), Line("out", middle)]
    label = f"{first.collective}, {first.scope}: bus bandwidth in GB/s"
    if len(sweeps) < 2:
        band = None
    else:
        band = Band("band", tuple((size, min(all_), max(all_)) for size, all_ in _by_size(sweeps, "busbw").items()))
    # The largest message in numbers, for on a logarithm 5% are not seen.
    parts = []
    if middle:
        of = "" if len(sweeps) == 1 else f"median of {len(sweeps):,}: "
        parts.append(f"{of}{rate(middle[-1][1])} GB/s at {size_text(middle[-1][0])}")
    if slow:
        parts.append(f"{', '.join(slow.nodes[:2])}: {rate(_points(slow, 'busbw')[-1][1])}")
    if limits:
        last = max(limits, key=lambda limit: limit.bytes)
        entries = [f"{kind} {number(value)}" for kind in ("norm", "warn", "fail") if (value := getattr(last, kind))]
        parts.append(f"from {size_text(last.bytes)}: {', '.join(entries)}")
    if used := sorted({name for sweep in sweeps for name in sweep.transport}):
        parts.append(f"by {', '.join(used[:4])}")
    if wrong := sum(sweep.wrong for sweep in sweeps):
        parts.append(f"{wrong:,} WRONG elements")
    return curves(label, lines, band), first.collective, "; ".join(parts)


def _points(sweep: Merged, which: Literal["busbw", "in_place"]) -> tuple[tuple[float, float], ...]:
    points = ((point.bytes, finite(getattr(point, which))) for point in sweep.points)
    return tuple((float(size), value) for size, value in points if value is not None)


def _by_size(sweeps: Sequence[Merged], which: Literal["busbw", "in_place"]) -> dict[float, list[float]]:
    result: dict[float, list[float]] = defaultdict(list)
    for sweep in sweeps:
        for size, value in _points(sweep, which):
            result[size].append(value)
    return dict(sorted(result.items()))


def _middle(sweeps: Sequence[Merged], which: Literal["busbw", "in_place"]) -> tuple[tuple[float, float], ...]:
    return tuple((size, statistics.median(all_)) for size, all_ in _by_size(sweeps, which).items())


def _scaling(points: Sequence[TrainingPoint]) -> tuple[Markup, str, str] | None:
    """Drawing, heading and caption of the training rate by machines, where there are several sizes."""
    if len(points) < 2:
        return None
    first, last = points[0], points[-1]
    most, least = last.tflops_per_rank or 0.0, first.tflops_per_rank or 1.0
    lines = [
        Line("ideal", tuple((float(len(point.nodes)), least * point.ranks) for point in points)),
        Line("out", tuple((float(len(p.nodes)), (p.tflops_per_rank or 0.0) * p.ranks) for p in points), dots=True),
    ]
    kept = f"{percent(most / least)} at {len(last.nodes):,}"
    caption = f"TFLOP/s of all ranks by machines; dashed: as many times the first. {kept}"
    return curves(f"Training rate on up to {len(last.nodes):,} machines", lines, bytes_=False), "Scaling", caption


def _shares(point: TrainingPoint) -> dict[str, float]:
    """What a step's time went to, as far as it was measured."""
    known = {name: finite(getattr(point, field)) for name, field in SHARES.items()}
    return {name: share for name, share in known.items() if share is not None}


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
