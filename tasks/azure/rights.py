"""The rights that a workspace's jobs and endpoints need in Azure, each with the command of the Azure CLI that gives it.

Nothing here asks Azure. The roles are Azure's own, by their names:
https://learn.microsoft.com/azure/role-based-access-control/built-in-roles. docs/azureml.md has them in words.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.azure.arm_client import Where, workspace_id

REGISTRY = ".azurecr.io"
FOLDER_DAYS = 30
"""After the last change of a job's file: longer than a job may run on Azure ML, whose first files are not written again."""
SUBMITTER, CLUSTER, ENDPOINT = "SUBMITTER", "CLUSTER_PRINCIPAL", "ENDPOINT_PRINCIPAL"
CREATOR, PUSHER = "CREATOR", "PUSHER"
"""Who creates the cluster and who pushes images; the script gives them nothing unless they are named."""
PEOPLE = (SUBMITTER, CREATOR, PUSHER)
SERVERLESS = "serverless"


@dataclass(frozen=True)
class Right:
    """A role that somebody needs."""

    who: str
    """The script's variable with their object id in Microsoft Entra."""
    role: str
    scope: str
    """A resource's id, as a word of the script: it may have a variable of the script in it."""
    why: str

    @property
    def command(self) -> str:
        kind = '"$TYPE"' if self.who in PEOPLE else "ServicePrincipal"
        who = f'--assignee-object-id "${self.who}" --assignee-principal-type {kind}'
        return f'az role assignment create --role "{self.role}" {who} --scope "{self.scope}"'


@dataclass(frozen=True)
class Uses:
    """What a configuration uses of Azure."""

    where: Where
    store: str
    """az://ACCOUNT/CONTAINER[/PREFIX]."""
    jobs: str = ""
    """The same of the store that folders of jobs lie in; empty: `store`."""
    compute: str = ""
    """The compute cluster of jobs, or SERVERLESS; empty: there are none."""
    cluster_identity: str = ""
    """Resource id of the cluster's user-assigned identity; empty: the cluster is asked for the one that it has."""
    subnet: str = ""
    """Resource id of the cluster's subnet, or its name, with `vnet`; empty: it has none of yours."""
    vnet: str = ""
    image: str = ""
    """The image of jobs."""
    as_submitter: bool = False
    """Whether a job reads and writes the store as whoever submitted it."""
    endpoint_identity: str = ""
    """Resource id of the endpoint's user-assigned identity; empty: nothing is deployed there."""
    endpoint_image: str = ""
    endpoint_scales: bool = False
    """Whether a deploy puts an autoscale setting."""


def rights(uses: Uses) -> Iterator[Right]:
    """Who needs which role on what; of a role that an identity needs for two reasons, one."""
    workspace, apart = workspace_id(uses.where), uses.jobs not in ("", uses.store)
    container = f"$STORAGE/blobServices/default/containers/{_parts(uses.store)[1]}"
    folders = f"$JOBS/blobServices/default/containers/{_parts(uses.jobs)[1]}" if apart else container
    yield Right(SUBMITTER, "AzureML Data Scientist", workspace, "submits jobs, registers data, models and endpoints")
    yield Right(
        SUBMITTER, "Storage Blob Data Contributor", container, "publishes artifacts, and writes and reads job folders"
    )
    if uses.compute and apart:
        yield Right(SUBMITTER, "Storage Blob Data Contributor", folders, "writes and reads job folders")
    if uses.compute and not uses.as_submitter:
        if apart:
            yield Right(CLUSTER, "Storage Blob Data Reader", container, "nodes read inputs, and may change none")
        why = "nodes write job folders" if apart else "nodes read inputs, and write job folders"
        yield Right(CLUSTER, "Storage Blob Data Contributor", folders, why)
    if uses.compute and (registry := _registry(uses.image)):
        yield Right(CLUSTER, "AcrPull", f"${registry}", f"nodes pull {uses.image}")
    if uses.endpoint_identity:
        identity = uses.endpoint_identity
        yield Right(SUBMITTER, "Managed Identity Operator", identity, "hands the identity to the endpoint")
        yield Right(SUBMITTER, "Monitoring Reader", workspace, "reads the counts by which a rollout is judged")
        if uses.endpoint_scales:
            group = workspace.partition("/providers/")[0]
            yield Right(SUBMITTER, "Monitoring Contributor", group, "puts the autoscale settings of deployments")
        yield Right(ENDPOINT, "Storage Blob Data Reader", container, "the endpoint reads its model")
        if registry := _registry(uses.endpoint_image):
            yield Right(ENDPOINT, "AcrPull", f"${registry}", f"the endpoint pulls {uses.endpoint_image}")


