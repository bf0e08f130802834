"""Great Expectations judges a corpus: suites, their metrics over a stream, and a Checkpoint in a file context. Its only home.

A corpus may be larger than memory, so that what an expectation asks for (its metrics) is computed batch by batch and added up;
the Checkpoint then judges by the sums. What cannot be added up is refused by name. Importing this takes seconds: import it where
something is judged. What is expected: tasks/data/expectations.py and, of users, tasks/data/suite.py. See docs/data.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isnan, nan, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tasks.common.process import locked
from tasks.data.corpus.profile import SCHEMA
from tasks.data.expectations import DocumentRule, Figure
from tasks.data.suite import IMPORT_PATH, LOCK, RESULTS, Suite, plugin, title

os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")  # read when it is imported
import great_expectations as gx
from great_expectations.checkpoint import UpdateDataDocsAction
from great_expectations.compatibility.pydantic import PrivateAttr
from great_expectations.core import ExpectationSuiteValidationResult
from great_expectations.core.run_identifier import RunIdentifier
from great_expectations.data_context.types.resource_identifiers import (
    ExpectationSuiteIdentifier,
    ValidationResultIdentifier,
)
from great_expectations.exceptions import GreatExpectationsError
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
from great_expectations.expectations.registry import (
    get_expectation_impl,
    get_metric_kwargs,
    list_registered_expectation_implementations,
    register_expectation,
)
from great_expectations.validator.metric_configuration import MetricConfiguration
from great_expectations.validator.metrics_calculator import MetricsCalculator
from great_expectations.validator.validation_statistics import calc_validation_statistics

SHOWN = 20
"""Values that a result shows of those that break an expectation."""
FORMAT = {"result_format": {"result_format": "BASIC", "partial_unexpected_count": SHOWN}}
RUNS = 50
"""Runs of a suite whose results stay in the file context: Data Docs read all of them whenever they are built."""
DEFINITIONS = ("expectations", "validation_definitions", "checkpoints")


logging.getLogger("great_expectations").setLevel(logging.CRITICAL)
"""What it logs of an expectation that cannot be computed is raised by us."""


class ExpectNoOtherDocument(gx.expectations.ExpectColumnValuesToBeBetween):  # type: ignore[misc]
    """The column names another document, of the corpus or of a benchmark, by its number; it must name none (-1)."""

    max_value: float = -1
    description: str = "No other document, here or in a benchmark, is the same."


SHIPPED = {kind: get_expectation_impl(kind) for kind in list_registered_expectation_implementations()}
"""Expectations that no code of a user's may define anew: ours are judged by them."""


@dataclass(frozen=True)
class _Moments:
    """Count, mean and sum of squared distances to it, of values that come in parts (Chan et al. 1979)."""

    count: int
    mean: float
    squares: float = 0.0

    def __add__(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return _Moments(count, self.mean + apart * other.count / count, squares)

    @property
    def deviation(self) -> float:
        """Of a sample, as pandas has it."""
        return sqrt(self.squares / (self.count - 1)) if self.count > 1 else nan


ADDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "table.row_count": operator.add,
    "table.columns": lambda before, _: before,
    "table.column_count": lambda before, _: before,
    "table.column_types": lambda before, _: before,
    "column.sum": operator.add,
    "column.min": lambda before, now: now if isnan(before) or now < before else before,
    "column.max": lambda before, now: now if isnan(before) or now > before else before,
    "column.mean": operator.add,
    "column.standard_deviation": operator.add,
    ".unexpected_count": operator.add,
    ".filtered_row_count": operator.add,
    ".unexpected_values": lambda before, now: [*before, *now][:SHOWN],
}
"""How a metric of two parts of a table becomes that of both, by its name or its ending."""
OF_ALL_ROWS = (
    "column_values.unique",
    "column_values.increasing",
    "column_values.decreasing",
    "column_values.z_score",
    "column_values.not_outliers",
    "compound_columns.unique",
)
"""Conditions of a row that depend on the rows around it."""


