"""What the report of a run shows of an evaluation beside its bits per byte, and of champion against challenger. Read leniently.

Written by tasks/jobs/evaluation/figures.py and tasks/evaluation/comparison.py; how it looks is section.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

Interval = tuple[float, float]


class Told(BaseModel):
    """Base: frozen, and keys that the report does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Share(Told):
    """A share of tokens with its interval, where there were documents enough for one."""

    estimate: float
    interval: Interval | None = None


class Bin(Told):
    """Tokens whose likeliest continuation was given about the same probability."""

    tokens: int
    probability: float
    accuracy: float


class Calibration(Told):
    """The expected calibration error, and the reliability curve."""

    error: float
    bins: tuple[Bin, ...] = ()


class PositionScore(Told):
    """One row of `positions`: tokens that were predicted with `from` to `to` tokens before them."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    tokens: int = 0
    bits_per_token: float | None = None
    interval: Interval | None = None
    joined: bool = False


class MeasuredContext(Told):
    """Tokens that the model takes, and how many of them were measured."""

    declared: int
    measured: int


class SliceScore(Told):
    """One row of `slices` in `evaluation.json`."""

    slice: str
    status: str = "measured"
    documents: int = 0
    bits_per_byte: float | None = None
    interval: Interval | None = None
    perplexity: float | None = None
    accuracy: Share | None = None
    calibration_error: float | None = None


class SuiteReport(Told):
    """One entry of `suites`."""

    metrics: Mapping[str, float] = {}
    samples: int = 0
    failed: str = ""


class Loss(Told):
    """The share by which this model is worse, with its interval."""

    estimate: float
    low: float
    high: float


class ComparedSlice(Told):
    """Both models on the same documents, in bits per byte; `loss` is None where there are too few documents."""

    slice: str
    status: str = "measured"
    documents: int = 0
    candidate: float | None = None
    champion: float | None = None
    loss: Loss | None = None
    candidate_accuracy: float | None = None
    champion_accuracy: float | None = None


class ComparisonReport(Told):
    """Champion against challenger."""

    candidate: str
    champion: str
    confidence: float = 0.95
    rows: tuple[ComparedSlice, ...] = ()
