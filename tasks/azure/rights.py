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
        kind = "" if self.who == SUBMITTER else " --assignee-principal-type ServicePrincipal"
        return f'az role assignment create --role "{self.role}" --assignee-object-id "${self.who}"{kind} --scope "{self.scope}"'


@dataclass(frozen=True)
class Uses:
    """What a configuration uses of Azure."""

    where: Where
    store: str
    """az://ACCOUNT/CONTAINER[/PREFIX]."""
    jobs: str = ""
    """The same of the store that folders of jobs lie in; empty: `store`."""
    compute: str = ""
    """The compute cluster of jobs; empty: there are none."""
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


def script(uses: Uses) -> str:
    """A shell script that gives them all, for somebody who may: an owner, or a user access administrator."""
    given = list(rights(uses))
    account, where = _parts(uses.store)[0], uses.where
    words = shlex.quote
    lines = [
        "#!/usr/bin/env bash",
        "# The rights that Headway needs in Azure. Whoever runs this may give roles: Owner, or User Access Administrator.",
        "set -euo pipefail",
        f"az account set --subscription {words(where.subscription_id)}",
        "# Who submits; another person or a service principal by their object id.",
        f'{SUBMITTER}="${{{SUBMITTER}:-$(az ad signed-in-user show --query id --output tsv)}}"',
        f"STORAGE=$(az storage account show --name {words(account)} --query id --output tsv)",
    ]
    if uses.compute:
        lines += _folders_of_jobs(uses)
    for image in dict.fromkeys((uses.image, uses.endpoint_image)):
        if name := _registry(image):
            host = image.partition("/")[0].removesuffix(REGISTRY)
            lines.append(f"{name}=$(az acr show --name {words(host)} --query id --output tsv)")
        elif image:
            lines.append(f"# {image} is in no registry of Azure: machines must reach it without a login.")
    if uses.compute:
        query = "identity.user_assigned_identities[0].principal_id || identity.principal_id"
        group, place = words(where.resource_group), words(where.workspace)
        lines += [
            "# The cluster's identity: its user-assigned one, or else its own.",
            f"{CLUSTER}=$(az ml compute show --name {words(uses.compute)} --resource-group {group} \\",
            f"  --workspace-name {place} --query {words(query)} --output tsv)",
        ]
    if uses.endpoint_identity:
        shown = f"az identity show --ids {words(uses.endpoint_identity)} --query principalId --output tsv"
        lines.append(f"{ENDPOINT}=$({shown})")
    lines = list(dict.fromkeys(lines))
    for one in given:
        lines += ["", f"# {one.why}", one.command]
    return "\n".join(lines) + "\n"


def _folders_of_jobs(uses: Uses) -> list[str]:
    """Lines that make the account of jobs' folders where there is none, and give folders an end date."""
    account, container, *prefix = (uses.jobs or uses.store).removeprefix("az://").rstrip("/").split("/", 2)
    words = shlex.quote
    show = f"az storage account show --name {words(account)}"
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
    lines = []
    if apart:
        lines += [
            "# The account of jobs' folders. Blob versioning is a setting of an account, not of a container: this one has none.",
            f"if ! {show} --output none 2> /dev/null; then",
            f"  az storage account create --name {words(account)} --resource-group {words(uses.where.resource_group)} \\",
            "    --kind StorageV2 --sku Standard_LRS --enable-hierarchical-namespace false \\",
            "    --allow-blob-public-access false --min-tls-version TLS1_2 --output none",
            f"  az storage account blob-service-properties update --account-name {words(account)} \\",
            f"    --resource-group {words(uses.where.resource_group)} --enable-versioning false \\",
            "    --enable-delete-retention false --output none",
            "fi",
            f"az storage container-rm create --storage-account {words(account)} --name {words(container)} --output none",
        ]
    lines += [
        f"JOBS=$({show} --query id --output tsv)",
        f"JOBS_GROUP=$({show} --query resourceGroup --output tsv)",
        f"# Folders of jobs are deleted {FOLDER_DAYS} days after their last change (Azure ML ends a job after 21), versions of",
        "# their files, where the account keeps any, after a day. An account has one policy: one that is there stays as it is.",
        f'az storage account management-policy show --account-name {words(account)} --resource-group "$JOBS_GROUP" \\',
        f"  --output none 2> /dev/null || az storage account management-policy create --account-name {words(account)} \\",
        '  --resource-group "$JOBS_GROUP" --output none --policy \\',
        f"  {words(json.dumps({'rules': [rule]}))}",
    ]
    return lines


def _parts(store: str) -> tuple[str, str]:
    account, container, *_ = store.removeprefix("az://").split("/")
    return account, container


def _registry(image: str) -> str:
    """The script's variable with the id of an image's registry; empty where that is none of Azure's."""
    host = image.partition("/")[0]
    return f"REGISTRY_{host.removesuffix(REGISTRY).upper()}" if "/" in image and host.endswith(REGISTRY) else ""
