"""Which schedules there are, and when each fires next, as Prefect knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deployments.services import prefect_server

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
