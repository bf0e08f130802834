"""Tells a Prefect server of the work pool and of all deployments, and changes only what differs.

Schedules that people made in Prefect's page, and runs whose time has come, are left alone. Prefect's own upsert would delete
both. So do its other routes in part: a change of a deployment or of one of its schedules deletes the runs to come of all its
schedules, which are made again within a minute; with a schedule that is deleted go the missed runs of all. Imports Prefect:
`prepare` comes first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, NamedTuple

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import (
    ConcurrencyLimitStrategy,
    ConcurrencyOptions,
    DeploymentSchedule,
    State,
    StateType,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL
from prefect.states import AwaitingConcurrencySlot, Cancelled
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from deployments.catalogue.flows import OURS, POOL, Deployment, Schedule
from deployments.services import prefect_server
from deployments.services.flow_runs import KEPT, flow_runs, untried
from tasks.common.errors import Unknown

Change = Callable[[], Any]


def register(client: SyncPrefectClient, deployments: list[Deployment]) -> None:
    """Make the server's deployments of ours what they should be."""
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        described = "Flow runs as processes on the machine of the worker."
        client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", base_job_template=template, description=described)
        )
    for deployment in deployments:
        wanted, result = _fields(deployment), _read(client, deployment)
        if result is None:
            flow = client.create_flow_from_name(deployment.flow)
            client.create_deployment(flow_id=flow, name=deployment.name, **wanted)
            result = _read(client, deployment)
            assert result is not None, f"{deployment.full_name} was just made"
        # By name. What has a name that is wanted no more was edited, if there is a new one: it stays the same for its
        # runs.
        existing = {one.slug: one for one in result.schedules if one.slug and one.slug.startswith(OURS)}
        pairs = [
            (existing.pop(schedule.slug), schedule) for schedule in deployment.schedules if schedule.slug in existing
        ]
        known = {schedule.slug for _, schedule in pairs}
        new = [schedule for schedule in deployment.schedules if schedule.slug not in known]
        old = [existing[slug] for slug in sorted(existing, key=lambda slug: (len(slug), slug))]
        matched = _Matched([*pairs, *zip(old, new, strict=False)], new[len(old) :], old[len(new) :])
        changes: list[Change] = []
        # The limit itself comes back in another field, and never changes.
        compared = [key for key in wanted if key != "concurrency_limit"]
        if any(_plain(getattr(result, key)) != _plain(wanted[key]) for key in compared):
            update = DeploymentUpdate(**wanted)
            changes.append(partial(client.update_deployment, result.id, update))
        changes += _of_schedules(client, result, *matched)
        if changes:
            # Change a deployment without losing a run: what is due is kept, what is to come is made again at once.
            # What was due of a schedule that is gone is cancelled, and says why.
            gone = {one.id for one in matched.gone}
            began = datetime.now(UTC)
            of_it = FlowRunFilterDeploymentId(any_=[result.id])
            for run in flow_runs(client, StateType.SCHEDULED, by_schedule=True, deployment_id=of_it):
                if run.run_count or run.expected_start_time > began or run.state is None or not untried(run.state):
                    continue
                if run.created_by is not None and run.created_by.id in gone:
                    state: State[Any] = Cancelled(message="Its schedule is gone from the settings")
                else:  # Prefect deletes no run in this state, and workers take it up like any other
                    state = AwaitingConcurrencySlot(scheduled_time=run.state.state_details.scheduled_time, message=KEPT)
                client.set_flow_run_state(run.id, state)
            for change in changes:
                change()
            payload = {"start_time": began.isoformat()}
            client.request("POST", "/deployments/{id}/schedule", path_params={"id": result.id}, json=payload)


@cache
def _form(flow: str) -> dict[str, Any]:
    """The schema of a flow's parameters, which Prefect's page makes its form of; not to be changed.

    It takes 10 ms, and each flow has several deployments.
    """
    function = getattr(importlib.import_module(f"flows.{flow}"), flow)
    schema: dict[str, Any] = parameter_schema(function).model_dump_for_openapi()
    return schema


def _fields(deployment: Deployment) -> dict[str, Any]:
    strategy = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy(deployment.collision))
    return {
        # `prefect deploy` may have given it to another pool, and named another home than the worker's.
        "work_pool_name": POOL,
        "job_variables": {},
        "entrypoint": deployment.entrypoint,
        "parameters": deployment.parameters,
        "parameter_openapi_schema": _form(deployment.flow),
        "enforce_parameter_schema": True,
        "description": deployment.description,
        "tags": deployment.tags,
        "concurrency_limit": 1,
        "concurrency_options": strategy,
        "pull_steps": [],
    }


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _read(client: SyncPrefectClient, deployment: Deployment) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        return None


class _Matched(NamedTuple):
    """Which schedules at Prefect are which of the settings."""

    pairs: list[tuple[DeploymentSchedule, Schedule]]
    new: list[Schedule]
    gone: list[DeploymentSchedule]


def _of_schedules(
    client: SyncPrefectClient,
    result: DeploymentResponse,
    pairs: list[tuple[DeploymentSchedule, Schedule]],
    new: list[Schedule],
    gone: list[DeploymentSchedule],
) -> Iterator[Change]:
    for known, schedule in pairs:
        rule: Any = known.schedule
        times = (getattr(rule, "cron", ""), getattr(rule, "timezone", ""))
        now = (known.slug, times, known.active, known.parameters or {})
        if now != (schedule.slug, (schedule.cron, schedule.timezone), schedule.active, schedule.parameters):
            values = {"active": schedule.active, "parameters": schedule.parameters, "slug": schedule.slug}
            yield partial(client.update_deployment_schedule, result.id, known.id, schedule=_rule(schedule), **values)
    for schedule in new:
        yield partial(
            client.create_deployment_schedules,
            result.id,
            [
                DeploymentScheduleCreate(
                    schedule=_rule(schedule),
                    active=schedule.active,
                    parameters=schedule.parameters,
                    slug=schedule.slug,
                )
            ],
        )
    for known in gone:
        yield partial(client.delete_deployment_schedule, result.id, known.id)


def _rule(schedule: Schedule) -> CronSchedule:
    return CronSchedule(cron=schedule.cron, timezone=schedule.timezone)


def submit(deployment: str, parameters: dict[str, Any], key: str = "") -> tuple[dict[str, str], bool]:
    """Start a flow run of a deployment; with a key that was used before, the flow run of then. Whether it is new.

    Raises Unknown when the server does not have the deployment.
    """
    with prefect_server.client() as client:
        try:
            result = client.read_deployment_by_name(deployment)
        except ObjectNotFound as error:
            raise Unknown(
                f"the server has no deployment {deployment!r}", remedy="`headway up` registers all."
            ) from error
        before = (
            client.read_flow_runs(
                flow_run_filter=FlowRunFilter.model_validate({"idempotency_key": {"any_": [key]}}), limit=1
            )
            if key
            else []
        )
        run = client.create_flow_run_from_deployment(result.id, parameters=parameters, idempotency_key=key or None)
    base = PREFECT_UI_URL.value() or ""
    return {"id": str(run.id), "name": run.name, "url": f"{base}/runs/flow-run/{run.id}"}, not before
