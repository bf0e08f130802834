"""Of a qualification's page: the bandwidth of every collective against the hardware's limits, and the pairs of machines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tasks.hardware.sku import BusBandwidth
from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Row, Sweep
from tasks.qualification.verdicts import PairVerdict
from tasks.qualification_names import COLLECTIVES
from tasks.report.data import number
from tasks.report.markup import Html, figure, folded, grid, join, tag
from tasks.report.qualification_charts import Band, Line, chart, size_text, steps
from tasks.report.qualification_data import SIGN, STYLES, Found, count, finite
from tasks.report.qualification_map import pair_map, scale

SCOPES = {"all": "All machines together", "node": "Within a machine", "pair": "Between two machines"}
PAIRS_LISTED = 20
SWEEPS_WITH_ROWS = 12
LEGEND = {
    "out": "out of place",
    "in": "in place",
    "band": "from the least to the largest of all",
    "slow": "the slowest, where it is blamed",
    "norm": "what sound hardware reaches",
    "warn": "degraded below",
    "fail": "failed below",
}


def bandwidth(found: Found) -> Html:
    """A chart a collective and scope, then the rows of the sweeps over all machines."""
    parts = []
    for scope, heading in SCOPES.items():
        figures = [_figure(found, one, scope) for one in COLLECTIVES]
        if any(figures):
            parts.append(join(tag("h3", heading), tag("div", *figures, class_="figures")))
    if not parts:
        return Html()
    tables = [_rows(sweep) for sweep in _newest(found, None, "all")[:SWEEPS_WITH_ROWS]]
    return join(_legend(), *parts, *tables)


def pairs(found: Found) -> Html:
    """The map, the pairs that are not healthy, and what the search for a fault measured."""
    told = found.verdict.pairs
    if not told:
        return Html()
    names = list(dict.fromkeys([*(n for n in found.measured.nodes), *(n for pair in told for n in (pair.a, pair.b))]))
    blamed = frozenset(name for pair in told for name, side in ((pair.a, "a"), (pair.b, "b")) if pair.blamed == side)
    reference = _reference(found, told)
    drawn = (
        pair_map(names, told, reference, (blamed | set(found.verdict.named("failed", "unknown"))) & frozenset(names))
        if reference
        else Html()
    )
    said = _pairs_said(found, told, reference)
    return join(
        tag("p", said),
        scale(reference) if reference else Html(),
        tag("div", drawn, class_="scroll"),
        _bad_pairs(told),
        _parts(found),
    )


def _figure(found: Found, collective: str, scope: str) -> Html:
    sweeps = [sweep for sweep in _newest(found, collective, scope) if sweep.rows]
    if not sweeps:
        return Html()
    limits = bandwidths(found.sku, collective, scope, len(sweeps[0].nodes))
    rows = {sweep.nodes: sweep.rows for sweep in sweeps}
    until = max(row.bytes for sweep in sweeps for row in sweep.rows)
    lines = [
        Line(kind, steps([(one.bytes, value) for one in limits if (value := getattr(one, kind))], until))
        for kind in ("norm", "warn", "fail")
    ]
    slow = _slowest(found, sweeps)
    if slow:
        lines.append(Line("slow", _points(rows[slow.nodes])))
    middle = _middle(sweeps, in_place=False)
    lines += [Line("in", _middle(sweeps, in_place=True)), Line("out", middle)]
    drawn = chart(f"{collective}-{scope}", f"{collective}, {scope}: bus bandwidth in GB/s", lines, _band(sweeps))
    return figure(drawn, collective, _said(sweeps, middle, limits, slow))


def _said(
    sweeps: Sequence[Sweep], middle: Sequence[tuple[float, float]], limits: Sequence[BusBandwidth], slow: Sweep | None
) -> str:
    """The largest message in numbers, for on a logarithm 5% are not seen."""
    parts = []
    if middle:
        of = "" if len(sweeps) == 1 else f"median of {len(sweeps):,}: "
        parts.append(f"{of}{number(_three(middle[-1][1]))} GB/s at {size_text(middle[-1][0])}")
    if slow and (points := _points(slow.rows)):
        parts.append(f"{', '.join(slow.nodes[:2])}: {number(_three(points[-1][1]))}")
    if limits:
        last = max(limits, key=lambda limit: limit.bytes)
        told = [f"{kind} {number(value)}" for kind in ("norm", "warn", "fail") if (value := getattr(last, kind))]
        parts.append(f"from {size_text(last.bytes)}: {', '.join(told)}")
    if used := sorted({name for sweep in sweeps for name in sweep.transport}):
        parts.append(f"by {', '.join(used[:4])}")
    wrong = sum((row.wrong or 0) + (row.wrong_in_place or 0) for sweep in sweeps for row in sweep.rows)
    return "; ".join([*parts, f"{wrong:,} WRONG elements"] if wrong else parts)


def _legend() -> Html:
    items = (
        f'<li><svg class="key" width="26" height="14" aria-hidden="true">{_key(style)}</svg>{text}</li>'
        for style, text in LEGEND.items()
    )
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def _key(style: str) -> str:
    shape = '<rect y="2" width="26" height="10" class="band"/>' if style == "band" else ""
    return shape or f'<path class="line {style}" d="M0,7H26"/>'


def _newest(found: Found, collective: str | None, scope: str) -> list[Sweep]:
    """Of the machines that were measured several times, the last round."""
    kept: dict[tuple[str, tuple[str, ...]], Sweep] = {}
    for sweep in sorted(found.measured.sweeps, key=lambda sweep: sweep.round):
        if sweep.scope == scope and collective in (None, sweep.collective):
            kept[sweep.collective, sweep.nodes] = sweep
    return list(kept.values())


def _slowest(found: Found, sweeps: Sequence[Sweep]) -> Sweep | None:
    """Of several sweeps the one with the least at the end, where the verdict blames a machine of it."""
    suspects = [sweep for sweep in sweeps if found.suspects & set(sweep.nodes) and _points(sweep.rows)]
    return min(suspects, key=lambda sweep: _points(sweep.rows)[-1][1]) if suspects and len(sweeps) > 1 else None


def _points(rows: Sequence[Row], *, in_place: bool = False) -> tuple[tuple[float, float], ...]:
    told = ((row.bytes, finite(row.busbw_in_place if in_place else row.busbw)) for row in rows)
    return tuple(sorted((float(size), value) for size, value in told if value is not None))


def _by_size(sweeps: Sequence[Sweep], *, in_place: bool = False) -> dict[float, list[float]]:
    found: dict[float, list[float]] = defaultdict(list)
    for sweep in sweeps:
        for size, value in _points(sweep.rows, in_place=in_place):
            found[size].append(value)
    return dict(sorted(found.items()))


def _middle(sweeps: Sequence[Sweep], *, in_place: bool) -> tuple[tuple[float, float], ...]:
    return tuple((size, statistics.median(all_)) for size, all_ in _by_size(sweeps, in_place=in_place).items())


def _band(sweeps: Sequence[Sweep]) -> Band | None:
    if len(sweeps) < 2:
        return None
    return Band(tuple((size, min(all_), max(all_)) for size, all_ in _by_size(sweeps).items()))


def _rows(sweep: Sweep) -> Html:
    """A sweep as nccl-tests print it."""
    heads = (
        "Size",
        "Time, µs",
        "algbw",
        "busbw",
        "Wrong",
        "Time in place",
        "algbw in place",
        "busbw in place",
        "Wrong in place",
    )
    rows = [_row(row) for row in sorted(sweep.rows, key=lambda row: -row.bytes)]
    how = f"{sweep.collective}: {count(len(sweep.nodes), 'machine')}, {count(sweep.ranks, 'rank')}, {sweep.backend}, {sweep.tool}"
    return folded(how, grid(heads, rows, class_="numbers"))


def _row(row: Row) -> tuple[str, ...]:
    out = (row.microseconds, row.algbw, row.busbw, row.wrong)
    inside = (row.microseconds_in_place, row.algbw_in_place, row.busbw_in_place, row.wrong_in_place)
    return (size_text(row.bytes), *map(_cell, (*out, *inside)))


def _cell(value: float | None) -> str:
    return "N/A" if finite(value) is None else number(_three(float(value or 0)))


def _three(value: float) -> float:
    return float(f"{value:.4g}")


def _reference(found: Found, told: Sequence[PairVerdict]) -> float | None:
    """What a pair should reach: the hardware's norm, else the median of the pairs."""
    norms = [limit.norm for limit in bandwidths(found.sku, "all_reduce", "pair", 2) if limit.norm]
    known = [value for pair in told if (value := finite(pair.busbw_gb_s)) is not None]
    return max(norms, default=0.0) or (statistics.median(known) if known else 0.0) or None


