"""Suites: what a model is measured by besides held-out text. Each gives counted metrics, within the time that it is given.

A suite is a function that takes a Bench and returns a Suite, or None where the settings do not ask for it. Where several ranks
measure, each calls it: it does its share by `bench.division`, and all but rank 0 end with OnRankZero. `evaluation.json` has
its metrics and the number of samples under its name; a gate's rule names one as `SUITE.METRIC`. Nothing is judged here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from tasks.artifacts import parse_ref
from tasks.config.evaluation import EvaluationConfig
from tasks.jobs.evaluation.division import Division, OnRankZero
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
    division: Division = field(default_factory=Division)
    """Through which the ranks share its work."""
    sharded: bool = False
    """Whether each rank holds a share of the model only."""
    meet: Callable[[], None] = lambda: None
    """Waits for all ranks where they share the model, and computes with those that are not there yet."""
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

    Seconds are apart, for what is published holds no times. One that ran out of time has no metrics, and says why. On other ranks
    than the first there are none.
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
        except OnRankZero:
            continue
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


# Files that a user gives to a suite: a dataset that the stage handed to the job, or a path; JSON lines, errors with the
# line.
#
# What the records mean is the suites'.


class Line(NamedTuple):
    """One record of a file of JSON lines."""

    place: str
    """The file and the line, as errors say it."""
    record: dict[str, Any]


def place_of(bench: Bench, ref: str, *, setting: str) -> Path:
    """The folder of a dataset, or the path that is named. Raises ValueError for one that is not there."""
    if ref.startswith("/"):
        path = Path(ref)
        if not path.exists():
            raise ValueError(
                f"{setting} = {ref} is not on this machine: name a path that it sees, or publish a dataset"
            )
        return path
    _, name, _ = parse_ref(ref, kind="dataset")
    folder = bench.rank.inputs.get(f"files-{name}")
    if folder is None:
        raise ValueError(f"{setting} = {ref}, and the job was not given that dataset")
    return folder


def lines_of(place: Path, *, setting: str, fields: tuple[str, ...]) -> Iterator[Line]:
    """The records of a file, or of all `*.jsonl` of a folder in the order of their names; each has the fields, as text.

    Raises ValueError, with file and line, for what is no JSON object or lacks a field, and where there is no record at all.
    """
    empty = True
    for file in files_of(place):
        with open(file, "rb") as read:
            for number, raw in enumerate(read, start=1):
                if raw.strip():
                    empty = False
                    where = f"{file.name}, line {number}"
                    yield Line(where, _record(raw, fields, where=f"{setting}: {where}"))
    if empty:
        raise ValueError(f"{setting}: {place.name} has no records; give JSON lines with {' and '.join(fields)}")


def files_of(place: Path) -> list[Path]:
    """The files of JSON lines that `place` stands for."""
    return sorted(place.glob("*.jsonl")) if place.is_dir() else [place]


def digest_of(files: Iterable[Path]) -> str:
    """The sha256, in hexadecimal digits, of the names and contents of files, in their order.

    A suite gives it as `sha256` of its details: what is under an absolute path may change between two models.
    """
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as read:
            whole.update(f"{file.name}\0{hashlib.file_digest(read, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def _record(raw: bytes, fields: tuple[str, ...], *, where: str) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{where}: no JSON in UTF-8 ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__} where an object with {' and '.join(fields)} should be")
    for name in fields:
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise ValueError(f"{where}: `{name}` must be text, and is {record.get(name)!r:.60}")
    return record
