"""The estate as ARM templates: `main.json` for the subscription, and each module by itself.

A module is a file of templates/: YAML with Jinja, in which `{{ value }}` writes JSON, so that no setting can leave its place.
main.json has the modules within it, as Bicep compiles them, because a nested template cannot be named by a path of this machine;
modules/ has the same ones for who puts them together otherwise (`module x 'modules/storage.json'` in Bicep). Pure: the same
settings make the same bytes.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from deployments.azure.names import IDENTITIES, Place, datastore_name, places
from deployments.azure.settings import EstateConfig
from deployments.configuration.platform import AlertsConfig
from deployments.telemetry.monitors import azure_rules
from tasks.azure.rights import FOLDER_DAYS
from tasks.report.estate.regions import zone_regions

FOLDER = Path(__file__).parent
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
GROUP_SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#"
SUBSCRIPTION_SCHEMA = "https://schema.management.azure.com/schemas/2018-05-01/subscriptionDeploymentTemplate.json#"
PARAMETERS_SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentParameters.json#"
DEPLOYMENTS = "2025-04-01"
"""Version of Microsoft.Resources that the modules are deployed by."""
SYSTEM = ("workspace", "topic")
"""What has an identity that Azure makes with it."""
DNS = {
    "blob": ("privatelink.blob.core.windows.net",),
    "file": ("privatelink.file.core.windows.net",),
    "queue": ("privatelink.queue.core.windows.net",),
    "vault": ("privatelink.vaultcore.azure.net",),
    "registry": ("privatelink.azurecr.io",),
    "amlworkspace": ("privatelink.api.azureml.ms", "privatelink.notebooks.azure.net"),
    "postgresqlServer": ("privatelink.postgres.database.azure.com",),
    "azuremonitor": (
        "privatelink.monitor.azure.com",
        "privatelink.oms.opinsights.azure.com",
        "privatelink.ods.opinsights.azure.com",
        "privatelink.agentsvc.azure-automation.net",
        "privatelink.blob.core.windows.net",
    ),
}
"""Zones by what a private endpoint is of: https://learn.microsoft.com/azure/private-link/private-endpoint-dns."""
POLICIES = (
    ("anonymous", "4fa4b6c0-31ca-4c0d-b10d-24b96f62a751", "storage that everybody can read"),
    ("public", "b2982f36-99f2-4db5-8eff-283140c09693", "storage on the public network"),
)
PLANS = {
    "VirtualMachines": "P2",
    "StorageAccounts": "DefenderForStorageV2",
    "KeyVaults": "PerKeyVault",
    "Containers": "",
    "Arm": "PerSubscription",
}
"""Plans of Microsoft Defender for Cloud, and which variant of each is taken."""
TIERS = {"B": "Burstable", "D": "GeneralPurpose", "E": "MemoryOptimized"}
"""Tier of PostgreSQL by the family of its size."""


@dataclass(frozen=True)
class Grant:
    """One role assignment."""

    who: str
    """An identity's name, or a person's object id."""
    kind: str
    role: str
    role_id: str
    place: Place
    why: str
    person: bool


@dataclass(frozen=True)
class Module:
    """A nested deployment. `takes` are its parameters beside location and tags."""

    name: str
    template: str
    group: str
    after: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def files(estate: EstateConfig) -> dict[str, str]:
    """Every file of the estate but its README: its name and text."""
    chosen = list(modules(estate))
    context = _context(estate)
    rendered = {module.name: module_template(estate, module, context) for module in chosen}
    written = {
        "main.json": main_template(estate, chosen, rendered, context),
        "main.parameters.json": parameters(estate),
    }
    written |= {f"modules/{name}.json": template for name, template in rendered.items()}
    text = {name: json.dumps(template, indent=2) + "\n" for name, template in written.items()}
    whole = yaml.safe_dump(estate.model_dump(mode="json"), sort_keys=False, width=120, allow_unicode=True)
    return {
        **text,
        "estate.yaml": f"# Every setting that these files were rendered from, defaults written out.\n{whole}",
    }