def _pairs_said(found: Found, told: Sequence[PairVerdict], reference: float | None) -> str:
    known = [value for pair in told if (value := finite(pair.busbw_gb_s)) is not None]
    bad = sum(pair.verdict != "healthy" for pair in told)
    if not known:
        return f"None of {count(len(told), 'pair')} has a value."
    least, middle = number(_three(min(known))), number(_three(statistics.median(known)))
    named = " Names are of machines that the verdict blames." if found.suspects else ""
    return f"{count(len(told), 'pair')}, {len(told) - bad:,} healthy. Median {middle} GB/s, least {least}.{named}"


def _bad_pairs(told: Sequence[PairVerdict]) -> Html:
    """The slowest pairs that are not healthy."""
    bad = sorted((pair for pair in told if pair.verdict != "healthy"), key=lambda pair: finite(pair.busbw_gb_s) or -1.0)
    whose = {"a": "the first machine", "b": "the second machine", "link": "the link between them", "": ""}
    rows = [
        (
            pair.a,
            pair.b,
            "nothing measured" if finite(pair.busbw_gb_s) is None else f"{number(_three(pair.busbw_gb_s or 0))} GB/s",
            tag("span", f"{SIGN[pair.verdict]} {pair.verdict}", class_=STYLES[pair.verdict]),
            whose[pair.blamed],
        )
        for pair in bad[:PAIRS_LISTED]
    ]
    more = f", the first {PAIRS_LISTED} of {len(bad):,}" if len(bad) > PAIRS_LISTED else ""
    heads = ("One", "Other", "Bus bandwidth", "Verdict", "Blamed")
    return folded(f"Pairs that are not healthy{more}", grid(heads, rows))


def _parts(found: Found) -> Html:
    """Runs of the bisection, in their order."""
    rows = [
        tuple(_part(sweep)) for sweep in sorted(found.measured.sweeps, key=lambda s: s.round) if sweep.scope == "part"
    ]
    return folded("Search by bisection", grid(("Machines", "Collective", "Bus bandwidth"), rows))


def _part(sweep: Sweep) -> Iterator[str]:
    shown = ", ".join(sweep.nodes[:8]) + (f" and {len(sweep.nodes) - 8:,} more" if len(sweep.nodes) > 8 else "")
    points = _points(sweep.rows)
    yield shown
    yield sweep.collective
    yield f"{number(_three(points[-1][1]))} GB/s at {size_text(points[-1][0])}" if points else sweep.status
