"""A person's word before money is spent: on a retraining that events asked for, and on a training, with its plan beside the form.

How a run waits for an answer is flows/support/approval.py. Nothing is spent before the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flows.support.inputs import resolve
from flows.support.prefect_run import config_of_deployment
from flows.support.revalidated import evidence_of
from tasks.artifacts import Plan
from tasks.common.errors import HeadwayError
from tasks.config.base import canonical_json, digest
from tasks.config.continue_from import ContinueFrom, Origin
from tasks.config.flows import RetrainConfig
from tasks.events.batches import events_of
from tasks.events.ledger import Ledger
from tasks.orchestration.prefect_artifacts import number, table
from tasks.orchestration.run import Lifecycle, current
from tasks.registry.revalidations import revalidations
from tasks.registry.versions import flat
from tasks.report.data import duration, short
from tasks.report.revalidation.report import FILE as PAGE
from tasks.report.revalidation.report import evidence_markdown


@contextmanager
def agreed(dataset: str, config: RetrainConfig, cause: str, continue_from: ContinueFrom | None) -> Iterator[str]:
    """Wait until a person agrees to the training, where events asked for this run and the settings want it.

    Gives the dataset to train on: the very version that was agreed on. The run goes on in the name of who started it: what else
    it does, a deploy above all, asks for its own right. Raises GateFailed when somebody rejects, or nobody answers in time.
    """
    if not cause or not config.approval.before_retrain:
        yield dataset
        return
    from flows.support.approval import approve, using

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
    }
    parts = (_evidence(run, noted), _events(run, cause), _settings(config))
    given = approve(
        question,
        "\n\n".join(part for part in parts if part),
        config.approval,
        kind="retrain",
        subject=noted.get("ref") or data.ref,
        terms={name: value for name, value in terms.items() if value},
        exercises="run",
    )
    run.results["approval"] = f"Retraining approved by {given.person}: {given.reason}"
    with using(given, done=lambda: run.outcomes["train"].status in ("ran", "reused")):
        yield data.ref


@contextmanager
def agreed_to_train(
    plan: Plan, config: RetrainConfig, beside: tuple[Any, ...], *, recorded: Callable[[], bool]
) -> Iterator[None]:
    """Wait until a person agrees to what training takes, where the settings want it; what is done inside uses that up.

    Asked once for a plan and what train is handed `beside` it, and not for a training that is `recorded`. Raises GateFailed when
    somebody rejects, or nobody answers in time.
    """
    run = current()
    asks = config.approval.before_train and isinstance(plan, Plan) and run.spool is not None and not run.beyond("train")
    if not asks or recorded():
        yield
        return
    from flows.support.approval import approve, using

    question = f"Train {config.training.model} for about {duration(plan.seconds)}{_at_a_cost(plan)}?"
    terms = _terms(beside)
    rows = [[name.replace("_", " "), value] for name, value in terms.items()]
    given = approve(
        question,
        "\n\n".join((*([table(["begins with", ""], rows)] if rows else []), _numbers(plan))),
        config.approval,
        kind="train",
        subject=plan.ref,
        terms=terms,
        exercises="run",
    )
    run.results["approval"] = f"Training approved by {given.person}: {given.reason}"
    with using(given):
        yield


def _terms(beside: tuple[Any, ...]) -> dict[str, str]:
    """What training is made from that its plan does not hold: the checkpoint that it goes on from, a mixture's other tokens."""
    terms = {}
    for value in beside:
        if isinstance(value, Origin):
            terms["continue_from"] = f"{value.job} step {value.step}, {value.sha256}"
        if isinstance(value, tuple) and value:
            terms["mixture"] = ", ".join(tokens.ref for tokens in value)
    return terms


def _at_a_cost(plan: Plan) -> str:
    return f" and {plan.metrics['cost']:,.2f} in the prices' currency" if plan.metrics.get("cost") else ""


def _numbers(plan: Plan) -> str:
    rows = [[name.replace("_", " "), number(value)] for name, value in plan.metrics.items()]
    checks = [[check.name, number(check.measured), check.limit] for check in plan.checks]
    return "\n\n".join((table(["plan", "value"], rows), table(["limit", "planned", "allowed"], checks)))


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


def _settings(config: RetrainConfig) -> str:
    """What is set otherwise than in the deployment that runs, or than a setting's default where there is none."""
    old = {**flat("", RetrainConfig().model_dump(mode="json")), **flat("", config_of_deployment())}
    new = flat("", config.model_dump(mode="json"))
    rows = [
        [name.removeprefix("."), _shown(old.get(name)), _shown(value)]
        for name, value in new.items()
        if canonical_json(old.get(name)) != canonical_json(value)
    ]
    return f"Other settings than its own:\n\n{table(['setting', 'as shipped', 'here'], rows)}" if rows else ""


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _events(run: Lifecycle, cause: str) -> str:
    """What asked for this run."""
    rows = [
        [time.strftime("%Y-%m-%d %H:%M", time.localtime(row["occurred"])), row["name"], row["subject"], row["source"]]
        for row in events_of(Ledger(run.home), cause)
    ]
    return f"Asked for by:\n\n{table(['when', 'event', 'about', 'said by'], rows)}" if rows else ""
