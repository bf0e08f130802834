"""Of a qualification's page: what machines measured alone, against their limits; versions; what was not measured, and why.

Whether something is too slow is the verdict's word (tasks/qualification): here it is only shown where it lies.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tasks.hardware.sku import Limit
from tasks.qualification.measured import Probe, RankReport
from tasks.report.data import number
from tasks.report.markup import Html, grid, join, tag
from tasks.report.qualification.data import Found, count, finite

# What every rank or machine measured, as a strip: a tick each, limits as dashed lines, what breaks one as a diamond.
#
# In percent of the width, so that a strip fills a table's cell at any width. Thousands of ticks that fall together are
# one.


HEIGHT, MARGIN = 28, 2.5
GRAIN = 0.4
"""Percent of the width within which ticks are one."""
Marked = tuple[float, str]
"""A value, and warn or bad."""


def strip(values: Sequence[float], bad: Sequence[Marked], limits: dict[str, float], *, name: str, text: str) -> Html:
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
    return Html(f'{head}<title id="{name}-t">{escape(text)}</title>{"".join(shapes)}</svg>')


def _thinned(places: Iterable[float]) -> list[float]:
    kept = {round(place / GRAIN): place for place in places}
    return [kept[grain] for grain in sorted(kept)]


STORAGE = ("scratch_", "store_", "checkpoint_seconds")
NAMES_SHOWN = 6
DIGITS = 4


@dataclass(frozen=True)
class Rate:
    """One check on everything that measured it."""

    check: str
    unit: str
    values: tuple[tuple[float, str], ...]
    """With who measured it, worst first."""
    limit: Limit | None
    bad: Mapping[str, str]
    """Who breaks a limit by the verdict: warn or bad."""


def rates(result: Found, *, storage: bool) -> Html:
    """A row a check: the worst and who it is, the median, the best, the limits, and where every one lies."""
    rows = [_row(rate, result) for rate in _rates(result) if rate.check.startswith(STORAGE) == storage]
    return grid(("Check", "Worst", "Median", "Best", "Limit", "Every one"), rows, class_="rates")


def words(result: Found) -> Html:
    """What machines said in words: counts of what they said, what is not the same on all first."""
    output: dict[str, Counter[str]] = defaultdict(Counter)
    for _, probe in result.probes():
        if probe.status == "measured" and isinstance(probe.measured, str):
            output[probe.check][probe.measured] += 1
    ordered = sorted(output.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [(check, _counted(values)) for check, values in ordered]
    return grid(("Check", "Said"), rows)


def versions(result: Found) -> Html:
    """A row a component; what differs between machines stands first, with the machines that have it."""
    by_name: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for report in result.measured.ranks:
        for name, value in report.versions.items():
            if report.node not in by_name[name][value]:
                by_name[name][value].append(report.node)
    rows = []
    for name, values in sorted(by_name.items(), key=lambda item: (len(item[1]) < 2, item[0])):
        ordered = sorted(values.items(), key=lambda item: -len(item[1]))
        style = "bad" if len(values) > 1 else "good"
        same = tag("span", "✕ differs" if len(values) > 1 else "✓ equal", class_=style)
        rows.append((name, same, tag("ul", *(_version(value, nodes, ordered) for value, nodes in ordered))))
    return grid(("Component", "On all machines", "Version"), rows, class_="versions")


def missing(result: Found) -> Html:
    """What nobody knows: machines, ranks, checks, sweeps, probes, each with the reason and who."""
    gone: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for what, status, value, who in _missing(result):
        if who not in gone[what, status, value]:
            gone[what, status, value].append(who)
    rows = [
        (what, status, value, _people([name for name in who if name])) for (what, status, value), who in gone.items()
    ]
    return grid(("What", "Status", "Why", "Where"), rows, class_="missing")


def _missing(result: Found) -> Iterator[tuple[str, str, str, str]]:
    """What, how it went, why, who."""
    measured = result.measured
    if measured.error:
        yield "the job", "failed", measured.error, ""
    if result.absent:
        text = f"{result.absent} of {measured.expected_nodes} left no word, not even their name"
        yield "machines", "missing", text, ""
    existing = Counter(report.node for report in measured.ranks)
    for node in result.nodes:
        if existing[node.name] < measured.ranks_per_node:
            yield "ranks", "missing", f"{existing[node.name]} of {measured.ranks_per_node} have a result", node.name
    for report, probe in result.probes():
        if probe.status not in ("measured", "skipped"):
            yield probe.check, probe.status, probe.said, report.node
    yield from _missing_together(result)


def _missing_together(result: Found) -> Iterator[tuple[str, str, str, str]]:
    for sweep in result.measured.sweeps:
        if sweep.status != "measured" or not sweep.rows:
            yield f"{sweep.collective}, {sweep.scope}", sweep.status, sweep.said or "no rows", _people(sweep.nodes)
    for point in result.measured.training:
        if point.status != "measured":
            yield "training", point.status, point.said, _people(point.nodes)


def _rates(result: Found) -> Iterator[Rate]:
    """In the order of the hardware's limits, then the others by name."""
    values: dict[str, list[tuple[float, str]]] = defaultdict(list)
    units: dict[str, str] = {}
    for report, probe in result.probes():
        value = finite(probe.measured)
        if probe.status == "measured" and value is not None:
            values[probe.check].append((value, _who(report, probe)))
            units[probe.check] = probe.unit or units.get(probe.check, "")
    order = list(result.sku.limits)
    bad: dict[str, dict[str, str]] = defaultdict(dict)
    for reason in reversed(result.reasons):  # the worst of a machine stands first, and is the one that is kept
        style = "warn" if reason.verdict == "degraded" else "bad"
        bad[reason.check.partition(" ")[0]][f"{reason.node} {reason.where}".strip()] = style
    for check in sorted(values, key=lambda check: (order.index(check) if check in order else len(order), check)):
        limit = result.sku.limits.get(check)
        lower = limit.better == "lower" if limit else check.endswith(("_seconds", "_drop", "temperature", "skew"))
        ranked = tuple(sorted(values[check], reverse=lower))
        yield Rate(check, units[check] or (limit.unit if limit else ""), ranked, limit, bad[check])


