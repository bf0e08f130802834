"""Of a qualification's page: what machines measured alone, against their limits; versions; what was not measured, and why.

Whether something is too slow is the verdict's word (tasks/qualification): here it is only shown where it lies.

Its curves are bandwidth against the size of the message, and rates against machines; both axes are logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.hardware.sku import Limit
from tasks.report.charts import Axis, Band, Line, Point, log_ticks, plot, ticked
from tasks.report.data import number
from tasks.report.qualification.data import Found, brief, count, finite, people, size_text

# The map of pairs: the bus bandwidth between any two machines, as one picture at any number of machines.
#
# The squares are pixels of a PNG inside the page (512 machines have 262,144 of them), names and marks are SVG above it.
# Blue is what the pairs usually reach, orange and red are below; a pair without a value is a hole.


LIMITS = ("norm", "warn", "fail", "ideal")
"""Lines of what is asked: without a measured one nothing is drawn."""
SPAN = 300.0


def curves(label: str, lines: Sequence[Line], band: Band | None = None, *, bytes_: bool = True) -> Markup:
    """Lines on common axes, down to 1 / SPAN of the highest point; nothing where none that was measured has a point above zero.

    Small messages below that are left out at the left; what falls below it later is drawn at the bottom.
    """
    finite = [[p for p in line.points if all(math.isfinite(v) and v > 0 for v in p)] for line in lines]
    kept = [(line, points) for line, points in zip(lines, finite, strict=True) if points]
    if all(line.style in LIMITS for line, _ in kept):
        return Markup()
    floor = max(y for _, points in kept for _, y in points) / SPAN
    left = min(x for _, points in kept for x, y in points if y >= floor)
    shapes: list[Line | Band] = []
    if band:
        shapes.append(Band("band", [(x, max(a, floor), max(b, floor)) for x, a, b in band.points if x >= left]))
    shapes += [
        Line(line.style, [(x, max(y, floor)) for x, y in points if x >= left], line.dots) for line, points in kept
    ]
    places: list[Point] = [p for shape in shapes if isinstance(shape, Line) for p in shape.points]
    places += [(x, y) for shape in shapes if isinstance(shape, Band) for x, *ys in shape.points for y in ys]
    xs, ys = [x for x, _ in places], [y for _, y in places]
    start, end = (min(xs), max(xs)) if max(xs) >= 2 * min(xs) else (min(xs) / 2, max(xs) * 2)
    low = min(ys) / 1.25
    high = max(max(ys) * 1.25, low * 4)
    marks = log_ticks(start, end) if bytes_ else [2.0**power for power in range(13) if start <= 2.0**power <= end]
    x = Axis(start, end, marks, text=size_text if bytes_ else number, log=True)
    y = Axis(low, high, log_ticks(low, high), text=_thousands, log=True, grid=True)
    return plot(label, shapes, x, y, style="curve")


def limit_steps(limits: Sequence[tuple[float, float]], until: float) -> tuple[Point, ...]:
    """A limit that holds from a size on, as a curve: up to the next size that has one, the last to the end."""
    ordered = sorted(limits)
    ends = [start for start, _ in ordered[1:]] + [max(until, ordered[-1][0] * 1.5)] if ordered else []
    return tuple(
        point for (start, value), end in zip(ordered, ends, strict=True) for point in ((start, value), (end, value))
    )


def _thousands(value: float) -> str:
    return f"{number(value / 1000)}k" if value >= 10_000 else number(value)


STORAGE = ("scratch_", "store_", "checkpoint_seconds")
LOWER = ("_seconds", "_drop", "temperature", "skew")
"""Ends of the names of checks without a limit whose lower values are better."""


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

    @property
    def storage(self) -> bool:
        return self.check.startswith(STORAGE)

    @property
    def median(self) -> float:
        return statistics.median(value for value, _ in self.values)

    @property
    def limits(self) -> list[str]:
        """What is asked, in words."""
        if self.limit is None:
            return []
        sign = {"higher": "<", "lower": ">", "equal": "≠"}[self.limit.better]
        asked = (("failed", self.limit.fail), ("degraded", self.limit.warn))
        words = [f"{verdict} {sign} {brief(value)}" for verdict, value in asked if value is not None]
        return [*words, f"norm {brief(self.limit.norm)}"] if self.limit.norm is not None else words

    @property
    def drawn(self) -> Markup:
        """Where every one lies; nothing where they are all the same and no limit is a number."""
        only = [value for value, _ in self.values]
        kinds = {kind: finite(getattr(self.limit, kind, None)) for kind in ("norm", "warn", "fail")}
        limits = {kind: value for kind, value in kinds.items() if value is not None}
        if len(set(only)) < 2 and not limits:
            return Markup()
        bad = [(value, self.bad[name]) for value, name in self.values if name in self.bad]
        name = "".join(letter if letter.isalnum() else "-" for letter in self.check)
        text = f"{self.check} of {len(only):,}: {brief(min(only))} to {brief(max(only))} {self.unit}"
        return ticked(only, bad, limits, name=f"strip-{name}", text=text)


def rates(result: Found) -> list[Rate]:
    """In the order of the hardware's limits, then the others by name."""
    values: dict[str, list[tuple[float, str]]] = defaultdict(list)
    units: dict[str, str] = {}
    for report, probe in result.probes():
        value = finite(probe.measured)
        if probe.status == "measured" and value is not None:
            values[probe.check].append((value, f"{report.node} {probe.where}".strip()))
            units[probe.check] = probe.unit or units.get(probe.check, "")
    order = list(result.sku.limits)
    bad: dict[str, dict[str, str]] = defaultdict(dict)
    for reason in reversed(result.reasons):  # the worst of a machine stands first, and is the one that is kept
        style = "warn" if reason.verdict == "degraded" else "bad"
        bad[reason.check.partition(" ")[0]][f"{reason.node} {reason.where}".strip()] = style
    ordered = []
    for check in sorted(values, key=lambda check: (order.index(check) if check in order else len(order), check)):
        limit = result.sku.limits.get(check)
        lower = limit.better == "lower" if limit else check.endswith(LOWER)
        ranked = tuple(sorted(values[check], reverse=lower))
        ordered.append(Rate(check, units[check] or (limit.unit if limit else ""), ranked, limit, bad[check]))
    return ordered


