"""Tells a Prefect server of the work pool and of all deployments, and changes only what differs.

Schedules that people made in Prefect's page, and runs that are late, are left alone: Prefect's own upsert would delete both.
Imports Prefect: `prepare` comes first.
"""

from __future__ import annotations

import importlib
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from deployments.catalogue import POOL, Deployment, Schedule
from deployments.platform import prefect_server
from tasks.errors import Unknown

OURS = "headway-"


def register(client: SyncPrefectClient, deployments: list[Deployment]) -> None:
    """Make the server's deployments of ours what they should be."""
    _pool(client)
    for deployment in deployments:
        wanted = _fields(deployment)
        found = _read(client, deployment)
        if found is None:
            flow = client.create_flow_from_name(deployment.flow)
            client.create_deployment(flow_id=flow, name=deployment.name, work_pool_name=POOL, **wanted)
        elif any(_plain(getattr(found, key)) != _plain(value) for key, value in _compared(wanted).items()):
            client.update_deployment(found.id, DeploymentUpdate(work_pool_name=POOL, **wanted))
        now = _read(client, deployment)
        assert now is not None, f"{deployment.full_name} was just made"
        _schedules(client, now, deployment.schedules)


def _pool(client: SyncPrefectClient) -> None:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        described = "Flow runs as processes on the machine of the worker."
        client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", base_job_template=template, description=described)
        )


def _fields(deployment: Deployment) -> dict[str, Any]:
    flow = getattr(importlib.import_module(f"flows.{deployment.flow}"), deployment.flow)
    strategy = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy(deployment.collision))
    return {
        "entrypoint": deployment.entrypoint,
        "parameters": deployment.parameters,
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "enforce_parameter_schema": True,
        "description": deployment.description,
        "tags": deployment.tags,
        "concurrency_limit": 1,
        "concurrency_options": strategy,
        "pull_steps": [],
    }


def _compared(wanted: dict[str, Any]) -> dict[str, Any]:
    """The limit itself comes back in another field, and never changes."""
    return {key: value for key, value in wanted.items() if key != "concurrency_limit"}


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _read(client: SyncPrefectClient, deployment: Deployment) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        return None


def _schedules(client: SyncPrefectClient, found: DeploymentResponse, wanted: tuple[Schedule, ...]) -> None:
    there = {one.slug: one for one in found.schedules if one.slug and one.slug.startswith(OURS)}
    for schedule in wanted:
        known = there.pop(schedule.slug, None)
        if known is not None and _same(known, schedule):
            continue
        if known is not None:
            client.delete_deployment_schedule(found.id, known.id)
        client.create_deployment_schedules(found.id, [_as_prefect(schedule)])
    for gone in there.values():
        client.delete_deployment_schedule(found.id, gone.id)


def _same(known: Any, schedule: Schedule) -> bool:
    rule = known.schedule
    same_time = (getattr(rule, "cron", ""), getattr(rule, "timezone", "")) == (schedule.cron, schedule.timezone)
    return same_time and known.active == schedule.active and (known.parameters or {}) == schedule.parameters


def _as_prefect(schedule: Schedule) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=CronSchedule(cron=schedule.cron, timezone=schedule.timezone),
        active=schedule.active,
        parameters=schedule.parameters,
        slug=schedule.slug,
    )


def submit(deployment: str, parameters: dict[str, Any], key: str = "") -> tuple[dict[str, str], bool]:
    """Start a flow run of a deployment; with a key that was used before, the flow run of then. Whether it is new.

    Raises Unknown when the server does not have the deployment.
    """
    with prefect_server.client() as client:
        try:
            found = client.read_deployment_by_name(deployment)
        except ObjectNotFound as error:
            raise Unknown(
                f"the server has no deployment {deployment!r}", remedy="`headway up` registers all."
            ) from error
        before = client.read_flow_runs(flow_run_filter=_by_key(key), limit=1) if key else []
        run = client.create_flow_run_from_deployment(found.id, parameters=parameters, idempotency_key=key or None)
    base = PREFECT_UI_URL.value() or ""
    return {"id": str(run.id), "name": run.name, "url": f"{base}/runs/flow-run/{run.id}"}, not before


def _by_key(key: str) -> FlowRunFilter:
    return FlowRunFilter.model_validate({"idempotency_key": {"any_": [key]}})
