"""A managed online endpoint as files that `az` takes, each read back by the SDK's own schema before anybody sees it.

What is in them is render.py, and what stands around an endpoint is here; Headway's own deploy sends the same values and no files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

from tasks.azure.arm_client import workspace_id
from tasks.serving.azureml.render import Rendering, yaml_of

# What stands around a managed online endpoint, as files: scaling, quotas before it, and its logs. Nothing here asks
# Azure.
#
# `autoscale.json` is a Microsoft.Insights/autoscaleSettings, `diagnostics.json` a
# Microsoft.Insights/diagnosticSettings, and `policy.xml` the inbound policy of an API of Azure API Management. Headway
# renders them; who owns the subscription applies them. See
# https://learn.microsoft.com/azure/machine-learning/how-to-autoscale-endpoints and
# https://learn.microsoft.com/azure/api-management/api-management-policies.


BUSY_PERCENT, IDLE_PERCENT = 70, 30
"""CPU of a deployment's machines, above which one is added, and below which one is taken away."""
LOGS = ("AmlOnlineEndpointTrafficLog", "AmlOnlineEndpointConsoleLog", "AmlOnlineEndpointEventLog")
DAY_SECONDS = 86_400
ELEMENTS = frozenset(
    {
        "policies", "inbound", "backend", "outbound", "on-error", "base", "validate-azure-ad-token", "client-application-ids",
        "application-id", "audiences", "audience", "rate-limit-by-key", "quota-by-key", "set-header", "value",
        "authentication-managed-identity", "forward-request",
    }
)  # fmt: skip
"""Elements that a policy of ours may have."""
HTTP_IDENTITY = "https://ml.azure.com"
"""What API Management's own identity asks a token for, where the endpoint takes tokens of Microsoft Entra."""
CALLER = '@(context.Request.Headers.GetValueOrDefault("Authorization","").AsJwt()?.Claims.GetValueOrDefault("appid", "unknown"))'
SUBSCRIPTION = "@(context.Subscription.Id)"


def autoscale(made: Rendering, colour: str) -> dict[str, Any]:
    """Rules that add a machine while a deployment is busy, and take one away while it is idle."""
    target = f"{_endpoint_id(made)}/deployments/{colour}"
    config = made.config
    capacity = {"minimum": config.instances, "maximum": config.most_instances, "default": config.instances}
    rules = [
        _rule(target, "GreaterThan", BUSY_PERCENT, change="Increase", minutes=5),
        _rule(target, "LessThan", IDLE_PERCENT, change="Decrease", minutes=15),
    ]
    return {
        "location": made.location,
        "properties": {
            "enabled": True,
            "name": f"{made.name}-{colour}",
            "targetResourceUri": target,
            "targetResourceLocation": made.location,
            "profiles": [
                {"name": "by load", "capacity": {k: str(v) for k, v in capacity.items()}, "rules": rules},
            ],
        },
    }


def diagnostics(made: Rendering) -> dict[str, Any]:
    """All logs and metrics of the endpoint to the Log Analytics workspace of `log_analytics`."""
    return {
        "properties": {
            "workspaceId": made.config.log_analytics,
            "logAnalyticsDestinationType": "Dedicated",
            "logs": [{"category": name, "enabled": True} for name in LOGS],
            "metrics": [{"category": "AllMetrics", "enabled": True}],
        }
    }


