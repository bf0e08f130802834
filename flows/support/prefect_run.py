"""What a flow asks Prefect about its own run: who it is, what it is called, whether somebody cancelled it. For all flows."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, Pause
from prefect.runtime import deployment
from prefect.runtime import flow_run as runtime
from prefect.settings import PREFECT_UI_URL
from prefect.states import AwaitingRetry, Cancelled

from flows.support.blocks import take_store
from flows.support.pause import withdraw
from tasks.artifacts import parse_ref
from tasks.common import process
from tasks.common.errors import Superseded, Suspended, Unknown
from tasks.common.home import home, require_known
from tasks.events.ledger import Ledger
from tasks.orchestration.prefect_artifacts import Away, ask
from tasks.orchestration.run_log import read_question, read_run
from tasks.security import audit_chain
from tasks.security.audit import Actor, acting, actor, entries, noted
from tasks.security.policy import Right, require
from tasks.storage import open_store
from tasks.storage.store import Store, find

# Why a flow run was started: the batch of events that it covers (tasks/events/ledger.py). A batch has one run.


def covered_elsewhere(cause: str) -> str:
    """Take the batch of events that asked for this run; the id of the flow run that has it, when that is another one.

    Empty without a cause, and when this run has the batch: also after it was resumed. Raises Unknown for no such batch.
    """
    if not cause:
        return ""
    mine = str(runtime.get_id())
    holder = Ledger(home()).claim(cause, mine)
    if holder is None:
        raise Unknown(f"no events asked for a run as {cause!r}", remedy="Leave `cause` empty: the bridge fills it in.")
    return "" if holder == mine else holder


def require_dataset(cause: str, dataset: str) -> None:
    """Raise Unknown for events about a dataset that is not there: before our run begins, for it is no failure of the model's."""
    if cause:
        find(open_store(home()), *parse_ref(dataset, kind="dataset"))


ASK_EVERY_SECONDS = 3.0
STOPPED = "Stopped by `headway down`"
"""How the message of every state begins that a planned stop gave a flow run."""
TRIES = 3
"""Attempts of a run that is stopped to tell Prefect's server, which may take longer than a request waits on a busy machine."""
LATER = timedelta(seconds=90)
"""The worker, which `headway down` stops after the flow runs, does not take them up again before that."""
_last_asked = 0.0
_lost: list[BaseException] = []
"""Ctrl-C or SIGTERM that came where Python cannot raise: while an object was being finalised."""


def flow_run() -> dict[str, str]:
    """Id and page of the running flow run."""
    identity = str(runtime.get_id())
    base = PREFECT_UI_URL.value() or ""
    return {"id": identity, "url": f"{base}/runs/flow-run/{identity}"}


GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi"
    "|psi|omega"
)
MADE_UP = re.compile(rf"[a-z]+-[a-z]+|[A-Z][a-z]+-[A-Z][a-z]+|(?:{GREEK})\d*(?:-[a-z]+)+")
"""Names as Prefect makes them up: its server (`brave-otter`), and its two pages for their forms (`omega248-edasich-point`,
`Sleek-Koala`)."""


def named(subject: str) -> str:
    """A name that tells runs of one flow apart: what it is about, and when it was to start, in local time.

    A name that somebody gave the run stays. Where it may be one that Prefect made up, it stays at the end, unless no form
    made the run: a form is sent with the name that the page put into it, and nothing that the server keeps tells who wrote it.
    """
    given = str(runtime.get_name() or "")
    if given and not MADE_UP.fullmatch(given):
        return given
    planned: datetime = runtime.get_scheduled_start_time()
    # Whether the running flow run may come from the form of Prefect's page: of a deployment, by no schedule or
    # automation, and without the key that `headway run` gives
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    by_form = bool(run and run.deployment_id and not run.created_by and not run.idempotency_key)
    return f"{subject} {planned.astimezone():%Y-%m-%d %H:%M} {given if by_form else ''}".strip()


def setting(*path: str) -> str:
    """A setting of the running flow run's configuration, before anybody checked it; empty when it is not there."""
    value: Any = runtime.get_parameters().get("config")
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return str(value or "")


def parameters_of_deployment() -> dict[str, Any]:
    """The parameters that the running flow run's deployment holds; empty where it has none, as on the command line."""
    identity = deployment.get_id()
    if identity is None:
        return {}
    with get_client(sync_client=True) as client:
        return dict(client.read_deployment(UUID(identity)).parameters)


