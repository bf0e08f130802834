"""Settings of the estate: one YAML file, and three presets that it may lie on top of.

What contradicts itself is refused here, before anything is written. What Azure refuses without a contradiction of ours, such
as a region without capacity, only a deployment shows.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from deployments.telemetry.monitors import RUNBOOKS
from tasks.config.access import TENANT
from tasks.config.base import Positive, Settings
from tasks.config.files import BASED_ON, merged, read_whole, validated
from tasks.hardware.files import is_known
from tasks.hardware.sku import load_sku
from tasks.planning.storages import storage_named
from tasks.report.estate.regions import regions_date, zone_regions

PRESETS = Path(__file__).with_name("presets")
Id = Annotated[str, Field(pattern=TENANT)]
Email = Annotated[str, Field(pattern=r"^[^@\s'\[\]]+@[^@\s'\[\]]+$")]


CLOCK = r"^([01]\d|2[0-3]):[0-5]\d$"
LUSTRE_MOST_TIB, NETAPP_MOST_TIB = 400, 100
"""Where Microsoft's table of subnets ends, and what a volume that is not a large one has."""
TagName = Annotated[str, Field(pattern=r"^[^<>%&\\?/']{1,128}$")]
NAME, REGION, CLUSTER = r"^[a-z][a-z0-9]{2,9}$", r"^[a-z][a-z0-9]{3,30}$", r"^[a-z][a-z0-9-]{1,14}[a-z0-9]$"
TagValue = Annotated[str, Field(pattern=r"^([^\[].{0,254})?$")]


def _form(pattern: str, words: str) -> BeforeValidator:
    """Text that does not fit a pattern is refused in words; the pattern itself is for the schema and the documentation."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} must be {words}")
        return value

    return BeforeValidator(check)


class PersonConfig(Settings):
    """Somebody in Microsoft Entra who gets rights beside the identities."""

    object_id: Id
    """Their object id: `az ad signed-in-user show --query id`."""
    kind: Literal["User", "Group", "ServicePrincipal"] = "User"
    """What the id is of."""
    parts: Annotated[tuple[Literal["submitter", "pusher", "creator"], ...], Field(min_length=1)] = ("submitter",)
    """Who submits and deploys, who pushes images, who creates compute clusters."""


class ClusterConfig(Settings):
    """A compute cluster of the workspace."""

    name: Annotated[
        str,
        Field(pattern=CLUSTER),
        _form(
            CLUSTER,
            "3 to 16 lower-case letters, digits and dashes, beginning with a letter and not ending with a dash, as Azure ML "
            "names compute clusters",
        ),
    ]
    """Name of the cluster."""
    size: Annotated[str, Field(pattern=r"^Standard_[A-Za-z0-9_]+$")]
    """VM size of its nodes."""
    max_nodes: Positive
    """Most nodes; the fewest are 0."""
    preemptible: bool = False
    """Whether the nodes are of the low-priority tier."""
    idle_minutes: Positive = 15
    """Time after which an idle node is given back."""
    infiniband: bool = False
    """Whether its jobs need InfiniBand between nodes."""


class DatabaseConfig(Settings):
    """PostgreSQL for Prefect and MLflow, when the platform has several hosts. The deployment asks for its password."""

    size: Annotated[str, Field(pattern=r"^Standard_[A-Za-z0-9_]+$")] = "Standard_D2ds_v5"
    """VM size."""
    storage_gb: Literal[32, 64, 128, 256, 512, 1024, 2048] = 64
    """Size of its disk in GB."""
    standby: bool = False
    """Whether a second server in another zone takes over when the first one fails."""
    backup_days: int = Field(14, ge=7, le=35)
    """Days that backups of it are kept."""


class HostConfig(Settings):
    """A virtual machine for the platform: `headway up`, with no public address."""

    size: Annotated[str, Field(pattern=r"^Standard_[A-Za-z0-9_]+$")] = "Standard_D4s_v5"
    """VM size."""
    disk_gb: int = Field(128, ge=64, le=4095)
    """Size of its disk in GB."""
    ssh_key: Annotated[str, Field(pattern=r"^(ssh-rsa|ssh-ed25519) [A-Za-z0-9+/=]+( [^'\n]*)?$")]
    """Public key of who administers it."""
    patch_window: Annotated[str, Field(pattern=CLOCK)] = "02:00"
    """Start of the two hours on Sunday in which it is patched, UTC."""


class FileSystemConfig(Settings):
    """A file system that machines of Slurm and SSH in the virtual network share: Managed Lustre, or a NetApp volume over NFS."""

    storage: Literal[
        "lustre-40", "lustre-125", "lustre-250", "lustre-500", "netapp-standard", "netapp-premium", "netapp-ultra"
    ]
    """Which of the storages that `headway plan` compares."""
    tib: Positive
    """Its size in TiB."""
    patch_window: Annotated[str, Field(pattern=CLOCK)] = "02:00"
    """Start of the half hour on Sunday in which Managed Lustre is patched, UTC."""


class BudgetConfig(Settings):
    """What the estate may cost before somebody is notified. It stops nothing."""

    monthly: Positive
    """Amount in the subscription's currency."""
    start: datetime.date
    """First day of the first month; Azure takes no month that is over."""
    emails: Annotated[tuple[Email, ...], Field(min_length=1, max_length=50)]
    """Who is notified at 80 % spent, 100 % spent and 100 % forecast."""

    @field_validator("start")
    @classmethod
    def _first_of_a_month(cls, value: datetime.date) -> datetime.date:
        if value.day != 1:
            raise ValueError(f"{value} is not the first day of a month, as Azure asks for: take {value.replace(day=1)}")
        return value