def optional_rights(uses: Uses) -> Iterator[Right]:
    """What who creates the cluster and who pushes images need; often somebody has it already."""
    workspace = workspace_id(uses.where)
    if uses.compute and uses.compute != SERVERLESS:
        yield Right(CREATOR, "AzureML Compute Operator", workspace, "creates the cluster")
        yield Right(CREATOR, "Reader", workspace, "reads the workspace")
        if uses.cluster_identity:
            yield Right(
                CREATOR, "Managed Identity Operator", uses.cluster_identity, "hands the identity to the cluster"
            )
        if uses.subnet:
            group = workspace.partition("/providers/")[0]
            network = f"{group}/providers/Microsoft.Network/virtualNetworks/{uses.vnet}/subnets/{uses.subnet}"
            subnet = uses.subnet if uses.subnet.startswith("/") else network
            yield Right(CREATOR, "Network Contributor", subnet, "joins nodes to the subnet")
    for image in (uses.image if uses.compute else "", uses.endpoint_image):
        if registry := _registry(image):
            yield Right(PUSHER, "AcrPush", f"${registry}", "pushes images")


def script(uses: Uses) -> str:
    """A shell script that gives them all, for somebody who may give roles: these first, then what needs another right."""
    of_jobs = [one for one in rights(uses) if one.scope.startswith("$JOBS/")]
    account = shlex.quote(_parts(uses.store)[0])
    beginning = [
        "#!/usr/bin/env bash",
        "# The rights that Headway needs in Azure. Whoever runs this may give roles: Owner, User Access Administrator or RBAC",
        "# Administrator (Role Based Access Control Administrator).",
        "# The lifecycle rule at the end also needs Storage Account Contributor.",
        "set -euo pipefail",
        f"az account set --subscription {shlex.quote(uses.where.subscription_id)}",
        "# Who submits; another person or a service principal by their object id, the latter with TYPE=ServicePrincipal.",
        f'{SUBMITTER}="${{{SUBMITTER}:-$(az ad signed-in-user show --query id --output tsv)}}"',
        'TYPE="${TYPE:-User}"',
        f"STORAGE=$(az storage account show --name {account} --query id --output tsv)",
    ]
    lines = [*beginning, *_registries(uses), *_principals(uses)]
    for one in rights(uses):
        lines += [] if one in of_jobs else ["", f"# {one.why}", one.command]
    optional = list(dict.fromkeys(optional_rights(uses)))
    for who in dict.fromkeys(one.who for one in optional):
        lines += ["", f"# For somebody who has no such role yet: {who}=OBJECT_ID before this script."]
        lines.append(f'if [ -n "${{{who}:-}}" ]; then')
        for one in optional:
            lines += [f"  # {one.why}", f"  {one.command}"] if one.who == who else []
        lines.append("fi")
    if uses.compute:
        lines += ["", *_account_of_jobs(uses)]
        for one in of_jobs:
            lines += ["", f"# {one.why}", one.command]
        lines += ["", *_end_of_folders(uses)]
    return "\n".join(lines) + "\n"


def _registries(uses: Uses) -> Iterator[str]:
    """Lines that set the ids of registries, each once."""
    lines = []
    for image in (uses.image, uses.endpoint_image):
        if name := _registry(image):
            host = image.partition("/")[0].removesuffix(REGISTRY)
            lines.append(f"{name}=$(az acr show --name {shlex.quote(host)} --query id --output tsv)")
        elif image:
            lines.append(f"# {image} is in no registry of Azure: machines must reach it without a login.")
    yield from dict.fromkeys(lines)