class Stream:
    """The metrics that a suite asks for, added up over the batches of a table: memory is that of one batch."""

    def __init__(self, suite: gx.ExpectationSuite, table: str = "documents") -> None:
        """Raises ValueError for an expectation that cannot be judged by what is added up. `table` is what it has rows of."""
        self.suite, self.table = suite, table
        self._engine = PandasExecutionEngine()
        self._sums: dict[Any, Any] = {}
        self._needs: list[list[MetricConfiguration]] = []
        self._masks: list[MetricConfiguration | None] = []
        for each in suite.expectations:
            metrics = each.get_validation_dependencies(self._engine, dict(FORMAT)).get_metric_configurations()
            if strange := [m.metric_name for m in metrics if _adding(m.metric_name) is None]:
                raise ValueError(
                    f"{title(each.configuration)} needs {', '.join(strange)} of all documents at once, and they are judged in "
                    "batches: leave it out; docs/validation-suites.md says what can be judged"
                )
            row_wise = getattr(each, "map_metric", None)
            self._needs.append(metrics)
            mask = None
            if row_wise:
                kwargs = get_metric_kwargs(f"{row_wise}.condition", each.configuration, dict(FORMAT))
                domain, value = kwargs["metric_domain_kwargs"], kwargs["metric_value_kwargs"]
                mask = MetricConfiguration(f"{row_wise}.condition", domain, value)
            self._masks.append(mask)
        self._wanted = {metric.id: metric for metrics in self._needs for metric in metrics}
        deviations = [m for m in self._wanted.values() if m.metric_name == "column.standard_deviation"]
        self._means = {m.id: MetricConfiguration("column.mean", m.metric_domain_kwargs, {}) for m in deviations}

    def add(self, frame: pd.DataFrame) -> Iterator[NDArray[np.int64]]:
        """Take a batch of rows in; yields for each expectation of the suite the rows of the batch that break it.

        Raises ValueError for an expectation that cannot be computed on these columns.
        """
        self._engine.load_batch_data("batch", frame)
        masks = [mask for mask in self._masks if mask is not None]
        calculator = MetricsCalculator(execution_engine=self._engine, show_progress_bars=False)
        done, failed = calculator.compute_metrics([*self._wanted.values(), *self._means.values(), *masks], dict(FORMAT))
        for each, metrics, mask in zip(self.suite.expectations, self._needs, self._masks, strict=True):
            if missing := [m for m in (mask, *metrics) if m is not None and m.id not in done]:
                why = failed.get(missing[0].id) or next(iter(failed.values()), None)
                words = why["exception_info"]["exception_message"] if why else missing[0].metric_name
                raise ValueError(f"{title(each.configuration)} cannot be computed: {' '.join(words.split())[:300]}")
        for key, metric in self._wanted.items():
            value, adding = self._value(metric, done, len(frame)), _adding(metric.metric_name)
            assert adding is not None, metric.metric_name
            self._sums[key] = adding(self._sums[key], value) if key in self._sums else value
        for mask in self._masks:
            broken = done[mask.id][0] if mask is not None else None
            yield np.zeros(0, np.int64) if broken is None else broken.index[broken.to_numpy(bool)].to_numpy(np.int64)

    def _value(self, metric: MetricConfiguration, done: Mapping[Any, Any], rows: int) -> Any:
        """A metric of a batch in the form in which it is added."""
        value = done[metric.id]
        if metric.metric_name == "column.mean":
            return _Moments(rows, float(value))
        if metric.metric_name == "column.standard_deviation":
            squares = float(value) ** 2 * (rows - 1) if rows > 1 else 0.0
            return _Moments(rows, float(done[self._means[metric.id].id]), squares)
        return value

    def judge(self, expectation: Any) -> Any:
        """The result of an expectation of the suite, by all rows that were added."""
        if not self._sums:
            list(
                self.add(pd.DataFrame({column: np.zeros(0, kind) for column, kind in DTYPES.items()}))
            )  # a corpus of nothing
        metrics = {}
        for key, metric in self._wanted.items():
            value = self._sums[key]
            if isinstance(value, _Moments):
                value = value.mean if metric.metric_name == "column.mean" else value.deviation
            metrics[key] = value
        return expectation.metrics_validate(metrics, dict(FORMAT), self._engine)