def modules(estate: EstateConfig) -> Iterator[Module]:
    """The modules of an estate, in an order in which each comes after those that it needs."""
    main, data = estate.name, f"{estate.name}-data"
    closed = estate.network != "public"
    yield Module("identities", "identities", main)
    yield Module("logs", "logs", main)
    if closed:
        yield Module("network", "network", main)
    yield Module("storage", "storage", data, ("logs",))
    yield Module("registry", "registry", main, ("logs",))
    yield Module("vault", "vault", main, ("logs",))
    yield Module("workspace", "workspace", main, ("storage", "registry", "vault"))
    if estate.events:
        yield Module("events", "events", data, ("storage",))
    before = ("identities", "workspace", *(("events",) if estate.events else ()))
    yield Module("roles", "roles", main, before, ("principals",))
    yield Module("roles-data", "roles", data, before, ("principals",))
    if estate.database:
        yield Module("database", "database", main, ("logs",), ("password",))
    if closed:
        needed = ("network", "workspace", *(("database",) if estate.database else ()))
        yield Module("endpoints", "endpoints", main, needed)
    yield Module("compute", "compute", main, ("roles", "roles-data"))
    if estate.events:
        yield Module("arrivals", "subscription", data, ("roles-data",))
    yield Module("alerts", "alerts", main, ("logs",))
    if estate.file_system:
        yield Module("file-system", "file-system", data, ("network",))
    if estate.host:
        yield Module("host", "host", main, ("network", "identities", "roles", "roles-data"))
    if estate.policies:
        yield Module("policy", "policy", main, ("wide",))
        yield Module("policy-data", "policy", data, ("wide",))


def main_template(
    estate: EstateConfig, chosen: list[Module], rendered: dict[str, Any], context: dict[str, Any]
) -> dict[str, Any]:
    """The template of the subscription, with every module within it."""
    resources: list[dict[str, Any]] = [
        {
            "type": "Microsoft.Resources/resourceGroups",
            "apiVersion": DEPLOYMENTS,
            "name": group,
            "location": "[parameters('location')]",
            "tags": "[parameters('tags')]",
        }
        for group in groups(estate)
    ]
    for template in ("subscription-wide", *(("budget",) if estate.budget else ())):
        resources += _rendered(context, template, "")["resources"]
    resources += [_nested(estate, module, chosen, rendered[module.name]) for module in chosen]
    secret = {"type": "securestring", "metadata": {"description": "Password of the database's user headway"}}
    return {
        "$schema": SUBSCRIPTION_SCHEMA,
        "contentVersion": "1.0.0.0",
        "parameters": {
            "location": {"type": "string", "defaultValue": estate.region},
            "tags": {"type": "object", "defaultValue": {"headway-estate": estate.name, **estate.tags}},
            **({"databasePassword": secret} if estate.database else {}),
        },
        "resources": resources,
        "outputs": {"headway": {"type": "object", "value": outputs(estate)}},
    }


def groups(estate: EstateConfig) -> tuple[str, str]:
    return estate.name, f"{estate.name}-data"


def _nested(estate: EstateConfig, module: Module, chosen: list[Module], template: dict[str, Any]) -> dict[str, Any]:
    """A module as a resource of main.json."""
    by_name = {one.name: one for one in chosen}
    principals = {who: _output(estate, "identities", f"principals.value.{who}") for who in IDENTITIES}
    principals["workspace"] = _output(estate, "workspace", "principal.value")
    if estate.events:
        principals["topic"] = _output(estate, "events", "principal.value")
    own = {"principals": principals, "password": "[parameters('databasePassword')]"}
    given = {"location": "[parameters('location')]", "tags": "[parameters('tags')]"} | {w: own[w] for w in module.takes}
    needed = [f"[subscriptionResourceId('Microsoft.Resources/resourceGroups', '{module.group}')]"]
    for name in module.after:
        if name == "wide":
            definition = f"{estate.name}-sizes"
            needed.append(f"[subscriptionResourceId('Microsoft.Authorization/policyDefinitions', '{definition}')]")
        else:
            needed.append(f"[{_deployment(by_name[name])}]")
    return {
        "type": "Microsoft.Resources/deployments",
        "apiVersion": DEPLOYMENTS,
        "name": module.name,
        "resourceGroup": module.group,
        "dependsOn": needed,
        "properties": {
            "mode": "Incremental",
            "expressionEvaluationOptions": {"scope": "inner"},
            "parameters": {name: {"value": value} for name, value in given.items()},
            "template": template,
        },
    }


