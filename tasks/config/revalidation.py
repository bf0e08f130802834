"""Settings of a revalidation: drift, performance, service. Part of the configuration of tasks/config/flows.py."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from tasks.config.base import Fraction, Positive, Settings


class DriftConfig(Settings):
    """New data against the data that the champion was promoted on."""

    false_alarm_rate: float = Field(0.05, gt=0.0, le=0.5)
    """Share of windows of unchanged data that may be called drift, over all columns together."""
    min_documents: Positive = 100
    """Fewest documents on either side that a verdict may rest on; with fewer it is `insufficient`."""
    max_documents: Positive = 4000
    """Most documents of each side that the tests look at, drawn by the hash of their content. Totals are of all."""
    splits: int = Field(400, ge=100)
    """Times that reference and new data are mixed and split at random to calibrate the thresholds."""
    min_auc: float = Field(0.55, ge=0.5, lt=1.0)
    """The domain classifier's area under the curve under which a difference is too small to be reported."""
    seed: int = Field(1234, ge=0)
    """Of draws and splits."""

    @model_validator(mode="after")
    def _can_alarm(self) -> DriftConfig:
        """The smallest p value that splits can give is one by their number."""
        if self.false_alarm_rate * (self.splits + 1) < 1:
            needed = math.ceil(1 / self.false_alarm_rate) - 1
            raise ValueError(
                f"drift.false_alarm_rate {self.false_alarm_rate:g} needs at least {needed} splits, not {self.splits}"
            )
        return self


class PerformanceConfig(Settings):
    """The champion on updated data against itself at promotion. The limit of the whole is comparison's."""

    min_slice_documents: Positive = 20
    """Fewest documents on either side that a slice is judged by."""
    max_slice_loss: float = Field(0.25, ge=0.0)
    """Share by which the bits per byte of a slice may lie over those at promotion: the low end of the interval counts."""
    max_loss_interval: float = Field(0.2, gt=0.0)
    """Widest interval of the loss since promotion that a verdict may rest on; a wider one is `insufficient`."""


class ServiceConfig(Settings):
    """What an endpoint answered since the last revalidation, against what it answered before."""

    false_alarm_rate: float = Field(0.01, ge=0.001, le=0.5)
    """Share of unchanged windows that may be called an anomaly, over all columns together."""
    min_requests: Positive = 50
    """Fewest answers on either side that a verdict may rest on; with fewer it is `insufficient`. A model's own reference needs
    20."""
    max_error_share: Fraction = 0.2
    """Largest share of requests that may fail by the server's fault."""
    min_labels: Positive = 20
    """Fewest labels of answers (`POST /v1/feedback`) on either side that a verdict on their accuracy may rest on."""
    smallest_accuracy_loss: Fraction = 0.05
    """Smallest loss of the share of right answers that is worth telling, however certain it is."""
    reference: Literal["auto", "model", "answers"] = "auto"
    """What answers are compared with: `answers`, what the endpoint answered before; `model`, the `reference.json` of the model;
    `auto`, the first where there is enough of it, else the second."""

    def shared_by(self, endpoints: int) -> ServiceConfig:
        """The same with the part of the false-alarm rate that each of some endpoints is judged at."""
        return self.model_copy(update={"false_alarm_rate": self.false_alarm_rate / max(endpoints, 1)})


class IntegrityConfig(Settings):
    """What becomes of a champion whose files are not what was signed."""

    stop_endpoints: bool = True
    """Whether endpoints that serve from changed files are stopped: what they hold in memory may be mapped from them."""


class RevalidationConfig(Settings):
    """How a model is looked after once it serves. Changes nothing of a retraining run."""

    integrity: IntegrityConfig = IntegrityConfig()
    drift: DriftConfig = DriftConfig()
    performance: PerformanceConfig = PerformanceConfig()
    service: ServiceConfig = ServiceConfig()
    windows: Positive = 2
    """Revalidations in a row, each on other data, that must find the model degraded before `model.degraded` is said."""
    windows_per_year: Positive = 52
    """Revalidations of a champion in a year: what a false-alarm rate comes to in a year is said by it."""
    false_alarms_per_year: float | None = Field(None, gt=0.0, lt=1.0)
    """Share of unchanged champions that may be said to be degraded by drift alone within a year: `drift.false_alarm_rate` is then
    what comes to that. Without it `drift.false_alarm_rate` stands."""

    def judged_drift(self) -> DriftConfig:
        """How drift is judged: as set, or at the rate that comes to `false_alarms_per_year`, with splits enough for it."""
        if self.false_alarms_per_year is None:
            return self.drift
        rate = rate_for_year(self.false_alarms_per_year, windows=self.windows, per_year=self.windows_per_year)
        splits = max(self.drift.splits, math.ceil(20 / rate))
        return self.drift.model_copy(update={"false_alarm_rate": rate, "splits": splits})

    def drift_alarms_per_year(self) -> float:
        """Share of unchanged champions that drift alone says to be degraded within a year."""
        return alarms_per_year(
            self.judged_drift().false_alarm_rate, windows=self.windows, per_year=self.windows_per_year
        )


def alarms_per_year(rate: float, *, windows: int, per_year: int) -> float:
    """The chance of so many false alarms in a row among a year's independent comparisons at a rate.

    Exact: the distribution of the length of the row that stands, one comparison after the other.
    """
    standing, output = [1.0] + [0.0] * (windows - 1), 0.0
    for _ in range(per_year):
        output += standing[-1] * rate
        standing = [sum(standing) * (1 - rate), *(each * rate for each in standing[:-1])]
    return output


def rate_for_year(alarms: float, *, windows: int, per_year: int) -> float:
    """The false-alarm rate of a comparison, to four digits, that comes to `alarms` in a year; a half where none does."""
    low, high = 0.0, 0.5
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if alarms_per_year(middle, windows=windows, per_year=per_year) <= alarms else (low, middle)
        )
    return float(f"{low:.4g}") if low > 0 else high
