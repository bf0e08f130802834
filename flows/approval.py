"""A person's approval, once for all flows: the run pauses with a form, reminds, and expires. See docs/approval.md.

How Prefect shows the form is flows/pause.py, who may approve is tasks/registry/policy.py. An approval is kept in the store under
what was asked about, so it is asked for once: a run that is resumed, retried or started again goes on with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from prefect.events import emit_event

from flows.pause import Form, NeverAnswered, Pause
from tasks.artifacts import Value, parse_ref
from tasks.config import ApprovalConfig
from tasks.errors import GateFailed, Refused
from tasks.lifecycle import Lifecycle, current
from tasks.registry.audit import acting, audited
from tasks.registry.policy import Right, authorise, load_policy
from tasks.settings import digest

LOOK_EVERY_SECONDS = 2.0
NEEDED = "headway.approval.needed"
"""The Prefect event of a question and of each reminder; notifications are automations on it."""


class Approval(Value):
    """A person said yes."""

    kind: str
    """What was asked: deploy, promote, ..."""
    subject: str
    """Reference of what it was asked about."""
    person: str
    reason: str
    time: float
    """Seconds since the epoch."""
    flow_run: str


class Question(Value):
    """What somebody is asked, until when, and how often they are reminded."""

    kind: str
    subject: str
    text: str
    details: str
    right: Right
    asked: float
    expires: float
    remind_seconds: float

    def form(self, refused: str) -> str:
        """The text above the form, in Markdown."""
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.expires))
        again = f"**Not accepted: {refused}** Please answer again." if refused else ""
        parts = (f"**{self.text}**", again, self.details, f"Without an answer the run ends at {until}.")
        return "\n\n".join(part for part in parts if part)


def approve(
    text: str, details: str, config: ApprovalConfig, *, kind: str, subject: str, right: Right = "approve"
) -> Approval:
    """Pause the running flow until a person approves. Raises GateFailed when somebody rejects, or nobody answers in time.

    `details` is Markdown. `subject` is the reference of an artifact: the same kind of question about it is asked once.
    """
    run = current()
    given = given_before(run, kind, subject)
    if given:
        return _told(run, given)
    now = time.time()
    question = Question(
        kind=kind,
        subject=subject,
        text=text,
        details="\n\n".join(part for part in (details, _rejected_before(run, kind, subject)) if part),
        right=right,
        asked=now,
        expires=now + config.expire_minutes * 60,
        remind_seconds=config.remind_minutes * 60,
    )
    with _pause(run, question) as pause:
        answer = _decided(run, question, pause)
    return _told(run, _conclude(run, question, answer))


def given_before(run: Lifecycle, kind: str, subject: str) -> Approval | None:
    """The approval of this very subject, when there is one."""
    found = run.journal.get(_key("approvals", kind, subject))
    return Approval.model_validate(found) if found else None


def _told(run: Lifecycle, given: Approval) -> Approval:
    """Who approved, and why, as tags of the run in MLflow; of two approvals in one run, both."""
    tags = run.results.setdefault("tags", {})
    for name, said in (("headway.approved_by", given.person), ("headway.approval_reason", given.reason)):
        tags[name] = "; ".join(part for part in (tags.get(name), said) if part)
    return given


@contextmanager
def _pause(run: Lifecycle, question: Question) -> Iterator[Pause]:
    pause = Pause(f"{question.kind}-{digest(question.subject)[:10]}", run.home)
    try:
        yield pause
    finally:
        pause.leave()


def _decided(run: Lifecycle, question: Question, pause: Pause) -> Form:
    """The answer of somebody who may give it; anybody else is told so, and the question stays."""
    refused = ""
    while True:
        answer = _answer(run, question, pause, refused)
        token = answer.token.get_secret_value()
        what = f"{answer.decision} {question.kind} of {question.subject}"
        try:
            authorise(run.home, question.right, answer.person, token, what=what, reason=answer.reason)
        except Refused as error:
            refused = f"{error.message}."
        else:
            return answer


def _answer(run: Lifecycle, question: Question, pause: Pause, refused: str) -> Form:
    """Wait for an answer, and remind."""
    remind_at = 0.0
    while time.time() < question.expires:
        try:
            answer = pause.turn(question.form(refused), question.expires)
        except NeverAnswered:
            break
        if answer is not None:
            return answer
        if time.time() >= remind_at:
            remind_at = time.time() + question.remind_seconds
            run.observer.waiting("approval", question.text, question.asked)
            _remind(run, question)
        time.sleep(LOOK_EVERY_SECONDS)
    raise GateFailed(
        f"nobody answered in time: {question.text}",
        stage="approve",
        checks=[{"name": "approval", "measured": "no answer", "limit": "approved"}],
        remedy="Start the run again: it reuses what is finished, and asks again. approval.expire_minutes is how long it waits.",
    )


def _remind(run: Lifecycle, question: Question) -> None:
    identity, page = (run.flow_run or {})["id"], (run.flow_run or {})["url"]
    emit_event(
        event=NEEDED,
        resource={"prefect.resource.id": f"headway.approval.{identity}", "prefect.resource.name": question.text},
        payload={
            "question": question.text,
            "url": page,
            "minutes_left": round((question.expires - time.time()) / 60, 1),
            "kind": question.kind,
            "subject": question.subject,
            "flow": run.flow,
            "flow_run": identity,
        },
    )


def _conclude(run: Lifecycle, question: Question, answer: Form) -> Approval:
    """Write the decision down, in the name of who decided. A name that nobody asked a token for is what it claims to be."""
    approval = Approval(
        kind=question.kind,
        subject=question.subject,
        person=answer.person,
        reason=answer.reason,
        time=time.time(),
        flow_run=(run.flow_run or {})["id"],
    )
    known = load_policy(run.home).asks(question.right)
    what, claimed = f"{question.kind} {question.subject}", "" if known else answer.person
    said = {"right": question.right, "what": what, "claimed": claimed, "reason": answer.reason}
    with acting(answer.person) if known else nullcontext(), audited(run.store, answer.decision, **said):
        if answer.decision == "approve":
            run.journal.put(_key("approvals", question.kind, question.subject), approval.model_dump())
            return approval
        run.journal.append(_key("rejections", question.kind, question.subject), approval.model_dump())
    raise GateFailed(
        f"{answer.person} rejected it: {answer.reason}",
        stage="approve",
        checks=[{"name": "approval", "measured": f"rejected by {answer.person}", "limit": "approved"}],
        remedy="What serves stays. The next run on the same data and settings asks again.",
    )


def _rejected_before(run: Lifecycle, kind: str, subject: str) -> str:
    prefix = _key("rejections", kind, subject)
    found = [run.journal.get(f"{prefix}/{key.rpartition('/')[2]}") for key in run.journal.list(prefix)]
    told = [f"- by {one['person']}: {one['reason']}" for one in found if one]
    return "\n".join(["Rejected before:", "", *told]) if told else ""


def _key(folder: str, kind: str, subject: str) -> str:
    return "/".join((folder, kind, *parse_ref(subject)))