class Streamed(gx.ValidationDefinition):  # type: ignore[misc]
    """A validation definition whose batch came as a stream: it judges by what was added up."""

    _stream: Stream = PrivateAttr()

    def run(self, *, checkpoint_id: str | None = None, run_id: Any, **_: Any) -> Any:
        """Judge each expectation, and store the result as the class above does."""
        results = [self._stream.judge(expectation) for expectation in self.suite.expectations]
        counts = calc_validation_statistics(results)
        suite = ExpectationSuiteIdentifier(name=self.suite.name)
        whole = ExpectationSuiteValidationResult(
            results=results,
            success=counts.success,
            suite_name=self.suite.name,
            statistics={
                "evaluated_expectations": counts.evaluated_expectations,
                "successful_expectations": counts.successful_expectations,
                "unsuccessful_expectations": counts.unsuccessful_expectations,
                "success_percent": counts.success_percent,
            },
            meta={
                "great_expectations_version": gx.__version__,
                "batch_spec": {"data_asset_name": self.asset.name},
                "validation_id": self.id,
                "checkpoint_id": checkpoint_id,
                "run_id": run_id,
                "validation_time": run_id.run_time,
                "batch_parameters": None,
            },
            batch_id=self.name,
        )
        self._validation_results_store.store_validation_results(
            suite_validation_result=whole,
            suite_validation_result_identifier=ValidationResultIdentifier(suite, run_id, self.name),
            expectation_suite_identifier=suite,
        )
        return whole


def rules_suite(name: str, rules: Sequence[DocumentRule], only_warn: Sequence[str]) -> gx.ExpectationSuite:
    """What is expected of each document, with the share that must keep it."""
    return gx.ExpectationSuite(
        name=name,
        expectations=[
            _bounded(r.name, r.column, r.low, r.high, only_warn=r.name in only_warn, mostly=round(1 - r.share, 12))
            for r in rules
        ],
    )


def figures_suite(name: str, figures: Sequence[Figure], only_warn: Sequence[str]) -> gx.ExpectationSuite:
    """What is expected of the corpus: a table of one row, with a column for each figure."""
    bounded = [_bounded(f.name, f.name, f.low, f.high, only_warn=f.name in only_warn) for f in figures]
    return gx.ExpectationSuite(name=name, expectations=bounded)


def one_row(figures: Sequence[Figure]) -> pd.DataFrame:
    """The corpus as a table of one row. What there was too little data for is missing, and keeps every limit."""
    return pd.DataFrame({f.name: [np.nan if f.value is None else float(f.value)] for f in figures})


def own_suite(name: str, own: Suite, home: Path) -> gx.ExpectationSuite:
    """A user's suite, tried on one made-up document before anything is read.

    Raises ValueError for an expectation that Great Expectations does not have, or that cannot be judged over a stream.
    """
    expectations = []
    for each in own.expectations:
        try:
            parts = {"kwargs": {}, **each, "type": _type(each["type"], home, own.code)}
            expectations.append(ExpectationConfiguration(**parts).to_domain_obj())
        except (GreatExpectationsError, TypeError, ValueError) as error:
            raise ValueError(f"suite {own.name}: {each['type']}: {' '.join(str(error).split())[:400]}") from error
    suite = gx.ExpectationSuite(name=name, expectations=expectations)
    try:
        list(Stream(suite).add(pd.DataFrame({column: np.ones(1, kind) for column, kind in DTYPES.items()})))
    except GreatExpectationsError as error:
        raise ValueError(f"suite {own.name}: {' '.join(str(error).split())[:400]}") from error
    return suite


DTYPES = {name: kind if kind != "bool" else "?" for name, kind in SCHEMA.items()}


