"""The audit of an estate: every recommendation of recommendations.yaml against what exports and the home show.

What is not known is never met: a property that an export lacks, a resource of a query that was not answered whole, a record that
nobody made. docs/estate.md says what the verdicts mean.
"""

from __future__ import annotations

import datetime
import functools
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from tasks.config.base import Settings
from tasks.report.estate.exports import Export, Resource
from tasks.report.estate.records import Record
from tasks.report.estate.regions import zone_regions

FILE = Path(__file__).with_name("recommendations.yaml")
Verdict = Literal["met", "not met", "not in this export", "not applicable", "waived"]
Impact = Literal["high", "medium", "low"]
LEVELS: tuple[Impact, ...] = ("high", "medium", "low")
WORST: tuple[Verdict, ...] = ("not met", "not in this export", "waived", "met", "not applicable")
NO_HOME = "no home was looked at"
"""Why a row of Headway's own half has no verdict."""
SHOWN = 5
"""How many resources of a check the terminal names."""


class Test(Settings):
    """What is asked of a row. It holds, fails, or is not known (None)."""

    path: str = ""
    """Property, dots between its parts; the values of a list count one by one. Several with spaces between: those of all."""
    equals: tuple[Any, ...] | None = None
    """It is one of these; letters' case does not count."""
    form: str = ""
    """It has this form: a regular expression of all of it."""
    least: float | None = None
    most: float | None = None
    """Bounds; a duration such as PT30M counts in minutes."""
    port: tuple[int, ...] = ()
    """It is a port or a range such as 20-30 with one of these in it, or all of them (*)."""
    days: int | None = None
    """It is a time that lies no longer ago."""
    present: bool = False
    """It is there, and not empty."""
    absent: Literal["unknown", "fails", "holds"] = "unknown"
    """What its absence means in Azure."""
    any: tuple[Test, ...] = ()
    """One of these holds."""
    ahead: bool = False
    """It is a time that is still to come."""
    element: str = ""
    no_element: str = ""
    """Path of a list of which one element, or none, is such that all of `having` hold."""
    having: tuple[Test, ...] = ()
    unlike: str = ""
    """It is not what this path has."""

    def holds(self, row: Mapping[str, Any], *, old: bool, now: datetime.datetime) -> bool | None:
        if self.any:
            return either(one.holds(row, old=old, now=now) for one in self.any)
        if self.element or self.no_element:
            return self._holds_of_elements(row, now)
        values = [values_of(row, path) for path in self.path.split()]
        known = [one for each in values if each is not None for one in each if one not in (None, "", [], {})]
        if not known:
            unknown = all(one is None for one in values) or (old and self.absent == "fails")
            return None if unknown or self.absent == "unknown" else self.absent == "holds"
        if self.unlike:
            other = values_of(row, self.unlike)
            return known != other if other else None
        return either(self._holds_of(one, now) for one in known)

    def _holds_of_elements(self, row: Mapping[str, Any], now: datetime.datetime) -> bool | None:
        path = self.element or self.no_element
        above_it, _, last = path.removesuffix(".*").rpartition(".")
        if not any(isinstance(one, dict) and last in one for one in values_of(row, above_it) or ()):
            return None
        one_is = either(
            both(one.holds(element, old=False, now=now) for one in self.having)
            for element in values_of(row, path) or ()
            if isinstance(element, dict)
        )
        return one_is if self.element else inverse(one_is)

    def _holds_of(self, value: Any, now: datetime.datetime) -> bool | None:
        if self.equals is not None:
            return str(value).lower() in {str(one).lower() for one in self.equals}
        if self.form:
            return bool(re.fullmatch(self.form, str(value), re.IGNORECASE | re.DOTALL))
        if self.port:
            first, _, last = str(value).replace("*", "0-65535").partition("-")
            return any(int(first) <= one <= int(last or first) for one in self.port) if first.isdigit() else None
        if self.days is not None or self.ahead:
            time = _time(value)
            if time is None:
                return None
            return time >= now if self.ahead else now - time <= datetime.timedelta(days=self.days or 0)
        if self.least is not None or self.most is not None:
            number = _number(value)
            if number is None:
                return None
            return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)
        return True


class Related(Settings):
    """Another resource that belongs to one."""

    query: str
    type: str
    by: str = ""
    """Property with the id of what it belongs to, or of something that this lies in; empty: it lies below it."""
    of: str = ""
    """Property that `by` names in place of the id."""
    single: bool = False
    """There is exactly one."""
    anywhere: bool = False
    """One of the subscription will do, whatever it belongs to."""
    met: tuple[Test, ...] = ()


