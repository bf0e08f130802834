"""What the report of one retraining run shows: plain frozen values, and how numbers are written.

Where the values come from is page.py, how they look templates/run.html and run_charts.py, and what stages published as JSON
published.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tasks.artifacts import Check, Value
from tasks.report.published import (
    Champion,
    ComparisonReport,
    EvaluationReport,
    LossPoint,
    Parity,
    QualificationReport,
    TokensReport,
    TrainingReport,
    ValidationReport,
    Variants,
)

RunStatus = Literal["completed", "gate_closed", "failed", "cancelled", "waiting"]
StageStatus = Literal["ran", "reused", "failed", "gate_closed", "cancelled", "pending", "not_run"]


class External(Value):
    """A run in another system. `url` may be empty: then only the id is shown."""

    id: str
    url: str | None = None


class JobSummary(Value):
    """The job that a stage submitted."""

    id: str
    folder: str
    submissions: int = 1
    attempts: int = 1
    """Starts of the program, restarts among them."""
    adopted: bool = False
    """Whether a job of an orchestrator that died was taken over."""
    resumed_from_step: int | None = None
    excluded_nodes: tuple[str, ...] = ()
    """Machines that were left out after a failure that named them."""


class StageReport(Value):
    """One stage, as it went."""

    name: str
    status: StageStatus
    seconds: float | None = None
    key: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    metrics: Mapping[str, Any] = {}
    checks: tuple[Check, ...] = ()
    job: JobSummary | None = None


class ErrorReport(Value):
    """What ended the run early."""

    type: str
    stage: str = ""
    message: str
    remedy: str = ""


class Node(Value):
    """An artifact or an endpoint in the lineage. `created` is UTC, ISO 8601."""

    ref: str
    kind: str
    name: str
    version: str | None = None
    stage: str | None = None
    created: str | None = None
    uri: str | None = None
    commit: str | None = None
    config_digest: str | None = None
    count: int = 1
    """How many versions it stands for, where a large lineage is drawn."""


class Edge(Value):
    """`output` was made from `input`, or under it (`context`); both are references."""

    output: str
    input: str
    how: str = "input"


class Lineage(Value):
    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()


class EndpointReport(Value):
    """Where the model is served; `model` is the reference of the model."""

    ref: str
    url: str
    model: str


class Sample(Value):
    """What the endpoint answered."""

    prompt: str
    completion: str


class RunReport(Value):
    """One retraining run, as far as it came. What is None or empty is left out of the page."""

    title: str
    status: RunStatus
    started: str
    """UTC, ISO 8601."""
    seconds: float
    dataset: str
    config_digest: str
    config: dict[str, Any]
    commit: str | None = None
    dirty: bool | None = None
    flow_run: External | None = None
    mlflow_run: External | None = None
    stages: tuple[StageReport, ...] = ()
    error: ErrorReport | None = None
    loss: tuple[LossPoint, ...] = ()
    training: TrainingReport | None = None
    validation: ValidationReport | None = None
    tokens: TokensReport | None = None
    qualification: QualificationReport | None = None
    evaluation: EvaluationReport | None = None
    champion: Champion | None = None
    comparison: ComparisonReport | None = None
    pages: Mapping[str, str] = {}
    """Other pages about the run, by name: where they lie from the report's own folder."""
    parity: Parity | None = None
    variants: Variants | None = None
    lineage: Lineage = Lineage()
    endpoint: EndpointReport | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def model(self) -> str:
        """Reference of the served model, or the name of the one to be trained; empty where neither is known."""
        if self.endpoint:
            return self.endpoint.model
        training = self.config.get("training")
        return str(training.get("model", "")) if isinstance(training, dict) else ""

    @property
    def resumed_steps(self) -> tuple[int, ...]:
        """Steps at which a job went on from a checkpoint."""
        jobs = (stage.job for stage in self.stages)
        return tuple(job.resumed_from_step for job in jobs if job and job.resumed_from_step is not None)


def number(value: object) -> str:
    """A value for people: about four digits, thousands with commas; what is no number as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value == 0 or 1000 <= abs(value) < 1e15 or (abs(value) < 1000 and value == int(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def percent(share: float) -> str:
    """A share in percent with one decimal place."""
    return f"{share:.1%}".replace("-", "\u2212")


def duration(seconds: float) -> str:
    """Seconds for people: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def short(ref: str) -> str:
    """A reference with the first eight digits of its version."""
    name, at, version = ref.rpartition("@")
    return f"{name}{at}{version[:8]}" if at else ref
