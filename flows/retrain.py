"""The whole lifecycle, one call a stage: from a dataset to a served model.

Each stage is a file of tasks/ with the same name (next: tasks/train.py). How a stage is recorded and reused is tasks/stage.py;
who starts this flow is deployments/ (`headway retrain`).
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.closing import close
from flows.prefect_run import cancelled, flow_run
from tasks.artifacts import Cluster, Dataset, Endpoint, Evaluation, Pending, Tokens, parse_ref, unqualified
from tasks.benchmark import benchmark
from tasks.config import RetrainConfig
from tasks.deploy import deploy, sample
from tasks.evaluate import champion_checkpoint, compare, evaluate
from tasks.export import export
from tasks.lifecycle import current, lifecycle
from tasks.plan import plan
from tasks.preprocess import preprocess
from tasks.storage.store import find
from tasks.train import train
from tasks.validate import validate

STAGES = ("validate", "preprocess", "benchmark", "plan", "train", "evaluate", "export", "deploy")


@flow(name="retrain", flow_run_name="retrain-{dataset}", validate_parameters=True)  # type: ignore[untyped-decorator]
def retrain(
    dataset: str, config: RetrainConfig, from_stage: str | None = None, to_stage: str | None = None
) -> Endpoint | None:
    """Take the newest version of a dataset to a served model.

    `from_stage` and all later stages run again; stages after `to_stage` do not run. Raises GateFailed, JobFailed, IntegrityError,
    Missing; a ValueError names a mistake of the user's.
    """
    with lifecycle(
        "retrain",
        config,
        subject=config.training.model,
        stages=STAGES,
        first=from_stage,
        last=to_stage,
        cancelled=cancelled,
        flow_run=flow_run(),
        at_end=close,
    ):
        endpoint = chain(dataset, config)
        if not isinstance(endpoint, Endpoint):
            return None
        current().results |= {"endpoint": endpoint, "sample": sample(endpoint, config.export)}
        return endpoint


def chain(name: str, config: RetrainConfig) -> Endpoint:
    """The stages in their order."""
    validation = validate(resolve(name), config.validation)
    tokens = preprocess(validation.require(), config.preprocessing, under=validation, on=unqualified(config.cluster))
    cluster = benchmark(config.cluster, config.benchmark).require()
    limits = plan(tokens, config.training, config.planning, on=cluster).require()
    checkpoint = train(tokens, config.training, under=limits, on=cluster)
    scores = evaluate(checkpoint, tokens, config.evaluation, on=cluster)
    champion = champion_scores(scores, tokens, config, on=cluster)
    proven = compare(scores, champion, config.evaluation, config.comparison)
    model = export(proven, config.export, under=scores, on=cluster)
    return deploy(model, config.deployment)


def resolve(name: str) -> Dataset:
    """The dataset of a reference: NAME or dataset/NAME@VERSION. Raises Missing."""
    store = current().store
    manifest = find(store, *parse_ref(name, kind="dataset"))
    dataset = Dataset(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest))
    current().results["dataset"] = dataset.ref
    return dataset


def champion_scores(candidate: Evaluation, tokens: Tokens, config: RetrainConfig, *, on: Cluster) -> Evaluation | None:
    """The champion, measured by the same stage on the same held-out split; None when there is none yet."""
    champion = champion_checkpoint(config.training.model)
    if champion is None or isinstance(candidate, Pending):
        return None
    if champion.version == candidate.subject.version:
        return candidate
    return evaluate(champion, tokens, config.evaluation, on=on)


def preview(
    dataset: str, config: RetrainConfig, from_stage: str | None, to_stage: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """The dataset's version, and what a run would do, stage by stage, without doing it: a dry run needs no server."""
    with lifecycle(
        "retrain", config, subject=config.training.model, stages=STAGES, first=from_stage, last=to_stage, dry=True
    ) as run:
        chain(dataset, config)
        return run.results["dataset"], [outcome.plain() for outcome in run.outcomes.values()]