@contextmanager
def started_by(right: Right, what: str, *, cause: str = "", cluster: str = "") -> Iterator[None]:
    """Act as whoever stands behind this flow run, if the policy lets them start it. Raises Refused; ValueError without a home,
    or for a cluster block whose store is not the home's.

    That is the person of the command line; else who started it before it was resumed; else `schedule`; `bridge` where one of its
    automations did, and the ledger gives this run the batch of events that is its `cause`; or `prefect` for its page.
    """
    if deployment.get_id():
        require_known()
    take_store(home(), cluster)
    known = actor()
    if known.identity == "account" and deployment.get_id():
        kept = (process.read_json(home() / "runs" / str(runtime.get_id()) / "handle.json") or {}).get("actor")
        if kept:
            known = Actor.model_validate(kept)
        else:
            # By what Prefect's server noted when it made the run: tags and parameters say what whoever started it wrote.
            context = FlowRunContext.get()
            maker = context.flow_run.created_by if context and context.flow_run else None
            kind = maker.type if maker else None
            by_bridge = kind == "AUTOMATION" and cause and not covered_elsewhere(cause)
            name = "schedule" if kind == "SCHEDULE" else "bridge" if by_bridge else "prefect"
            known = Actor(name=name, identity="automatic")
    with nullcontext() if known.identity == "account" else acting(known.name):
        require(home(), right, what=what)
        before = sys.unraisablehook
        sys.unraisablehook = partial(_keep_interrupt, before)
        try:
            yield
        except Suspended as waits:
            waits.suspend()
        except Superseded as superseded:
            if deployment.get_id():  # a worker of another host works on it: what becomes of it is that one's to say
                raise Abort(str(superseded)) from superseded
            raise
        except Exception:
            _withdraw()
            raise
        except BaseException as error:
            _leave_for_later(error)
            raise
        else:
            _withdraw()
        finally:
            sys.unraisablehook = before


def _withdraw() -> None:
    """Forget what a run that ends asked when it was suspended. While Prefect is away, the watch does it."""
    running = runtime.get_id()
    if running and read_question(home() / "runs" / running):
        with suppress(Away):
            ask(lambda client: withdraw(client, home(), UUID(running)))


def _leave_for_later(error: BaseException) -> None:
    """Have a run that `headway down` stops say so, instead of Crashed, of which people are told. Raises Prefect's Pause.

    One of a deployment is queued, and goes on at the next `headway up`. While Prefect is away the watch does it then.
    """
    running = runtime.get_id()
    if not running or not read_run(home() / "runs" / running).stopped:
        return
    identity = UUID(running)
    if deployment.get_id():
        state = AwaitingRetry(
            scheduled_time=datetime.now(UTC) + LATER, message=f"{STOPPED}: resumes at the next `headway up`"
        )
    else:
        state = Cancelled(message=f"{STOPPED}: the same command continues after the last finished stage")
    for _ in range(TRIES):
        try:
            answer = ask(lambda client: client.set_flow_run_state(identity, state))
        except Away as away:
            if away.refused:
                return
            continue
        if answer.status == SetStateStatus.ACCEPT:
            raise Pause(state=answer.state) from error
        return


def _keep_interrupt(report: Callable[[Any], object], unraisable: Any) -> None:
    """A hook of Python's for errors that nobody can catch; `cancelled` raises those that ask the flow to end."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _lost.append(unraisable.exc_value)
    else:
        report(unraisable)


def starters(store: Store) -> frozenset[str] | None:
    """Persons who started the running flow run, or handed it to the platform; None where nobody can tell.

    That is so where an account did that no policy asked, or the audit log does not tell any more who handed it over: the home
    that it was handed over in has an entry of its own, which counts first. The set is empty for a run of a schedule, an event, or
    Prefect's page.
    """
    now = actor()
    if now.identity != "automatic":
        return frozenset([now.name]) if now.identity == "person" else None
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.idempotency_key or now.name != "prefect":
        return frozenset()
    words = f"under the key {run.idempotency_key}"
    own = [one for one in noted(home()) if one["action"] == "start run" and str(one["what"]).endswith(words)]
    if own:
        return frozenset(one["who"] for one in own) if all(one["identity"] == "person" for one in own) else None
    handed = [entry for entry in entries(store) if entry.action == "start run" and entry.what.endswith(words)]
    known = bool(handed) and all(e.identity == "person" and audit_chain.unchanged(store, e.number) for e in handed)
    return frozenset(entry.who for entry in handed) if known else None


def cancelled() -> bool:
    """Whether somebody ended the flow run, asked every three seconds at most; no while Prefect's server is away.

    They cancelled it, or deleted it in Prefect's page, after which nobody could cancel it. Raises the KeyboardInterrupt that came
    where Python could not raise it.
    """
    global _last_asked
    if _lost:
        raise _lost.pop()
    identity = runtime.get_id()
    if time.monotonic() - _last_asked < ASK_EVERY_SECONDS or identity is None:
        return False

    def ended_by_somebody(client: Any) -> bool:
        try:
            state = client.read_flow_run(UUID(identity)).state
        except ObjectNotFound:
            # A server that does not know the run's flow either has lost all it knew: that is no wish of anybody's.
            context = FlowRunContext.get()
            if context is None or context.flow_run is None:
                return False
            client.read_flow(context.flow_run.flow_id)
            return True
        return bool(state and (state.is_cancelling() or state.is_cancelled()))

    try:
        ended = ask(ended_by_somebody)
    except Away:
        ended = False
    _last_asked = time.monotonic()
    return ended
