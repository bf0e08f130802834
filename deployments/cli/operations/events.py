"""`headway events`: what came, what it caused, what was refused and why; and one made by hand. See docs/events.md.

Read from the ledger and the folders of the home: it works while the platform is down. What strangers sent is shown without
control characters, which could make a terminal show something else.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.output import in_home, say, short_ref, visible
from tasks.artifacts import parse_ref
from tasks.common import process
from tasks.common.home import home
from tasks.common.redaction import redact_value, require_no_secrets
from tasks.events.event import NAMES, Event
from tasks.events.ledger import Ledger
from tasks.security.audit import actor, audited
from tasks.storage import open_store
from tasks.storage.store import find

if TYPE_CHECKING:
    from tasks.events.batches import Now

EventsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout; with -f, one per line.")]
EVERY_SECONDS = 1.0
FOLLOWED = 500
ALL = -1
"""SQLite's word for no limit."""
"""Events behind the newest whose changes are still told."""


def events(
    context: typer.Context,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new events, and each again when it changes.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="The number of newest events to show.")] = 50,
    as_json: EventsJson = False,
) -> None:
    """List events, newest last: what came, which run covered it, what it waits for, and what was refused and why."""
    if context.invoked_subcommand is not None:
        return

    if follow:
        _follow(home(), limit, as_json)
    else:
        result = told(home(), limit=limit)
        from deployments.services import prefect_server

        lines = list(map(line, result)) or [in_home("No event yet")]
        if any((batch["url"] or "").startswith("http") for event in result for batch in event["batches"]):
            lines.append(prefect_server.login_of(home()).strip())
        say({"events": result}, lines, as_json=as_json)


def send(
    name: Annotated[str, typer.Argument(help="What happened, for example dataset.published or model.degraded.")],
    subject: Annotated[str, typer.Argument(help="What it happened to: dataset/NAME, model/NAME or endpoint/NAME.")],
    object_: Annotated[
        str, typer.Option("--object", metavar="REF", help="Which version of that. Each version is reported once.")
    ] = "",
    data: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Further data of the event; may be repeated.")
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason, for the audit log.")] = "",
    as_: As = "",
    as_json: EventsJson = False,
) -> None:
    """Send an event by hand. The bridge decides what it starts, and when: `headway events` shows it."""
    what = f"{name} of {subject}"
    with asked("run", as_, what=f"send {what}"):
        event = _by_hand(home(), name, subject, object_, data or [], reason)
        with audited(open_store(home()), "send event", right="run", what=what, reason=reason):
            receipt = Ledger(home()).receive(event)
    fields = {key: getattr(event, key) for key in ("name", "subject", "object", "identity")}
    fields |= {"number": receipt.number, "status": receipt.status, "duplicate_of": receipt.of}
    repeats = f"It repeats event {receipt.of}: each version is reported once." if receipt.of else ""
    say({"event": fields}, repeats or f"Event {receipt.number}: {what}", as_json=as_json)


def told(home: Path, *, limit: int, after: int = 0) -> list[dict[str, Any]]:
    """Events as this command tells them, oldest first: times are ISO 8601 in UTC, flow runs have their page."""
    # Where flow runs have their pages, also while the server is down.
    from deployments.services import prefect_server
    from tasks.events.batches import told as listed

    known = process.read_json(home / "prefect" / "server.json") or {}
    pages = prefect_server.named_server(home) or str(known.get("url", ""))
    result = []
    for event in map(redact_value, listed(Ledger(home), _now(home), limit=limit, after=after)):
        for batch in event["batches"]:
            batch["url"] = f"{pages}/runs/flow-run/{batch['flow_run']}" if batch["flow_run"] else None
        waits = [{**one, "until": _utc(one["until"])} for one in event["waits"]]
        times = {key: _utc(event[key]) for key in ("received", "occurred")}
        result.append({**event, **times, "waits": waits})
    return result


