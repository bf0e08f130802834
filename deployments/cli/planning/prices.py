"""`headway prices` and `headway quota`: what machines and storage cost, what an account may have; with `update`, Azure is asked.

The lists are tasks/planning/prices, limits tasks/planning/quota.py. See docs/planning.md, "Money".
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.options import Config, Json, Set
from deployments.cli.output import aligned, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.artifacts import Check
    from tasks.planning.prices.book import Book
    from tasks.planning.prices.update import Updated


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
        return _quota_update(config, set_, as_json)
    if not size:
        return _show(as_json)
    from tasks.artifacts import require_checks
    from tasks.common.home import home
    from tasks.hardware.sku import load_sku
    from tasks.planning.quota import Request, judge, read_limits

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
    from tasks.planning.quota import FETCHED, FILE, read_file

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


def _quota_update(config: list[str] | None, set_: list[str] | None, as_json: bool) -> None:
    """Ask Azure ML, and keep what it says."""
    from functools import partial

    from deployments.cli.options import parameters_of
    from tasks.common.home import home
    from tasks.compute.azureml.client import account_usages
    from tasks.config.cluster import ClusterConfig
    from tasks.planning.quota import keep_limits, of_usages
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


UPDATE = "update"
HEAD = ("machine", "region", "on-demand", "spot", "low priority", "1 y", "3 y", "plan 1 y", "plan 3 y", "as of", "from")
Regions = Annotated[
    list[str] | None,
    typer.Option("--region", metavar="REGION", help="As Azure's API writes it, such as eastus; may be given often."),
]


def prices(
    size: Annotated[
        str,
        typer.Argument(
            metavar="[SIZE|update]",
            help="A size of Azure, a GPU, or a name of your own list; without it, all. `update` asks Azure.",
        ),
    ] = "",
    region: Regions = None,
    as_json: Json = False,
) -> None:
    """Show what machines cost an hour and storage a month; or, with `update`, ask Azure for its prices of today.

    Yours, in `prices/own.yaml` of the home, come before Azure's, and these before those that are shipped. Asking needs no
    account. What is not known is left empty; prices older than 30 days say so.
    """
    if size == UPDATE:
        return _update(region or [], as_json)
    from tasks.common.home import home
    from tasks.planning.prices.book import open_book

    book, today = open_book(home()), _today()
    rows = list(_machines(book, size, region or [], today))
    if size and not any(row["hours"] for row in rows):
        raise ValueError(f"{rows[0]['warnings'][0]}; `headway prices` lists what is known")
    stored = [] if size else list(_storage(book, region or [], today))
    warnings = list(dict.fromkeys(value for row in [*rows, *stored] for value in row["warnings"]))
    fields = {"machines": rows, "storage": stored, "warnings": warnings}
    return say(fields, "\n".join(_page(rows, stored, warnings)), as_json=as_json)


def _update(regions: list[str], as_json: bool) -> None:
    from tasks.common.home import home
    from tasks.config.base import prices_url
    from tasks.planning.prices.book import open_book
    from tasks.planning.prices.update import default_regions, known_sizes, update

    where = list(dict.fromkeys(regions)) or default_regions(home())
    done = update(home(), prices_url(), regions=where, sizes=known_sizes(open_book(home())), today=_today())
    fields = {
        region: {
            "machines": {name: dict(hours) for name, hours in item.machines.items()},
            "storage": dict(item.storage),
            "egress_gb": item.egress,
            "left_out": list(item.left_out),
        }
        for region, item in done.found.items()
    }
    words = "\n".join(_updated_in_words(done))
    return say({"file": str(done.path), "regions": fields}, words, as_json=as_json)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _machines(book: Book, size: str, regions: list[str], today: datetime.date) -> Iterator[dict[str, Any]]:
    """One row a machine and region, as the lists say in their order."""
    from tasks.planning.prices.book import machine_price

    if size:
        of_gpu = book.size_of_gpu(size)
        known = sorted({r for one in book.lists for r in one.regions_of(of_gpu.size if of_gpu else size)})
        asked = [(size, region) for region in regions or known or [""]]
    else:
        asked = sorted({(name, r) for one in book.lists for name, by in one.machines.items() for r in by})
        asked = [(name, region) for name, region in asked if not regions or region in regions]
    for name, region in asked:
        price = machine_price(book, name, region=region, today=today)
        origins = [price.origin(kind) for kind, hour in price.hours.items() if hour is not None]
        dates = [origin.date for origin in origins if origin.date]
        yield {
            "machine": name,
            "region": price.region,
            "currency": price.currency,
            "hours": {kind: hour for kind, hour in price.hours.items() if hour is not None},
            "source": "; ".join(dict.fromkeys(origin.source for origin in origins)),
            "date": min(dates, default=None),
            "warnings": list(dict.fromkeys([*price.warnings, *(value for o in origins for value in o.warnings)])),
        }


def _storage(book: Book, regions: list[str], today: datetime.date) -> Iterator[dict[str, Any]]:
    from tasks.planning.prices.book import storage_prices

    known = sorted({r for one in book.lists for r in (*one.storage, *one.egress) if not regions or r in regions})
    for region in known:
        price = storage_prices(book, region=region, today=today)
        yield {
            "region": region,
            "currency": price.currency,
            "gb_month": dict(price.gb_month),
            "egress_gb": price.egress_gb,
            "source": price.source,
            "date": price.date or None,
            "warnings": list(price.warnings),
        }


def _page(rows: list[dict[str, Any]], stored: list[dict[str, Any]], warnings: list[str]) -> Iterator[str]:
    from tasks.planning.money import KINDS

    if rows:
        currencies = sorted({row["currency"] for row in rows})
        several = len(currencies) > 1
        yield f"{', '.join(currencies)} an hour of the whole machine, Linux:"
        cells = [
            (
                row["machine"],
                row["region"] or "any",
                *([row["currency"]] if several else ()),
                *(f"{row['hours'][kind]:,.6g}" if kind in row["hours"] else "-" for kind in KINDS),
                row["date"] or "no date",
                row["source"],
            )
            for row in rows
        ]
        yield from aligned([(*HEAD[:2], *(("currency",) if several else ()), *HEAD[2:]), *cells])
    if stored:
        yield from ("", "10^9 bytes for a month; egress once:")
        for row in stored:
            parts = [f"{choice} {price:g}" for choice, price in row["gb_month"].items() if price is not None]
            parts += [f"egress {row['egress_gb']:g}"] if row["egress_gb"] is not None else []
            yield f"  {row['region']:<16}{row['currency']}  {', '.join(parts) or 'nothing known'}"
    shown = _short(warnings)
    yield from ("", *shown) if shown else ()


def _short(warnings: list[str], most: int = 6) -> list[str]:
    """A few of them; of those that only say how old prices are, how many there are."""
    old = [value for value in warnings if " days old (" in value]
    if len(old) > 2:
        remedy = old[0].partition("): ")[2]
        warnings = [
            *(value for value in warnings if value not in old),
            f"prices of {len(old)} kinds of machines are old: {remedy}",
        ]
    more = len(warnings) - most
    return [*warnings[:most], *([f"and {more} more of these: see --json"] if more > 0 else [])]


def _updated_in_words(done: Updated) -> Iterator[str]:
    for region, item in done.found.items():
        yield f"{region}: {len(item.machines)} sizes, {len(item.storage)} kinds of storage"
        yield from (f"  {value}" for value in item.left_out)
    yield f"written to {done.path}; `headway prices` shows them"