def policy(made: Rendering) -> str:
    """The policy of an API that stands before the endpoint: who may come in, and how often.

    With `access.entra`, callers show a token and are counted by their application; else by their subscription key. Tokens (of
    text) are counted by the server itself, whose `limits` the deployment carries.
    """
    entra, limits = made.deployment.access.entra, made.deployment.limits
    root = Xml.Element("policies")
    inbound = Xml.SubElement(root, "inbound")
    Xml.SubElement(inbound, "base")
    if entra:
        checked = Xml.SubElement(
            inbound,
            "validate-azure-ad-token",
            {"tenant-id": entra.tenant, "failed-validation-httpcode": "401"},
        )
        _texts(checked, "client-application-ids", "application-id", entra.applications)
        _texts(checked, "audiences", "audience", (entra.audience,))
    key = CALLER if entra else SUBSCRIPTION
    calls = str(limits.requests_per_minute)
    Xml.SubElement(inbound, "rate-limit-by-key", {"calls": calls, "renewal-period": "60", "counter-key": key})
    by_day = str(limits.requests_per_minute * 60 * 24)
    Xml.SubElement(inbound, "quota-by-key", {"calls": by_day, "renewal-period": str(DAY_SECONDS), "counter-key": key})
    if made.config.auth == "aad_token":
        Xml.SubElement(inbound, "authentication-managed-identity", {"resource": HTTP_IDENTITY})
    else:
        header = Xml.SubElement(inbound, "set-header", {"name": "Authorization", "exists-action": "override"})
        Xml.SubElement(header, "value").text = "Bearer {{headway-endpoint-key}}"
    # Callers must not choose a deployment past the split.
    Xml.SubElement(inbound, "set-header", {"name": "azureml-model-deployment", "exists-action": "delete"})
    for section in ("backend", "outbound", "on-error"):
        Xml.SubElement(Xml.SubElement(root, section), "base")
    Xml.indent(root)
    text = Xml.tostring(root, encoding="unicode") + "\n"
    require_policy(text)
    return text


def require_policy(text: str) -> None:
    """Raise ValueError for a policy that is not well-formed, or has an element that none of ours has."""
    try:
        root = Xml.fromstring(text)
    except Xml.ParseError as error:
        raise ValueError(f"the policy is no XML: {error}") from error
    unknown = sorted({element.tag for element in root.iter()} - ELEMENTS)
    if root.tag != "policies" or unknown:
        raise ValueError(
            f"the policy has {', '.join(unknown) or root.tag}: only {', '.join(sorted(ELEMENTS))} are known"
        )


def _rule(target: str, operator: str, limit: int, *, change: str, minutes: int) -> dict[str, Any]:
    return {
        "metricTrigger": {
            "metricName": "CpuUtilizationPercentage",
            "metricResourceUri": target,
            "timeGrain": "PT1M",
            "statistic": "Average",
            "timeWindow": f"PT{minutes}M",
            "timeAggregation": "Average",
            "operator": operator,
            "threshold": limit,
        },
        "scaleAction": {"direction": change, "type": "ChangeCount", "value": "1", "cooldown": f"PT{minutes}M"},
    }


def _texts(parent: Xml.Element, group: str, name: str, values: tuple[str, ...]) -> None:
    within = Xml.SubElement(parent, group)
    for value in values:
        Xml.SubElement(within, name).text = value


def _endpoint_id(made: Rendering) -> str:
    return f"{workspace_id(made.config)}/onlineEndpoints/{made.name}"


def files_of(
    made: Rendering, colour: str, ref: str, *, files: Sequence[Mapping[str, Any]], inputs: Sequence[str], address: str
) -> dict[str, str]:
    """Name and text of each file. `address` is the model's folder in the store. Raises ValueError for what cannot be."""
    texts = {
        "endpoint.yml": yaml_of(made.endpoint()),
        f"{colour}-deployment.yml": yaml_of(made.online(colour, ref, files=files, inputs=inputs, by_id=False)),
        "environment.yml": yaml_of(made.environment()),
        "model.yml": yaml_of(made.model(ref, address)),
        "policy.xml": policy(made),
    }
    require_loadable(texts)
    if made.config.most_instances > made.config.instances:
        texts["autoscale.json"] = json.dumps(autoscale(made, colour), indent=2) + "\n"
    if made.config.log_analytics:
        texts["diagnostics.json"] = json.dumps(diagnostics(made), indent=2) + "\n"
    return texts


def require_loadable(texts: Mapping[str, str]) -> None:
    """Raise ValueError, in the SDK's words, for YAML that the SDK would not take."""
    from azure.ai.ml import load_environment, load_model, load_online_deployment, load_online_endpoint
    from azure.ai.ml.exceptions import ValidationException
    from marshmallow.exceptions import ValidationError

    load = {"endpoint.yml": load_online_endpoint, "environment.yml": load_environment, "model.yml": load_model}
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in texts.items():
            if not name.endswith(".yml"):
                continue
            path = Path(scratch) / name
            path.write_text(text)
            try:
                load.get(name, load_online_deployment)(str(path))
            except (ValidationError, ValidationException, ValueError) as error:
                raise ValueError(f"azure-ai-ml does not take {name}: {error}") from error
