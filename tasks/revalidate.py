"""What a revalidation found -> Revalidation: the verdict on a champion, `revalidation.json`, and the page of its evidence.

`verdict` judges, and is always run; the parts are measured before it, by stages of their own. How a loss is judged is
tasks/evaluation, how the page looks is tasks/report/revalidation/report.py. See docs/revalidation.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tasks.artifacts import Check, Dataset, Drift, Evaluation, Model, Revalidation, Value
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.revalidation import RevalidationConfig
from tasks.evaluation.performance import bigram_checks, compared, loss_checks
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import fetch, publish, scratch
from tasks.report.revalidation.report import PAYLOAD, figures, write_evidence

SCHEMA = "headway/revalidation/1"
SAMPLED, DIGITS = 500, 16
"""Of the hashes of documents that a note keeps."""
MOST_SHARED = 0.1
"""Of the documents of two windows: two that share more are one."""
PartName = Literal["integrity", "data", "drift", "performance", "service"]


class Part(Value):
    """One of the things that a verdict rests on."""

    name: PartName
    status: Literal["passed", "failed", "insufficient", "absent"]
    said: str
    checks: tuple[Check, ...] = ()


class Found(Value):
    """What was found before the verdict, besides what is measured on documents."""

    integrity: Part
    data: Part = Part(name="data", status="absent", said="not looked at")
    reference: str = ""
    """Reference of the dataset that the champion was promoted on; empty where nobody knows it any more."""
    same_data: bool = False
    """Whether the new data is the reference."""
    lacking: str = ""
    """Why nothing could be measured on the data, where it could not."""
    service: dict[str, Any] | None = None
    """service.json of the endpoint that stands out most; None where none writes its outputs."""
    degraded_before: tuple[str, ...] = ()
    """References of the datasets on which this champion was found degraded without a break, oldest first."""
    documents_before: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """A sample of the held-out documents of earlier datasets, as `sampled` draws it, by reference."""


@stage(
    version=1,
    expires=lambda record, arguments: True,
    shown=Shown(headlines=("loss_since_promotion", "drift_p_value", "domain_auc")),
)
def verdict(
    model: Model,
    dataset: Dataset,
    drift: Drift | None,
    scores: Evaluation | None,
    promotion: Evaluation | None,
    config: RevalidationConfig,
    evaluation: EvaluationConfig,
    comparison: ComparisonConfig,
    *,
    evidence: Found,
) -> Revalidation:
    """Judge a champion by all parts, and publish the evidence. `scores` are of the new data, `promotion` of its promotion."""
    drifted = _json(fetch(drift) / "drift.json") if drift else None
    measured = None
    if scores and promotion:
        scored_by = scores.subject.ref
        measured = compared(
            _evaluated(scores), _evaluated(promotion), config.performance, evaluation, scored_by=scored_by
        )
    checks = performance_checks(scores, measured, config, evaluation, comparison)
    parts = (
        evidence.integrity,
        evidence.data,
        drift_part(drifted, evidence, config),
        performance_part(measured, checks, evidence),
        service_part(evidence.service, looked_at=evidence.data.status == "passed"),
    )
    given = verdict_of(parts)
    documents = sampled(_evaluated(scores)["documents"].get("hashes", ())) if scores else ()
    before = evidence.degraded_before
    same = counted_before(dataset.ref, documents, evidence)
    window: dict[str, Any] = window_of(given, same or dataset.ref, before, of=config.windows)
    if same:
        window["shares_documents_with"] = same
    payload = {
        "schema": SCHEMA,
        "model": model.ref,
        "dataset": dataset.ref,
        "reference": evidence.reference,
        "verdict": given,
        "why": list(why(parts, given)),
        "parts": [part.model_dump(mode="json") for part in parts],
        "drift": drifted,
        "performance": measured,
        "service": evidence.service,
        "window": window,
        "documents": list(documents),
        "drift_alarms_per_year": config.drift_alarms_per_year(),
        "acts": acts(given, same or dataset.ref, before, of=config.windows),
    }
    return _published(payload, parts, model, scores)


def verdict_of(parts: Sequence[Part]) -> Literal["valid", "degraded", "invalid", "unknown"]:
    """The word for all parts together. What is not what was signed is invalid whatever it can do."""
    status = {part.name: part.status for part in parts}
    if status["integrity"] == "failed":
        return "invalid"
    if "failed" in (status["drift"], status["performance"], status["service"]):
        return "degraded"
    return "valid" if (status["data"], status["performance"]) == ("passed", "passed") else "unknown"


def window_of(given: str, dataset: str, before: Sequence[str], *, of: int) -> dict[str, Any]:
    """Which of how many in a row this is, and on which data. A valid one ends the row, one on the same data is no new one."""
    data = () if given == "valid" else tuple(before)
    if given == "degraded" and dataset not in data:
        data = (*data, dataset)
    return {"number": len(data), "of": of, "data": list(data)}


def acts(given: str, dataset: str, before: Sequence[str], *, of: int) -> bool:
    """Whether `model.degraded` is said: enough in a row, and this one on data that was not looked at in the row before."""
    return given == "degraded" and dataset not in before and len(before) + 1 >= of


def sampled(hashes: Sequence[str]) -> tuple[str, ...]:
    """The lowest hashes of some documents, cut: of two datasets they say how many documents both have (Broder, On the
    resemblance and containment of documents, 1997)."""
    return tuple(sorted({each[:DIGITS] for each in hashes})[:SAMPLED])


def counted_before(dataset: str, documents: Sequence[str], result: Found) -> str:
    """Another dataset of the row that shares more than MOST_SHARED of its documents with this one; empty without one."""
    others = (each for each in result.degraded_before if each != dataset)
    return next((each for each in others if shared(documents, result.documents_before.get(each, ())) > MOST_SHARED), "")


def shared(one: Sequence[str], other: Sequence[str]) -> float:
    """Share of the documents of either side that are on both, by the samples of both; 0 where one of them is not known."""
    if not one or not other:
        return 0.0
    lowest = sorted({*one, *other})[: max(min(len(one), len(other)), 1)]
    return len({*lowest} & {*one} & {*other}) / len(lowest)


def why(parts: Sequence[Part], given: str) -> tuple[str, ...]:
    """The sentences that the verdict rests on."""
    if given == "valid":
        return ("Nothing speaks against it.",)
    wanted = ("failed",) if given in ("invalid", "degraded") else ("failed", "insufficient")
    return tuple(f"{part.name}: {part.said}" for part in parts if part.status in wanted)


def drift_part(payload: Mapping[str, Any] | None, result: Found, config: RevalidationConfig) -> Part:
    """What the drift of the data says, and how often it says so of an unchanged champion in a year."""
    if payload is None:
        text = "the same data that it was promoted on" if result.same_data else "not measured"
        return Part(name="drift", status="passed" if result.same_data else "absent", said=text)
    moved = payload["verdict"] == "drift"
    check = Check(
        name="drift, smallest corrected p value",
        measured=payload["p_value"],
        limit=f"> {payload['false_alarm_rate']:.4g}",
        passed=not moved,
        remedy="Look at what moved. Fix broken data at its source; train on other new data: `headway retrain`. "
        "revalidation.drift.false_alarm_rate is the share of unchanged data that may be called drift; with "
        f"{config.windows_per_year} revalidations a year, {config.windows} in a row, that is "
        f"{config.drift_alarms_per_year():.1%} of unchanged champions a year: revalidation.false_alarms_per_year chooses it.",
    )
    status: Literal["failed", "insufficient", "passed"]
    status = "failed" if moved else "insufficient" if payload["verdict"] == "insufficient" else "passed"
    return Part(name="drift", status=status, said=_moved(payload) if moved else payload["why"], checks=(check,))


def _moved(payload: Mapping[str, Any]) -> str:
    """The columns that moved, by name: how far each did is a line of the evidence."""
    names = [column["name"] for column in payload["columns"] if column["verdict"] == "drift"]
    return f"{len(names)} of {len(payload['columns'])} columns moved: {', '.join(names)}"


def performance_checks(
    scores: Evaluation | None,
    measured: Mapping[str, Any] | None,
    config: RevalidationConfig,
    evaluation: EvaluationConfig,
    comparison: ComparisonConfig,
) -> tuple[Check, ...]:
    """What the champion must keep to on the new data; nothing where it was not measured."""
    if scores is None or measured is None:
        return ()
    return (
        *bigram_checks(scores.metrics, evaluation, comparison),
        *loss_checks(measured, config.performance, comparison),
    )


def performance_part(measured: Mapping[str, Any] | None, checks: tuple[Check, ...], result: Found) -> Part:
    """How the champion does on the new data."""
    if measured is None:
        if not result.lacking:
            return Part(name="performance", status="absent", said="not looked at")
        lacking = Check(name="documents to measure on", measured=result.lacking, limit="enough", passed=False)
        return Part(name="performance", status="insufficient", said=result.lacking, checks=(lacking,))
    new, before, loss = measured["new"], measured["promotion"], measured["loss"]
    failed = [check.name for check in checks if check.outcome == "failed"]
    unsure = [check.name for check in checks if check.outcome == "insufficient"]
    text = (
        f"{new['bits_per_byte']:.4f} bits per byte, {before['bits_per_byte']:.4f} at its promotion: a loss of "
        f"{loss['estimate']:.1%} ({loss['low']:.1%} to {loss['high']:.1%})"
    )
    text += f"; not kept: {', '.join(failed)}" if failed else ""
    text += f"; too wide an interval to judge by: {', '.join(unsure)}" if unsure else ""
    status: Literal["failed", "insufficient", "passed"] = "failed" if failed else "insufficient" if unsure else "passed"
    return Part(name="performance", status=status, said=text, checks=checks)


def service_part(payload: Mapping[str, Any] | None, *, looked_at: bool = True) -> Part:
    """What the answers of the endpoint say."""
    if payload is None:
        text = "no endpoint writes down what it answers" if looked_at else "not looked at"
        return Part(name="service", status="absent", said=text)
    exists = payload["verdict"] == "anomaly"
    moved = [column["title"] or column["name"] for column in payload["columns"] if column["verdict"] == "anomaly"]
    requests = f"{payload['requests']} requests since the last revalidation, {payload['reference_requests']} before"
    check = Check(
        name=f"answers of endpoint/{payload['endpoint']}, smallest corrected p value",
        measured=payload["p_value"],
        limit="as before",
        passed=not exists,
        remedy="Look at what it is asked, and at its log. `headway endpoint list` shows what is served.",
    )
    text = f"not as before: {', '.join(moved) or payload['endpoint']}; {requests}" if exists else requests
    status: Literal["failed", "insufficient", "passed"]
    status = "failed" if exists else "insufficient" if payload["verdict"] == "insufficient" else "passed"
    return Part(name="service", status=status, said=text, checks=() if status == "insufficient" else (check,))


def _evaluated(scores: Evaluation) -> dict[str, Any]:
    folder = fetch(scores)
    return {name: _json(folder / f"{name}.json") for name in ("evaluation", "documents")}


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _published(payload: dict[str, Any], parts: Sequence[Part], model: Model, scores: Evaluation | None) -> Revalidation:
    """`revalidation.json`, its page and its pictures, as the artifact that says the verdict."""
    with scratch() as folder:
        (folder / PAYLOAD).write_text(json.dumps(payload, indent=1))
        write_evidence(folder, payload)
        figures(folder, payload)
        # What runs are compared by; what was not measured is left out
        drift, performance = payload["drift"] or {}, payload["performance"]
        result = {
            "drift_p_value": drift.get("p_value"),
            "domain_auc": (drift.get("classifier") or {}).get("auc"),
            "loss_since_promotion": performance["loss"]["estimate"] if performance else None,
            "loss_low": performance["loss"]["low"] if performance else None,
            "loss_high": performance["loss"]["high"] if performance else None,
            "bits_per_byte": scores.metrics["bits_per_byte"] if scores else None,
            "window": float(payload["window"]["number"]),
        }
        metrics = {name: value for name, value in result.items() if value is not None}
        return publish(
            folder,
            Revalidation,
            name=model.name,
            metrics=metrics,
            checks=tuple(check for part in parts for check in part.checks),
            subject=model,
            verdict=payload["verdict"],
        )
