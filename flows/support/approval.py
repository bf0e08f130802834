"""A person's approval, once for all flows: the run pauses with a form, reminds, and expires. See docs/approval.md.

How Prefect shows the form is flows/support/pause.py, who may approve is tasks/security/policy.py. An approval is kept, so it is
asked for once: a run that is resumed, retried or started again goes on with it while it counts (tasks/registry/approvals.py).
While a run waits without a process its question lies in its folder; deployments/watch/waiting.py reminds of it, and ends the
time to answer.

A person's word in a retraining: before one that events asked for, before training, and before the model takes the endpoint.
Nothing is spent or served before the answer.

How a run waits for an answer is flows/support/approval.py; which stage asks is `approvals`, which the frame of the stages calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.events import emit_event
from pydantic import Field, ValidationError

from flows.support.inputs import of_deployment, resolve
from flows.support.pause import Form, NeverAnswered, Pause, withdraw
from flows.support.prefect_page import champion_table
from flows.support.prefect_run import starters
from tasks.artifacts import Checkpoint, Cluster, Model, Plan, Tokens, Value, parse_ref
from tasks.common.errors import GateFailed, HeadwayError, Refused, Suspended
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
from tasks.orchestration.observers import Away, ask, number, table
from tasks.orchestration.run import Lifecycle, current
from tasks.orchestration.run_log import read_question, write_question
from tasks.registry.approvals import Approval, Asked, keep, require_standing, spend, standing, token_of, words
from tasks.registry.revalidations import revalidations
from tasks.registry.versions import flat
from tasks.report.data import duration, short
from tasks.report.revalidation.report import FILE as PAGE
from tasks.report.revalidation.report import evidence_markdown, evidence_of
from tasks.security.audit import acting, audit, audited, by_somebody
from tasks.security.policy import Right, authorise, load_policy


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


KEY_DIGITS = 32
"""Of sha256: so many that nobody finds two questions with the same key, where they choose what both ask."""
LOOK_EVERY_SECONDS = 2.0
NEEDED = "headway.approval.needed"
"""The Prefect event of a question and of each reminder; notifications are automations on it."""


class Question(Value):
    """What somebody is asked, until when, and how often they are reminded."""

    kind: str
    subject: str
    terms: dict[str, str]
    text: str
    details: str
    right: Right
    exercises: Right
    before: dict[str, str]
    asked: float
    expires: float
    valid_hours: float
    remind_seconds: float
    flow: str
    flow_run: str
    url: str
    versions: dict[str, str] = Field(default_factory=dict)
    """What the references stand for that its run was given, where the run waits without a process."""
    reminded: float = 0.0
    """When people were told of it last, where its run waits without a process."""

    @property
    def about(self) -> str:
        return words(self.kind, self.subject, self.terms)

    @property
    def key(self) -> str:
        """The same for every question that one answer fits, and only for those."""
        return digest([self.about, self.before, self.right, self.exercises])[:KEY_DIGITS]

    def form(self, refused: str) -> str:
        """The text above the form, in Markdown."""
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.expires))
        again = f"**Not accepted: {refused}** Please answer again." if refused else ""
        counts = f"An approval counts once, within {self.valid_hours:g} hours, for exactly this: `{self.about}`."
        stands = [f"- {name}: `{what}`" for name, what in self.before.items()]
        while_ = "\n".join(["It counts while this stands, and nobody decides about it:", "", *stands]) if stands else ""
        ends = f"Without an answer the run ends at {until}; time in which the platform is down comes on top."
        parts = (f"**{self.text}**", again, self.details, counts, while_, ends)
        return "\n\n".join(part for part in parts if part)

    def reminder(self) -> dict[str, Any]:
        """The event that tells people, as `emit_event` takes it, and Prefect's API but for its id and time."""
        return {
            "event": NEEDED,
            "resource": {
                "prefect.resource.id": f"headway.approval.{self.flow_run}",
                "prefect.resource.name": self.text,
            },
            "payload": {
                "question": self.text,
                "url": self.url,
                "minutes_left": round((self.expires - time.time()) / 60, 1),
                "kind": self.kind,
                "subject": self.subject,
                "flow": self.flow,
                "flow_run": self.flow_run,
            },
        }


