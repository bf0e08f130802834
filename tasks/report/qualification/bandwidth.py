"""Of a qualification's page: the bandwidth of every collective against the hardware's limits. Pairs: pairs.py."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from tasks.common.names import COLLECTIVES
from tasks.hardware.sku import BusBandwidth
from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Row, Sweep
from tasks.qualification.merged import Merged, merged
from tasks.report.data import number
from tasks.report.markup import Html, figure, folded, grid, join, tag
from tasks.report.qualification.charts import Band, Line, chart, size_text, steps
from tasks.report.qualification.data import Found, count, finite, four

SCOPES = {"all": "All machines together", "node": "Within a machine", "pair": "Between two machines"}
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


def bandwidth(result: Found) -> Html:
    """A chart a collective and scope, then the rows of the sweeps over all machines."""
    drawn, parts = _drawn(result), list[Html]()
    for scope, heading in SCOPES.items():
        if scope == "node" and parts and len(drawn["all", COLLECTIVES[0]][0].nodes) == 1:
            continue  # the same as all machines together
        figures = [_figure(result, drawn[scope, one]) for one in COLLECTIVES]
        if any(figures):
            parts.append(join(tag("h3", heading), tag("div", *figures, class_="figures")))
    whole = [sweep for sweep in result.measured.sweeps if sweep.scope == "all"]
    return join(_legend(), *parts, *map(_rows, whole[:SWEEPS_WITH_ROWS])) if parts else Html()


def _figure(result: Found, sweeps: Sequence[Merged]) -> Html:
    """Of one collective and scope: the median of all, where they lie, and the slowest one that is blamed."""
    if not sweeps:
        return Html()
    first = sweeps[0]
    limits = bandwidths(result.sku, first.collective, first.scope, len(first.nodes))
    until = max(point.bytes for sweep in sweeps for point in sweep.points)
    lines = [
        Line(kind, steps([(one.bytes, value) for one in limits if (value := getattr(one, kind))], until))
        for kind in ("norm", "warn", "fail")
    ]
    slow, middle = _slowest(result, sweeps), _middle(sweeps, "busbw")
    lines += [Line("slow", _curve(slow, "busbw"))] if slow else []
    lines += [Line("in", _middle(sweeps, "in_place")), Line("out", middle)]
    label = f"{first.collective}, {first.scope}: bus bandwidth in GB/s"
    drawn = chart(f"{first.collective}-{first.scope}", label, lines, _band(sweeps))
    return figure(drawn, first.collective, _said(sweeps, middle, limits, slow))


def _said(
    sweeps: Sequence[Merged], middle: Sequence[tuple[float, float]], limits: Sequence[BusBandwidth], slow: Merged | None
) -> str:
    """The largest message in numbers, for on a logarithm 5% are not seen."""
    parts = []
    if middle:
        of = "" if len(sweeps) == 1 else f"median of {len(sweeps):,}: "
        parts.append(f"{of}{number(four(middle[-1][1]))} GB/s at {size_text(middle[-1][0])}")
    if slow:
        parts.append(f"{', '.join(slow.nodes[:2])}: {number(four(_curve(slow, 'busbw')[-1][1]))}")
    if limits:
        last = max(limits, key=lambda limit: limit.bytes)
        entries = [f"{kind} {number(value)}" for kind in ("norm", "warn", "fail") if (value := getattr(last, kind))]
        parts.append(f"from {size_text(last.bytes)}: {', '.join(entries)}")
    if used := sorted({name for sweep in sweeps for name in sweep.transport}):
        parts.append(f"by {', '.join(used[:4])}")
    wrong = sum(sweep.wrong for sweep in sweeps)
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


def _drawn(result: Found) -> dict[tuple[str, str], list[Merged]]:
    """Best rounds by scope and collective. Of runs over several numbers of machines, the one over those that are used."""
    kept: dict[tuple[str, str], list[Merged]] = defaultdict(list)
    for sweep in merged(result.measured.sweeps):
        if sweep.points:
            kept[sweep.scope, sweep.collective].append(sweep)
    used = set(result.usable)
    for key, several in kept.items():
        if key[0] == "all":
            kept[key] = [max(several, key=lambda sweep: (set(sweep.nodes) <= used, len(sweep.nodes)))]
    return kept


def _slowest(result: Found, sweeps: Sequence[Merged]) -> Merged | None:
    """Of several sweeps the one with the least at the end, where the verdict blames a machine of it."""
    suspects = [sweep for sweep in sweeps if result.suspects & set(sweep.nodes) and _curve(sweep, "busbw")]
    return min(suspects, key=lambda sweep: _curve(sweep, "busbw")[-1][1]) if suspects and len(sweeps) > 1 else None


def _curve(sweep: Merged, which: Literal["busbw", "in_place"]) -> tuple[tuple[float, float], ...]:
    payload = ((point.bytes, finite(getattr(point, which))) for point in sweep.points)
    return tuple((float(size), value) for size, value in payload if value is not None)


def _by_size(sweeps: Sequence[Merged], which: Literal["busbw", "in_place"]) -> dict[float, list[float]]:
    result: dict[float, list[float]] = defaultdict(list)
    for sweep in sweeps:
        for size, value in _curve(sweep, which):
            result[size].append(value)
    return dict(sorted(result.items()))


def _middle(sweeps: Sequence[Merged], which: Literal["busbw", "in_place"]) -> tuple[tuple[float, float], ...]:
    return tuple((size, statistics.median(all_)) for size, all_ in _by_size(sweeps, which).items())


def _band(sweeps: Sequence[Merged]) -> Band | None:
    if len(sweeps) < 2:
        return None
    return Band(tuple((size, min(all_), max(all_)) for size, all_ in _by_size(sweeps, "busbw").items()))


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
    again = f", measured again ({sweep.round})" if sweep.round else ""
    who = f"{count(len(sweep.nodes), 'machine')}, {count(sweep.ranks, 'rank')}"
    how = f"{sweep.collective}: {who}, {sweep.backend}, {sweep.tool}{again}"
    return folded(how, grid(heads, rows, class_="numbers"))


def _row(row: Row) -> tuple[str, ...]:
    out = (row.microseconds, row.algbw, row.busbw, row.wrong)
    inside = (row.microseconds_in_place, row.algbw_in_place, row.busbw_in_place, row.wrong_in_place)
    return (size_text(row.bytes), *map(_cell, (*out, *inside)))


def _cell(value: float | None) -> str:
    return "N/A" if finite(value) is None else number(four(float(value or 0)))
