"""What `headway status` tells: parts, last runs, next schedules, what waits for a person, what is wrong.

Read from the folders of the home; only the schedules are asked of Prefect, and are left out while it does not answer.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from deployments.services import bridge, mlflow_server, prefect_server, watch, worker
from tasks.common import process
from tasks.common.redaction import redact
from tasks.orchestration.run_log import LoggedRun, logged_runs, read_run, suspended
from tasks.security.policy import in_force

# Which schedules there are, and when each fires next, as Prefect knows them.


READ = 200


def next_runs(home: Path) -> list[dict[str, Any]]:
    """Each active schedule with its next time (ISO 8601), soonest first; empty while Prefect does not answer."""
    prefect_server.prepare(home)
    import httpx
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    try:
        with prefect_server.client() as client:
            names = {deployment.id: deployment for deployment in client.read_deployments()}
            flows = {flow.id: flow.name for flow in client.read_flows()}
            scheduled = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
            runs = client.read_flow_runs(
                flow_run_filter=scheduled, sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC, limit=READ
            )
    except httpx.HTTPError:
        return []
    return list(_first_of_each(runs, names, flows))


def _first_of_each(runs: list[Any], names: dict[Any, Any], flows: dict[Any, str]) -> Any:
    seen = set()
    for run in runs:
        deployment = names.get(run.deployment_id)
        schedule = run.created_by.id if run.auto_scheduled and run.created_by else None
        if deployment is None or schedule is None or schedule in seen or run.next_scheduled_start_time is None:
            continue
        seen.add(schedule)
        rule = next((one.schedule for one in deployment.schedules if one.id == schedule), None)
        yield {
            "deployment": f"{flows.get(deployment.flow_id)}/{deployment.name}",
            "cron": getattr(rule, "cron", None),
            "timezone": getattr(rule, "timezone", None),
            "next": run.next_scheduled_start_time.isoformat(timespec="seconds"),
        }


PACKAGES = ("headway", "prefect", "mlflow")
RUNS = 10
SCHEDULES = 10


def state(home: Path) -> dict[str, Any]:
    """Everything, as plain values; times are ISO 8601 in UTC."""
    from deployments.watch.alerts import firing

    runs = list(islice(logged_runs(home), RUNS))
    shown = {run.identity for run in runs}
    older = [read_run(folder) for folder in suspended(home) if folder.name not in shown]
    return {
        "policy": {**(policy := in_force(home)).model_dump(mode="json"), "words": policy.words},
        **addresses(home),
        "parts": [_part(name, item) for name, item in _parts(home).items()],
        "versions": {name: _version(name) for name in PACKAGES},
        "runs": [_run(run) for run in runs],
        "schedules": _schedules(home),
        "waiting": [_waiting(run, event) for run in [*runs, *older] if (event := run.waits)],
        "alerts": firing(home),
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
    }


def words(fields: dict[str, Any]) -> list[str]:
    """The same for people."""
    lines = [_part_words(part) for part in fields["parts"]]
    lines += [f"versions: {', '.join(f'{name} {value}' for name, value in fields['versions'].items())}"]
    lines += [f"policy: {fields['policy']['words']}"] if fields["policy"]["named"] else []
    lines += _section("waiting for a person", [f"{w['name']}  {w['question']}  {w['url']}" for w in fields["waiting"]])
    lines += _section("alerts", [f"{a['summary']}" for a in fields["alerts"]])
    lines += _section("no events from", [f"{name}: {why}" for name, why in fields["broken_sources"].items()])
    lines += _section("last runs", [_run_words(run) for run in fields["runs"]])
    lines += _section(
        "next", [f"{s['next']}  {s['deployment']}  ({s['cron']} {s['timezone']})" for s in fields["schedules"]]
    )
    return lines


def _parts(home: Path) -> dict[str, dict[str, Any] | None]:
    return {
        "prefect": prefect_server.status(home),
        "mlflow": mlflow_server.status(home),
        "worker": worker.status(home),
        "watch": watch.status(home),
        "bridge": bridge.status(home),
    }


def _part(name: str, result: dict[str, Any] | None) -> dict[str, Any]:
    running = result or {}
    since = _time(running["since"]) if "since" in running else None
    return {
        "name": name,
        "running": result is not None,
        "url": running.get("url"),
        "since": since,
        "pid": running.get("pid"),
    }


def _part_words(part: dict[str, Any]) -> str:
    text = f"running since {part['since']}  {part['url'] or ''}" if part["running"] else "not running"
    return f"{part['name']:<9}{text}"


def _run(run: LoggedRun) -> dict[str, Any]:
    opened, closed, ended = run.last("opened") or {}, run.last("closed"), run.status != "running"
    last = run.events[-1]["time"] if run.events else opened.get("time", 0.0)
    until = last if ended else time.time()
    stage = run.last("started") or {}
    return {
        "id": run.identity,
        "flow": run.handle.get("flow"),
        "subject": run.handle.get("subject"),
        "status": run.status,
        "stage": None if ended else stage.get("stage"),
        "started": _time(opened["time"]) if opened else None,
        "seconds": round(closed["seconds"] if closed else until - opened.get("time", until), 1),
        "url": (run.handle.get("flow_run") or {}).get("url"),
        "report": (closed or {}).get("report"),
    }


def _run_words(run: dict[str, Any]) -> str:
    where = f" in {run['stage']}" if run["stage"] else ""
    return f"{run['started']}  {run['flow']} {run['subject']}  {run['status']}{where}  {run['seconds']} s  {run['url'] or ''}"


def _waiting(run: LoggedRun, output: dict[str, Any]) -> dict[str, Any]:
    url = (run.handle.get("flow_run") or {}).get("url")
    return {
        "run": run.identity,
        "name": run.question,
        "for": output.get("for"),
        "question": output.get("question"),
        "url": url,
    }


def _schedules(home: Path) -> list[dict[str, Any]]:
    """The next run of each schedule, soonest first."""
    server = prefect_server.status(home)
    if server is None and prefect_server.named_server(home) is None:
        return []

    return next_runs(home)[:SCHEDULES]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