def approve(
    text: str,
    details: str,
    config: ApprovalConfig,
    *,
    kind: str,
    subject: str,
    terms: Mapping[str, str] | None = None,
    right: Right = "approve",
    exercises: Right = "approve",
    stands: Callable[[], Mapping[str, str]] = dict,
) -> Approval:
    """Pause the running flow until a person approves. Raises GateFailed when somebody rejects, or nobody answers in time.

    `details` is Markdown. `subject` is the reference of an artifact, `terms` what else the question names: the same kind of
    question about exactly this is not asked again while an approval of it counts. What is approved is done inside `using`.

    `right` is what who decides must have, `exercises` what is done by the decision: who started the run must have that too, to
    decide alone. `stands` looks at what the answer changes (tasks/registry/approvals.py).
    """
    run, terms = current(), dict(terms or {})
    asked = Asked(
        kind=kind,
        subject=subject,
        terms=terms,
        right=right,
        exercises=exercises,
        hours=config.valid_hours,
        stands=stands,
        starters=starters(run.store),
    )
    now = time.time()
    question = Question(
        kind=kind,
        subject=subject,
        terms=terms,
        text=text,
        details="\n\n".join(part for part in (details, _rejected_before(run, kind, subject)) if part),
        right=right,
        exercises=exercises,
        before=dict(stands()),
        asked=now,
        expires=now + config.expire_minutes * 60,
        remind_seconds=config.remind_minutes * 60,
        valid_hours=config.valid_hours,
        flow=run.flow,
        flow_run=(run.flow_run or {})["id"],
        url=(run.flow_run or {})["url"],
    )
    question, refused = _asked_before(run, question)
    pause = Pause(question.kind, question.key, run.home)
    answer = pause.answer()  # first of all: it may be a rejection of what somebody else approved
    given = None if answer else standing(run.home, run.store, asked)
    if given:
        return _told(run, asked, given)
    with run.standing_aside():
        answer, proven = _decided(run, question, asked, pause, answer, refused)
        approval = _conclude(run, question, answer, proven)
    require_standing(
        run.home, run.store, asked, approval
    )  # other runs may have been at work for hours since the answer
    return _told(run, asked, approval)