def said_in_words(result: Found) -> list[tuple[str, Counter[str]]]:
    """How many machines said what, by check; what is not the same on all first."""
    output: dict[str, Counter[str]] = defaultdict(Counter)
    for _, probe in result.probes():
        if probe.status == "measured" and isinstance(probe.measured, str):
            output[probe.check][probe.measured] += 1
    return sorted(output.items(), key=lambda item: (-len(item[1]), item[0]))


def versions(result: Found) -> list[tuple[str, list[tuple[str, str]]]]:
    """Versions of a component with the machines that have them; what differs between machines stands first."""
    by_name: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for report in result.measured.ranks:
        for name, value in report.versions.items():
            if report.node not in by_name[name][value]:
                by_name[name][value].append(report.node)
    rows = []
    for name, values in sorted(by_name.items(), key=lambda item: (len(item[1]) < 2, item[0])):
        most, *others = sorted(values.items(), key=lambda item: -len(item[1]))
        counted = not others or len(most[1]) > 1
        first = (most[0], count(len(most[1]), "machine") if counted else people(most[1]))
        rows.append((name, [first, *((value, people(nodes)) for value, nodes in others)]))
    return rows


def missing(result: Found) -> list[tuple[str, ...]]:
    """What nobody knows: machines, ranks, checks, sweeps, probes, each with the reason and who."""
    gone: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for what, status, value, who in _missing(result):
        if who not in gone[what, status, value]:
            gone[what, status, value].append(who)
    return [(*row, people([name for name in who if name])) for row, who in gone.items()]


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
            yield f"{sweep.collective}, {sweep.scope}", sweep.status, sweep.said or "no rows", people(sweep.nodes)
    for point in result.measured.training:
        if point.status != "measured":
            yield "training", point.status, point.said, people(point.nodes)
