"""Of a qualification's page: pairs of machines, as a map and as a list, and the search for a fault among more of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Sweep
from tasks.qualification.verdicts import PairVerdict
from tasks.report.data import number
from tasks.report.markup import Html, folded, grid, join, tag
from tasks.report.qualification.charts import size_text
from tasks.report.qualification.data import SIGN, STYLES, Found, by_number, count, finite, four
from tasks.report.qualification.map import pair_map, scale

PAIRS_LISTED = 20
NAMES_SHOWN = 8


def pairs(found: Found) -> Html:
    """The map, the pairs that are not healthy, and what the search for a fault measured."""
    told = found.verdict.pairs
    if not told:
        return Html()
    names = sorted({name for pair in told for name in (pair.a, pair.b)}, key=by_number)
    blamed = {name for pair in told for name, side in ((pair.a, "a"), (pair.b, "b")) if pair.blamed == side}
    marked = frozenset((blamed | set(found.verdict.named("failed", "unknown"))) & set(names))
    said, reference = tag("p", _said(found, told)), _reference(found, told)
    drawn = pair_map(names, told, reference, marked) if reference else Html()
    meaning = scale(reference) if reference else Html()
    return join(said, meaning, tag("div", drawn, class_="scroll"), _bad_pairs(told), _parts(found))


def _reference(found: Found, told: Sequence[PairVerdict]) -> float:
    """What a pair should reach: the hardware's norm, else the median of each machine's best pair. 0: nobody knows."""
    norms = [limit.norm for limit in bandwidths(found.sku, "all_reduce", "pair", 2) if limit.norm]
    best: dict[str, float] = {}
    for pair in told:
        for name in (pair.a, pair.b):
            best[name] = max(best.get(name, 0.0), finite(pair.busbw_gb_s) or 0.0)
    return max(norms) if norms else statistics.median(best.values())


def _said(found: Found, told: Sequence[PairVerdict]) -> str:
    known = [value for pair in told if (value := finite(pair.busbw_gb_s)) is not None]
    bad = sum(pair.verdict != "healthy" for pair in told)
    if not known:
        return f"None of {count(len(told), 'pair')} has a value."
    least, middle = number(four(min(known))), number(four(statistics.median(known)))
    named = " Names are of machines that the verdict blames." if found.suspects else ""
    return f"{count(len(told), 'pair')}, {len(told) - bad:,} healthy. Median {middle} GB/s, least {least}.{named}"


def _bad_pairs(told: Sequence[PairVerdict]) -> Html:
    """The slowest pairs that are not healthy."""
    bad = sorted((pair for pair in told if pair.verdict != "healthy"), key=lambda pair: finite(pair.busbw_gb_s) or -1.0)
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


def _parts(found: Found) -> Html:
    """Runs of the bisection, in their order."""
    parts = sorted((sweep for sweep in found.measured.sweeps if sweep.scope == "part"), key=lambda sweep: sweep.round)
    return folded("Search by bisection", grid(("Machines", "Collective", "Bus bandwidth"), [*map(_part, parts)]))


def _part(sweep: Sweep) -> tuple[str, ...]:
    more = f" and {len(sweep.nodes) - NAMES_SHOWN:,} more" if len(sweep.nodes) > NAMES_SHOWN else ""
    last = max(sweep.rows, key=lambda row: row.bytes, default=None)
    rate = finite(last.busbw) if last else None
    said = (
        f"{number(four(rate))} GB/s at {size_text(last.bytes)}"
        if last and rate is not None
        else sweep.said or sweep.status
    )
    return (", ".join(sweep.nodes[:NAMES_SHOWN]) + more, sweep.collective, said)