def line(event: dict[str, Any]) -> str:
    """One event for people."""
    what = (event["name"], event["object"] or event["subject"])
    about = "  ".join(short_ref(part) if part.startswith("dataset/") else part for part in what if part)
    came: list[str] = []
    if event["duplicate_of"]:
        came.append(f"of {event['duplicate_of']}")
    if event["reason"]:
        came.append(f"({event['reason']})")
    if event["became"]:
        came.append(f"-> {short_ref(event['became'])}")
    for batch in event["batches"]:
        state = batch["outcome"] or ("running" if batch["state"] == "running" else "is being started")
        came.append(f"-> {batch['deployment']}: {state}  {batch['url'] or ''}".rstrip())
    for wait in event["waits"]:
        until = f" until {wait['until']}" if wait["until"] else ""
        came.append(f"waits for {wait['trigger']}: {wait['why']}{until}")
    output = event["reason"] or event["became"] or event["batches"] or event["waits"]
    if event["status"] == "accepted" and not output:
        trigger = "no trigger" if event["looked_at"] else "waits for the bridge"
        came.append("waits until all of it has landed" if event["name"] == "data.arrived" else trigger)
    parts = (event["received"], f"{event['channel']:<7}", about, event["status"], *came)
    return visible("  ".join(part for part in parts if part))


def _follow(home: Path, limit: int, as_json: bool) -> None:
    """Print new and changed events until the user presses Ctrl-C."""
    shown: dict[int, str] = {}
    first, newest = True, 0
    try:
        while True:
            result = told(home, limit=limit if first else FOLLOWED)
            if not first and result and result[0]["number"] > newest + 1:  # a burst: more came than are looked at again
                result = told(home, limit=ALL, after=newest)
            for event in result:
                text = json.dumps(event) if as_json else line(event)
                fresh = first or event["number"] in shown or event["number"] > newest
                if fresh and shown.get(event["number"]) != text:
                    print(text, flush=True)
                    shown[event["number"]] = text
            newest = max([newest, *(event["number"] for event in result)])
            shown = dict(sorted(shown.items())[-FOLLOWED:])
            first = False
            time.sleep(EVERY_SECONDS)
    except KeyboardInterrupt:
        return


def _utc(seconds: float | None) -> str | None:
    """ISO 8601; a sender may say any number, and one that is no time is left out."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def _now(home: Path) -> Now:
    """What is known of the triggers: from the settings, and from what the bridge says of Prefect's automations."""
    from deployments.bridge.dispatch import told_at
    from deployments.catalogue.routes import routes
    from deployments.configuration.platform import load_settings
    from deployments.services.parts import bridge
    from tasks.events.batches import Now

    cooldowns = {route.name: route.trigger.cooldown_minutes * 60 for route in routes(load_settings(home).events)}
    runs, output = bridge.status(home) is not None, process.read_json(told_at(home)) or {}

    def kept(trigger: str) -> str:
        if not runs:
            return "the bridge does not run: `headway up`"
        known = output.get(trigger, {})
        automation = {
            "off": "its automation is switched off in Prefect's page",
            "missing": "its automation is gone: `headway up` makes it",
        }
        return automation.get(known.get("automation"), "") or str(known.get("problem", ""))

    return Now(time.time(), cooldowns, kept)


def _by_hand(home: Path, name: str, subject: str, object_: str, data: list[str], reason: str) -> Event:
    """The event of a command line. Raises ValueError, and Unknown for what is not there."""
    from uuid import uuid4

    if name not in NAMES:
        raise ValueError(f"there is no event {name!r}; there are {', '.join(NAMES)}")
    from deployments.configuration.platform import load_settings
    from tasks.serving.known import require_known

    kind, known, version = parse_ref(subject)
    if kind not in ("dataset", "model", "endpoint") or version:
        raise ValueError(
            f"{subject} cannot be a subject: dataset/NAME, model/NAME or endpoint/NAME; --object takes a version"
        )
    if kind == "endpoint":
        require_known(home, known)
    elif name == "data.arrived":
        events = load_settings(home).events
        watched = {one.dataset for one in events.folders} | {one.dataset for one in events.containers}
        if kind != "dataset" or known not in watched:
            hint = ", ".join(f"dataset/{one}" for one in sorted(watched)) or "none"
            raise ValueError(f"no watched folder or container makes {subject}; those that there are make: {hint}")
    else:
        find(open_store(home), kind, known)
    details = {}
    for one in data:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise ValueError(f"--data {one!r} is not K=V")
        details[key] = value
    details |= {"reason": reason} if reason else {}
    require_no_secrets(details)
    artifact = find(open_store(home), *parse_ref(object_)).ref if object_ else ""
    if artifact and not artifact.startswith(f"{subject}@"):
        raise ValueError(f"--object {object_} is no version of {subject}: name {subject}@VERSION")
    return Event(
        name=name,
        subject=subject,
        source=f"hand/{actor().name}",
        identity=str(uuid4()),
        object=artifact,
        occurred=time.time(),
        channel="hand",
        data=details,
    )
