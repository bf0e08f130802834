"""Settings of a revalidation: drift, performance, service. Part of the configuration of tasks/config.py."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from tasks.settings import Fraction, Positive, Settings


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
    """The domain classifier's area under the curve under which a difference is too small to be told."""
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