class Check(Settings):
    """One question that a recommendation is judged by."""

    id: str
    text: str
    remedy: str
    record: str = ""
    query: str = ""
    type: tuple[str, ...] = ()
    where: tuple[Test, ...] = ()
    unless: tuple[Related, ...] = ()
    """Resources that have one of these are passed over."""
    only: tuple[Related, ...] = ()
    """Resources without one of each of these are passed over."""
    apart: str = ""
    """Property that is not the same for all resources of a group whose names differ in a number alone."""
    beside: str = ""
    """Type of what must be in the same region."""
    zoned: bool = False
    """Only resources in regions with availability zones count."""
    met: tuple[Test, ...] = ()
    related: Related | None = None
    least_one: bool = False
    """One resource is enough."""
    forbidden: bool = False
    """There is no such resource."""
    none: Literal["not applicable", "not met"] = "not applicable"
    title: str = ""
    """Property with words for people."""
    unknown: str = ""
    """Why no export can tell."""


class Recommendation(Settings):
    id: str
    text: str
    source: str
    impact: Impact
    link: str
    estate: str = ""
    headway: str = ""
    left_out: str = ""
    """Why it is not followed, and what stands in its place."""
    unjudged: str = ""
    """Why neither an export nor a record can show it."""
    checks: tuple[Check, ...] = ()


class Waiver(Settings):
    """Somebody's decision that a row need not be met."""

    row: str
    """Recommendation, or ROW/CHECK."""
    resource: str = ""
    """Id of one resource; empty: all."""
    who: Annotated[str, Field(min_length=1)]
    why: Annotated[str, Field(min_length=1)]
    until: datetime.date
    """Last day on which it counts."""


@dataclass(frozen=True)
class Finding:
    """What became of a check for one resource, or as a whole where `resource` is empty."""

    check: str
    verdict: Verdict
    text: str
    resource: str = ""
    remedy: str = ""
    waiver: Waiver | None = None


@dataclass(frozen=True)
class Row:
    """What became of a recommendation."""

    recommendation: Recommendation
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    why: str = ""


@functools.cache
def recommendations() -> tuple[Recommendation, ...]:
    """The rows, in the order of the texts."""
    value = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for row in value:
        for check in row.get("checks", ()):
            if isinstance(check.get("unless"), dict):
                check["unless"] = [check["unless"]]
    return TypeAdapter(tuple[Recommendation, ...]).validate_python(value)


