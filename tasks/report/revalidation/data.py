"""What a revalidation published, as far as its page shows it: `revalidation.json`, with `drift.json` and `service.json` in it.

Read leniently: keys that are not known here are ignored, a value that is no finite number counts as not measured, and a part that
was not done is None. Who measures and judges does not live here, nor how it looks (report.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tasks.artifacts import Check
from tasks.report.published import Published, PublishedCheck

Verdict = Literal["valid", "degraded", "invalid", "unknown"]
Finding = Literal["drift", "anomaly", "none", "insufficient"]
Status = Literal["passed", "failed", "insufficient", "absent"]


NOT_MEASURED = "not measured"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]
"""None: not measured."""


class FoundCheck(PublishedCheck):
    """A check whose measured value may be missing."""

    measured: Annotated[
        float | str, BeforeValidator(lambda value: NOT_MEASURED if _finite(value) is None else value)
    ] = NOT_MEASURED


class Distribution(Published):
    """Shares of a whole by label, in the reference and in the new data."""

    labels: tuple[str, ...] = ()
    reference: tuple[Measured, ...] = ()
    new: tuple[Measured, ...] = ()


class Column(Published):
    """One statistic of the new data against the reference."""

    name: str
    title: str = ""
    unit: str = ""
    value: Measured = None
    threshold: Measured = None
    p_value: Measured = None
    """Corrected for the number of columns."""
    verdict: Finding = "insufficient"
    reference: Measured = None
    new: Measured = None
    """What people would call the column's value in either, for example the mean."""
    moved: tuple[str, ...] = ()
    histogram: Distribution | None = None
    null: tuple[Measured, ...] = ()
    """The statistic after both sides were mixed and split at random."""

    @property
    def found(self) -> bool:
        return self.verdict in ("drift", "anomaly")


class Feature(Published):
    """A word or token by which the classifier tells the two apart. A positive weight speaks for the new data."""

    feature: str
    weight: Measured = None
    reference: Measured = None
    new: Measured = None


class Classifier(Published):
    """Can a classifier tell new from reference documents? An area under the curve of 0.5 is guessing."""

    auc: Measured = None
    threshold: Measured = None
    p_value: Measured = None
    features: tuple[Feature, ...] = ()


class Documents(Published):
    reference: int = 0
    new: int = 0
    looked_at_reference: int = 0
    looked_at_new: int = 0


class DriftReport(Published):
    """`drift.json`."""

    reference: str = ""
    new: str = ""
    verdict: Finding = "insufficient"
    why: str = ""
    false_alarm_rate: Measured = None
    splits: int = 0
    p_value: Measured = None
    documents: Documents = Documents()
    columns: tuple[Column, ...] = ()
    classifier: Classifier | None = None


class Score(Published):
    """The champion on one body of text, with the interval of its bits per byte."""

    bits_per_byte: Measured = None
    low: Measured = None
    high: Measured = None
    perplexity: Measured = None
    documents: int | None = None


class Loss(Published):
    """Share by which the bits per byte lie over those at promotion; negative: under them."""

    estimate: Measured = None
    low: Measured = None
    high: Measured = None


class Slice(Published):
    """A kind of documents, for example those under 1 kB."""

    slice: str
    documents: int = 0
    reference_documents: int = 0
    new: Measured = None
    promotion: Measured = None
    loss: Loss | None = None
    status: Status = "insufficient"


class PerformanceReport(Published):
    """The champion on updated data against itself at promotion."""

    new: Score = Score()
    promotion: Score = Score()
    loss: Loss | None = None
    paired: int = 0
    """Documents that are the same in both."""
    confidence: Measured = None
    scored_by: str = ""
    slices: tuple[Slice, ...] = ()


class ServiceReport(Published):
    """`service.json`: what an endpoint answered since the last revalidation."""

    endpoint: str = ""
    model: str = ""
    since: Measured = None
    """Seconds since the epoch."""
    requests: int = 0
    reference_requests: int = 0
    verdict: Finding = "insufficient"
    p_value: Measured = None
    columns: tuple[Column, ...] = ()


class Part(Published):
    """One of integrity, data, drift, performance, service."""

    name: str
    status: Status = "absent"
    said: str = ""
    checks: tuple[FoundCheck, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


class Window(Published):
    """Which of how many revalidations in a row this is that found the model degraded, and on which data each."""

    number: int = 0
    of: int = 0
    data: tuple[str, ...] = ()
    shares_documents_with: str = ""
    """An earlier dataset of the row that this one has documents of: both are one window."""


class Evidence(Published):
    """`revalidation.json`."""

    model: str = ""
    dataset: str = ""
    reference: str = ""
    verdict: Verdict = "unknown"
    why: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    drift: DriftReport | None = None
    performance: PerformanceReport | None = None
    service: ServiceReport | None = None
    window: Window = Window()
    acts: bool = False
    """Whether `model.degraded` is said."""

    @property
    def name(self) -> str:
        """Name of the model, without kind and version."""
        return self.model.partition("/")[2].partition("@")[0] or self.model


def evidence(payload: Mapping[str, Any]) -> Evidence:
    """The content of `revalidation.json`. Raises ValueError when it is something else."""
    return Evidence.model_validate(_without_none(payload))


def _without_none(value: Any) -> Any:
    """Keys whose value is null fall back to what is said of them above."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list | tuple) else value