def _principals(uses: Uses) -> Iterator[str]:
    """Lines that set the object ids of identities."""
    group, place = shlex.quote(uses.where.resource_group), shlex.quote(uses.where.workspace)
    if uses.compute == SERVERLESS:
        yield "# Machines that Azure ML brings act as the workspace."
        yield f"{CLUSTER}=$(az ml workspace show --name {place} --resource-group {group} \\"
        yield "  --query identity.principal_id --output tsv)"
    elif uses.cluster_identity:
        yield "# The cluster's identity. The cluster itself need not exist yet."
        yield _principal(CLUSTER, uses.cluster_identity)
    elif uses.compute:
        query = "identity.user_assigned_identities[0].principal_id || identity.principal_id"
        yield "# The cluster's identity: its user-assigned one, or else its own. The cluster must exist, unless the configuration"
        yield "# names its identity: cluster.azureml.cluster_identity."
        yield f"{CLUSTER}=$(az ml compute show --name {shlex.quote(uses.compute)} --resource-group {group} \\"
        yield f"  --workspace-name {place} --query {shlex.quote(query)} --output tsv)"
    if uses.endpoint_identity:
        yield _principal(ENDPOINT, uses.endpoint_identity)


def _principal(name: str, identity: str) -> str:
    """A line that sets a variable of the script to the object id of an identity."""
    return f"{name}=$(az identity show --ids {shlex.quote(identity)} --query principalId --output tsv)"


def _account_of_jobs(uses: Uses) -> list[str]:
    """Lines that make the account of jobs' folders, and its container, where there is none."""
    account, container = _parts(uses.jobs or uses.store)
    words = shlex.quote
    show = f"az storage account show --name {words(account)}"
    group, make = words(uses.where.resource_group), f"--storage-account {words(account)} --name {words(container)}"
    lines = []
    if account != _parts(uses.store)[0]:
        lines = [
            "# The account of jobs' folders. Blob versioning is a setting of an account, not of a container: this one has none.",
            "# Creating it needs Contributor on the group; nothing is created where account and container exist.",
            f"if ! {show} --output none 2> /dev/null; then",
            f"  az storage account create --name {words(account)} --resource-group {group} \\",
            "    --kind StorageV2 --sku Standard_LRS --enable-hierarchical-namespace false \\",
            "    --allow-blob-public-access false --min-tls-version TLS1_2 --output none",
            f"  az storage account blob-service-properties update --account-name {words(account)} \\",
            f"    --resource-group {group} --enable-versioning false \\",
            "    --enable-delete-retention false --output none",
            "fi",
            f"az storage container-rm show {make} --output none 2> /dev/null \\",
            f"  || az storage container-rm create {make} --output none",
        ]
    return [
        *lines,
        f"JOBS=$({show} --query id --output tsv)",
        f"JOBS_GROUP=$({show} --query resourceGroup --output tsv)",
    ]


def _end_of_folders(uses: Uses) -> list[str]:
    """Lines that give the folders of jobs an end date."""
    account, container, *prefix = (uses.jobs or uses.store).removeprefix("az://").rstrip("/").split("/", 2)
    words = shlex.quote
    below = "/".join([container, *prefix, "jobs/"])
    apart = account != _parts(uses.store)[0]
    versions: dict[str, Any] = {} if apart else {"version": {"delete": {"daysAfterCreationGreaterThan": 1}}}
    rule = {
        "enabled": True,
        "name": "headway-jobs",
        "type": "Lifecycle",
        "definition": {
            "actions": {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": FOLDER_DAYS}}, **versions},
            "filters": {"blobTypes": ["blockBlob"], "prefixMatch": [below]},
        },
    }
    return [
        f"# Folders of jobs are deleted {FOLDER_DAYS} days after their last change (Azure ML ends a job after 21), versions of",
        "# their files, where the account keeps any, after a day. An account has one policy: one that is there stays as it is.",
        f'az storage account management-policy show --account-name {words(account)} --resource-group "$JOBS_GROUP" \\',
        f"  --output none 2> /dev/null || az storage account management-policy create --account-name {words(account)} \\",
        '  --resource-group "$JOBS_GROUP" --output none --policy \\',
        f"  {words(json.dumps({'rules': [rule]}))} \\",
        '  || echo "lifecycle rule not set: needs Storage Account Contributor" >&2',
    ]


def _parts(store: str) -> tuple[str, str]:
    account, container, *_ = store.removeprefix("az://").split("/")
    return account, container


def _registry(image: str) -> str:
    """The script's variable with the id of an image's registry; empty where that is none of Azure's."""
    host = image.partition("/")[0]
    return f"REGISTRY_{host.removesuffix(REGISTRY).upper()}" if "/" in image and host.endswith(REGISTRY) else ""