def load_waivers(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file. Raises ValueError, also for a row that there is not."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        result = TypeAdapter(tuple[Waiver, ...]).validate_python(value)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"{path} is no list of waivers, each with row, who, why, until: {error}") from error
    known = {row.id for row in recommendations()}
    known |= {f"{row.id}/{check.id}" for row in recommendations() for check in row.checks}
    if unknown := sorted({one.row for one in result} - known):
        raise ValueError(f"{path} waives {', '.join(unknown)}, which is no row; `headway estate audit` lists the rows")
    return result


def audit(
    export: Export, records: Mapping[str, Record], waivers: Sequence[Waiver] = (), *, now: datetime.datetime
) -> list[Row]:
    """Every row, judged. A waiver that no row needs, or that has ended, is a note of the export."""
    judge = _Judge(export, records, now)
    rows = [_row(one, judge, waivers) for one in recommendations()]
    used = [finding.waiver for row in rows for finding in row.findings]
    export.notes += [
        f"the waiver of {one.row} by {one.who} "
        + (
            f"ended on {one.until}"
            if one.until < now.date()
            else f"until {one.until} is not needed: what it waives is met or not known"
        )
        for one in waivers
        if one not in used
    ]
    return rows


def _row(one: Recommendation, judge: _Judge, waivers: Sequence[Waiver]) -> Row:
    if one.left_out:
        return Row(one, "not applicable", why=f"left out: {one.left_out}")
    if not one.checks:
        return Row(one, "not in this export", why=f"nothing can show it: {one.unjudged}")
    findings = tuple(
        _waived(finding, one, waivers, judge.now.date()) for check in one.checks for finding in judge.findings(check)
    )
    return Row(one, worst(finding.verdict for finding in findings), findings)


def _waived(finding: Finding, row: Recommendation, waivers: Sequence[Waiver], today: datetime.date) -> Finding:
    if finding.verdict != "not met":
        return finding
    for one in waivers:
        of_it = one.row in (row.id, f"{row.id}/{finding.check}")
        if of_it and one.resource.lower() in ("", finding.resource.lower()):
            if one.until < today:
                expired = f"{finding.text} (the waiver of {one.who} ended on {one.until})"
                return Finding(finding.check, "not met", expired, finding.resource, finding.remedy, one)
            return Finding(finding.check, "waived", finding.text, finding.resource, finding.remedy, one)
    return finding


class _Judge:
    """Checks against one export."""

    def __init__(self, export: Export, records: Mapping[str, Record], now: datetime.datetime) -> None:
        self.export, self.records, self.now = export, records, now
        self._by: dict[tuple[str, str], tuple[dict[str, list[Resource]], bool]] = {}
        self._elsewhere: dict[int, bool | None] = {}
        self._values: dict[str, dict[tuple[str, str, str], list[list[Any] | None]]] = {}

    def findings(self, check: Check) -> list[Finding]:
        """What became of a check: what is not met and not known by resource, what is met as a whole."""
        if check.record:
            record = self.records.get(check.record) or Record(None, NO_HOME)
            verdict: Verdict = _verdict(record.holds) if record.applies else "not applicable"
            return [
                Finding(check.id, verdict, f"{check.text}: {record.why}", remedy=_unless_met(verdict, check.remedy))
            ]
        judged = list(self._judged(check))
        whole = check.query in self.export.complete
        if check.least_one:
            return [self._least_one(check, judged, whole)]
        result = [
            Finding(
                check.id,
                _verdict(holds),
                f"{check.text}: {check.unknown}" if holds is None and check.unknown else _told(check, one),
                one.id,
                _filled(check.remedy, one),
            )
            for one, holds in judged
            if not holds
        ]
        if not whole:
            why = f"{check.text}: the answer of the query {check.query} is not there, or not whole"
            result.append(Finding(check.id, "not in this export", why))
        elif not judged:
            holds = check.forbidden
            verdict = "met" if holds else check.none
            text = f"{check.text}: {'so it is' if holds else 'there is none of what it asks for'}"
            result.append(Finding(check.id, verdict, text, remedy=_unless_met(verdict, check.remedy)))
        elif not result:
            result.append(Finding(check.id, "met", f"{check.text}: all of {len(judged):,}"))
        return result

    def _least_one(self, check: Check, judged: list[tuple[Resource, bool | None]], whole: bool) -> Finding:
        verdicts = [holds for _, holds in judged]
        if True in verdicts:
            return Finding(check.id, "met", check.text)
        if None in verdicts or not whole:
            why = f"{check.text}: no export shows one, and the answer of the query {check.query} is not whole or lacks properties"
            return Finding(check.id, "not in this export", why)
        verdict: Verdict = "not met" if judged else check.none
        text = f"{check.text}: " + (
            f"none of {', '.join(one.name for one, _ in judged[:SHOWN])}" if judged else "there is none"
        )
        return Finding(check.id, verdict, text, remedy=_unless_met(verdict, check.remedy))

    def _judged(self, check: Check) -> Iterator[tuple[Resource, bool | None]]:
        """Resources that a check is about, and whether it holds of each; those of which that is not known are among them."""
        for one in self.export.having(check.type):
            if check.zoned and _region(one) not in _zoned():
                continue
            about = both(
                [
                    self._all(check.where, one),
                    *(inverse(self._related(related, one)) for related in check.unless),
                    *(self._related(related, one) for related in check.only),
                    not check.apart or len(self._alike(check, one)) > 1,
                    not check.beside or any(True for _ in self.export.having((check.beside,))),
                ]
            )
            if about is False:
                continue
            met = False if check.forbidden else self._met(check, one)
            yield one, met if about or met else None

    def _met(self, check: Check, one: Resource) -> bool | None:
        """Whether a check holds of a resource that it is about."""
        if check.apart:
            values = self._alike(check, one)
            return None if None in values else len({tuple(map(str, each or ())) for each in values}) > 1
        if check.beside:
            return _region(one) in {_region(each) for each in self.export.having((check.beside,))}
        met = self._all(check.met, one)
        if check.related and met is not False:
            met = both((met, self._related(check.related, one)))
        return met if met is False or not check.unknown else None

    def _alike(self, check: Check, one: Resource) -> list[list[Any] | None]:
        """What the property has for each resource whose name differs from this one's in a number alone."""
        if check.id not in self._values:
            values = self._values[check.id] = defaultdict(list)
            for each in self.export.having(check.type):
                values[_without_number(each)].append(values_of(each.body, check.apart))
        return self._values[check.id][_without_number(one)]

    def _all(self, tests: Iterable[Test], one: Resource) -> bool | None:
        return both(test.holds(one.body, old=one.old, now=self.now) for test in tests)

    def _related(self, related: Related, one: Resource) -> bool | None:
        """Whether a resource has one that belongs to it."""
        if related.anywhere:
            # Whether the subscription has one: looked up once, for it is asked for each of many resources.
            if id(related) not in self._elsewhere:
                holds = either(self._all(related.met, each) for each in self.export.having((related.type,)))
                known = holds is not False or related.query in self.export.complete
                self._elsewhere[id(related)] = holds if known else None
            return self._elsewhere[id(related)]
        index, unclear = self._index(related.type, related.by)
        keys = [one.id, *(above(one.id) if related.by else ())]
        if related.of:
            if (values := values_of(one.body, related.of)) is None:
                return None
            keys = list(map(str, values))
        own = [each for key in keys for each in index.get(key.lower(), ())]
        holds = either(self._all(related.met, each) for each in own)
        if holds or (own and (holds is None or related.single)):
            return holds
        whole = related.query in self.export.complete or one.id.lower() in self.export.of[related.query]
        return False if whole and not unclear else None

    def _index(self, type_: str, by: str) -> tuple[dict[str, list[Resource]], bool]:
        """Resources of a type by the ids that they belong to, and whether one does not say."""
        if (type_, by) not in self._by:
            index, unclear = defaultdict(list), False
            for one in self.export.having((type_,)):
                ids = (id_ for path in by.split() for id_ in values_of(one.body, path) or ())
                owners = [str(id_).lower() for id_ in ids] if by else list(above(one.id.lower()))
                unclear = unclear or not owners
                for owner in owners:
                    index[owner].append(one)
            self._by[type_, by] = (dict(index), unclear)
        return self._by[type_, by]


@functools.cache
def _zoned() -> frozenset[str]:
    return frozenset(zone_regions())


def _region(one: Resource) -> str:
    return str(one.body.get("location")).lower().replace(" ", "")


def _without_number(one: Resource) -> tuple[str, str, str]:
    """Type, group and name without the number at its end: the same for machines that do the same work."""
    return one.type, one.group.lower(), re.sub(r"[-_]?\d+$", "", one.name.lower())


def above(id_: str) -> Iterator[str]:
    """Ids that an id lies below."""
    while "/" in id_[1:]:
        id_ = id_.rpartition("/")[0]
        yield id_


def values_of(row: Mapping[str, Any], path: str) -> list[Any] | None:
    """The values at a path; None where the row lacks even the first part, which then nobody asked for."""
    parts = path.split(".")
    names = {key.lower(): key for key in row}
    if parts[0].lower() not in names:
        return None
    values: list[Any] = [row[names[parts[0].lower()]]]
    if values == [None] and parts[0] == "tags":
        return []  # it was asked for, and null is how Azure says that there are none
    if len(parts) > 1 and not isinstance(values[0], dict):
        return None
    for part in parts[1:]:
        inner = [one for value in values for one in (value if isinstance(value, list) else [value])]
        values = [
            value
            for one in inner
            if isinstance(one, dict)
            for key, value in one.items()
            if part in ("*", key) or key.lower() == part.lower()
        ]
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def both(values: Iterable[bool | None]) -> bool | None:
    """True when all are, False when one is not, None when it is not known."""
    result: bool | None = True
    for value in values:
        if value is False:
            return False
        result = None if value is None else result
    return result


def either(values: Iterable[bool | None]) -> bool | None:
    """True when one is, False when none is, None when it is not known."""
    result: bool | None = False
    for value in values:
        if value:
            return True
        result = None if value is None else result
    return result


def inverse(value: bool | None) -> bool | None:
    return None if value is None else not value


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return min(verdicts, key=WORST.index)


def failed(rows: Iterable[Row], level: Impact, *, strict: bool = False) -> list[Row]:
    """Rows of a level and above that are not met; when strict, those too that something could show and nothing does."""
    wanted = LEVELS[: LEVELS.index(level) + 1]
    return [
        row
        for row in rows
        if row.recommendation.impact in wanted
        and (row.verdict == "not met" or (strict and row.verdict == "not in this export" and row.findings))
    ]


def _verdict(holds: bool | None) -> Verdict:
    return "not in this export" if holds is None else "met" if holds else "not met"


def _unless_met(verdict: Verdict, remedy: str) -> str:
    return "" if verdict in ("met", "not applicable") else _filled(remedy)


def _told(check: Check, one: Resource) -> str:
    words = values_of(one.body, check.title) if check.title else None
    return f"{check.text}: {words[0] if words else one.name}"


def _filled(remedy: str, one: Resource | None = None) -> str:
    """The remedy with the resource's names in it, as a shell takes them; with words in capitals where there is none."""
    values = {"id": one.id, "name": one.name, "group": one.group} if one else {}
    return re.sub(
        r"\{(id|name|group)\}",
        lambda word: shlex.quote(values[word[1]]) if values.get(word[1]) else word[1].upper(),
        remedy,
    )


def _number(value: Any) -> float | None:
    """A number, or a duration of ISO 8601 in minutes."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    parts = re.fullmatch(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?", str(value))
    if not parts or not any(parts.groups()):
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def _time(value: Any) -> datetime.datetime | None:
    try:
        time = datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