def _row(rate: Rate, result: Found) -> tuple[str, ...]:
    only = [value for value, _ in rate.values]
    worst, who = rate.values[0]
    bad = [(value, rate.bad[name]) for value, name in rate.values if name in rate.bad]
    limits = _limits(rate.limit)
    text = f"{rate.check} of {len(only):,}: {_short(min(only))} to {_short(max(only))} {rate.unit}"
    drawn = (
        strip(only, bad, limits, name=f"strip-{_plain(rate.check)}", text=text)
        if len(set(only)) > 1 or limits
        else Html()
    )
    return (
        join(tag("span", rate.check), tag("small", rate.unit)),
        join(tag("span", _short(worst), class_=rate.bad.get(who, "plain")), tag("small", who)),
        _short(statistics.median(only)),
        _short(rate.values[-1][0]),
        _limit_text(rate.limit, result),
        drawn,
    )


def _limits(limit: Limit | None) -> dict[str, float]:
    payload = {"norm": limit.norm, "warn": limit.warn, "fail": limit.fail} if limit else {}
    return {name: value for name, told_value in payload.items() if (value := finite(told_value)) is not None}


def _limit_text(limit: Limit | None, result: Found) -> Html:
    if limit is None:
        return Html("none")
    sign = {"higher": "<", "lower": ">", "equal": "≠"}[limit.better]
    asked = (("failed", limit.fail), ("degraded", limit.warn))
    entries = [f"{verdict} {sign} {_short(value)}" for verdict, value in asked if value is not None]
    entries += [f"norm {_short(limit.norm)}"] if limit.norm is not None else []
    return join(*(tag("span", text, class_="one") for text in entries), tag("small", result.source(limit.source)))


def _short(value: float | str) -> str:
    return number(float(f"{value:.{DIGITS}g}")) if isinstance(value, float) else number(value)


def _who(report: RankReport, probe: Probe) -> str:
    return f"{report.node} {probe.where}".strip()


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)


def _version(value: str, nodes: Sequence[str], ordered: Sequence[tuple[str, list[str]]]) -> Html:
    if len(ordered) == 1:
        return tag("li", tag("code", value), tag("small", count(len(nodes), "machine")))
    who = count(len(nodes), "machine") if nodes is ordered[0][1] and len(nodes) > 1 else _people(nodes)
    return tag("li", tag("code", value), tag("small", who))


def _counted(values: Counter[str]) -> Html:
    return tag(
        "ul",
        *(tag("li", tag("code", value), f" {number:,} times") for value, number in values.most_common(NAMES_SHOWN)),
    )


def _people(names: Iterable[str]) -> str:
    """The first names, and how many more."""
    known = list(names)
    more = f" and {len(known) - NAMES_SHOWN:,} more" if len(known) > NAMES_SHOWN else ""
    return ", ".join(known[:NAMES_SHOWN]) + more