def _deployment(module: Module) -> str:
    """The expression of a module's id, without brackets."""
    return f"resourceId('{module.group}', 'Microsoft.Resources/deployments', '{module.name}')"


def _output(estate: EstateConfig, module: str, path: str) -> str:
    """The expression of an output of a module."""
    one = next(one for one in modules(estate) if one.name == module)
    return f"[reference({_deployment(one)}, '{DEPLOYMENTS}').outputs.{path}]"


def module_template(estate: EstateConfig, module: Module, context: dict[str, Any]) -> dict[str, Any]:
    """The template of a module."""
    if module.template == "alerts":
        # The rules that the watch follows too (docs/monitoring/headway-alerts-azure.json), on the estate's own component.
        at, rules = places(estate), azure_rules(AlertsConfig(), estate.runbooks)
        values = {"component": at["insights"].id, "actionGroups": [at["action"].id] if estate.alert_emails else []}
        declared = rules["parameters"]
        for name, value in values.items():
            declared[name] = {**declared[name], "defaultValue": value}
        return {**rules, "parameters": {**declared, "tags": {"type": "object", "defaultValue": {}}}, "outputs": {}}
    body = _rendered(context, module.template, module.group)
    common = {"location": {"type": "string"}, "tags": {"type": "object", "defaultValue": {}}}
    return {
        "$schema": GROUP_SCHEMA,
        "contentVersion": "1.0.0.0",
        "parameters": {**common, **body.get("parameters", {})},
        "resources": body["resources"],
        "outputs": body.get("outputs", {}),
    }


def _rendered(context: dict[str, Any], template: str, group: str) -> dict[str, Any]:
    """What a file of templates/ says of an estate."""
    text = _environment().get_template(f"{template}.yaml").render(context, group=group)
    value: dict[str, Any] = yaml.load(text, Loader=LOADER)
    return {**value, "resources": value["resources"] or []}


def _context(estate: EstateConfig) -> dict[str, Any]:
    """What the files of templates/ are written with."""
    at, endpoints = places(estate), private_endpoints(estate)
    return {
        "e": estate,
        "at": at,
        "identities": IDENTITIES,
        "accounts": accounts(estate),
        "made": made(estate),
        "grants": grants(estate),
        "rid": lambda *words: Place(words[0], words[1], words[2:]).id,
        "datastore": lambda account, container: datastore_name(estate, account, container),
        "datastores": (("artifacts", "headway"), ("jobs", "jobs")),
        "outbound": (("artifacts", "blob"), ("jobs", "blob"), ("registry", "registry")),
        "subnets": subnets(estate),
        "lustre": estate.file_system is not None and estate.file_system.storage.startswith("lustre-"),
        "in_zones": estate.region in zone_regions(),
        "tebibyte": 2**40,
        "endpoints": endpoints,
        "zones": sorted({zone for *_, names in endpoints for zone in names}),
        "folder_days": FOLDER_DAYS,
        "plans": {p: {"pricingTier": "Standard", **({"subPlan": sub} if sub else {})} for p, sub in PLANS.items()},
        "policies": [row for row in POLICIES if row[0] != "public" or estate.network == "isolated"],
        "sizes": sorted({*(cluster.size for cluster in estate.clusters), *estate.endpoint_sizes}),
        "tier": TIERS.get(estate.database.size.removeprefix("Standard_")[0], "") if estate.database else "",
    }


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # what is written is YAML; every value is written as JSON
        finalize=lambda value: json.dumps(value, ensure_ascii=False),
    )


def accounts(estate: EstateConfig) -> tuple[str, ...]:
    """The storage accounts that are made."""
    return ("artifacts", "jobs", "work", *(("backup",) if estate.backup_days else ()))


def made(estate: EstateConfig) -> frozenset[str]:
    """Settings, and containers, that rows of the tables ask for."""
    flags = {
        "events": estate.events,
        "backup": bool(estate.backup_days),
        "signing_key": estate.signing_key,
        "network": estate.network != "public",
    }
    containers = {"headway", "jobs"}
    containers |= {"incoming", "dead-letters"} if estate.events else set()
    containers |= {"backups"} if estate.backup_days else set()
    return frozenset(
        {*(name for name, wanted in flags.items() if wanted), *(f"container:{name}" for name in containers)}
    )


