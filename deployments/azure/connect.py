"""From what a deployment of the estate put out to the settings of a home: stores, a configuration for each cluster, the platform.

The file is what `az stack sub show`, `az deployment sub show` or `--query` of their outputs printed. Nothing in it is believed
that has not the form of a name of Azure's: it is written into files that commands are made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError

from deployments.azure.settings import Id
from deployments.configuration.platform import PlatformConfig
from tasks.common.validation import explain
from tasks.config.base import Settings
from tasks.config.files import SHIPPED, load, read_whole
from tasks.hardware.sku import gpus_of
from tasks.storage.settings import Stores

SCHEMA = "headway/estate/1"
IMAGES = {"gpu": "headway/cluster", "cpu": "headway/cluster-cpu", "endpoint": "headway/endpoint"}
RELEASE = "0.2.0"
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Address = Annotated[str, Field(pattern=r"^$|^az://[a-z0-9]{3,24}/[a-z0-9-]{3,63}$")]
Url = Annotated[str, Field(pattern=r"^$|^https://[a-z0-9.-]+(/[A-Za-z0-9-]+)*$")]
Resource = Annotated[
    str, Field(pattern=r"^/subscriptions/[0-9a-f-]{36}/resourceGroups/[\w.-]+/providers/[\w.-]+(/[\w.-]+)+$")
]
Who = Literal["submitter", "cluster", "endpoint", "platform", "bridge"]


class ClusterOutput(Settings):
    """A compute cluster that was made."""

    name: Word
    size: Word
    max_nodes: int
    preemptible: bool
    idle_minutes: int


class Outputs(Settings):
    """What a deployment of the estate puts out."""

    model_config = ConfigDict(hide_input_in_errors=True)

    schema_: Literal["headway/estate/1"] = Field(alias="schema")
    subscription_id: Id
    tenant_id: Id
    region: Word
    resource_group: Word
    workspace: Word
    network: Literal["public", "private", "isolated"]
    registry: Annotated[str, Field(pattern=r"^[a-z0-9]{5,50}\.azurecr\.io$")]
    artifacts: Address
    jobs: Address
    backups: Address
    identities: dict[Who, Resource]
    clients: dict[Who, Id]
    clusters: Annotated[tuple[ClusterOutput, ...], Field(min_length=1)]
    endpoint_size: Annotated[str, Field(pattern=r"^$|^Standard_\w+$")]
    incoming: Url
    queue: Url
    signing_key: Url
    log_analytics: Resource
    insights: Resource
    database: Annotated[str, Field(pattern=r"^$|^[a-z0-9.-]+$")]


def read_outputs(path: Path) -> Outputs:
    """The outputs in a file that the Azure CLI printed. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: write it with `az stack sub show --name NAME --output json`")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON, or was cut off: {error}; print it again with --output json") from error
    return outputs_of(value, str(path))


def outputs_of(value: Any, source: str) -> Outputs:
    """The outputs in what the Azure CLI printed. Raises ValueError."""
    for key in ("properties", "outputs", "headway", "value"):
        if isinstance(value, dict) and key in value and "schema" not in value:
            value = value[key]
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError(
            f"{source} has no outputs of an estate ({SCHEMA}): it is of another deployment, or of one that has not succeeded; "
            "write it with `az stack sub show --name NAME --output json` once that says succeeded"
        )
    try:
        return Outputs.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{source}, outputs.headway: {explain(error, Outputs, values=False)}") from error


def settings(outputs: Outputs) -> dict[str, str]:
    """The files of a home, and a configuration for each cluster: name and text. Each is read back by its own class first."""
    stores: dict[str, Any] = {
        "use": "azure",
        "jobs": "folders",
        "stores": {"azure": {"uri": f"{outputs.artifacts}/home"}, "folders": {"uri": outputs.jobs}},
    }
    if outputs.backups:
        stores["stores"]["backups"] = {"uri": outputs.backups}
    Stores.model_validate(stores)
    platform: dict[str, Any] = {"telemetry": {"azure_connection_string": "env:APPLICATIONINSIGHTS_CONNECTION_STRING"}}
    if outputs.queue:
        bridge = {"credential": "managed_identity", "client": outputs.clients["bridge"]}
        platform["events"] = {
            "containers": [{"url": outputs.incoming, "dataset": "incoming", **bridge}],
            "queues": [{"url": outputs.queue, **bridge}],
        }
    if outputs.database:
        platform["database"] = "env:HEADWAY_DATABASE"
    PlatformConfig.model_validate(platform)
    texts = {"stores.yaml": _text(stores), "platform.yaml": _text(platform)}
    for cluster in outputs.clusters:
        texts[f"{cluster.name}.yaml"] = _text(_cluster(outputs, cluster))
    return texts


def check(folder: Path, outputs: Outputs) -> None:
    """Read each configuration as `headway -c` does. Raises ValueError."""
    for cluster in outputs.clusters:
        path = folder / f"{cluster.name}.yaml"
        trains = [] if "trains" in read_whole(path) else ["tiny"]
        load([*trains, str(path)], [])


def _cluster(outputs: Outputs, cluster: ClusterOutput) -> dict[str, Any]:
    """A configuration for a cluster, on top of the shipped one for its size and tier."""
    gpus = gpus_of(cluster.size)
    azureml: dict[str, Any] = {
        "subscription_id": outputs.subscription_id,
        "resource_group": outputs.resource_group,
        "workspace": outputs.workspace,
        "compute": cluster.name,
        "size": cluster.size,
        "max_nodes": cluster.max_nodes,
        "idle_minutes": cluster.idle_minutes,
        "cluster_identity": outputs.identities["cluster"],
    }
    if outputs.network != "public":
        azureml["public_address"] = False
    endpoint: dict[str, Any] = {
        "image": f"{outputs.registry}/{IMAGES['endpoint']}:{RELEASE}",
        "identity": outputs.identities["endpoint"],
        "log_analytics": outputs.log_analytics,
    }
    if outputs.endpoint_size:
        endpoint["instance_type"] = outputs.endpoint_size
    if outputs.network == "isolated":
        endpoint["public"] = False
    return {
        "based_on": _shipped(cluster),
        "cluster": {
            "name": cluster.name,
            "preemptible": cluster.preemptible,
            "image": f"{outputs.registry}/{IMAGES['gpu' if gpus else 'cpu']}:{RELEASE}",
            "azureml": azureml,
        },
        "planning": {"spending": {"region": outputs.region}},
        "deployment": {"backend": "azureml", "azureml": endpoint},
    }


def _shipped(cluster: ClusterOutput) -> str:
    """The shipped configuration of a cluster's size and tier; `azureml` where there is none."""
    for path in sorted(SHIPPED.glob("azureml-*.yaml")):
        section = read_whole(path)["cluster"]
        if section["azureml"]["size"] == cluster.size and section.get("preemptible", False) == cluster.preemptible:
            return path.stem
    return "azureml"


def _text(value: dict[str, Any]) -> str:
    head = "# Written by `headway estate connect` out of a deployment's outputs.\n"
    return head + yaml.safe_dump(value, sort_keys=False, width=120, allow_unicode=True)
