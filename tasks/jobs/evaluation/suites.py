"""Suites: what a model is measured by besides held-out text. Each gives counted metrics, within the time that it is given.

A suite is a function that takes a Bench and returns a Suite, or None where the settings do not ask for it. `evaluation.json` has
its metrics and the number of samples under its name; a gate's rule names one as `SUITE.METRIC`. Nothing is judged here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer

from tasks.config.evaluation import EvaluationConfig
from tasks.jobs.evaluation.heldout import Heldout
from tasks.jobs.node.runtime import Rank


class SuiteTimeout(Exception):
    """A suite has used up its time."""


@dataclass(frozen=True)
class Suite:
    """What a suite measured."""

    metrics: Mapping[str, float]
    """Finite numbers by plain names (letters, digits, underscore)."""
    samples: int
    """How many prompts, documents or tasks they rest on."""
    lower_is_better: tuple[str, ...] = ()
    """Those metrics of which less is better: a rule against the champion must know."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Of metrics that are shares of problems right: 1 or 0 for each problem, in the order of the file."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else people may want to know, as JSON: the same for the same inputs, and small."""


@dataclass(frozen=True)
class Bench:
    """What a suite is given. `deadline` is on the clock of `time.monotonic`."""

    model: Any
    """The causal language model of Hugging Face, on its device, in evaluation mode."""
    tokenizer: Tokenizer
    """The checkpoint's own."""
    eod_id: int
    """The token that ends a document, in the checkpoint's ids."""
    opening: tuple[int, ...]
    """What the first token of a document is predicted from: what the tokenizer puts before a document, else `eod_id`."""
    context: int
    """Most tokens that the model takes."""
    heldout: Heldout
    rank: Rank
    config: EvaluationConfig
    deadline: float = float("inf")
    shared: dict[str, Any] = field(default_factory=dict)
    """What one suite made and another one of the same job needs too, by a name that says what."""

    def check_time(self) -> None:
        """Raise SuiteTimeout when the suite's time is used up: call it between pieces of work that take seconds."""
        if time.monotonic() > self.deadline:
            raise SuiteTimeout


Measure = Callable[[Bench], Suite | None]


def run_suites(bench: Bench, suites: Mapping[str, Measure]) -> tuple[dict[str, Any], dict[str, float]]:
    """The suites that the settings ask for as `evaluation.json` has them, and the seconds that each took.

    Seconds are apart, for what is published holds no times. One that ran out of time has no metrics, and says why.
    """
    payload: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name, measure in suites.items():
        began = time.monotonic()
        bench.rank.progress(len(payload), len(suites), f"suite {name}")
        limited = Bench(**{**vars(bench), "deadline": began + bench.config.suite_seconds})
        try:
            with torch.inference_mode():
                suite = measure(limited)
        except SuiteTimeout:
            why = f"did not end within evaluation.suite_seconds = {bench.config.suite_seconds}"
            payload[name] = {"metrics": {}, "samples": 0, "lower_is_better": [], "failed": why}
        else:
            if suite is None:
                continue
            payload[name] = as_json(suite)
        seconds[name] = round(time.monotonic() - began, 3)
    return payload, seconds


def as_json(suite: Suite) -> dict[str, Any]:
    """A suite as `evaluation.json` has it."""
    payload = {
        "metrics": {name: float(value) for name, value in suite.metrics.items()},
        "samples": suite.samples,
        "lower_is_better": sorted(suite.lower_is_better),
        **({"problems": dict(suite.problems)} if suite.problems else {}),
    }
    return {**payload, "details": dict(suite.details)} if suite.details else payload
