"""A person's approval, once for all flows: the run pauses with a form, reminds, and expires. See docs/approval.md.

How Prefect shows the form is flows/support/pause.py, who may approve is tasks/security/policy.py. An approval is kept, so it is
asked for once: a run that is resumed, retried or started again goes on with it while it counts (tasks/registry/approvals.py).
While a run waits without a process its question lies in its folder; deployments/watch/waiting.py reminds of it, and ends the
time to answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect.events import emit_event
from pydantic import Field, ValidationError

from flows.support.pause import Form, NeverAnswered, Pause, withdraw
from flows.support.prefect_run import starters
from tasks.artifacts import Value, parse_ref
from tasks.common.errors import GateFailed, Refused, Suspended
from tasks.config.base import digest
from tasks.config.flows import ApprovalConfig
from tasks.orchestration.prefect_artifacts import Away, ask
from tasks.orchestration.run import Lifecycle, current
from tasks.orchestration.run_log import read_question, write_question
from tasks.registry.approvals import Approval, Asked, keep, require_standing, spend, standing, token_of, words
from tasks.security.audit import acting, audit, audited, by_somebody
from tasks.security.policy import Right, authorise, load_policy

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
