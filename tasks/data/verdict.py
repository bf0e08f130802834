"""What came of judging a profile, and `validation.json`, which tells it to a report page. Pure.

Its keys are listed in tasks/validate.py. Who judges: tasks/data/judging.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Check
from tasks.data.corpus.quarantine import Columns, Marked, Profile, Teller, mark, mark_unreadable
from tasks.data.drift.histograms import Drift
from tasks.data.expectations import DocumentRule

Bits = NDArray[np.uint16]
"""Of each document, the rules that it breaks: one bit a rule."""


TOTALS = (
    "documents",
    "unreadable",
    "characters",
    "bytes",
    "tokens",
    "near",
    "contaminated",
    "heldout",
)


TYPES = ("secret_types", "personal_types")


OF_A_SHARD = ("name", "documents", "unreadable", "bytes", "characters", "duplicates", "near", "secrets", "personal")


@dataclass(frozen=True)
class Judged:
    """What came of judging a profile."""

    profile: Profile
    checks: tuple[Check, ...]
    rules: list[DocumentRule]
    bits: Bits
    wanted: tuple[str, ...]
    """Rules whose offenders are set aside."""
    drift: list[Drift]
    apart: dict[str, Drift]
    strange: Mapping[str, str]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @cached_property
    def gone(self) -> NDArray[np.bool_]:
        """The rows that are set aside."""
        return np.asarray(self.bits & mask_of(self.rules, self.wanted) != 0)

    @cached_property
    def quarantined(self) -> dict[str, int]:
        """How many lines are set aside, and how many by each rule."""
        counts: dict[str, int] = {
            r.name: int((self.bits >> n & 1).sum()) for n, r in enumerate(self.rules) if r.name in self.wanted
        }
        broken = int(self.profile.columns["unreadable"]) if "unreadable" in self.wanted else 0
        payload = {name: count for name, count in {**counts, "unreadable": broken}.items() if count}
        return {"documents": int(self.gone.sum()) + broken, **payload}

    def marked(self) -> Iterator[Iterator[Marked]]:
        """What is set aside, as streams of lines."""
        rows = ((row, self._broken(row["row"])) for row in self.profile.rows(self.gone))
        yield mark(rows, Teller(self.profile, self.profile.rows(self.gone)))
        if "unreadable" in self.wanted:
            yield mark_unreadable(self.profile)

    def _broken(self, row: int) -> tuple[str, ...]:
        met = int(self.bits[row])
        return tuple(r.name for n, r in enumerate(self.rules) if met >> n & 1 and r.name in self.wanted)


def verdict(judged: Judged, refs: Mapping[str, str | None]) -> dict[str, Any]:
    """The content of `validation.json`; `refs` name the artifacts that it speaks of."""
    profile = judged.profile
    columns = profile.columns
    # A histogram without the empty bins at both ends
    histogram = columns["histograms"]["characters"]
    edges, counts = histogram["edges"], histogram["counts"]
    met = [index for index, count in enumerate(counts) if count] or [0]
    first, last = met[0], met[-1]
    shown = {"edges": list(edges[first : last + 2]), "counts": list(counts[first : last + 1])}
    return {
        **{key: columns[key] for key in (*TOTALS, *TYPES)},
        "duplicates": columns["exact"],
        **({"known": columns["known"]} if "known" in columns else {}),
        "lengths": shown,
        "classes": shares(columns["classes"]),
        "passed": judged.passed,
        "checks": [check.model_dump(mode="json") for check in judged.checks],
        "quarantine": judged.quarantined,
        "shards": [_shard(shard, judged) for shard in profile.shards],
        "drift": [{"column": d.column, "distance": d.distance, "moved": list(d.moved)} for d in judged.drift],
        **refs,
    }


def mask_of(rules: Sequence[DocumentRule], wanted: Sequence[str]) -> np.uint16:
    """The bits of some rules."""
    return np.uint16(sum(1 << bit for bit, rule in enumerate(rules) if rule.name in wanted))


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Counts as shares of their sum."""
    total = sum(counts.values()) or 1
    return {name: count / total for name, count in counts.items()}


def _shard(shard: Columns, judged: Judged) -> dict[str, Any]:
    far = judged.apart.get(shard["name"])
    return {
        **{key: shard[key] for key in OF_A_SHARD},
        "divergence": far.distance if far else None,
        "farthest": far.column if far else None,
        "refused": judged.strange.get(shard["name"]),
    }