def checkpoint(name: str, streams: Sequence[Stream], folder: Path | None, run: str) -> list[list[Any]]:
    """Run the Checkpoint of a corpus; returns the results of each stream's suite, in the order of its expectations.

    In `folder` lies the file context that keeps suites, results and Data Docs; None: nothing is kept. `run` names this run in its
    results.
    """
    with _context(folder) as context:
        if folder is not None:
            # Take away the definitions that this run replaces, and the oldest results of its suites.
            suites = [stream.suite.name for stream in streams]
            for file in (f"{each}.json" for each in (*suites, name)):
                for place in DEFINITIONS:
                    (folder / place / file).unlink(missing_ok=True)
            for results in (folder / place / suite for place in RESULTS for suite in suites):
                for old in sorted(results.glob("*/*"), key=lambda each: each.name)[: -RUNS + 1]:
                    shutil.rmtree(old)
        try:
            source = context.data_sources.get("headway")
        except KeyError:
            source = context.data_sources.add_pandas("headway")
        definitions = []
        for stream in streams:
            try:
                batches = source.get_asset(stream.table).get_batch_definition("all")
            except LookupError:
                batches = source.add_dataframe_asset(stream.table).add_batch_definition_whole_dataframe("all")
            suite = context.suites.add(stream.suite)
            definition = Streamed(name=suite.name, data=batches, suite=suite)
            definition._stream = stream
            context.validation_definitions.add(definition)  # what it returns is of the class above
            definitions.append(definition)
        actions = [UpdateDataDocsAction(name="data docs")] if folder else []
        made = gx.Checkpoint(name=name, validation_definitions=definitions, actions=actions)
        context.checkpoints.add(made)
        done = made.run(run_id=RunIdentifier(run_name=run, run_time=datetime.now(UTC)))
        return [list(result.results) for result in done.run_results.values()]


@contextmanager
def _context(folder: Path | None) -> Iterator[Any]:
    """A context in memory, or that of a folder, which one run at a time writes to.

    Great Expectations writes its files in place: what a run left that was killed while it wrote is taken away by the next one.
    """
    if folder is None:
        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        yield context
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK):
        writing = folder / ".writing"
        if writing.exists():
            _mend(folder)
        writing.touch()
        path = list(sys.path)
        context = gx.get_context(mode="file", context_root_dir=folder)
        sys.path[:] = (
            path  # it appends its folder of plugins, from which any import would run code that nobody looked at
        )
        yield context
        writing.unlink()


def _mend(folder: Path) -> None:
    (folder / "great_expectations.yml").unlink(missing_ok=True)
    for path in (path for place in (*DEFINITIONS, RESULTS[0]) for path in (folder / place).rglob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            path.unlink()


def _bounded(
    name: str, column: str, low: float | None, high: float | None, *, only_warn: bool, mostly: float = 1.0
) -> Any:
    """An expectation of bounds; a highest value of -1 stands for naming no other document."""
    rest = {"meta": {"name": name}, "mostly": mostly, "severity": "warning" if only_warn else "critical"}
    if high == -1:
        return ExpectNoOtherDocument(column=column, **rest)
    return gx.expectations.ExpectColumnValuesToBeBetween(column=column, min_value=low, max_value=high, **rest)


def _adding(metric: str) -> Callable[[Any, Any], Any] | None:
    """How two values of a metric are added up; None where they cannot be."""
    if metric.startswith(OF_ALL_ROWS):
        return None
    return ADDED.get(metric) or ADDED.get(f".{metric.rpartition('.')[2]}")


def _type(kind: str, home: Path, code: Mapping[str, str]) -> str:
    """The registered type of an expectation; an import path is loaded from the plugins of the home, and from nowhere else.

    `code` has the sha256 of each file as the suite was read. Raises ValueError for another one, and for one that does not load.
    """
    match = IMPORT_PATH.fullmatch(kind)
    if not match:
        return kind
    module = ModuleType(f"headway_plugin_{match[1]}")
    sys.modules[module.__name__] = module
    file = f"{match[1]}.py"
    text = plugin(home, file)
    if hashlib.sha256(text).hexdigest() != code[file]:
        raise ValueError(f"{file} of the plugins was changed since the suite was read: start the run again")
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except Exception as error:
        raise ValueError(f"{file} of the plugins cannot be loaded: {type(error).__name__}: {error}") from error
    replaced = [kind for kind, shipped in SHIPPED.items() if get_expectation_impl(kind) is not shipped]
    for each in replaced:
        register_expectation(SHIPPED[each])
    if replaced:
        raise ValueError(f"Great Expectations has {', '.join(replaced)} of its own: give the class another name")
    made = getattr(module, match[2], None)
    registered = getattr(made, "expectation_type", None)
    if not (isinstance(made, type) and issubclass(made, gx.expectations.Expectation)):
        raise ValueError(f"{match[1]}.py of the plugins has no Expectation {match[2]}")
    return str(registered)
