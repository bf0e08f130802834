"""The documents of a corpus that break a rule: where they stand, why, and the files of the quarantine.

Which rows break which rule is tasks/validate.py's to say.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from pathlib import Path

import numpy as np

from tasks.data.corpus.profiled import PARTNERS, Places, Profile, Row
from tasks.data.corpus.rewriting import set_aside

BORDER = "held-out contamination"
"""The name of what no single document breaks: repeating one on the other side of the held-out border."""


@dataclass(frozen=True)
class Marked:
    """One line that goes to the quarantine."""

    shard: int
    line: int
    rules: tuple[str, ...]
    detail: str
    raw: str | None = None
    """What stands there, where it is no document; its first bytes."""


class Teller:
    """Says in a few words how documents break a rule; never what they say."""

    def __init__(self, profile: Profile, rows: Iterable[Row]) -> None:
        """`rows` are those that will be told of, read once."""
        partners, result = array("q"), set()
        for row in rows:
            partners.extend(row[column] for column in PARTNERS if row[column] >= 0)
            if row["secrets"] or row["personal"]:
                result.add(row["row"])
        self._places = Places(profile, partners)
        self._types = profile.types(result) if result else {}
        self._benchmarks = profile.benchmarks

    def __call__(self, rule: str, row: Row) -> str:
        match rule:
            case "too short" | "too long":
                return f"{row['characters']} characters"
            case "control characters" | "replacement characters":
                return f"{row[rule.partition(' ')[0]]:.1%} {rule}"
            case "repeated lines":
                return f"{row['repeated']:.1%} in repeated lines"
            case "exact duplicates":
                return f"repeats {self._places[row['exact_of']]}"
            case "near duplicates":
                return f"{row['near_similarity']:.2f} like {self._places[row['near_of']]}"
            case "contamination":
                return f"holds a document of {self._benchmarks[row['benchmark']]}"
            case "secrets" | "personal data":
                return ", ".join(sorted(self._types.get((row["row"], KINDS[rule]), {"of a type that was found often"})))
            case _:
                assert rule == BORDER, rule
                return f"repeats {self._places[partner(row)]} across the border"


KINDS = {"secrets": "secret", "personal data": "personal"}
"""What findings of a rule are called in a profile."""


def partner(row: Row) -> int:
    """The row of the earlier document that this one repeats, exactly or nearly; -1 when it repeats none."""
    return int(row["exact_of"] if row["exact_of"] >= 0 else row["near_of"])


def samples_of(profile: Profile, wanted: Mapping[str, list[int]]) -> dict[str, tuple[str, ...]]:
    """`SHARD:LINE: why` of a few rows, by rule."""
    mask = np.zeros(profile.documents, bool)
    for numbers in wanted.values():
        mask[numbers] = True
    rows = {row["row"]: row for row in profile.rows(mask)}
    tell = Teller(profile, rows.values())
    place = {number: f"{profile.names[row['shard']]}:{row['line']}" for number, row in rows.items()}
    return {rule: tuple(f"{place[n]}: {tell(rule, rows[n])}" for n in numbers) for rule, numbers in wanted.items()}


def mark(rows: Iterable[tuple[Row, tuple[str, ...]]], tell: Teller) -> Iterator[Marked]:
    """Rows with the rules that they break, as lines of the quarantine."""
    for row, rules in rows:
        yield Marked(row["shard"], row["line"], rules, "; ".join(tell(rule, row) for rule in rules))


def mark_unreadable(profile: Profile) -> Iterator[Marked]:
    """The lines that are no documents, as lines of the quarantine."""
    for item in profile.unreadable():
        yield Marked(item["shard"], item["line"], ("unreadable",), item["reason"], item["raw"])


def write(corpus: Path, target: Path, names: list[str], *marked: Iterator[Marked]) -> dict[str, array[int]]:
    """Write `quarantine.jsonl` and `quarantine.json` (counts by rule and shard); returns the lines that go, by shard.

    `marked` are streams in the order of shards and lines. A document's own value stands in `raw` where it can be read.
    """
    rules: Counter[str] = Counter()
    gone: dict[str, array[int]] = {}
    with open(target / "quarantine.jsonl", "w", encoding="utf-8") as file:
        for shard, group in groupby(merge(*marked, key=_place), key=lambda one: one.shard):
            lines = {one.line: one for one in group}
            name = names[shard]
            gone[name] = array("q", lines)
            for line, value in set_aside(corpus / name, lines.keys()):
                one = lines[line]
                rules.update(one.rules)
                payload = {"shard": name, "line": line, "rules": one.rules, "detail": one.detail}
                file.write(json.dumps({**payload, "raw": one.raw if value is None else value}) + "\n")
    shards = {name: len(lines) for name, lines in gone.items()}
    counted = {"documents": sum(shards.values()), "rules": dict(rules), "shards": shards}
    (target / "quarantine.json").write_text(json.dumps(counted, indent=1))
    return gone


def _place(marked: Marked) -> tuple[int, int]:
    return marked.shard, marked.line
