"""What events start, as Prefect's automations: one a trigger of the settings, `headway.trigger.NAME`. See docs/events.md.

An automation waits for `headway.trigger.due`, which the bridge sends for a batch of events (deployments/bridge/dispatch.py), and
starts the deployment with the batch as `cause`. Whether it is switched on is left to who looks at Prefect's page. Imports
Prefect: `prepare` comes first.
"""

from __future__ import annotations

import json
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import RunDeployment
from prefect.events.filters import AutomationFilter, AutomationFilterName
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.exceptions import ObjectNotFound

from deployments.catalogue.routes import Route, routes
from deployments.configuration.events import EventsConfig

OURS = "headway.trigger."
DUE = "headway.trigger.due"
COMPARED = {"expect", "match", "match_related", "for_each", "threshold", "posture", "within"}


def apply(client: SyncPrefectClient, config: EventsConfig) -> list[str]:
    """Make a server's automations of triggers what the settings say; returns their names.

    What did not change is left alone, and so is every automation whose name does not start with `headway.trigger.`. Raises
    ValueError for a trigger of a deployment that the server does not have, before anything is changed.
    """
    wanted = {f"{OURS}{route.name}": _automation(client, route) for route in routes(config)}
    existing = {item.name: item for item in client.read_automations() if item.name.startswith(OURS)}
    for name, automation in wanted.items():
        known = existing.pop(name, None)
        if known is None:
            client.create_automation(automation)
        elif _compared(known) != _compared(automation):
            client.update_automation(known.id, automation.model_copy(update={"enabled": known.enabled}))
    for gone in existing.values():
        client.delete_automation(gone.id)
    return sorted(wanted)


def switched(client: SyncPrefectClient, names: list[str]) -> dict[str, str]:
    """Of each trigger, whether its automation is `on`, `off` or `missing`."""
    filtered = AutomationFilter(name=AutomationFilterName(any_=[f"{OURS}{name}" for name in names]))
    result = {one.name.removeprefix(OURS): one.enabled for one in client.read_automations(automations=filtered)}
    return {name: {True: "on", False: "off", None: "missing"}[result.get(name)] for name in names}


def _automation(client: SyncPrefectClient, route: Route) -> AutomationCore:
    trigger = route.trigger
    try:
        deployment = client.read_deployment_by_name(trigger.start)
    except ObjectNotFound as error:
        raise ValueError(f"events: a trigger starts {trigger.start!r}, which the server does not have") from error
    # What the flow is called with. Values come out of the event; settings are handed over as they are, never as
    # templates.
    payload: dict[str, Any] = {
        name: {"__prefect_kind": "jinja", "template": f"{{{{ event.payload.{name} }}}}"}
        for name in ("cause", "dataset")
    }
    if route.trigger.set:
        payload["overrides"] = {"__prefect_kind": "json", "value": json.dumps(route.trigger.set)}
    made = AutomationCore(
        name=f"{OURS}{route.name}",
        description=f"{trigger.event} of {trigger.subject} starts {trigger.start}. Made from Headway's settings.",
        trigger=EventTrigger(
            expect={DUE}, match={"prefect.resource.id": f"{OURS}{route.name}"}, for_each={"headway.batch"}
        ),
        actions=[RunDeployment(deployment_id=deployment.id, parameters=payload)],
    )
    # An update leaves out what was never set, and Prefect refuses it without the defaults; it refuses it with an owner, too.
    return AutomationCore.model_validate(made.model_dump(exclude={"owner_resource"}))


def _compared(automation: Any) -> Any:
    """What the settings say of it: not whether it is switched on."""
    return automation.model_dump(mode="json", include={"description": True, "actions": True, "trigger": COMPARED})
