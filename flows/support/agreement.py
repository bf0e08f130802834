"""A person's word in a retraining: before one that events asked for, before training, and before the model takes the endpoint.
Nothing is spent or served before the answer.

How a run waits for an answer is flows/support/approval.py; which stage asks is `approvals`, which the frame of the stages calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.support.approval import approve, using
from flows.support.inputs import of_deployment, resolve
from flows.support.prefect_page import champion_table
from tasks.artifacts import Checkpoint, Cluster, Model, Plan, Tokens
from tasks.common.errors import HeadwayError
from tasks.config.base import canonical_json, digest
from tasks.config.continue_from import ContinueFrom, Origin
from tasks.config.flows import ApprovalConfig, RetrainConfig
from tasks.config.serving import DeploymentConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.data.suite import read_suite
from tasks.deploy import stands
from tasks.deploy import terms as deploy_terms
from tasks.events.batches import events_of
from tasks.events.ledger import Ledger
from tasks.orchestration.prefect_artifacts import number, table
from tasks.orchestration.run import Lifecycle, current
from tasks.registry.revalidations import revalidations
from tasks.registry.versions import flat
from tasks.report.data import duration, short
from tasks.report.revalidation.report import FILE as PAGE
from tasks.report.revalidation.report import evidence_markdown, evidence_of
from tasks.security.audit import acting


@contextmanager
def agreed(dataset: str, config: RetrainConfig, cause: str, continue_from: ContinueFrom | None) -> Iterator[str]:
    """Wait until a person agrees to the training, where events asked for this run and the settings want it.

    Gives the dataset to train on: the very version that was agreed on. The run goes on in the name of who started it: what else
    it does, a deploy above all, asks for its own right. Raises GateFailed when somebody rejects, or nobody answers in time.
    """
    if not cause or not config.approval.before_retrain:
        yield dataset
        return
    run, data = current(), resolve(dataset)
    newest = next(iter(revalidations(run.store, config.training.model)), {})
    noted = newest if newest.get("dataset") == data.ref else {}
    question = f"Retrain model/{config.training.model} on {short(data.ref)}, for endpoint/{config.served.endpoint}?"
    terms = {
        "model": config.training.model,
        "dataset": data.ref,
        "settings": digest(config.model_dump(mode="json", exclude={"approval"})),
        "from_stage": run.first or "",
        "to_stage": run.last or "",
        "continue_from": canonical_json(continue_from.model_dump(mode="json")) if continue_from else "",
        "suite": read_suite(Path(config.validation.suite), run.home).digest if config.validation.suite else "",
    }
    old = {**flat("", RetrainConfig().model_dump(mode="json")), **flat("", of_deployment(RetrainConfig))}
    new = flat("", config.model_dump(mode="json"))
    rows = [
        [name.removeprefix("."), _shown(old.get(name)), _shown(value)]
        for name, value in new.items()
        if canonical_json(old.get(name)) != canonical_json(value)
    ]
    events = [
        [time.strftime("%Y-%m-%d %H:%M", time.localtime(row["occurred"])), row["name"], row["subject"], row["source"]]
        for row in events_of(Ledger(run.home), cause)
    ]
    parts = (
        _evidence(run, noted),
        f"Asked for by:\n\n{table(['when', 'event', 'about', 'said by'], events)}" if events else "",
        f"Other settings than its own:\n\n{table(['setting', 'as shipped', 'here'], rows)}" if rows else "",
    )
    given = approve(
        question,
        "\n\n".join(part for part in parts if part),
        config.approval,
        kind="retrain",
        subject=noted.get("ref") or data.ref,
        terms={name: value for name, value in terms.items() if value},
        exercises="run",
    )
    run.result = replace(run.result, approval=f"Retraining approved by {given.person}: {given.reason}")
    with using(given, done=lambda: run.outcomes["train"].status in ("ran", "reused")):
        yield data.ref


def approvals(config: RetrainConfig) -> dict[str, Callable[..., AbstractContextManager[None]]]:
    """What asks before which stage, where the settings want it; the frame calls it with what the stage is handed
    (tasks/orchestration/stage.py)."""
    asks = {
        "train": agree_to_train if config.approval.before_train else None,
        "deploy": agree_to_deploy if config.approval.before_deploy else None,
    }
    return {stage: partial(ask, config.approval) for stage, ask in asks.items() if ask}


@contextmanager
def agree_to_train(
    config: ApprovalConfig,
    tokens: Tokens,
    training: TrainingConfig,
    base: Checkpoint | None = None,
    mixed: tuple[Tokens, ...] = (),
    origin: Origin | None = None,
    *,
    how: ExecutionConfig,
    under: Plan,
    on: Cluster,
    **rest: Any,
) -> Iterator[None]:
    """Wait until a person agrees to what training takes; what is done inside uses that up.

    Asked once for a plan, and for what is trained and where: the plan is only a record in the store, which may be of another
    training. Raises GateFailed when somebody rejects, or nobody answers in time.
    """
    cost = f" and {under.metrics['cost']:,.2f} in the prices' currency" if under.metrics.get("cost") else ""
    begins = beginnings(mixed, origin)
    trained = {
        "tokens": tokens.ref,
        "training": training.model_dump(mode="json"),
        "base": base.ref if base else "",
        "execution": how.model_dump(mode="json"),
        "cluster": [on.name, on.backend, on.nodes, on.ranks_per_node],
    }
    rows = [[name.replace("_", " "), value] for name, value in begins.items()]
    settings = flat("training", training.model_dump(mode="json", exclude_defaults=True))
    settings |= flat("execution", how.model_dump(mode="json", exclude_defaults=True))
    settings |= {"tokens": short(tokens.ref), "cluster": f"{on.name}, {on.nodes} x {on.ranks_per_node} ranks"}
    numbers = [[name.replace("_", " "), number(value)] for name, value in under.metrics.items()]
    checks = [[check.name, number(check.measured), check.limit] for check in under.checks]
    tables = [table(["begins with", ""], rows)] if rows else []
    tables += [table(["setting", "beside the defaults"], [[name, _shown(value)] for name, value in settings.items()])]
    tables += [table(["plan", "value"], numbers), table(["limit", "planned", "allowed"], checks)]
    given = approve(
        f"Train {training.model} for about {duration(under.seconds)}{cost}?",
        "\n\n".join(tables),
        config,
        kind="train",
        subject=under.ref,
        terms={"settings": digest(trained), **begins},
        exercises="run",
    )
    run = current()
    run.result = replace(run.result, approval=f"Training approved by {given.person}: {given.reason}")
    with using(given):
        yield


@contextmanager
def agree_to_deploy(config: ApprovalConfig, model: Model, serving: DeploymentConfig) -> Iterator[None]:
    """Wait until a person approves that the model takes the endpoint; without that, the stage asks whether who runs this may
    promote.

    What is done inside is done in the name of who approved, and uses the approval up. Raises GateFailed.
    """
    run, asked = current(), deploy_terms(serving)
    where = f"endpoint/{asked['endpoint']} under settings {asked['settings'][:12]}"
    given = approve(
        f"Deploy model/{model.name}@{model.version[:12]} to {where}?",
        reasons(run, model, serving),
        config,
        kind="deploy",
        subject=model.ref,
        terms=asked,
        exercises="promote",
        stands=partial(stands, run.store, model.name, serving),
    )
    run.result = replace(run.result, approval=f"Approved by {given.person}: {given.reason}")
    with acting(given.person) if given.proven else nullcontext(), using(given):
        yield


def beginnings(mixed: tuple[Tokens, ...], origin: Origin | None) -> dict[str, str]:
    """What training begins with beside its own tokens: a mixture's other tokens, the checkpoint that it goes on from."""
    mixture = {"mixture": ", ".join(tokens.ref for tokens in mixed)} if mixed else {}
    return mixture | ({"continue_from": f"{origin.job} step {origin.step}, {origin.sha256}"} if origin else {})


