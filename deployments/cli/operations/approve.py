"""`headway approve`: list what waits for an approval, and answer from a terminal. The form in Prefect's page does the same."""

from __future__ import annotations

import getpass
import os
import sys
import time
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As
from deployments.cli.options import Json
from deployments.cli.output import in_home, note, say
from deployments.services import prefect_server
from tasks.common.errors import Missing
from tasks.common.home import home
from tasks.orchestration.run_log import read_run, runs_at_work, suspended
from tasks.security.audit import account
from tasks.security.policy import authorise, load_policy

SUSPENDING_SECONDS = 30.0
"""A run that has said what it waits for is suspended within moments."""


def approve(
    question: Annotated[
        str, typer.Argument(metavar="RUN.QUESTION", help="The question to answer, as the list names it.")
    ] = "",
    yes: Annotated[bool, typer.Option("--approve", help="Approve.")] = False,
    no: Annotated[bool, typer.Option("--reject", help="Reject: the run ends, and what is served stays.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the audit log.")] = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """List what waits for an approval; with a question and --approve or --reject, answer. HEADWAY_TOKEN can hold your token."""
    token = os.environ.pop("HEADWAY_TOKEN", "")
    waiting = _waiting(home())
    if not yes and not no:
        login = prefect_server.login_of(home())
        lines = [text for one in waiting for text in (f"{one['name']}  {one['question']}", f"    {one['url']}{login}")]
        say({"waiting": waiting}, lines or in_home("Nothing waits for an approval"), as_json=as_json)
        return
    if (yes and no) or not reason.strip():
        raise ValueError("say --approve or --reject, and --reason TEXT, which goes into the audit log")
    chosen = _choose(waiting, question)
    decision = "approve" if yes else "reject"
    person = _person(chosen, decision, reason, as_, token)
    _answer(chosen["flow_run"], {"decision": decision, "reason": reason, "question": chosen["key"], **person})
    fields = {"flow_run": chosen["flow_run"], "decision": decision, "person": person["person"]}
    say(
        fields,
        f"{decision}: handed to {chosen['flow_run']}; `headway status` shows what becomes of it",
        as_json=as_json,
    )


def _waiting(home: Any) -> list[dict[str, Any]]:
    """Runs of this home that wait for an approval, with a process or without."""
    results = []
    at_work = {run.identity: run for run in runs_at_work(home)}
    for run in (at_work | {folder.name: read_run(folder) for folder in suspended(home)}).values():
        event = run.waits
        if event and event.get("for") == "approval":
            where = run.handle.get("flow_run") or {}
            payload = {
                "name": run.question,
                "flow_run": run.identity,
                "url": where.get("url"),
                "flow": run.handle.get("flow"),
                "subject": run.handle.get("subject"),
                "question": event["question"],
                "since": event["since"],
                "exercises": event.get("exercises", "approve"),
                "key": event.get("key", ""),
            }
            results.append(payload)
    return told_apart(sorted(results, key=lambda one: one["since"], reverse=True))


def told_apart(waiting: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With as many digits of the runs in their names as no two share: a schedule's runs begin alike, and ask the same."""
    runs = [(one["flow_run"], one["key"]) for one in waiting]
    digits = next((n for n in range(8, 36) if len({(run[:n], key) for run, key in runs}) == len(runs)), 36)
    return [{**one, "name": f"{one['flow_run'][:digits]}.{one['key']}".rstrip(".")} for one in waiting]


def _choose(waiting: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The question that is named by the first digits of its run, a dot, and its key: what was read is what is answered."""
    if not waiting:
        raise ValueError("nothing waits for an approval; `headway status` shows what runs")
    names = ", ".join(one["name"] for one in waiting)
    run, _, key = name.partition(".")
    fitting = [one for one in waiting if run and one["flow_run"].startswith(run) and one["key"] == key]
    if len(fitting) == 1:
        return fitting[0]
    if not key:
        raise ValueError(f"name the question that is answered, for a run may ask another one by now: one of {names}")
    raise ValueError(f"{name} does not wait, or not any more; what waits: {names}")


def _person(chosen: dict[str, Any], decision: str, reason: str, name: str, token: str) -> dict[str, str]:
    """Who answers, with a token where the policy asks for `approve`, or for what the answer exercises, as a deploy `promote`.

    Refused here already when the policy refuses; the run asks the policy once more. Raises Refused.
    """
    policy = load_policy(home())
    if not policy.asks("approve") and not policy.asks(chosen["exercises"]):
        return {"person": name or account(), "token": ""}
    if name and not token and sys.stdin.isatty():
        token = getpass.getpass(f"Token of {name}: ")
    what = f"{decision}: {chosen['question']}"
    authorise(home(), "approve", name, token, what=what, reason=reason, exercises=chosen["exercises"])
    return {"person": name, "token": token}


def _answer(flow_run: str, answer: dict[str, str]) -> None:
    """Resume the paused run. Raises Missing when it does not wait any more, or its server is away."""
    from uuid import UUID

    prefect_server.require(home(), note)
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.exceptions import ObjectNotFound

    with prefect_server.client() as client:
        try:  # Prefect answers an answer to a run that it does not have with HTTP 500
            client.read_flow_run(UUID(flow_run))
        except ObjectNotFound as error:
            raise Missing(
                f"Prefect has no flow run {flow_run} any more: somebody deleted it",
                remedy="It ends within seconds. Start the run again: it reuses what is finished, and asks again.",
            ) from error
        deadline = time.monotonic() + SUSPENDING_SECONDS
        while (result := client.resume_flow_run(UUID(flow_run), run_input=answer)).status != SetStateStatus.ACCEPT:
            if time.monotonic() > deadline or not client.read_flow_run(UUID(flow_run)).state.is_running():
                break
            time.sleep(0.5)
    if result.status != SetStateStatus.ACCEPT:
        raise Missing(
            f"the run took no answer: {result.details.reason}", remedy="`headway approve` lists what waits now."
        )
