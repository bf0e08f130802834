"""A person's word before money is spent: on a retraining that events asked for, and on a training, with its plan beside the form.

How a run waits for an answer is flows/approval.py. Nothing is spent before the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from flows.inputs import resolve
from flows.revalidated import evidence_of
from tasks.artifacts import Plan
from tasks.config import RetrainConfig
from tasks.errors import HeadwayError
from tasks.events.batches import events_of
from tasks.events.ledger import Ledger
from tasks.lifecycle import Lifecycle, current
from tasks.prefect_notes import number, table
from tasks.registry.audit import acting
from tasks.registry.policy import load_policy
from tasks.registry.revalidations import revalidations
from tasks.report.data import duration, short
from tasks.report.evidence import FILE as PAGE
from tasks.report.evidence import evidence_markdown
from tasks.settings import digest


@contextmanager
def agreed(dataset: str, config: RetrainConfig, cause: str) -> Iterator[str]:
    """Wait until a person agrees, where events asked for this run and the settings want it; what is done inside is in their name.

    Gives the dataset to train on: the very version that was agreed on. Raises GateFailed when somebody rejects, or nobody
    answers in time.
    """
    if not cause or not config.approval.before_retrain:
        yield dataset
        return
    from flows.approval import approve

    run, data = current(), resolve(dataset)
    newest = next(iter(revalidations(run.store, config.training.model)), {})
    noted = newest if newest.get("dataset") == data.ref else {}
    question = f"Retrain model/{config.training.model} on {short(data.ref)}?"
    details = "\n\n".join(part for part in (_evidence(run, noted), _events(run, cause)) if part)
    subject, settings = noted.get("ref") or data.ref, digest(config.model_dump(mode="json", exclude={"approval"}))
    terms = {"model": config.training.model, "dataset": data.ref, "settings": settings}
    given = approve(question, details, config.approval, kind="retrain", subject=subject, terms=terms)
    run.results["approval"] = f"Retraining approved by {given.person}: {given.reason}"
    with acting(given.person) if load_policy(run.home).asks("approve") else nullcontext():
        yield data.ref


def agreed_to_train(plan: Plan, config: RetrainConfig, *, recorded: Callable[[], bool]) -> AbstractContextManager[None]:
    """Wait until a person agrees to what training takes, where the settings want it; what is done inside is in their name.

    Asked once a plan, and not for a training that is `recorded`. Raises GateFailed when somebody rejects, or nobody
    answers in time.
    """
    run = current()
    if not config.approval.before_train or not isinstance(plan, Plan) or run.spool is None or run.beyond("train"):
        return nullcontext()
    if recorded():
        return nullcontext()
    from flows.approval import approve

    question = f"Train {config.training.model} for about {duration(plan.seconds)}{_at_a_cost(plan)}?"
    given = approve(question, _numbers(plan), config.approval, kind="train", subject=plan.ref)
    run.results["approval"] = f"Training approved by {given.person}: {given.reason}"
    return acting(given.person) if load_policy(run.home).asks("approve") else nullcontext()


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
        folder, told = evidence_of(run.store, noted["ref"])
    except HeadwayError as error:
        return f"Its revalidation cannot be read: {error}"
    where = [f"The whole evidence, with figures: `{folder / PAGE}`."]
    where += [f"[The flow run that found it]({noted['flow_run']})."] if noted.get("flow_run") else []
    return "\n\n".join((evidence_markdown(told), " ".join(where)))


def _events(run: Lifecycle, cause: str) -> str:
    """What asked for this run."""
    rows = [
        [time.strftime("%Y-%m-%d %H:%M", time.localtime(row["occurred"])), row["name"], row["subject"], row["source"]]
        for row in events_of(Ledger(run.home), cause)
    ]
    return f"Asked for by:\n\n{table(['when', 'event', 'about', 'said by'], rows)}" if rows else ""
