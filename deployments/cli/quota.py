"""`headway quota`: what an account may have, whether some machines fit into it, and what to file when they do not.

The limits are files, and Azure ML's account where there is one. See docs/planning.md, "Money".
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.checks import Config, Json, Set
from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.artifacts import Check

UPDATE = "update"


def quota(
    size: Annotated[
        str,
        typer.Argument(
            metavar="[SIZE|update]", help="A size of Azure; `update` asks the account of the configuration."
        ),
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", help="How many machines of it.")] = 1,
    days: Annotated[float | None, typer.Option("--days", help="How long the longest job runs.")] = None,
    region: Annotated[str, typer.Option("--region", help="Azure's region, as its API writes it.")] = "eastus",
    low_priority: Annotated[bool, typer.Option("--low-priority", help="Machines that may be taken away.")] = False,
    vms: Annotated[
        bool, typer.Option("--vms", help="Virtual machines (Slurm), and not Azure ML: they count apart.")
    ] = False,
    config: Config = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Show an account's limits; or whether machines of a size fit into them, and if not, what to ask Azure for.

    `limits.yaml` of the home says what you may have; `headway quota update -c CONFIG` asks Azure ML. Not enough leaves with 3.
    """
    if size == UPDATE:
        return _update(config, set_, as_json)
    if not size:
        return _show(as_json)
    from tasks.artifacts import require_checks
    from tasks.common.home import home
    from tasks.hardware.sku import load_sku
    from tasks.planning.prices.limits import read_limits
    from tasks.planning.quota import Request, judge

    sku = load_sku(size, home() / "hardware")
    vcpus, ports = sku.specs.get("vcpus"), sku.specs.get("infiniband_ports")
    if not vcpus:
        raise ValueError(f"{sku.name} is no size of Azure: its file says no vCPUs")
    limits = read_limits(home(), region=region, service="vm" if vms else "azureml", sku=sku)
    request = Request(
        sku.name,
        sku.family,
        int(float(vcpus.value)),
        nodes,
        days=days,
        low_priority=low_priority,
        rdma=bool(ports and ports.value),
        service="vm" if vms else "azureml",
    )
    checks = judge(request, limits)
    fields = {"checks": [{**check.model_dump(), "outcome": check.outcome} for check in checks], "region": region}
    if any(not check.passed for check in checks):
        require_checks("quota", checks)
    return say({**fields, "source": limits.source}, "\n".join(map(_line, checks)), as_json=as_json)


def _line(check: Check) -> str:
    end = f"\n  -> {check.remedy}" if check.warned else ""
    return f"{check.outcome:<8}{check.name}: {check.measured:g}, limit {check.limit}{end}"


def _show(as_json: bool) -> None:
    from tasks.common.home import home
    from tasks.planning.prices.limits import FETCHED, FILE, read_file

    result = {
        name: read_file(home() / name).model_dump(mode="json") for name in (FILE, FETCHED) if (home() / name).exists()
    }
    lines = [
        f"{service} {region}: {_told(entry)}  ({name}, {entry['date'] or 'no date'})"
        for name, value in result.items()
        for service, by_region in value.items()
        for region, entry in by_region.items()
    ]
    none = "No limits are known: write limits.yaml of the home, or `headway quota update -c CONFIG` asks Azure ML."
    say({"limits": result}, "\n".join(lines) or none, as_json=as_json)


def _told(payload: dict[str, Any]) -> str:
    parts = [f"{family} {vcpus} vCPUs" for family, vcpus in payload["dedicated"].items() if vcpus]
    parts += [f"total {payload['total']}"] if payload["total"] is not None else []
    parts += [f"low priority {payload['low_priority']}"] if payload["low_priority"] is not None else []
    return ", ".join(parts) or "nothing"


def _update(config: list[str] | None, set_: list[str] | None, as_json: bool) -> None:
    """Ask Azure ML, and keep what it says."""
    from functools import partial

    from deployments.cli.checks import parameters_of
    from tasks.common.home import home
    from tasks.compute.azureml.quota import account_usages
    from tasks.config.cluster import ClusterConfig
    from tasks.planning.prices.limits import keep_limits
    from tasks.planning.quota import of_usages
    from tasks.storage import open_files

    cluster = parameters_of("qualify", config, "", set_)["config"]["cluster"]
    region, usages = account_usages(ClusterConfig.model_validate(cluster), partial(open_files, home()))
    payload = of_usages(usages)
    path = keep_limits(home(), region, payload, today=datetime.datetime.now(datetime.UTC).date())
    say(
        {"region": region, "file": str(path), **payload},
        f"{region}: {len(payload['dedicated'])} families; {path}",
        as_json=as_json,
    )
