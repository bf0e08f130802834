"""The README of a rendered estate: how it is deployed, who may do that, what is made, and what it costs a month."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deployments.azure.render import Grant, grants, groups, modules
from deployments.azure.settings import EstateConfig
from tasks.config.planning import PriceKind
from tasks.planning.prices.book import Book, machine_price, storage_prices

MONTH_HOURS = 730
TERABYTE = 1000
TEBIBYTE_GB = 2**40 / 1e9
FOR_ENDPOINTS = {"PolicyInsights", "Cdn"}
"""Providers that managed endpoints need."""
UNKNOWN = "not in the price list"


def readme(estate: EstateConfig, templates: Mapping[str, Any], *, book: Book, today: datetime.date) -> str:
    """The text of README.md; `templates` are the modules by name."""
    lines = [*_deploying(estate, templates), *_rights(estate), *_made(estate, templates), *_who_may(estate)]
    return "\n".join([*lines, *_costs(estate, book, today)]) + "\n"


def _deploying(estate: EstateConfig, templates: Mapping[str, Any]) -> Iterator[str]:
    """The commands, in order."""
    stack = f"{estate.name}-estate"
    deployment = f"--location {estate.region} --template-file main.json --parameters @main.parameters.json"
    yield f"# The estate `{estate.name}` in {estate.region}"
    yield ""
    yield "Rendered by `headway estate render` out of `estate.yaml`, which has every setting: change that and render again."
    yield "**Nobody has deployed these templates yet** (docs/estate.md): look at what Azure says that it would do first."
    yield ""
    yield "```bash"
    yield f"az account set --subscription {estate.subscription_id}"
    names = " ".join(_providers(estate, templates))
    yield f"for name in {names}; do az provider register --namespace Microsoft.$name --wait; done"
    yield f"az deployment sub what-if {deployment}                                  # changes nothing"
    yield f"az stack sub create --name {stack} {deployment} \\"
    yield "  --action-on-unmanage detachAll --deny-settings-mode none"
    yield f"az stack sub show --name {stack} --output json > outputs.json"
    yield "headway estate connect outputs.json --to settings"
    yield "```"
    yield ""
    if estate.database:
        yield "Azure asks for `databasePassword`: 16 characters or more, and in no file. Keep it where you keep passwords."
        yield ""
    if estate.file_system:
        yield f"Machines of Slurm and SSH in the network mount the file system as this says: `{_mounting(estate)}`."
        yield ""
    yield "A second `az stack sub create` with the same files changes nothing. `az stack sub delete --action-on-unmanage"
    yield "deleteAll` takes everything away but what is locked, and the vault, whose name is kept for 90 days."
    if estate.network == "isolated":
        yield ""
        yield "Nothing of it is reached from outside: run `headway`, push images and open the studio inside the virtual network."


def _mounting(estate: EstateConfig) -> str:
    """The command that says how the file system is mounted."""
    where = f"--resource-group {estate.name}-data"
    if estate.file_system and estate.file_system.storage.startswith("lustre-"):
        return f"az amlfs show --name {estate.name} {where} --query clientInfo.mountCommand"
    shared = "--pool-name shared --name shared"
    return (
        f"az netappfiles volume show --account-name {estate.name} {shared} {where} --query 'mountTargets[0].ipAddress'"
    )


def _providers(estate: EstateConfig, templates: Mapping[str, Any]) -> list[str]:
    """Resource providers whose types are in the templates, and those of the subscription's own."""
    types = {resource["type"] for template in templates.values() for resource in template["resources"]}
    types |= {"Microsoft.Consumption/budgets"} if estate.budget else set()
    types |= {"Microsoft.Security/pricings"} if estate.defender else set()
    names = {one.partition("/")[0].removeprefix("Microsoft.") for one in types}
    return sorted(names | FOR_ENDPOINTS)


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
        yield f"| {_name(grant)} | {grant.role} | {grant.place.name} | {grant.why} |"
    yield ""
    yield f"No role is given on {' or '.join(groups(estate))} as a whole, nor on the subscription."


def _name(grant: Grant) -> str:
    return f"{grant.kind} {grant.who}" if grant.person else grant.who


def _costs(estate: EstateConfig, book: Book, today: datetime.date) -> Iterator[str]:
    """What is known of the prices, and what is not: nothing is guessed."""
    yield from ("", "## What it costs", "", "| what | while | USD | price |", "| --- | --- | ---: | --- |")
    for cluster in estate.clusters:
        kind: PriceKind = "low-priority" if cluster.preemptible else "on-demand"
        price = machine_price(book, cluster.size, region=estate.region, today=today)
        hour = price.hours.get(kind)
        text = f"{hour:,.2f} an hour, {hour * MONTH_HOURS:,.0f} a month" if hour else UNKNOWN
        note = _origin(price.region, price.source, price.date) if hour else ""
        nodes = f"a node of {cluster.name}, {cluster.size}, {kind}; at most {cluster.max_nodes}"
        yield f"| {nodes} | a job runs | {text} | {note} |"
    if estate.host:
        price = machine_price(book, estate.host.size, region=estate.region, today=today)
        hour = price.hours.get("on-demand")
        text = f"{hour * MONTH_HOURS:,.0f} a month" if hour else UNKNOWN
        yield f"| the platform's machine, {estate.host.size} | always | {text} | |"
    stored = storage_prices(book, region=estate.region, today=today)
    month = stored.gb_month.get("blob-hot")
    text = f"{month * TERABYTE:,.2f} a month" if month else UNKNOWN
    redundancy = "; of one zone, three zones cost more" if estate.zones and month else ""
    yield f"| 10^12 bytes of storage{redundancy} | they are kept | {text} | {stored.source} {stored.date} |"
    if shared := estate.file_system:
        month = stored.gb_month.get(shared.storage)
        text = f"{month * shared.tib * TEBIBYTE_GB:,.0f} a month" if month else UNKNOWN
        origin = stored.source if month else ""
        yield f"| the file system, {shared.storage}, {shared.tib} TiB | always, however full | {text} | {origin} |"
    for what, wanted in (
        ("the registry, " + ("Premium" if estate.network != "public" or estate.zones else "Basic"), True),
        ("private endpoints", estate.network != "public"),
        ("PostgreSQL" + (", two servers" if estate.database and estate.database.standby else ""), estate.database),
        ("logs, by the gigabyte", True),
        ("plans of Microsoft Defender for Cloud", estate.defender),
    ):
        if wanted:
            yield f"| {what} | always | {UNKNOWN} | <https://azure.microsoft.com/pricing> |"
    yield ""
    yield (
        "A price that is not known is no price of 0. `headway prices update --region "
        + estate.region
        + "` asks Azure; then render again."
    )


def _origin(region: str, source: str, date: str) -> str:
    return f"{region}: {source} {date}".strip(": ")


def write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the files; those that are there with the same text stay. Raises ValueError before any is written.

    A file with another text is never written over: somebody may have changed it.
    """
    changed = [name for name, text in texts.items() if _other(folder / name, text)]
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


def _other(path: Path, text: str) -> bool:
    return path.exists() and (not path.is_file() or path.read_bytes() != text.encode())
