"""The README of a rendered estate: how it is deployed, the quota it needs, who may do that, what is made, and what it costs."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.azure.render import grants, groups, modules
from deployments.azure.settings import EstateConfig
from tasks.config.planning import PriceKind
from tasks.hardware.files import is_known
from tasks.hardware.sku import load_sku
from tasks.planning.prices.book import USUAL_REGION, Book, machine_price, storage_prices
from tasks.serving.azureml.render import SIZES

MONTH_HOURS = 730
TERABYTE = 1000
TEBIBYTE_GB = 2**40 / 1e9
FOR_ENDPOINTS = {"PolicyInsights", "Cdn"}
"""Providers that managed endpoints need."""
UNKNOWN = "not in the price list"
SILENT = "alert_emails is empty: Azure Monitor shows alerts, and nobody gets a message; set alert_emails: [YOU@YOURS]"
DSV2 = {size: vcpus for size, _, vcpus in SIZES}
"""vCPUs of the sizes of managed endpoints. All are of the family DSv2, which no file of tasks/hardware describes."""
RESERVED = 2
"""Machines that the quota has to hold for one instance of an endpoint: ceil(1.2 x 1), because Azure upgrades beside it."""


@dataclass(frozen=True)
class Price:
    """A line of what the estate costs."""

    what: str
    while_: str
    usd: str
    origin: str
    of_region: bool = True
    """False: a price of another region, or none, where a list of prices could have one."""


def readme(estate: EstateConfig, templates: Mapping[str, Any], *, book: Book, today: datetime.date) -> str:
    """The text of README.md; `templates` are the modules by name."""
    lines = [*_deploying(estate, templates), *_quota(estate), *_rights(estate), *_made(estate, templates)]
    return "\n".join([*lines, *_who_may(estate), *_costs(estate, book, today)]) + "\n"


def notes(estate: EstateConfig, *, book: Book, today: datetime.date) -> list[str]:
    """What whoever renders should know before the estate is deployed."""
    prices = list(_prices(estate, book, today))
    missing = sum(not one.of_region for one in prices)
    result = [SILENT] if not estate.alert_emails else []
    if missing:
        result.append(
            f"{missing} of {len(prices)} prices in README.md are not of {estate.region}: run `headway prices update --region "
            f"{estate.region}`, and render again into a new folder"
        )
    return result


def _deploying(estate: EstateConfig, templates: Mapping[str, Any]) -> Iterator[str]:
    """The commands, in order."""
    stack = f"{estate.name}-estate"
    deployment = f"--location {estate.region} --template-file main.json --parameters @main.parameters.json"
    yield f"# The estate `{estate.name}` in {estate.region}"
    yield ""
    yield "Rendered by `headway estate render` out of `estate.yaml`, which has every setting: change that and render again."
    yield "**Nobody has deployed these templates yet** (docs/estate.md): look at what Azure says that it would do first."
    yield ""
    yield "## Deploy it"
    yield ""
    yield "Whoever deploys needs this folder, Bash and the Azure CLI (`az login`), which Azure's Cloud Shell has, and nothing of"
    yield "Headway. Run the commands in this folder. [Quota](#quota) comes first: raising it takes days."
    yield ""
    yield "```bash"
    yield f"az account set --subscription {estate.subscription_id}"
    types = {resource["type"] for template in templates.values() for resource in template["resources"]}
    types |= {"Microsoft.Consumption/budgets"} if estate.budget else set()
    types |= {"Microsoft.Security/pricings"} if estate.defender else set()
    providers = FOR_ENDPOINTS | {one.partition("/")[0].removeprefix("Microsoft.") for one in types}
    yield f"for name in {' '.join(sorted(providers))}; do az provider register --namespace Microsoft.$name --wait; done"
    yield f"az deployment sub what-if {deployment}                                  # changes nothing"
    yield f"az stack sub create --name {stack} {deployment} \\"
    yield "  --action-on-unmanage detachAll --deny-settings-mode none"
    yield f"az stack sub show --name {stack} --output json > outputs.json"
    yield "```"
    yield ""
    if estate.database:
        yield "Azure asks for `databasePassword`: 16 characters or more, and in no file. Keep it where you keep passwords."
        yield ""
    yield "**Stop here if somebody else runs Headway**, and send `outputs.json` back: it has names and ids, and no secret."
    yield "Who runs Headway makes its settings of it:"
    yield ""
    yield "```bash"
    yield "headway estate connect outputs.json --to settings"
    yield "```"
    yield ""
    if estate.file_system:
        where = f"--resource-group {estate.name}-data"
        shared = f"--account-name {estate.name} --pool-name shared --name shared {where}"
        command = f"az netappfiles volume show {shared} --query 'mountTargets[0].ipAddress'"
        if estate.file_system.storage.startswith("lustre-"):
            command = f"az amlfs show --name {estate.name} {where} --query clientInfo.mountCommand"
        yield f"Machines of Slurm and SSH in the network mount the file system as this says: `{command}`."
        yield ""
    yield "A second `az stack sub create` with the same files changes nothing. `az stack sub delete --action-on-unmanage"
    yield "deleteAll` takes everything away but what is locked, and the vault, whose name is kept for 90 days."
    if not estate.alert_emails:
        yield ""
        yield f"**{SILENT}.**"
    yield from _not_made(estate)


def _not_made(estate: EstateConfig) -> Iterator[str]:
    """What a closed network needs beside what is made."""
    if estate.network == "public":
        return
    yield from ("", "## What is needed and not made", "")
    if estate.network == "isolated":
        yield "Nothing of the estate is reached from outside its virtual network"
    elif estate.allowed_addresses:
        yield f"The estate is reached from {', '.join(estate.allowed_addresses)} and from its virtual network"
    else:
        yield "`allowed_addresses` is empty: the estate is reached from its virtual network alone"
    yield "(docs/estate.md, What is made). Who runs `headway`, pushes images or opens the studio from elsewhere needs a way in:"
    yield ""
    yield "- a VPN gateway, or a network with one that is peered with this one; or"
    yield "- Azure Bastion, and a machine in the network" + (" (the `host` is one)" if estate.host else "") + "."
    if estate.host:
        yield ""
        yield "The `host` has no public address: without a NAT gateway or a firewall it cannot fetch even packages."


def _quota(estate: EstateConfig) -> Iterator[str]:
    """The vCPUs that each cluster, an endpoint and the host need, by the family that Azure counts them in."""
    yield from ("", "## Quota", "")
    yield "Azure counts vCPUs by family and region, and Azure ML apart from virtual machines. Families with GPUs begin at 0, and"
    yield "raising a quota can take days: look before `az stack sub create`."
    yield ""
    yield from ("| for | quota | vCPUs |", "| --- | --- | ---: |")
    for cluster in estate.clusters:
        family = "low-priority, all families" if cluster.preemptible else _family(cluster.size)
        nodes = f"{cluster.max_nodes} nodes of {cluster.name}, {cluster.size}"
        yield f"| {nodes} | Azure ML: {family} | {_vcpus(cluster.size, cluster.max_nodes)} |"
    for size in estate.endpoint_sizes:
        what = f"one instance of an endpoint, {size}, and room to upgrade it"
        yield f"| {what} | Azure ML: {_family(size)} | {_vcpus(size, RESERVED)} |"
    if estate.host:
        size = estate.host.size
        yield f"| the platform's machine, {size} | virtual machines: {_family(size)} | {_vcpus(size, 1)} |"
    yield ""
    yield "*Total Cluster Dedicated Regional vCPUs* limits all dedicated families of Azure ML together, too. Your limits:"
    yield ""
    provider = f"subscriptions/{estate.subscription_id}/providers/Microsoft.MachineLearningServices"
    usages = f"{provider}/locations/{estate.region}/usages?api-version=2024-10-01"
    yield "```bash"
    yield f'az rest --method get --url "https://management.azure.com/{usages}" \\'
    yield '  --query "value[].{quota:name.localizedValue, used:currentValue, limit:limit}" --output table'
    yield f"az vm list-usage --location {estate.region} --output table    # virtual machines"
    where = f"--location {estate.region} --resource-type virtualMachines --size SIZE"
    yield f'az vm list-skus {where} --query "[].family" --output tsv    # the family of a size'
    yield "```"
    yield ""
    yield "More is asked for in the studio (Quota), or for virtual machines in the portal (Quotas, Compute)."


def _family(size: str) -> str:
    """The quota family of a size; where it is not known, what it is of."""
    family = load_sku(size).family if is_known(size) else ""
    return family or ("Standard DSv2 Family" if size in DSV2 else f"the family of {size}")


def _vcpus(size: str, machines: int) -> str:
    """vCPUs of some machines of a size."""
    known = load_sku(size).specs.get("vcpus") if is_known(size) else None
    each = int(float(known.value)) if known else DSV2.get(size, 0)
    return f"{each * machines:,}" if each else f"{machines} x those of {size}"


def _rights(estate: EstateConfig) -> Iterator[str]:
    yield from ("", "## Who may deploy it", "", "| role, of the subscription | for |", "| --- | --- |")
    yield "| *Contributor* | groups and everything in them |"
    yield "| *Role Based Access Control Administrator* (or *User Access Administrator*, *Owner*) | the roles below |"
    if estate.backup_days:
        yield "| *User Access Administrator* or *Owner* | the lock on the account of backups |"
    if estate.policies:
        yield "| *Resource Policy Contributor* | the policies |"
    if estate.defender:
        yield "| *Security Admin* | plans of Microsoft Defender for Cloud, which are the whole subscription's |"


def _made(estate: EstateConfig, templates: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## What is made", "", "| module | group | resources |", "| --- | --- | --- |")
    for module in modules(estate):
        counts: dict[str, int] = {}
        for resource in templates[module.name]["resources"]:
            kind = resource["type"].partition(".")[2]
            counts[kind] = counts.get(kind, 0) + 1
        words = ", ".join(f"{number} {kind}" if number > 1 else kind for kind, number in counts.items())
        yield f"| {module.name} | {module.group} | {words} |"


def _who_may(estate: EstateConfig) -> Iterator[str]:
    yield from ("", "## Who may do what in it", "", "| who | role | on | for |", "| --- | --- | --- | --- |")
    for grant in grants(estate):
        who = f"{grant.kind} {grant.who}" if grant.person else grant.who
        yield f"| {who} | {grant.role} | {grant.place.name} | {grant.why} |"
    yield ""
    yield f"No role is given on {' or '.join(groups(estate))} as a whole, nor on the subscription."


def _costs(estate: EstateConfig, book: Book, today: datetime.date) -> Iterator[str]:
    """What is known of the prices, and what is not: nothing is guessed."""
    yield from ("", "## What it costs", "", "| what | while | USD | price |", "| --- | --- | ---: | --- |")
    others = (
        Price(what, "always", UNKNOWN, "<https://azure.microsoft.com/pricing>")
        for what, wanted in (
            ("the registry, " + ("Premium" if estate.network != "public" or estate.zones else "Basic"), True),
            ("private endpoints", estate.network != "public"),
            ("PostgreSQL" + (", two servers" if estate.database and estate.database.standby else ""), estate.database),
            ("logs, by the gigabyte", True),
            ("plans of Microsoft Defender for Cloud", estate.defender),
        )
        if wanted
    )
    for one in (*_prices(estate, book, today), *others):
        yield f"| {one.what} | {one.while_} | {one.usd} | {one.origin} |"
    yield ""
    yield (
        f"A price that is not known is no price of 0, and one of another region is only a hint. `headway prices update --region "
        f"{estate.region}` asks Azure; then render again into a new folder. Sizes that no list has belong in `prices/own.yaml` "
        "of the home."
    )


def _prices(estate: EstateConfig, book: Book, today: datetime.date) -> Iterator[Price]:
    """What price lists have: machines and storage."""
    for cluster in estate.clusters:
        kind: PriceKind = "low-priority" if cluster.preemptible else "on-demand"
        hour, origin, own = _hour(estate, book, cluster.size, kind, today)
        text = f"{hour:,.2f} an hour, {hour * MONTH_HOURS:,.0f} a month" if hour else UNKNOWN
        nodes = f"a node of {cluster.name}, {cluster.size}, {kind}; at most {cluster.max_nodes}"
        yield Price(nodes, "a job runs", text, origin, own)
    if estate.host:
        hour, origin, own = _hour(estate, book, estate.host.size, "on-demand", today)
        text = f"{hour * MONTH_HOURS:,.0f} a month" if hour else UNKNOWN
        yield Price(f"the platform's machine, {estate.host.size}", "always", text, origin, own)
    month, origin, own = _stored(estate, book, "blob-hot", today)
    text = f"{month * TERABYTE:,.2f} a month" if month else UNKNOWN
    redundancy = "; of one zone, three zones cost more" if estate.zones and month else ""
    yield Price(f"10^12 bytes of storage{redundancy}", "they are kept", text, origin, own)
    if shared := estate.file_system:
        month, origin, own = _stored(estate, book, shared.storage, today)
        text = f"{month * shared.tib * TEBIBYTE_GB:,.0f} a month" if month else UNKNOWN
        yield Price(f"the file system, {shared.storage}, {shared.tib} TiB", "always, however full", text, origin, own)


def _hour(
    estate: EstateConfig, book: Book, size: str, kind: PriceKind, today: datetime.date
) -> tuple[float | None, str, bool]:
    """What a machine costs an hour."""
    prices = (machine_price(book, size, region=region, today=today) for region in (estate.region, ""))
    return _first(
        estate, ((one.hours.get(kind), one.region, one.origin(kind).source, one.origin(kind).date) for one in prices)
    )


def _stored(estate: EstateConfig, book: Book, choice: str, today: datetime.date) -> tuple[float | None, str, bool]:
    """What 10^9 bytes in a storage cost a month."""
    prices = ((region, storage_prices(book, region=region, today=today)) for region in (estate.region, USUAL_REGION))
    return _first(estate, ((one.gb_month.get(choice), region, one.source, one.date) for region, one in prices))


def _first(
    estate: EstateConfig, prices: Iterable[tuple[float | None, str, str, str]]
) -> tuple[float | None, str, bool]:
    """The first price that is known, of (price, region, source, date); where it is from; whether it is of the estate's region."""
    for price, region, source, date in prices:
        if price:
            own = region in (estate.region, "")
            where = region if own else f"**of {region}, not of {estate.region}**"
            return price, f"{where}: {source} {date}".strip(": "), own
    return None, "", False


def write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the files; those that are there with the same text stay. Raises ValueError before any is written.

    A file with another text is never written over: somebody may have changed it.
    """
    changed = [
        name
        for name, text in texts.items()
        if (path := folder / name).exists() and (not path.is_file() or path.read_bytes() != text.encode())
    ]
    if changed:
        raise ValueError(
            f"{folder} has other files of these names: {', '.join(changed)}; take another folder, or delete them first"
        )
    written = []
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
