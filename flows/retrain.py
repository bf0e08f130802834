"""The whole lifecycle, one call a stage: from a dataset to a served model.

Each stage is a file of tasks/ with the same name (next: tasks/train.py). How a stage is recorded and reused is
tasks/orchestration/stage.py; who starts this flow is deployments/ (`headway retrain`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

from prefect import flow
from prefect.states import Completed

from flows.support.agreement import agreed, agreed_to_train
from flows.support.closing import close
from flows.support.continuing import require_possible, start_of, with_origin
from flows.support.data import tokenized, validated
from flows.support.evaluated import read_by_suites, with_suites
from flows.support.inputs import base_of, beside, checked, configured, mixed_in, tokenizer_of_base
from flows.support.prefect_run import (
    cancelled,
    covered_elsewhere,
    flow_run,
    named,
    require_dataset,
    setting,
    started_by,
    starters,
)
from flows.support.progress import PrefectProgress
from tasks.artifacts import Cluster, Endpoint, Evaluation, Model, Pending, Tokens, as_configured
from tasks.benchmark import benchmark
from tasks.config.continue_from import ContinueFrom
from tasks.config.flows import RetrainConfig
from tasks.deploy import deploy, samples, stands, terms
from tasks.evaluate import champion_checkpoint, compare, evaluate
from tasks.export import export
from tasks.orchestration.node_exclusion import require_proof
from tasks.orchestration.promotion import challenge
from tasks.orchestration.run import current, lifecycle
from tasks.orchestration.stage import recorded
from tasks.plan import plan
from tasks.registry.refs import place_of
from tasks.security.audit import acting
from tasks.train import train

StageName = Literal["validate", "preprocess", "benchmark", "plan", "train", "evaluate", "export", "deploy"]
STAGES: tuple[StageName, ...] = get_args(StageName)


def _name() -> str:
    return named(setting("training", "model"))


@flow(name="retrain", flow_run_name=_name, validate_parameters=False)  # type: ignore[untyped-decorator]
def retrain(
    dataset: str,
    config: RetrainConfig,
    from_stage: StageName | None = None,
    to_stage: StageName | None = None,
    cause: str = "",
    continue_from: ContinueFrom | None = None,
) -> Endpoint | None:
    """Take the newest version of a dataset to a served model.

    Raises GateFailed, JobFailed, IntegrityError, Missing; a ValueError names a mistake of the user's.

    Args:
        dataset: NAME for the newest version of a dataset, or dataset/NAME@VERSION. `headway dataset list` shows them.
        config: All settings of the run, one section a stage.
        from_stage: This stage and all later ones run again, although their results are recorded. Empty reuses what there is.
        to_stage: Stages after this one do not run. Empty runs all.
        cause: The events that asked for this run. Leave it empty: who starts a run by events fills it in.
        continue_from: Another run whose newest good checkpoint training begins with. Empty begins anew.
    """
    config = configured(RetrainConfig, config)
    continue_from = checked(ContinueFrom, continue_from) if continue_from else None
    with started_by("run", f"retrain {config.training.model} on dataset {dataset}", cause=cause):
        if holder := covered_elsewhere(cause):
            return Completed(message=f"nothing done: flow run {holder} covers the same events")  # type: ignore[no-any-return]
        require_dataset(cause, dataset)
        with lifecycle(
            "retrain",
            config,
            subject=config.training.model,
            stages=STAGES,
            first=from_stage,
            last=to_stage,
            cancelled=cancelled,
            flow_run=flow_run(),
            observers=(PrefectProgress(),),
            at_end=close,
        ) as run:
            run.starters = starters(run.store)
            with agreed(dataset, config, cause, continue_from) as agreed_on:
                return served(agreed_on, config, continue_from)


def served(dataset: str, config: RetrainConfig, continue_from: ContinueFrom | None) -> Endpoint | None:
    """The endpoint that serves the new model; None when the run was to stop before that."""
    endpoint = chain(dataset, config, continue_from)
    if not isinstance(endpoint, Endpoint):
        return None
    current().results |= {"endpoint": endpoint, "samples": samples(endpoint, config.export)}
    return endpoint


def chain(name: str, config: RetrainConfig, continue_from: ContinueFrom | None = None) -> Endpoint:
    """The stages in their order."""
    require_proof(config.cluster, config.benchmark)
    store = current().store
    require_possible(current().home, store, continue_from, config)
    base, tokenizer = base_of(store, config), tokenizer_of_base(store, config)
    mixed = mixed_in(store, name, config.training, heldout_fraction=config.preprocessing.heldout_fraction)
    files = read_by_suites(config.evaluation)
    validation = validated(name, config.validation, config.preprocessing, config.cluster)
    tokens = tokenized(validation, config.preprocessing, config.cluster, tokenizer)
    start = start_of(continue_from, config, tokens=tokens, base=base, mixed=mixed)
    qualified = benchmark(config.cluster, config.benchmark, training=config.training).require()
    cluster = as_configured(qualified, config.cluster)
    limits = plan(tokens, config.training, config.planning, config.execution, *base, on=cluster).require()
    handed, how = with_origin(beside(base, mixed), start), config.execution
    taking = start.taking if start else None
    known = partial(recorded, train, tokens, config.training, *handed, how=how, under=limits, on=cluster)
    with agreed_to_train(limits, config, handed, recorded=known):
        checkpoint = train(tokens, config.training, *handed, how=how, under=limits, on=cluster, taking=taking)
    others = with_suites(mixed, files)
    scores = evaluate(checkpoint, tokens, config.evaluation, *others, on=cluster)
    champion = champion_scores(scores, tokens, config, others, on=cluster)
    proven = compare(scores, champion, config.evaluation, config.comparison)
    model = export(proven, tokens, config.export, under=scores, on=cluster)
    with allowed(model, scores, config):
        return deploy(model, config.served)


def champion_scores(
    candidate: Evaluation, tokens: Tokens, config: RetrainConfig, others: tuple[Any, ...], *, on: Cluster
) -> Evaluation | None:
    """The champion, measured by the same stage on the same held-out split; None when there is none yet."""
    run = current()
    run.champion_place = place_of(run.store, f"{config.training.model}/champion")
    champion = champion_checkpoint(config.training.model)
    if champion is None or isinstance(candidate, Pending):
        return None
    if champion.version == candidate.subject.version:
        return candidate
    return evaluate(champion, tokens, config.evaluation, *others, on=on)


@contextmanager
def allowed(model: Model, scores: Evaluation, config: RetrainConfig) -> Iterator[None]:
    """Wait until a person approves that the model takes the endpoint, where the settings want it; without that, the stage asks
    whether who runs this may promote. Nobody is asked where the stage has nothing to do.

    What is done inside is done in the name of who approved, and uses the approval up. Raises GateFailed.
    """
    run = current()
    if isinstance(model, Model):
        challenge(run, model)
    if not config.approval.before_deploy or run.beyond("deploy") or recorded(deploy, model, config.served):
        yield
        return
    if run.spool is None:
        run.results["approval"] = "approval required"
        yield
        return
    from flows.support.approval import approve, using
    from flows.support.messages import reasons

    details, asked = reasons(run, model, scores, config.served), terms(config.served)
    where = f"endpoint/{asked['endpoint']} under settings {asked['settings'][:12]}"
    given = approve(
        f"Deploy model/{model.name}@{model.version[:12]} to {where}?",
        details,
        config.approval,
        kind="deploy",
        subject=model.ref,
        terms=asked,
        exercises="promote",
        stands=partial(stands, run.store, model.name, config.served),
    )
    run.results["approval"] = f"Approved by {given.person}: {given.reason}"
    with acting(given.person) if given.proven else nullcontext(), using(given):
        yield


def preview(
    dataset: str,
    config: RetrainConfig,
    from_stage: StageName | None,
    to_stage: StageName | None,
    continue_from: ContinueFrom | None = None,
) -> tuple[str, list[dict[str, Any]]]:
    """The dataset's version, and what a run would do, stage by stage, without doing it: a dry run needs no server."""
    with lifecycle(
        "retrain", config, subject=config.training.model, stages=STAGES, first=from_stage, last=to_stage, dry=True
    ) as run:
        chain(dataset, config, continue_from)
        training, last = run.outcomes["train"], run.outcomes["deploy"]
        if config.approval.before_train and training.status == "pending":
            training.why = "; ".join(part for part in (training.why, "approval required") if part)
        last.why = "; ".join(part for part in (last.why, run.results.get("approval", "")) if part)
        return run.results["dataset"], [outcome.plain() for outcome in run.outcomes.values()]
