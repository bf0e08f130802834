"""The whole lifecycle, one call a stage: from a dataset to a served model.

Each stage is a file of tasks/ with the same name (next: tasks/train.py); `validated` and `tokenized` (flows/support/inputs.py)
call validate and preprocess. How a stage is recorded and reused, and waits for a person's word, is tasks/orchestration/stage.py;
who starts this flow is deployments/ (`headway retrain`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefect import flow
from prefect.states import Completed
from pydantic import NonNegativeFloat, NonNegativeInt

from flows.support.agreement import agreed, approvals
from flows.support.continuing import start_of
from flows.support.inputs import (
    NOTHING,
    Config,
    Inputs,
    Overrides,
    Preset,
    Where,
    checked,
    configured,
    inputs_of,
    require_licenses,
    resolve,
    setting,
    tokenized,
    validated,
)
from flows.support.prefect_page import shown_lifecycle
from flows.support.prefect_run import covered_elsewhere, named, require_dataset, started_by, starters
from tasks.artifacts import Cluster, Endpoint, Evaluation, Pending, Tokens, as_configured
from tasks.benchmark import admitting, benchmark
from tasks.common.errors import GateFailed
from tasks.config.continue_from import ContinueFrom
from tasks.config.evaluation import EvaluationConfig
from tasks.config.flows import STAGES, RetrainConfig, StageName
from tasks.deploy import deploy, samples
from tasks.evaluate import champion_checkpoint, compare, evaluate
from tasks.export import export
from tasks.orchestration.promotion import challenge
from tasks.orchestration.run import current, lifecycle
from tasks.plan import plan
from tasks.registry.refs import place_of
from tasks.train import train


@flow(  # type: ignore[untyped-decorator]
    name="retrain",
    flow_run_name=lambda: named(setting(RetrainConfig, "training", "model")),
    validate_parameters=False,
)
def retrain(
    dataset: str,
    preset: Preset = "",
    learning_rate: NonNegativeFloat = 0.0,
    steps: NonNegativeInt = 0,
    where: Where = "",
    cluster: str = "",
    overrides: Overrides = (),
    cause: str = "",
    from_stage: StageName | None = None,
    to_stage: StageName | None = None,
    continue_from: ContinueFrom | None = None,
    config: Config = NOTHING,
) -> Endpoint | None:
    """Take the newest version of a dataset to a served model.

    Raises GateFailed, JobFailed, IntegrityError, Missing; a ValueError names a mistake of the user's.

    Args:
        dataset: NAME for the newest version of a dataset, or dataset/NAME@VERSION. `headway dataset list` shows them.
        preset: The shipped configuration that all other settings come from, its size above all. Empty: the deployment's.
        learning_rate: Instead of the preset's; 0: the preset's.
        steps: Training steps, instead of the preset's; 0: the preset's.
        where: The shipped configuration that says where jobs run, on top of the preset. Empty: where the preset says.
        cluster: Name of a Prefect block `Headway cluster`, whose settings count over `where`. Empty: none.
        overrides: Settings that differ, each as A.B=VALUE, like --set of the command line: training.warmup_steps=20.
        cause: The events that asked for this run. Leave it empty: who starts a run by events fills it in.
        from_stage: This stage and all later ones run again, although their results are recorded. Empty reuses what there is.
        to_stage: Stages after this one do not run. Empty runs all.
        continue_from: Another run whose newest good checkpoint training begins with. Empty begins from the start.
        config: The same by sections, as JSON: what it names counts instead of the preset's, and `overrides` instead of it.
    """
    training = {"learning_rate": learning_rate, "steps": steps}
    config = configured(RetrainConfig, config, preset, where, overrides, cluster=cluster, **training)
    continue_from = checked(ContinueFrom, continue_from) if continue_from else None
    with started_by("run", f"retrain {config.training.model} on dataset {dataset}", cause=cause, cluster=cluster):
        if holder := covered_elsewhere(cause):
            return Completed(message=f"nothing done: flow run {holder} covers the same events")  # type: ignore[no-any-return]
        require_dataset(cause, dataset)
        with shown_lifecycle(
            "retrain",
            config,
            subject=config.training.model,
            stages=STAGES,
            first=from_stage,
            last=to_stage,
            approvals=approvals(config),
        ) as run:
            run.starters = starters(run.store)
            with agreed(dataset, config, cause, continue_from) as agreed_on:
                endpoint = chain(agreed_on, config, continue_from)
            if isinstance(endpoint, Pending):  # the run was to stop before that
                return None
            completions = samples(endpoint, config.export, run.result.openings)
            run.result = replace(run.result, endpoint=endpoint, samples=completions)
            return endpoint


def chain(name: str, config: RetrainConfig, continue_from: ContinueFrom | None = None) -> Endpoint:
    """The stages in their order: each is handed what stages before it made, and its own section of the settings.

    `on` and `under` say where a stage runs and within which limits; they decide nothing about what it makes. `require` gives up
    what a gate judged, and raises GateFailed where it is closed; `compare` raises it itself.
    """
    given = inputs_of(name, config, continue_from)
    dataset = resolve(name)
    require_licenses(dataset, given, config.licenses)
    validation = validated(dataset, config.validation, config.preprocessing, config.cluster)
    tokens = tokenized(validation, config.preprocessing, config.cluster, given.tokenizer)
    origin, take_over = start_of(continue_from, config, tokens=tokens, base=given.base, mixed=given.mixed)
    qualification = benchmark(config.cluster, config.benchmark, training=config.training)
    cluster, how = as_configured(qualification.require(), config.cluster), config.execution
    cluster = admitting(cluster, config.benchmark, config.training)
    limits = plan(tokens, config.training, config.planning, how, given.base, on=cluster).require()
    checkpoint = train(
        tokens, config.training, given.base, given.mixed, origin, how=how, under=limits, on=cluster, taking=take_over
    )
    scores = evaluate(checkpoint, tokens, config.evaluation, given.mixed, given.files, given.suites, on=cluster)
    champion = champion_scores(scores, tokens, config.evaluation, given, on=cluster)
    base = base_scores(tokens, config, given, on=cluster)
    proven = compare(scores, champion, config.evaluation, config.comparison, base)
    model = export(proven, tokens, config.exported, under=scores, on=cluster)
    challenge(model)
    return deploy(model, config.served)


def champion_scores(
    candidate: Evaluation,
    tokens: Tokens,
    config: EvaluationConfig,
    given: Inputs,
    *,
    on: Cluster,
) -> Evaluation | None:
    """The champion, measured by the same stage on the same held-out split; None when there is none yet."""
    run = current()
    run.champion_place = place_of(run.store, f"{run.subject}/champion")
    champion = champion_checkpoint(run.subject)
    if champion is None or isinstance(candidate, Pending):
        return None
    if champion.version == candidate.subject.version:
        return candidate
    return evaluate(champion, tokens, config, given.mixed, given.files, given.suites, on=on)


def preview(
    dataset: str,
    config: RetrainConfig,
    from_stage: StageName | None,
    to_stage: StageName | None,
    continue_from: ContinueFrom | None = None,
) -> tuple[str, list[dict[str, Any]], GateFailed | None]:
    """The dataset's version, and what a run would do, stage by stage, without doing it: a dry run needs no server.

    The last value is the gate at which it would end, by what is recorded.
    """
    closed: GateFailed | None = None
    try:
        with lifecycle(
            "retrain",
            config,
            subject=config.training.model,
            stages=STAGES,
            first=from_stage,
            last=to_stage,
            dry=True,
            approvals=approvals(config),
        ) as run:
            chain(dataset, config, continue_from)
    except GateFailed as error:
        closed = error
    return run.result.dataset or dataset, [outcome.plain() for outcome in run.outcomes.values()], closed


def base_scores(tokens: Tokens, config: RetrainConfig, given: Inputs, *, on: Cluster) -> Evaluation | None:
    """The scores of the base that was tuned, on the same material: None where no rule of the gate asks for them."""
    if not given.base or not config.comparison.against_base:
        return None
    return evaluate(given.base, tokens, config.evaluation, given.mixed, given.files, given.suites, on=on)
