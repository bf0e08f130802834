"""A managed online endpoint as values: endpoint, deployment, environment and model by the SDK's own classes. Asks nobody.

What is sent is the SDK's REST form; the YAML is what `az ml online-endpoint create --file` and `az ml online-deployment create
--file` take. What stands around an endpoint (scaling, quotas, logs) is here as well. See
https://learn.microsoft.com/azure/machine-learning/reference-yaml-deployment-managed-online.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

import yaml

from tasks.artifacts import parse_ref
from tasks.azure import arm_client
from tasks.azure.arm_client import workspace_id
from tasks.azure.datastore import Datastore
from tasks.config.base import digest
from tasks.config.serving import AzureEndpointConfig, DeploymentConfig
from tasks.serving.vllm import require_gpus, settings_of

if TYPE_CHECKING:
    from azure.ai.ml.entities import Environment, ManagedOnlineDeployment, ManagedOnlineEndpoint, Model

OURS = "headway"
COLOURS = ("blue", "green")
DIGITS = 12
PORT = 8080
"""Of docker/endpoint.Dockerfile."""
LONGEST_NAME = 32
SIZES = (
    ("Standard_DS3_v2", 14.0, 4),
    ("Standard_DS4_v2", 28.0, 8),
    ("Standard_DS5_v2", 56.0, 16),
)
"""VM sizes that managed online endpoints take, GiB, cores; smaller ones Azure ML itself advises against.
https://learn.microsoft.com/azure/machine-learning/reference-managed-online-endpoints-vm-sku-list"""
TIMES_THE_FILES, SPARE_GIB = 2.5, 1.0
"""Memory of a server: its files once in ONNX Runtime and once while they are verified, key and value caches beside them."""
LONGEST_REQUEST_MS = 180_000
"""What Azure ML allows."""


