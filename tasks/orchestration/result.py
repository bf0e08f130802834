"""What a flow run leaves for those who ask afterwards: the command line, the report, MLflow, Prefect's page.

`plain` is what the flow's command answers with `--json`. What became of each stage is tasks/orchestration/observers.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.artifacts import Endpoint


@dataclass(frozen=True)
class ChampionScore:
    """The champion that a new model was compared with."""

    ref: str
    """Reference of its checkpoint."""
    bits_per_byte: float


@dataclass(frozen=True)
class ValidationResult:
    """A verdict on a dataset, in references."""

    validation: str | None = None
    accepted: str | None = None
    quarantined: str | None = None
    checks: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class QualificationResult:
    """A verdict on a cluster, as tasks/registry/qualifications.py reads it back."""

    qualification: Mapping[str, Any] | None = None
    """Its reference, and the rates that it measured."""
    verdict: str | None = None
    sku: str | None = None
    expires: str | None = None
    nodes: list[dict[str, Any]] | None = None
    pairs: list[dict[str, Any]] | None = None
    reasons: list[dict[str, Any]] | None = None
    usable: list[str] | None = None
    excluded: list[dict[str, Any]] | None = None
    drained: list[dict[str, Any]] | None = None
    requests: list[dict[str, Any]] | None = None
    page: str | None = None
    """Where its page for people lies."""


@dataclass(frozen=True)
class RevalidationResult:
    """A verdict on a champion."""

    ref: str
    champion: str
    verdict: str
    why: list[str]
    parts: list[dict[str, str]]
    window: dict[str, Any]
    acts: bool
    passed: bool
    evaluation: str | None
    bits_per_byte: float | None
    bits_per_byte_at_promotion: float | None
    evidence: str
    """Where its page for people lies."""


@dataclass(frozen=True)
class RunResult:
    """Everything that a run leaves; what its flow does not make, or did not come to, stays empty."""

    dataset: str | None = None
    """The version that the run is about."""
    report: str | None = None
    """Where the report of the run lies."""
    approval: str = ""
    """Who approved what, and why, in a sentence."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """For the run in MLflow."""
    endpoint: Endpoint | None = None
    samples: Sequence[Mapping[str, str]] | None = None
    """What the endpoint goes on with after a few prompts."""
    openings: Sequence[str] = ()
    """Prompts of the corpus's kind of text: how a few of its held-out documents begin."""
    champion: ChampionScore | None = None
    comparison: Mapping[str, Any] | None = None
    """Champion against challenger, as tasks/evaluation/comparison.py writes it into comparison.json."""
    validation: ValidationResult = ValidationResult()
    qualification: QualificationResult = QualificationResult()
    revalidation: RevalidationResult | None = None
    evidence: str = ""
    """Of the revalidation, in Markdown."""

    def plain(self, flow: str, *, dataset: str | None) -> dict[str, Any]:
        """The fields of a flow's own in its command's answer, in their order. `dataset` stands for one that was not looked up."""
        named = {"dataset": self.dataset or dataset}
        if flow == "validate":
            return named | asdict(self.validation)
        if flow == "qualify":
            return asdict(self.qualification)
        if flow == "revalidate":
            return named | {"revalidation": asdict(self.revalidation) if self.revalidation else None}
        return named | {"endpoint": endpoint_fields(self.endpoint), "samples": self.samples}


def endpoint_fields(endpoint: Endpoint | None) -> dict[str, str] | None:
    """An endpoint in a command's answer and in the report."""
    return {"ref": endpoint.ref, "url": endpoint.url, "model": endpoint.model.ref} if endpoint else None
