"""What `headway status` tells: parts, last runs, next schedules, what waits for a person, what is wrong.

Read from the folders of the home; only the schedules are asked of Prefect, and are left out while it does not answer.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from deployments.services import mlflow_server, prefect_server
from deployments.services.parts import bridge, watch, worker
from deployments.services.starting import starting
from deployments.telemetry.runs import firing
from tasks.common import process
from tasks.common.redaction import redact
from tasks.orchestration.run_log import LoggedRun, logged_runs, read_run, suspended
from tasks.report.rehearsals import last_rehearsal
from tasks.security.policy import in_force

READ = 200


def next_runs(home: Path) -> list[dict[str, Any]]:
    """Each active schedule with its next time (ISO 8601), soonest first; empty while Prefect does not answer."""
    prefect_server.prepare(home)
    scheduled = {"state": {"type": {"any_": ["SCHEDULED"]}}}
    ask = {"flow_runs": scheduled, "sort": "NEXT_SCHEDULED_START_TIME_ASC", "limit": READ}
    try:
        names = {deployment["id"]: deployment for deployment in prefect_server.post("/deployments/filter", {})}
        flows = {flow["id"]: flow["name"] for flow in prefect_server.post("/flows/filter", {})}
        runs = prefect_server.post("/flow_runs/filter", ask)
    except (OSError, ValueError):
        return []
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        deployment = names.get(run["deployment_id"])
        schedule = run["created_by"]["id"] if run["auto_scheduled"] and run["created_by"] else None
        if deployment is None or schedule is None or schedule in first or run["next_scheduled_start_time"] is None:
            continue
        rule: dict[str, Any] = next((one["schedule"] for one in deployment["schedules"] if one["id"] == schedule), {})
        first[schedule] = {
            "deployment": f"{flows.get(deployment['flow_id'])}/{deployment['name']}",
            "cron": rule.get("cron"),
            "timezone": rule.get("timezone"),
            "next": datetime.fromisoformat(run["next_scheduled_start_time"]).isoformat(timespec="seconds"),
        }
    return list(first.values())


PACKAGES = ("headway", "prefect", "mlflow")
RUNS = 10
SCHEDULES = 10
LONGEST_ERROR = 160
"""Characters of why a run ended early, in its line."""


def state(home: Path) -> dict[str, Any]:
    """Everything, as plain values; times are ISO 8601 in UTC."""
    runs = list(islice(logged_runs(home), RUNS))
    shown = {run.identity for run in runs}
    older = [read_run(folder) for folder in suspended(home) if folder.name not in shown]
    running = {
        "prefect": prefect_server.status(home),
        "mlflow": mlflow_server.status(home),
        "worker": worker.status(home),
        "watch": watch.status(home),
        "bridge": bridge.status(home),
    }
    parts = []
    for name, result in running.items():
        part = result or {}
        parts.append(
            {
                "name": name,
                "running": result is not None,
                "url": part.get("url"),
                "since": _time(part["since"]) if "since" in part else None,
                "starting_seconds": None if "port" not in part or (age := starting(part)) is None else round(age, 1),
                "pid": part.get("pid"),
            }
        )
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    waiting = [
        {
            "run": run.identity,
            "name": run.question,
            "for": event.get("for"),
            "question": event.get("question"),
            "url": (run.handle.get("flow_run") or {}).get("url"),
        }
        for run in [*runs, *older]
        if (event := run.waits)
    ]
    asked = running["prefect"] is not None or prefect_server.named_server(home) is not None
    return {
        "policy": {**(policy := in_force(home)).model_dump(mode="json"), "words": policy.words},
        **addresses(home),
        "parts": parts,
        "versions": versions,
        "runs": [_run(run) for run in runs],
        "schedules": next_runs(home)[:SCHEDULES] if asked else [],
        "waiting": waiting,
        "alerts": firing(home),
        "rehearsal": last_rehearsal(home),
        "broken_sources": bridge.problems(home),
    }


def addresses(home: Path) -> dict[str, Any]:
    """Where the pages are: our servers', or those that the environment names."""
    ours = prefect_server.status(home)
    named = prefect_server.named_server(home)
    tracking = os.environ.get("MLFLOW_TRACKING_URI", "")
    mlflow = mlflow_server.status(home)
    metrics = process.read_json(home / "platform" / "metrics.json") or {}
    webhook = process.read_json(home / "events" / "webhook.json") or {}
    return {
        "prefect": named or (ours or {}).get("url"),
        "mlflow": redact(tracking) if tracking.startswith("http") else (mlflow or {}).get("url"),
        "metrics": metrics.get("url") if watch.status(home) else None,
        "webhook": webhook.get("url") if bridge.status(home) else None,
        "login": str(home / "prefect" / "credentials") if ours or mlflow else None,
    }