@cache
def role_table() -> dict[str, Any]:
    """roles.yaml: the ids of the roles, and who gets which on what."""
    value: dict[str, Any] = yaml.load((FOLDER / "roles.yaml").read_text(encoding="utf-8"), Loader=LOADER)
    return value


def grants(estate: EstateConfig) -> list[Grant]:
    """Every role assignment of the estate."""
    table = role_table()
    at, flags, result = places(estate), made(estate), []
    for row in table["grants"]:
        if row.get("needs", "") not in ("", *flags):
            continue
        who = [(name, "ServicePrincipal", False) for name in row["who"] if name in (*IDENTITIES, *SYSTEM)]
        who += [(one.object_id, one.kind, True) for one in estate.people if set(one.parts) & set(row["who"])]
        for name, kind, person in who:
            result.append(
                Grant(name, kind, row["role"], table["roles"][row["role"]], at[row["on"]], row["why"], person)
            )
    return result


def subnets(estate: EstateConfig) -> dict[str, str]:
    """A quarter of the network for private endpoints, one for hosts, one for a file system; the rest is left for more."""
    quarters = ipaddress.IPv4Network(estate.address_space).subnets(prefixlen_diff=2)
    names = ("private-endpoints", "platform", *(("file-system",) if estate.file_system else ()))
    return {name: str(next(quarters)) for name in names}


def private_endpoints(estate: EstateConfig) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Name, what it is of, which part of that, and its zones."""
    if estate.network == "public":
        return []
    rows = [(account, account, "blob") for account in accounts(estate)]
    rows += [("work-files", "work", "file"), ("vault", "vault", "vault"), ("registry", "registry", "registry")]
    rows += [("workspace", "workspace", "amlworkspace")]
    rows += [("queue", "artifacts", "queue")] if estate.events else []
    rows += [("database", "database", "postgresqlServer")] if estate.database else []
    rows += [("monitor", "link_scope", "azuremonitor")] if estate.network == "isolated" else []
    return [(*row, DNS[row[2]]) for row in rows]


def outputs(estate: EstateConfig) -> dict[str, Any]:
    """What `headway estate connect` makes a home's settings of."""
    at = places(estate)
    artifacts, jobs = at["artifacts"].names[0], at["jobs"].names[0]
    clusters = [
        {
            "name": cluster.name,
            "size": cluster.size,
            "max_nodes": cluster.max_nodes,
            "preemptible": cluster.preemptible,
            "idle_minutes": cluster.idle_minutes,
        }
        for cluster in estate.clusters
    ]
    return {
        "schema": "headway/estate/1",
        "subscription_id": "[subscription().subscriptionId]",
        "tenant_id": "[subscription().tenantId]",
        "region": "[parameters('location')]",
        "resource_group": estate.name,
        "workspace": at["workspace"].name,
        "network": estate.network,
        "registry": f"{at['registry'].name}.azurecr.io",
        "artifacts": f"az://{artifacts}/headway",
        "jobs": f"az://{jobs}/jobs",
        "backups": f"az://{at['backup'].names[0]}/backups" if estate.backup_days else "",
        "identities": {name: at[f"identity:{name}"].id for name in IDENTITIES},
        "clients": {name: _output(estate, "identities", f"clients.value.{name}") for name in IDENTITIES},
        "clusters": clusters,
        "endpoint_size": estate.endpoint_sizes[0] if estate.endpoint_sizes else "",
        "incoming": f"https://{artifacts}.blob.core.windows.net/incoming" if estate.events else "",
        "queue": f"https://{artifacts}.queue.core.windows.net/headway-events" if estate.events else "",
        "signing_key": f"https://{at['vault'].name}.vault.azure.net/keys/headway" if estate.signing_key else "",
        "log_analytics": at["logs"].id,
        "insights": at["insights"].id,
        "database": f"{at['database'].name}.postgres.database.azure.com" if estate.database else "",
    }


def parameters(estate: EstateConfig) -> dict[str, Any]:
    """Values that who deploys may change; a password is in no file."""
    values = {"location": estate.region, "tags": {"headway-estate": estate.name, **estate.tags}}
    return {
        "$schema": PARAMETERS_SCHEMA,
        "contentVersion": "1.0.0.0",
        "parameters": {name: {"value": value} for name, value in values.items()},
    }
