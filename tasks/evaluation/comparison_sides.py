"""One model as its evaluation tells it: a metric's value and what it rests on, the whole or a slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tasks.evaluation.comparison_slices import Sums, slices, sums

ALL = "all documents"
"""The name of the whole, beside those of slices."""
LOWER_IS_BETTER = frozenset({"bits_per_byte", "perplexity", "calibration_error"})
"""Of the metrics on held-out text; a suite says which of its own."""
PLACES = {"accuracy": ("accuracy", "estimate"), "gain_over_bigram": ("gain_over_bigram", "estimate")}
"""Where a metric stands in `evaluation.json`, when not under its own name."""
OF_THE_WHOLE = {**PLACES, "calibration_error": ("calibration", "error")}


@dataclass(frozen=True)
class Side:
    """The files of an evaluation, and whose it is."""

    ref: str
    """Reference of the checkpoint."""
    told: Mapping[str, Any]
    """`evaluation.json`."""
    documents: Mapping[str, Any]
    """`documents.json`."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """`sources.json`; empty where the model learnt from one corpus."""

    @cached_property
    def parts(self) -> dict[str, Sums]:
        """The sums of the whole and of every slice. Raises KeyError when `documents.json` lacks what all need."""
        return {ALL: sums(self.documents), **slices(self.documents, self.sources)}

    @property
    def rows(self) -> dict[str, Mapping[str, Any]]:
        """The slices as `evaluation.json` tells them."""
        return {row["slice"]: row for row in self.told.get("slices", ())}

    def value(self, metric: str, slice: str = ALL) -> float | None:
        """What was measured; None where it was not. It may be no number."""
        suite, _, name = metric.rpartition(".")
        if suite:
            found = self._suite(suite).get("metrics", {}).get(name)
        else:
            whole = slice == ALL
            found = self.told if whole else self.rows.get(slice, {})
            for key in (OF_THE_WHOLE if whole else PLACES).get(metric, (metric,)):
                found = found.get(key) if isinstance(found, Mapping) else None
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    def count(self, metric: str, slice: str = ALL) -> int:
        """The documents or samples that a metric rests on; 0 where there is nothing."""
        suite, _, _ = metric.rpartition(".")
        if suite:
            return int(self._suite(suite).get("samples", 0))
        return int((self.told if slice == ALL else self.rows.get(slice, {})).get("documents", 0))

    def lower_is_better(self, metric: str) -> bool:
        suite, _, name = metric.rpartition(".")
        return name in self._suite(suite).get("lower_is_better", ()) if suite else metric in LOWER_IS_BETTER

    def given(self, metric: str) -> Any:
        """The sha256 of the files that a suite read, by file where it says so; None for what reads none."""
        suite, _, _ = metric.rpartition(".")
        return self._suite(suite).get("details", {}).get("sha256")

    def problems(self, metric: str) -> str:
        """1 or 0 for each problem of a suite, right or not; empty where the suite does not say, or has none."""
        suite, _, name = metric.rpartition(".")
        return str(self._suite(suite).get("problems", {}).get(name, "")) if suite else ""

    def why_not(self, metric: str) -> str:
        """Why a metric is missing, in words."""
        suite, _, _ = metric.rpartition(".")
        failed = self._suite(suite).get("failed", "") if suite else ""
        return f"missing: the suite {suite} {failed}" if failed else "missing"

    def _suite(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.told.get("suites", {}).get(name, {})
        return found
