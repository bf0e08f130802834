"""`validation.json`: what a verdict tells a report page, of a profile and what was judged of it. Pure.

Its keys are listed in tasks/validate.py, which judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.artifacts import Check
from tasks.corpus.profiled import Columns, Profile
from tasks.drift import Drift

TOTALS = (
    "documents",
    "unreadable",
    "characters",
    "bytes",
    "tokens",
    "near",
    "contaminated",
    "heldout",
    "speed",
    "seconds",
)
TYPES = ("secret_types", "personal_types")
OF_A_SHARD = ("name", "documents", "unreadable", "bytes", "characters", "duplicates", "near", "secrets", "personal")


def verdict(
    profile: Profile,
    checks: Sequence[Check],
    *,
    apart: Mapping[str, Drift],
    drift: Sequence[Drift],
    strange: Mapping[str, str],
    quarantined: Mapping[str, int],
    refs: Mapping[str, str | None],
) -> dict[str, Any]:
    """The file's content."""
    columns = profile.columns
    wall = columns["seconds"]["wall"]
    return {
        **{key: columns[key] for key in (*TOTALS, *TYPES)},
        "duplicates": columns["exact"],
        "lengths": _shown(columns["histograms"]["characters"]),
        "classes": shares(columns["classes"]),
        "passed": all(check.passed for check in checks),
        "checks": [check.model_dump(mode="json") for check in checks],
        "quarantine": dict(quarantined),
        "shards": [_shard(shard, apart, strange) for shard in profile.shards],
        "drift": [{"column": d.column, "distance": d.distance, "moved": list(d.moved)} for d in drift],
        "megabytes_per_second": columns["bytes"] / 1e6 / wall if wall else None,
        **refs,
    }


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Counts as shares of their sum."""
    total = sum(counts.values()) or 1
    return {name: count / total for name, count in counts.items()}


def _shard(shard: Columns, apart: Mapping[str, Drift], strange: Mapping[str, str]) -> dict[str, Any]:
    far = apart.get(shard["name"])
    return {
        **{key: shard[key] for key in OF_A_SHARD},
        "divergence": far.distance if far else None,
        "farthest": far.column if far else None,
        "refused": strange.get(shard["name"]),
    }


def _shown(histogram: Columns) -> dict[str, list[float]]:
    """A histogram without the empty bins at both ends."""
    edges, counts = histogram["edges"], histogram["counts"]
    met = [index for index, count in enumerate(counts) if count] or [0]
    first, last = met[0], met[-1]
    return {"edges": list(edges[first : last + 2]), "counts": list(counts[first : last + 1])}