@dataclass(frozen=True)
class Rendering:
    """One endpoint of a workspace, and a model on it."""

    endpoint_name: str
    """As Headway calls it: `deployment.endpoint`."""
    deployment: DeploymentConfig
    location: str

    @property
    def config(self) -> AzureEndpointConfig:
        return self.deployment.azureml

    @property
    def name(self) -> str:
        return azure_name(self.endpoint_name, self.config)

    def endpoint(self, *, expires: float | None = None) -> ManagedOnlineEndpoint:
        """The endpoint, without traffic. `expires`, in seconds since the epoch, is when the watch deletes it."""
        from azure.ai.ml.entities import IdentityConfiguration, ManagedIdentityConfiguration, ManagedOnlineEndpoint

        owned = IdentityConfiguration(
            type="user_assigned",
            user_assigned_identities=[ManagedIdentityConfiguration(resource_id=self.config.identity)],
        )
        until = {"expires": f"{expires:.0f}"} if expires else {}
        return ManagedOnlineEndpoint(
            name=self.name,
            description=f"endpoint/{self.endpoint_name}, by Headway",
            auth_mode=self.config.auth,
            public_network_access="enabled" if self.config.public else "disabled",
            identity=owned,
            tags={**self.config.tags, OURS: "endpoint", f"{OURS}.endpoint": self.endpoint_name, **until},
        )

    def online(
        self, colour: str, ref: str, *, files: Sequence[Mapping[str, Any]], inputs: Sequence[str], by_id: bool
    ) -> ManagedOnlineDeployment:
        """A deployment of a model; the service takes other resources by their ids, the Azure CLI by their names."""
        from azure.ai.ml.entities import (
            DefaultScaleSettings,
            ManagedOnlineDeployment,
            OnlineRequestSettings,
            ProbeSettings,
        )

        size, cores = self.size(files)
        waited = min(LONGEST_REQUEST_MS, int(self.deployment.limits.request_seconds * 1000))
        probe = {"period": 10, "timeout": 5, "success_threshold": 1}
        started = max(1, int(self.config.create_minutes * 60 / probe["period"]))
        return ManagedOnlineDeployment(
            name=colour,
            endpoint_name=self.name,
            description=f"{ref}, by Headway"[:200],
            model=self._asset("models", *model_name(ref), by_id=by_id),
            environment=self._asset("environments", *self._image_name, by_id=by_id),
            environment_variables=self._variables(ref, files, inputs, cores),
            instance_type=size,
            instance_count=self.config.instances,
            scale_settings=DefaultScaleSettings(),
            request_settings=OnlineRequestSettings(
                request_timeout_ms=waited,
                max_concurrent_requests_per_instance=self.config.at_once,
                max_queue_wait_ms=self.config.queue_ms,
            ),
            liveness_probe=ProbeSettings(initial_delay=30, failure_threshold=30, **probe),
            readiness_probe=ProbeSettings(initial_delay=10, failure_threshold=started, **probe),
            app_insights_enabled=False,
            egress_public_network_access="enabled" if self.config.egress else "disabled",
            tags={**self.config.tags, OURS: "deployment", f"{OURS}.model": ref},
        )

    def deployment_body(
        self, colour: str, ref: str, *, files: Sequence[Mapping[str, Any]], inputs: Sequence[str]
    ) -> dict[str, Any]:
        """Body of PUT .../deployments/COLOUR, with its own digest as a tag, by which it is known again."""
        made = self.online(colour, ref, files=files, inputs=inputs, by_id=True)
        body = arm_client.rest(made._to_rest_object(self.location))
        return {**body, "tags": {**body["tags"], f"{OURS}.spec": digest(body)[:DIGITS]}}

    def endpoint_body(self, *, expires: float | None = None) -> dict[str, Any]:
        """Body of PUT .../onlineEndpoints/NAME."""
        return arm_client.rest(self.endpoint(expires=expires)._to_rest_online_endpoint(self.location))

    def environment(self) -> Environment:
        """Our image, and where it is asked."""
        from azure.ai.ml.entities import Environment

        name, version = self._image_name
        routes = {"liveness_route": "/livez", "readiness_route": "/readyz", "scoring_route": "/score"}
        output = {route: {"path": path, "port": PORT} for route, path in routes.items()}
        return Environment(name=name, version=version, image=self.config.image, inference_config=output)

    def model(self, ref: str, address: str) -> Model:
        """The model's folder in the Blob store, as an asset whose version is the model's own."""
        from azure.ai.ml.entities import Model

        name, version = model_name(ref)
        return Model(
            name=name,
            version=version,
            type="custom_model",
            path=address,
            description=f"{ref}, by Headway"[:200],
            tags={OURS: "model", f"{OURS}.ref": ref},
        )

    def size(self, files: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
        """VM size and cores. Raises ValueError when none of the short list holds the model."""
        if self.deployment.runtime == "vllm":
            require_gpus(self.deployment)
        known = {name: cores for name, _, cores in SIZES}
        if self.config.instance_type:
            return self.config.instance_type, known.get(self.config.instance_type, 0)
        gib = sum(int(file["size"]) for file in files) / 2**30 * TIMES_THE_FILES + SPARE_GIB
        fitting = [(name, cores) for name, memory, cores in SIZES if memory >= gib]
        if not fitting:
            raise ValueError(
                f"the model needs {gib:.0f} GiB, more than {SIZES[-1][0]} has: name a VM size in azureml.instance_type"
            )
        return fitting[0]

    def _variables(
        self, ref: str, files: Sequence[Mapping[str, Any]], inputs: Sequence[str], cores: int
    ) -> dict[str, str]:
        """What docker/endpoint.sh reads. Azure ML keeps callers without a key out: OPEN says that we trust it to."""
        content = {"kind": parse_ref(ref)[0], "files": [dict(file) for file in files], "inputs": list(inputs)}
        return {
            "MODEL_REF": ref,
            "CONTENT": json.dumps(content, sort_keys=True),
            "LIMITS": json.dumps(self.deployment.limits.model_dump(mode="json"), sort_keys=True),
            "HOST": "0.0.0.0",
            "OPEN": "true",
            "DEGRADE": str(self.deployment.degrade).lower(),
            "PORT": str(PORT),
            "THREADS": str(cores or 4),
            **({"VLLM": json.dumps(by_vllm, sort_keys=True)} if (by_vllm := settings_of(self.deployment)) else {}),
        }

    def _asset(self, kind: str, name: str, version: str, *, by_id: bool) -> str:
        if by_id:
            return f"{arm_client.workspace_id(self.config)}/{kind}/{name}/versions/{version}"
        return f"azureml:{name}:{version}"

    @property
    def _image_name(self) -> tuple[str, str]:
        return "headway-endpoint", hashlib.sha256(self.config.image.encode()).hexdigest()[:DIGITS]


def azure_name(endpoint: str, config: AzureEndpointConfig) -> str:
    """The same for the same endpoint and workspace; a region has a name only once, so a digest of the workspace is part of it."""
    if config.name:
        return config.name
    plain = "".join(letter if letter.isalnum() else "-" for letter in endpoint).strip("-")
    mark = digest([arm_client.workspace_id(config), endpoint])[:6]
    return f"hw-{plain}"[: LONGEST_NAME - len(mark) - 1].rstrip("-") + f"-{mark}"


def model_name(ref: str) -> tuple[str, str]:
    """Name and version of a model as an asset."""
    kind, name, version = parse_ref(ref)
    return f"{OURS}-{kind}-{name}".replace(".", "-"), str(version)[:DIGITS]


def model_prefix(ref: str) -> str:
    """Where a model's files lie in the store as one folder; among artifacts a file is there once for all versions."""
    _, name, version = parse_ref(ref)
    return f"served/{name}/{version}"


def yaml_of(entity: Any) -> str:
    """An entity as `az ml ... --file` takes it."""
    return yaml.safe_dump(_without_nulls(json.loads(json.dumps(entity._to_dict()))), sort_keys=True)


def _without_nulls(value: Any) -> Any:
    """What the SDK's schema refuses though the SDK itself wrote it: an identity's client and principal, which Azure knows."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def require_complete(config: AzureEndpointConfig) -> None:
    """Raise what is missing before anything is spent: ValueError for settings, Missing for the package."""
    from tasks.common.errors import Missing

    named = ("subscription_id", "resource_group", "workspace", "image", "endpoint")
    if empty := [name for name in named if not getattr(config, name)]:
        raise ValueError(
            f"deployment.backend is azureml, and deployment.azureml.{empty[0]} is empty: set it"
            + ("" if empty[0] == "image" else f", or cluster.azureml.{empty[0]}")
        )
    if not config.identity:
        raise ValueError(
            "deployment.backend is azureml, and deployment.azureml.identity is empty: create a user-assigned identity "
            "(az identity create), give it AcrPull on the registry and Storage Blob Data Reader on the container, and set its "
            "resource id. An identity that Azure makes with the endpoint has no right by the time its first deployment needs one"
        )
    try:
        import azure.ai.ml  # noqa: F401
    except ModuleNotFoundError as error:
        raise Missing(
            f"deployment.backend azureml needs the package azure-ai-ml ({error.name} is not installed)",
            remedy="pip install -c constraints.txt -e '.[azure]'",
        ) from error


# A managed online endpoint as files that `az` takes, each read back by the SDK's own schema before anybody sees it.


# What stands around a managed online endpoint, as files: scaling, quotas before it, and its logs. Nothing here asks
# Azure.
#
# `autoscale-COLOUR.json` is a Microsoft.Insights/autoscaleSettings of a deployment, which a deploy puts; `diagnostics.json` a
# Microsoft.Insights/diagnosticSettings, and `policy.xml` the inbound policy of an API of Azure API Management, which who owns the
# subscription applies. See
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
    target = f"{workspace_id(made.config)}/onlineEndpoints/{made.name}/deployments/{colour}"
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
            "name": scaling_name(made.name, colour),
            "targetResourceUri": target,
            "targetResourceLocation": made.location,
            "profiles": [
                {"name": "by load", "capacity": {k: str(v) for k, v in capacity.items()}, "rules": rules},
            ],
        },
    }


def scaling_name(endpoint: str, colour: str) -> str:
    """Of a deployment's setting of Azure Monitor, by the names of Azure."""
    return f"{endpoint}-{colour}"


def scales(config: AzureEndpointConfig) -> bool:
    """Whether its deployments grow and shrink."""
    return config.most_instances > config.instances


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
    if by_day := made.config.requests_per_day:
        quota = {"calls": str(by_day), "renewal-period": str(DAY_SECONDS), "counter-key": key}
        Xml.SubElement(inbound, "quota-by-key", quota)
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


def files_of(
    made: Rendering, colour: str, ref: str, *, files: Sequence[Mapping[str, Any]], inputs: Sequence[str], store: str
) -> dict[str, str]:
    """Name and text of each file. `store` is the address az://... of the store. Raises ValueError for what cannot be."""
    datastore = Datastore(made.config, store)
    texts = {
        "endpoint.yml": yaml_of(made.endpoint()),
        f"{colour}-deployment.yml": yaml_of(made.online(colour, ref, files=files, inputs=inputs, by_id=False)),
        "environment.yml": yaml_of(made.environment()),
        "datastore.yml": yaml_of(datastore.entity()),
        "model.yml": yaml_of(made.model(ref, datastore.address(model_prefix(ref), by_id=False))),
        "policy.xml": policy(made),
    }
    require_loadable(texts)
    if scales(made.config):
        texts |= {f"autoscale-{one}.json": json.dumps(autoscale(made, one), indent=2) + "\n" for one in COLOURS}
    if made.config.log_analytics:
        texts["diagnostics.json"] = json.dumps(diagnostics(made), indent=2) + "\n"
    return texts


def require_loadable(texts: Mapping[str, str]) -> None:
    """Raise ValueError, in the SDK's words, for YAML that the SDK would not take."""
    from azure.ai.ml import (
        load_datastore,
        load_environment,
        load_model,
        load_online_deployment,
        load_online_endpoint,
    )
    from azure.ai.ml.exceptions import ValidationException
    from marshmallow.exceptions import ValidationError

    load = {
        "endpoint.yml": load_online_endpoint,
        "environment.yml": load_environment,
        "datastore.yml": load_datastore,
        "model.yml": load_model,
    }
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