@contextmanager
def using(given: Approval, *, done: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Do inside what was approved: it counts for nothing after that. `done` says whether it was, where an error ends the rest."""
    try:
        yield
    except Exception:
        if done():
            spend(current().store, given)
        raise
    spend(current().store, given)


def _told(run: Lifecycle, asked: Asked, given: Approval) -> Approval:
    """Have the run know that it was approved, and MLflow who did and why; of two approvals in one run, both."""
    run.approved[given.place] = asked, given
    notes = {"headway.approved_by": given.person, "headway.approval_reason": given.reason}
    tags = {name: "; ".join(filter(None, (run.result.tags.get(name), value))) for name, value in notes.items()}
    run.result = replace(run.result, tags={**run.result.tags, **tags})
    return given


def _asked_before(run: Lifecycle, question: Question) -> tuple[Question, str]:
    """The question with the time to answer that it had when the run was suspended; a changed one, and that it has changed.

    A question of another kind is still to come in this run, and so are the answers to it.
    """
    kept = read_question(run.home / "runs" / question.flow_run)
    if kept is None:
        return question, ""
    with suppress(ValidationError):  # that of another release
        before = Question.model_validate(kept)
        if question.key == before.key:
            times = {"asked": before.asked, "expires": before.expires}
            hours = min(before.valid_hours, question.valid_hours)  # the settings may say more than the form said
            return question.model_copy(update={**times, "valid_hours": hours}), ""
        if question.kind != before.kind:
            return question, ""
    with suppress(Away):
        ask(lambda client: withdraw(client, run.home, UUID(question.flow_run)))
    return question, "What was asked has changed since then."


def _decided(
    run: Lifecycle, question: Question, asked: Asked, pause: Pause, answer: Form | None, refused: str
) -> tuple[Form, bool]:
    """The answer of somebody who may give it, and whether a token proved who; anybody else is told so, and the question stays."""
    while True:
        answer = answer or _answer(run, question, pause, refused)
        try:
            with by_somebody():
                return answer, _require_may_decide(run, question, asked, answer)
        except Refused as error:
            answer, refused = None, f"{error.message}."


def _require_may_decide(run: Lifecycle, question: Question, asked: Asked, answer: Form) -> bool:
    """Whether a token proved who answers. Raises Refused, and notes it in the audit log, for who may not."""
    output = {"what": f"{answer.decision} {question.about}", "reason": answer.reason}
    policy, token = load_policy(run.home), answer.token.get_secret_value()
    proven = asked.proof(policy)
    authorise(run.home, asked.right, answer.person, token, exercises=asked.exercises, **output)
    why = asked.refusal(policy, answer.person, proven=proven) if answer.decision == "approve" else ""
    if why:
        audit(
            run.store, "authorise", outcome="refused", right=asked.exercises, claimed=answer.person, why=why, **output
        )
        raise Refused(why)
    return proven


def _answer(run: Lifecycle, question: Question, pause: Pause, refused: str) -> Form:
    """Wait for an answer, and remind. Raises GateFailed when nobody gave one in time, Suspended to wait without a process."""
    remind_at = 0.0
    while True:
        try:
            answer = pause.turn(question.form(refused), question.expires)
        except NeverAnswered:
            break
        except Suspended:
            run.observer.waiting("approval", question.text, question.asked, question.exercises, question.key)
            kept = question.model_copy(update={"versions": run.versions})
            write_question(run.home / "runs" / question.flow_run, kept.model_dump())
            raise
        if answer is not None:
            return answer
        if time.time() >= question.expires:
            break
        if time.time() >= remind_at:
            remind_at = time.time() + question.remind_seconds
            run.observer.waiting("approval", question.text, question.asked, question.exercises, question.key)
            emit_event(**question.reminder())
        time.sleep(LOOK_EVERY_SECONDS)
    raise GateFailed(
        f"nobody answered in time: {question.text}",
        stage="approve",
        checks=[{"name": "approval", "measured": "no answer", "limit": "approved"}],
        remedy="Start the run again: it reuses what is finished, and asks again. approval.expire_minutes is how long it waits.",
    )


def _conclude(run: Lifecycle, question: Question, answer: Form, proven: bool) -> Approval:
    """Write the decision down, in the name of who decided. A name that nobody asked a token for is what it claims to be."""
    approval = Approval(
        kind=question.kind,
        subject=question.subject,
        terms=question.terms,
        right=question.right,
        person=answer.person,
        proven=proven,
        token=token_of(load_policy(run.home), answer.person) if proven else "",
        reason=answer.reason,
        time=time.time(),
        flow_run=(run.flow_run or {})["id"],
        valid_hours=question.valid_hours,
        before=question.before,
    )
    with acting(answer.person) if proven else by_somebody():
        if answer.decision == "approve":
            keep(run.home, run.store, approval)
            return approval
        claimed = "" if proven else answer.person
        output = {"right": question.right, "what": question.about, "claimed": claimed, "reason": answer.reason}
        with audited(run.store, "reject", **output):
            run.journal.append(_rejections(question.kind, question.subject), approval.model_dump())
    raise GateFailed(
        f"{answer.person} rejected it: {answer.reason}",
        stage="approve",
        checks=[{"name": "approval", "measured": f"rejected by {answer.person}", "limit": "approved"}],
        remedy="What serves stays. The next run on the same data and settings asks again.",
    )


def _rejected_before(run: Lifecycle, kind: str, subject: str) -> str:
    prefix = _rejections(kind, subject)
    results = [run.journal.get(f"{prefix}/{key.rpartition('/')[2]}") for key in run.journal.list(prefix)]
    entries = [f"- by {_quoted(one.get('person'))}: {_quoted(one.get('reason'))}" for one in results if one]
    return "\n".join(["Rejected before:", "", *entries]) if entries else ""


def _quoted(text: object) -> str:
    """As code on one line: it is of the store, and must not look like what the form says itself."""
    line = " ".join(str(text).replace("`", "'").split())
    return f"`{line[:300]}`"


def _rejections(kind: str, subject: str) -> str:
    return "/".join(("rejections", kind, *parse_ref(subject)))
