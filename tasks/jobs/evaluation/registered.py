"""The suites that there are, by the names that rules and metrics use, in the order in which they run."""

from __future__ import annotations

from tasks.jobs.evaluation.suites import Measure

SUITES: dict[str, Measure] = {}
