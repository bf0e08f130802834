"""What each resource of the estate is called, of which type it is, and in which group it lies. Pure.

Two groups: NAME holds what works, NAME-data what must outlive it. A name that only one in the world can have ends with the
suffix. Lengths and letters follow https://learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules;
the patterns of EstateConfig keep them.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.azure.settings import EstateConfig
from tasks.azure.datastore import Datastore
from tasks.config.base import digest

STORAGE = "Microsoft.Storage/storageAccounts"
CONTAINER = f"{STORAGE}/blobServices/containers"
QUEUE = f"{STORAGE}/queueServices/queues"
IDENTITY = "Microsoft.ManagedIdentity/userAssignedIdentities"
WORKSPACE = "Microsoft.MachineLearningServices/workspaces"
IDENTITIES = ("submitter", "cluster", "endpoint", "platform", "bridge")
ACCOUNTS = {"artifacts": "art", "jobs": "jobs", "work": "work", "backup": "back"}
"""Storage accounts, and how their names go on."""


@dataclass(frozen=True)
class Workspace:
    """Where jobs run, as clients of Azure take it."""

    subscription_id: str
    resource_group: str
    workspace: str
    endpoint: str = "https://management.azure.com"


@dataclass(frozen=True)
class Place:
    """A resource: its group, its type, and its names, of which each belongs to a part of the type."""

    group: str
    type: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name as a template has it: that of a child begins with its parents'."""
        return "/".join(self.names)

    @property
    def id(self) -> str:
        """The expression of its id."""
        return f"[{self.call}]"

    @property
    def call(self) -> str:
        words = ", ".join(f"'{word}'" for word in (self.group, self.type, *self.names))
        return f"resourceId({words})"

    @property
    def scope(self) -> str:
        """The id below its group, as a role assignment's `scope` takes it."""
        provider, *types = self.type.split("/")
        pairs = "/".join(f"{type_}/{name}" for type_, name in zip(types, self.names, strict=True))
        return f"{provider}/{pairs}"


def suffix_of(estate: EstateConfig) -> str:
    return estate.suffix or digest([estate.subscription_id, estate.region, estate.name])[:6]


def container_of(estate: EstateConfig, account: str, container: str) -> str:
    """The az:// address of a container."""
    return f"az://{estate.name}{ACCOUNTS[account]}{suffix_of(estate)}/{container}"


def datastore_name(estate: EstateConfig, account: str, container: str) -> str:
    """The name under which Headway's jobs look for the datastore of a container."""
    where = Workspace(estate.subscription_id, estate.name, estate.name)
    return Datastore(where, container_of(estate, account, container)).name


def places(estate: EstateConfig) -> dict[str, Place]:
    """Every resource that another one, a role or an output refers to, by a short key."""
    main, data, suffix = estate.name, f"{estate.name}-data", suffix_of(estate)
    result = {
        "logs": Place(main, "Microsoft.OperationalInsights/workspaces", (main,)),
        "insights": Place(main, "Microsoft.Insights/components", (main,)),
        "action": Place(main, "Microsoft.Insights/actionGroups", (main,)),
        "vault": Place(main, "Microsoft.KeyVault/vaults", (f"{main}-{suffix}",)),
        "registry": Place(main, "Microsoft.ContainerRegistry/registries", (f"{main}{suffix}",)),
        "workspace": Place(main, WORKSPACE, (main,)),
        "key": Place(main, "Microsoft.KeyVault/vaults/keys", (f"{main}-{suffix}", "headway")),
        "vnet": Place(main, "Microsoft.Network/virtualNetworks", (main,)),
        "database": Place(main, "Microsoft.DBforPostgreSQL/flexibleServers", (f"{main}-{suffix}",)),
        "topic": Place(data, "Microsoft.EventGrid/systemTopics", (f"{main}-arrivals",)),
        "host": Place(main, "Microsoft.Compute/virtualMachines", (f"{main}-platform",)),
        "link_scope": Place(main, "Microsoft.Insights/privateLinkScopes", (main,)),
    }
    for name in IDENTITIES:
        result[f"identity:{name}"] = Place(main, IDENTITY, (f"{main}-{name}",))
    for key, word in ACCOUNTS.items():
        result[key] = Place(data, STORAGE, (f"{main}{word}{suffix}",))
    for account, container in (
        ("artifacts", "headway"),
        ("artifacts", "incoming"),
        ("artifacts", "dead-letters"),
        ("jobs", "jobs"),
        ("backup", "backups"),
    ):
        result[f"container:{container}"] = Place(data, CONTAINER, (result[account].names[0], "default", container))
    for queue in ("headway-events", "headway-events-poison"):
        result[f"queue:{queue}"] = Place(data, QUEUE, (result["artifacts"].names[0], "default", queue))
    return result
