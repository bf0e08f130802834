"""The champion of a model against the newest data: every byte verified, the data compared with what it learned, then measured.

It moves no ref, and stops only what serves changed files. Each stage is a file of tasks/; what a verdict leads to is `conclude`:
events, a note that alerts and the next window read, MLflow, Prefect's page. See docs/revalidation.md.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

from prefect import flow
from prefect.states import Completed

from flows.support.inputs import (
    NOTHING,
    Config,
    Overrides,
    Preset,
    Where,
    configured,
    content_of,
    datasets,
    resolve,
    setting,
    tokenized,
    tokenizer_given,
    tokenizer_of_tuned,
    validated,
)
from flows.support.prefect_page import shown_lifecycle
from flows.support.prefect_run import covered_elsewhere, named, require_dataset, started_by
from tasks.artifacts import (
    Checkpoint,
    Dataset,
    Drift,
    Evaluation,
    Model,
    Revalidation,
    Validation,
    parse_ref,
    unqualified,
)
from tasks.common.errors import Unknown
from tasks.config.flows import RevalidateConfig
from tasks.config.revalidation import ServiceConfig
from tasks.evaluate import evaluate
from tasks.events.event import Event, EventName
from tasks.events.ledger import Ledger
from tasks.measure_drift import measure_drift
from tasks.orchestration.result import RevalidationResult
from tasks.orchestration.run import Lifecycle
from tasks.registry.model_integrity import serving
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import (
    answers_judged,
    champions,
    degraded_in_a_row,
    documents_looked_at,
    learnt_from,
    note_revalidation,
)
from tasks.report.revalidation.report import FILE as PAGE
from tasks.report.revalidation.report import evidence_markdown, evidence_of
from tasks.revalidate import Found, Part, verdict
from tasks.serving.monitor.anomalies import anomalies
from tasks.storage.store import Store, find
from tasks.verify_integrity import integrity

GRAVEST = ("anomaly", "none", "insufficient")
"""Of several endpoints, whose answers are told of."""
STAGES = ("integrity", "validate", "drift", "preprocess", "evaluate", "verdict")


@flow(  # type: ignore[untyped-decorator]
    name="revalidate",
    flow_run_name=lambda: named(setting(RevalidateConfig, "model")),
    validate_parameters=False,
)
def revalidate(
    dataset: str,
    preset: Preset = "",
    where: Where = "",
    cluster: str = "",
    overrides: Overrides = (),
    cause: str = "",
    config: Config = NOTHING,
) -> Revalidation | None:
    """Verify the champion of a model, compare new data with what it learned, measure it, and judge it.

    Raises GateFailed when it is degraded, or nothing could be said; IntegrityError when it is not what was signed.

    Args:
        dataset: NAME for the newest version of a dataset, or dataset/NAME@VERSION. `headway dataset list` shows them.
        preset: The shipped configuration that all other settings come from, the model above all. Empty: the deployment's.
        where: The shipped configuration that says where jobs run, on top of the preset. Empty: where the preset says.
        cluster: Name of a Prefect block `Headway cluster`, whose settings count over `where`. Empty: none.
        overrides: Settings that differ, each as A.B=VALUE, like --set of the command line: training.model=tiny.
        cause: The events that asked for this run. Leave it empty: who starts a run by events fills it in.
        config: The same by sections, as JSON: what it names counts instead of the preset's, and `overrides` instead of it.
    """
    config = configured(RevalidateConfig, config, preset, where, overrides, cluster=cluster)
    with started_by("run", f"revalidate {config.model} on dataset {dataset}", cause=cause, cluster=cluster):
        if holder := covered_elsewhere(cause):
            return Completed(message=f"nothing done: flow run {holder} covers the same events")  # type: ignore[no-any-return]
        require_dataset(cause, dataset)
        with shown_lifecycle("revalidate", config, subject=config.model, stages=STAGES) as run:
            return looked_after(run, dataset, config)


def looked_after(run: Lifecycle, name: str, config: RevalidateConfig) -> Revalidation:
    """The stages in their order; whatever is found, a verdict is published before it is raised."""
    champion, given = champion_of(run.store, config.model), resolve(name)
    settings = (config.revalidation, config.evaluation, config.comparison)
    sound = integrity(champion, config.revalidation.integrity)
    value = Found(
        integrity=Part(
            name="integrity", status="passed" if sound.passed else "failed", said=sound.said, checks=sound.checks
        ),
        reference=(learnt_from(run.store, champion.ref) or "") if sound.passed else "",
        degraded_before=degraded_in_a_row(run.store, champion.ref),
        documents_before=documents_looked_at(run.store, champion.ref),
    )
    if not sound.passed:
        conclude(run, verdict(champion, given, None, None, None, *settings, evidence=value))
        sound.require()
    validation = validated(given, config.validation, config.preprocessing, config.cluster)
    value = value.model_copy(update={"data": data_part(validation)})
    if not validation.passed:
        conclude(run, verdict(champion, given, None, None, None, *settings, evidence=value))
        validation.require()
    checkpoint = checkpoint_of(run.store, champion)
    promoted = promotion_scores(run.store, champion, checkpoint)
    drift, same = drift_of(checkpoint, validation.require(), value.reference, config)
    scores, lacking = measured(run.store, checkpoint, validation, config)
    service = service_of(run, champion, config.revalidation.service)
    value = value.model_copy(update={"same_data": same, "lacking": lacking, "service": service})
    result = verdict(champion, given, drift, scores, promoted, *settings, evidence=value)
    conclude(run, result, scores=scores, promoted=promoted)
    result.require()
    return result


def champion_of(store: Store, model: str) -> Model:
    """The champion, also when its manifest is gone. Raises Unknown, naming the models that have one."""
    ref = read_ref(store, f"{model}/champion")
    if ref is None:
        known = ", ".join(champions(store)) or "none yet: `headway retrain` makes one"
        raise Unknown(f"model/{model} has no champion", remedy=f"Models that have one: {known}.")
    _, name, version = parse_ref(ref)
    return Model(name=name, version=version, uri="")


def checkpoint_of(store: Store, champion: Model) -> Checkpoint:
    """What this champion was exported from: another one may become champion while it is measured. Raises Unknown."""
    inputs = find(store, *parse_ref(champion.ref)).provenance.inputs
    ref = next((each for each in inputs if each.startswith("checkpoint/")), "")
    if not ref:
        raise Unknown(f"{champion.ref} names no checkpoint", remedy="Export it again: `headway retrain --from export`.")
    _, name, version = parse_ref(ref)
    return Checkpoint(name=name, version=version, uri="")


def promotion_scores(store: Store, champion: Model, checkpoint: Checkpoint) -> Evaluation:
    """The evaluation under which the champion was exported. Raises Unknown when that is gone."""
    context = find(store, *parse_ref(champion.ref)).provenance.context
    under = next((ref for ref in context if ref.startswith("evaluation/")), None)
    if under is None:
        raise Unknown(f"{champion.ref} names no evaluation", remedy="Export it again: `headway retrain --from export`.")
    manifest = find(store, *parse_ref(under))
    return Evaluation(
        name=manifest.provenance.name,
        version=manifest.version,
        uri=store.uri_of(manifest),
        metrics=manifest.provenance.metrics,
        subject=checkpoint,
    )


def data_part(validation: Validation) -> Part:
    """What the data stage says: the checks that closed its gate or warned."""
    entries = tuple(check for check in validation.checks if check.outcome != "passed")
    failed = [check.name for check in entries if not check.passed]
    counted = f"{validation.metrics['documents']:.0f} documents, {validation.metrics['quarantined']:.0f} set aside"
    text = f"the data is no measure: {', '.join(failed)}" if failed else counted
    return Part(name="data", status="failed" if failed else "passed", said=text, checks=entries)


def drift_of(
    checkpoint: Checkpoint, accepted: Dataset, reference: str, config: RevalidateConfig
) -> tuple[Drift | None, bool]:
    """New data against what the champion learnt from, and whether both are the same; no drift where nobody knows that now."""
    if not reference or accepted.ref == reference:
        return None, bool(reference)
    try:
        (before,) = datasets((reference,))
    except Unknown:
        return None, False
    text, cluster = config.validation.text_field, unqualified(config.cluster.for_data)
    return measure_drift(accepted, before, config.revalidation.judged_drift(), checkpoint, text, on=cluster), False


def measured(
    store: Store, checkpoint: Checkpoint, validation: Validation, config: RevalidateConfig
) -> tuple[Evaluation | None, str]:
    """The champion's checkpoint on the held-out split of the data; None, and why, where that is too small."""
    fewest = config.evaluation.min_documents
    # Documents of the held-out split before any was set aside: a split without one is refused by the next stage.
    folder = store.fetch(find(store, *parse_ref(validation.ref)))
    held = int(json.loads((folder / "validation.json").read_text(encoding="utf-8"))["heldout"])
    if held:
        own = tokenizer_given(store, config.preprocessing) or tokenizer_of_tuned(store, checkpoint)
        tokens = tokenized(validation, config.preprocessing, config.cluster, own)
        held = int(tokens.metrics["heldout_documents"])
    if held < fewest:
        return None, f"{held} documents held out, and a verdict needs evaluation.min_documents = {fewest}"
    files, suites = datasets(config.evaluation.files), content_of(config.evaluation.paths)
    return evaluate(checkpoint, tokens, config.evaluation, (), files, suites, on=unqualified(config.cluster)), ""