def reasons(run: Lifecycle, model: Model, serving: DeploymentConfig) -> str:
    """What speaks for a new model: its scores beside the champion's, its checks, what it was made from, and how it is served."""
    payload = flat("deployment", serving.model_dump(mode="json", exclude_defaults=True))
    evaluated = run.outcomes["evaluate"]
    scores = [[name, number(evaluated.metrics[name])] for name in evaluated.shown.metrics if name in evaluated.metrics]
    checks = [
        ["passed" if check["passed"] else "**failed**", check["name"], number(check["measured"]), check["limit"]]
        for outcome in run.outcomes.values()
        for check in outcome.checks
    ]
    served = [[name, number(value)] for name, value in payload.items()]
    parts = [
        champion_table(run) or "There is no champion to compare it with.",
        table(["score", "value"], scores),
        table(["", "check", "measured", "limit"], checks) if checks else "",
        f"Made from `{short(run.result.dataset or '')}`, settings `{run.config_digest[:12]}`; model `{short(model.ref)}`.",
        table(["how it is served, beside the defaults", ""], served),
    ]
    return "\n\n".join(part for part in parts if part)


def _evidence(run: Lifecycle, noted: dict[str, str]) -> str:
    """What the newest revalidation found, and where its page is."""
    if not noted.get("ref"):
        return "No revalidation looked at this data."
    try:
        folder, payload = evidence_of(run.store, noted["ref"])
    except HeadwayError as error:
        return f"Its revalidation cannot be read: {error}"
    where = [f"The whole evidence, with figures: `{folder / PAGE}`."]
    where += [f"[The flow run that found it]({noted['flow_run']})."] if noted.get("flow_run") else []
    return "\n\n".join((evidence_markdown(payload), " ".join(where)))


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
