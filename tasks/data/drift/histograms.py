"""New data against reference data: how far two columns lie apart. Pure: histograms in, distances out.

The limits are the configuration's; who judges is tasks/data/judging.py. See docs/data.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Counts = Mapping[str, float]
"""A histogram: how often each bin or class was met, by its label."""


Columns = Mapping[str, Any]
"""`columns.json` of a profile, or one shard of its `shards.json` (tasks/data/corpus/profile.py)."""


MOVED_SHOWN = 3


WORDS_NEED = 10
"""Words come from a fourth of the documents, and those of one document go together: random halves of the standard library lay up
to 0.25 apart with 100 documents a side, 0.13 with 300, 0.06 with 900."""


@dataclass(frozen=True)
class Drift:
    """One column, now and before."""

    column: str
    distance: float | None
    """Jensen-Shannon divergence, base 2: 0 for equal shares, 1 where nothing is common. None: too little data."""
    moved: tuple[str, ...] = ()
    """The labels whose shares changed most, with both shares; of words nothing, they are only known by hash."""


def distance(now: Counts, before: Counts) -> float:
    """Jensen-Shannon divergence in bits between two histograms, less what chance makes of equal ones; from 0 to 1.

    Chance: two samples of one distribution lie (k - 1) / 8 ln 2 x (1 / n + 1 / m) apart on average, for k labels and samples
    of n and m (Grosse et al., Phys. Rev. E 65, 041905, 2002). Without it, a hundred documents would differ from themselves.
    Two empty histograms are equal; an empty one and any other have nothing in common.
    """
    n, m = sum(now.values()), sum(before.values())
    if not n or not m:
        return 0.0 if n == m else 1.0
    result, labels = 0.0, 0
    for label in sorted(now.keys() | before.keys()):  # a sum in another order has another last digit
        p, q = now.get(label, 0) / n, before.get(label, 0) / m
        result += (_bits(p, (p + q) / 2) + _bits(q, (p + q) / 2)) / 2
        labels += p + q > 0
    chance = (labels - 1) / (8 * math.log(2)) * (1 / n + 1 / m)
    return min(1.0, max(0.0, result - chance))


def moved(now: Counts, before: Counts) -> tuple[str, ...]:
    """The labels whose shares differ most: `cyrillic 0.0 % -> 24.1 %`."""
    n, m = sum(now.values()) or 1.0, sum(before.values()) or 1.0
    shares = {label: (before.get(label, 0) / m, now.get(label, 0) / n) for label in now.keys() | before.keys()}
    order = sorted(shares, key=lambda label: (-round(abs(shares[label][1] - shares[label][0]), 9), label))
    entries = [label for label in order[:MOVED_SHOWN] if shares[label][0] != shares[label][1]]
    return tuple(f"{label} {shares[label][0]:.1%} -> {shares[label][1]:.1%}" for label in entries)


def drifts(now: Columns, before: Columns, *, fewest: int) -> list[Drift]:
    """Every column of a corpus against the same one of another; both are `columns.json` of a profile.

    Where either has fewer than `fewest` documents, or no such column, nothing is measured; words need WORDS_NEED times as many.
    """
    documents, old = min(now["documents"], before["documents"]), distributions(before)
    results = []
    for column, counts in distributions(now).items():
        needed = fewest * WORDS_NEED if column == "words" else fewest
        if documents < needed or column not in old:
            results.append(Drift(column, None))
        else:
            words = moved(counts, old[column]) if column != "words" else ()
            results.append(Drift(column, distance(counts, old[column]), words))
    return results


def outliers(shards: Sequence[Columns], *, fewest: int) -> dict[str, Drift]:
    """Of each shard, whether classes or lengths lie farther from all other shards together; as in `shards.json`.

    A shard is left out where it, or all others, have fewer than `fewest` documents.
    """
    documents = sum(shard["documents"] for shard in shards)
    parts = {shard["name"]: {"classes": shard["classes"], "lengths": _by_label(shard["lengths"])} for shard in shards}
    totals = _added(parts.values())
    result: dict[str, Drift] = {}
    for shard in shards:
        if fewest <= shard["documents"] <= documents - fewest:
            own = parts[shard["name"]]
            drifts = []
            for column, counts in own.items():
                rest = {label: count - counts.get(label, 0) for label, count in totals[column].items()}
                drifts.append(Drift(column, distance(counts, rest), moved(counts, rest)))
            result[shard["name"]] = max(drifts, key=lambda drift: drift.distance or 0.0)
    return result


def distributions(columns: Columns) -> dict[str, Counts]:
    """Every histogram of a whole corpus by its labels: the columns, classes of characters, words."""
    words = {f"bucket {number}": count for number, count in enumerate(columns["words"]) if count}
    measured = {name: _by_label(histogram) for name, histogram in columns["histograms"].items()}
    return {**measured, "classes": columns["classes"], "words": words}


def _by_label(histogram: Columns) -> dict[str, float]:
    """A histogram with bins named by their edges; the last one is open."""
    edges = [f"{edge:g}" for edge in histogram["edges"]]
    names = [*(f"{low} to {high}" for low, high in pairwise(edges)), f"{edges[-1]} or more"]
    return {name: count for name, count in zip(names, histogram["counts"], strict=True) if count}


def _added(parts: Iterable[Mapping[str, Counts]]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for columns in parts:
        for column, counts in columns.items():
            total = totals.setdefault(column, {})
            for label, count in counts.items():
                total[label] = total.get(label, 0) + count
    return totals


def _bits(p: float, mean: float) -> float:
    return p * math.log2(p / mean) if p else 0.0