def words(fields: dict[str, Any]) -> list[str]:
    """The same for people."""
    lines = [f"{part['name']:<9}{_part(part)}" for part in fields["parts"]]
    lines += [f"login of the pages: {fields['login']}"] if fields["login"] else []
    lines += [f"versions: {', '.join(f'{name} {value}' for name, value in fields['versions'].items())}"]
    lines += [f"policy: {fields['policy']['words']}"] if fields["policy"]["named"] else []
    lines += _section("waiting for an answer", [f"{w['name']}  {w['question']}  {w['url']}" for w in fields["waiting"]])
    if rehearsal := fields["rehearsal"]:
        counts = f"{rehearsal['passed']} passed, {rehearsal['failed']} failed, {rehearsal['not_tried']} not tried"
        broken = "".join(f"; not so: {name}" for name in rehearsal["broken"])
        lines += [f"rehearsal: {rehearsal['began'][:19]}, {counts}{broken}  {rehearsal['report']}"]
    lines += _section("alerts", [f"{a['summary']}" for a in fields["alerts"]])
    lines += _section("no events from", [f"{name}: {why}" for name, why in fields["broken_sources"].items()])
    runs = []
    for run in fields["runs"]:
        where = f" in {run['stage']}" if run["stage"] else ""
        where += f", {run['done']:.0%}" if run["done"] is not None else ""
        how = f"{run['status'].replace('_', ' ')}{where}  {run['seconds']} s  {run['url'] or ''}"
        runs.append(f"{run['started']}  {run['flow']} {run['subject']}  {how}")
        if run["error"]:
            runs.append(f"  {' '.join(run['error'].split())[:LONGEST_ERROR]}")
    lines += _section("last runs", runs)
    lines += _section(
        "next", [f"{s['next']}  {s['deployment']}  ({s['cron']} {s['timezone']})" for s in fields["schedules"]]
    )
    return lines


def _part(part: dict[str, Any]) -> str:
    if not part["running"]:
        return "not running"
    if part["starting_seconds"] is not None:
        return f"starting, for {part['starting_seconds']:.0f} s so far: {part['url']} does not listen yet"
    return f"running since {part['since']}  {part['url'] or ''}"


def _run(run: LoggedRun) -> dict[str, Any]:
    opened, closed, ended = run.last("opened") or {}, run.last("closed"), run.status != "running"
    last = run.events[-1]["time"] if run.events else opened.get("time", 0.0)
    until = last if ended else time.time()
    stage = run.last("started") or {}
    progress = run.last("started", "progress") or {}
    total = progress.get("total") or 0.0
    return {
        "id": run.identity,
        "flow": run.handle.get("flow"),
        "subject": run.handle.get("subject"),
        "status": run.status,
        "stage": None if ended else stage.get("stage"),
        "done": None if ended or not total else min(progress["done"] / total, 1.0),
        "started": _time(opened["time"]) if opened else None,
        "seconds": round(closed["seconds"] if closed else until - opened.get("time", until), 1),
        "url": (run.handle.get("flow_run") or {}).get("url"),
        "report": (closed or {}).get("report"),
        "error": ((closed or {}).get("error") or {}).get("message")
        if run.status in ("failed", "gate_closed")
        else None,
    }


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