class EstateConfig(Settings):
    """The estate."""

    subscription_id: Id
    """Subscription that it is made in."""
    region: Annotated[
        str,
        Field(pattern=REGION),
        _form(
            REGION,
            "a region's name in lower-case letters and digits, as `az account list-locations` prints it: westeurope",
        ),
    ]
    """Azure's name of the region, such as eastus."""
    name: Annotated[
        str,
        Field(pattern=NAME),
        _form(
            NAME,
            "3 to 10 lower-case letters and digits, beginning with a letter, because storage accounts' names begin with it",
        ),
    ] = "headway"
    """Begins every name; groups are NAME and NAME-data."""
    suffix: Annotated[str, Field(pattern=r"^$|^[a-z0-9]{3,6}$")] = ""
    """Ends names that only one in the world can have; empty: six digits of a digest of subscription, region and name."""
    network: Literal["public", "private", "isolated"]
    """Who reaches the services: everybody who shows a token; the virtual network and `allowed_addresses`; the network alone."""
    address_space: str = "10.64.0.0/20"
    """Addresses of the virtual network, in `private` and `isolated`."""
    allowed_addresses: tuple[str, ...] = ()
    """Public IPv4 addresses or ranges from which `private` is reached too."""
    zones: bool
    """Whether storage, database and registry survive the loss of one zone of the region."""
    people: tuple[PersonConfig, ...] = ()
    """Who gets rights beside the identities."""
    clusters: Annotated[tuple[ClusterConfig, ...], Field(min_length=1)]
    """Compute clusters of the workspace."""
    endpoint_sizes: tuple[str, ...] = ("Standard_DS3_v2",)
    """VM sizes of managed endpoints, which the policy of sizes permits beside those of clusters."""
    database: DatabaseConfig | None = None
    """PostgreSQL; none: files of the home."""
    host: HostConfig | None = None
    """A virtual machine for the platform; none: it runs elsewhere."""
    file_system: FileSystemConfig | None = None
    """What machines of Slurm and SSH share; none: nothing. Nodes of Azure ML do not reach it."""
    events: bool
    """Whether blobs that arrive in the container `incoming` send events to a queue."""
    backup_days: int = Field(ge=0, le=3650)
    """Days for which nobody can delete a backup; 0: there is no account for backups."""
    signing_key: bool
    """Whether the vault gets a key that signs models (P-256)."""
    log_days: int = Field(90, ge=30, le=730)
    """Days that logs are kept."""
    alert_emails: tuple[Email, ...] = ()
    """Who is notified of alerts; nobody: alerts are only shown in Azure Monitor."""
    runbooks: Annotated[str, Field(pattern=r"^[^\s#'\"\[\]]+$")] = RUNBOOKS
    """Page of the runbooks that alerts link to: the address of your copy of the site, for example
    https://docs.example.com/headway/runbooks.html."""
    budget: BudgetConfig | None = None
    """What it may cost."""
    defender: tuple[Literal["VirtualMachines", "StorageAccounts", "KeyVaults", "Containers", "Arm"], ...] = ()
    """Plans of Microsoft Defender for Cloud. They are the whole subscription's, and cost by resource."""
    policies: bool
    """Whether the groups refuse other sizes and storage that is public."""
    tags: dict[TagName, TagValue] = Field(default={})
    """Tags of every resource. A value that begins with a bracket would be an expression of a template, and is refused."""

    @field_validator("address_space")
    @classmethod
    def _large_enough(cls, value: str) -> str:
        try:
            network = ipaddress.IPv4Network(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no range of addresses: {error}; 10.64.0.0/20 is one") from error
        if not network.is_private or network.prefixlen > 24:
            raise ValueError(f"{value} is not private or smaller than /24: take one such as 10.64.0.0/20")
        return value

    @field_validator("allowed_addresses")
    @classmethod
    def _public_ranges(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            try:
                network = ipaddress.IPv4Network(value)
            except ValueError as error:
                raise ValueError(f"{value!r} is no IPv4 address or range: {error}") from error
            if network.is_private or network.prefixlen in (31, *range(8)):
                raise ValueError(
                    f"{value}: storage takes public addresses, single or as ranges of /8 to /30; one inside the virtual "
                    "network needs none"
                )
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(self._contradictions())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Any:
        """What cannot be together, each with what to do."""
        if self.allowed_addresses and self.network != "private":
            yield (
                f"allowed_addresses does not go with network: {self.network}; leave it empty, or set network: private"
            )
        if self.host and self.network == "public":
            yield "host needs a virtual network: set network: private or isolated, or leave host out"
        if self.zones and self.region not in zone_regions():
            yield (
                f"zones: true, and Microsoft's list of {regions_date()} names no availability zones in {self.region}: set "
                "zones: false, or take a region such as westeurope"
            )
        if self.database and self.database.standby and not self.zones:
            yield "database.standby is a server in another zone: set zones: true, or database.standby: false"
        if self.file_system:
            yield from self._without_file_system(self.file_system)
        names = [cluster.name for cluster in self.clusters]
        if len(names) != len(set(names)):
            yield f"clusters has one name twice ({', '.join(sorted(names))}): name each once"
        for cluster in self.clusters:
            if cluster.infiniband:
                yield from _without_infiniband(cluster)

    def _without_file_system(self, asked: FileSystemConfig) -> Any:
        """Why there cannot be such a file system."""
        storage, lustre = storage_named(asked.storage), asked.storage.startswith("lustre-")
        if self.network == "public" or (lustre and self.network == "isolated"):
            needs = (
                "a way to Azure's own services, which isolated closes" if self.network == "isolated" else "a network"
            )
            yield f"file_system {asked.storage} needs {needs}: set network: private, or leave it out"
        most = min(storage.largest, LUSTRE_MOST_TIB if lustre else NETAPP_MOST_TIB)
        if asked.tib > most or asked.tib % storage.step:
            yield (
                f"file_system.tib: {asked.storage} is made in steps of {storage.step:g} TiB up to {most:g}, and {asked.tib} is "
                f"none: take {max(storage.smallest, min(most, asked.tib) // storage.step * storage.step):g}"
            )
        prefix = ipaddress.IPv4Network(self.address_space).prefixlen + 2
        if lustre and prefix > (wanted := 24 if asked.tib <= 196 else 23):
            yield (
                f"file_system: {asked.tib} TiB of Managed Lustre need a subnet of /{wanted}, and a quarter of address_space is "
                f"/{prefix}: take a range of /{wanted - 2}"
            )


def _without_infiniband(cluster: ClusterConfig) -> Any:
    """Why nodes of a size have none, as far as it is known."""
    if not is_known(cluster.size):
        yield (
            f"cluster {cluster.name}: whether {cluster.size} has InfiniBand is not known; set infiniband: false, or take a size "
            "that `headway hardware` lists"
        )
    elif not (ports := load_sku(cluster.size).specs.get("infiniband_ports")) or not ports.value:
        yield (
            f"cluster {cluster.name}: {cluster.size} has no InfiniBand; set infiniband: false, or take an ND size with an r in "
            "its name, such as Standard_ND96isr_H100_v5"
        )


def load_estate(path: Path) -> EstateConfig:
    """The estate of a file, on top of the preset that its `based_on` names. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; docs/estate.md shows what belongs into it")
    value = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no settings: it is a {type(value).__name__}, and NAME: VALUE lines are wanted")
    return estate_of(value, str(path))


def estate_of(value: dict[str, Any], source: str) -> EstateConfig:
    """The estate of keys and values. Raises ValueError."""
    value = dict(value)
    if preset := value.pop(BASED_ON, ""):
        value = merged(preset_of(str(preset)), value)
    return validated(EstateConfig, value, source)


def preset_of(name: str) -> dict[str, Any]:
    """Settings of a preset. Raises ValueError."""
    known = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"based_on: {name!r} is no preset of the estate; there are {', '.join(known)}")
    return read_whole(PRESETS / f"{name}.yaml")