def service_of(run: Lifecycle, champion: Model, config: ServiceConfig) -> dict[str, Any] | None:
    """What is unusual in the answers of endpoints since the last revalidation; None where none writes them down.

    Several endpoints of one champion share the false-alarm rate (Bonferroni): one of many stands out by chance more often.
    """
    since = answers_judged(run.store, champion.ref, fewest=config.min_requests)
    names = list(serving(run.home, champion.ref))
    judgements = (anomalies(run.home, name, since=since, config=config.shared_by(len(names))) for name in names)
    return min((each for each in judgements if each), key=lambda each: GRAVEST.index(each["verdict"]), default=None)


def conclude(
    run: Lifecycle, revalidation: Revalidation, *, scores: Evaluation | None = None, promoted: Evaluation | None = None
) -> None:
    """Tell everybody who must know of a verdict. Events come before the note: who is killed in between says them again, and they
    are taken once."""
    folder, payload = evidence_of(run.store, revalidation.ref)
    result = RevalidationResult(
        ref=revalidation.ref,
        champion=payload["model"],
        verdict=payload["verdict"],
        why=payload["why"],
        parts=[{key: part[key] for key in ("name", "status", "said")} for part in payload["parts"]],
        window=payload["window"],
        acts=payload["acts"],
        passed=payload["verdict"] == "valid",
        evaluation=scores.ref if scores else None,
        bits_per_byte=scores.metrics["bits_per_byte"] if scores else None,
        bits_per_byte_at_promotion=promoted.metrics["bits_per_byte"] if promoted else None,
        evidence=str(folder / PAGE),
    )
    tags = {**run.result.tags, "headway.verdict": result.verdict}
    run.result = replace(run.result, revalidation=result, evidence=evidence_markdown(payload), tags=tags)
    if run.run:
        for path in (folder / PAGE, *sorted(folder.glob("*.png"))):
            run.need_spool().log_file(run.run, path)
    names: tuple[EventName, ...] = (
        ("model.revalidated", "model.degraded") if payload["acts"] else ("model.revalidated",)
    )
    data = {
        "revalidation": revalidation.ref,
        "verdict": payload["verdict"],
        "dataset": payload["dataset"],
        "model": payload["model"],
    }
    subject, now = payload["model"].partition("@")[0], time.time()
    events = [
        Event(
            name=name,
            subject=subject,
            source="headway/revalidate",
            identity=f"{name} {revalidation.ref}",
            object=revalidation.ref,
            occurred=now,
            channel="headway",
            data=data,
        )
        for name in names
    ]
    Ledger(run.home).receive_all(events)
    noted = {key: value for key, value in asdict(result).items() if key != "evidence"}
    noted |= {"dataset": payload["dataset"], "flow_run": (run.flow_run or {}).get("url")}
    noted |= {"answers": (payload["service"] or {}).get("requests", 0), "documents": payload["documents"]}
    note_revalidation(run.journal, revalidation.name, noted)
