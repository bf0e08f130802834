"""`headway hardware`, `prices`, `quota`: kinds of machines, what each has, must show and costs, and how many an account may
have.

Every number says where it is from. With `update`, Azure is asked. Files of machines are tasks/hardware (docs/hardware.md),
price lists tasks/planning/prices, limits tasks/planning/quota.py (docs/money.md).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set
from deployments.cli.output import aligned, say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tasks.hardware.sku import Level, Number, Sku
    from tasks.planning.prices.book import Book

COLUMNS = ("name", "gpus", "GB each", "bf16 peak", "achievable", "InfiniBand", "all_reduce in a machine", "file")


def hardware(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[SIZE]", help="An Azure VM size, such as Standard_ND96isr_H100_v5, or a file; by default all."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """List the kinds of machines that clusters are judged as; or show one in full, each number with its source.

    Files in `hardware/` of the home take precedence: those that `headway qualify --record` wrote, and your own.
    """
    from tasks.common.home import home
    from tasks.config.base import digest
    from tasks.hardware.files import find_sku, known_skus, read_sku

    own = home() / "hardware"
    if not name:
        rows = [_row(path, own) for path in known_skus(own).values()]
        cells: list[tuple[str, ...]] = [COLUMNS]
        for row in rows:
            if row["problem"]:
                cells.append((row["name"], "cannot be read:", *("" for _ in COLUMNS[3:]), row["problem"]))
                continue
            ports, rate = row["infiniband_ports"], row["all_reduce_gb_s"]
            infiniband = f"{ports:g} x {row['infiniband_gbit_s']:g} Gbit/s" if ports else "none" if ports == 0 else "-"
            busbw = f">= {rate:g} GB/s at {_bytes(row['all_reduce_bytes'])}" if rate else "-"
            gpus = f"{row['gpus']:g} {row['gpu']}" if row["gpus"] else "-"
            figures = (_plain(row[key]) for key in ("gpu_memory_gb", "peak_bf16_tflops", "achievable_bf16_tflops"))
            place = row["file"] if row["own"] else "shipped"
            cells.append((row["name"], gpus, *figures, infiniband, busbw, place))
        return say({"hardware": rows}, "\n".join(aligned(cells)), as_json=as_json)
    path = find_sku(name, own)
    sku = read_sku(path, own)
    output = sku.model_dump(mode="json")
    fields = {**output, "file": str(path), "digest": digest(output)}
    return say({"hardware": fields}, "\n".join(_sku_page(sku, path)), as_json=as_json)


def _row(path: Path, own: Path) -> dict[str, Any]:
    """What is most asked for; of a file that cannot be read, why."""
    from tasks.hardware.files import read_sku

    row: dict[str, Any] = {"name": path.stem, "file": str(path), "own": path.parent == own, "problem": ""}
    try:
        sku = read_sku(path, own)
    except ValueError as error:
        return {**row, "problem": str(error)}
    names: tuple[str, ...] = ("gpu", "gpus", "gpu_memory_gb", "peak_bf16_tflops", "achievable_bf16_tflops")
    names += ("infiniband_ports", "infiniband_gbit_s")
    specs = {name: sku.specs[name].value if name in sku.specs else None for name in names}
    limits = [limit for limit in sku.collectives if (limit.collective, limit.scope) == ("all_reduce", "node")]
    largest = max((limit for limit in limits if limit.fail), key=lambda limit: limit.bytes, default=None)
    return {
        **row,
        "name": sku.name,
        "vendor": sku.vendor,
        **specs,
        "all_reduce_gb_s": largest.fail if largest else None,
        "all_reduce_bytes": largest.bytes if largest else None,
    }


def _sku_page(sku: Sku, path: Path) -> Iterator[str]:
    """All of it, for people."""
    yield sku.name + (f", also {', '.join(sku.aliases)}" if sku.aliases else "")
    yield f"{path}" + (f", on top of {sku.based_on}" if sku.based_on else "")
    if sku.family:
        yield f"quota family {sku.family}, counted in vCPUs{_of(sku, 'family')}"
    yield from _section("It has", [_number(name, number) for name, number in sku.specs.items()])
    levels = [(check, limit.better, *_levels(limit), limit.unit, _cited(limit)) for check, limit in sku.limits.items()]
    yield from _section("It must show", [("", "better", "norm", "warn", "fail", "", ""), *levels] if levels else [])
    collectives: list[tuple[str, ...]] = []
    if sku.collectives:
        collectives.append(("", "", "", "norm", "warn", "fail", ""))
    for level in sku.collectives:
        where = f"{level.scope} {level.nodes or ''}".strip()
        collectives.append((level.collective, where, _bytes(level.bytes), *_levels(level), _cited(level)))
    yield from _section("Bus bandwidth in GB/s, from a message on", collectives)
    yield from _section(
        f"NCCL must use{_of(sku, 'transports')}", [(scope, *names) for scope, names in sku.transports.items()]
    )
    topology = [("NCCL_TOPO_FILE", sku.topology)] if sku.topology else []
    yield from _section(f"Environment{_of(sku, 'environment')}", [*sku.environment.items(), *topology])
    yield from _section("Azure ML", [_number(name, number) for name, number in sku.azureml.items()])
    images = [(i.urn, *(f"{k} {v}" for k, v in i.versions.items()), f"[{i.source}]") for i in sku.images]
    yield from _section("Images", images)
    sources = [(f"[{key}]", sku.cite(key)) for key in sku.sources if key in sku.named_sources]
    yield from _section("Sources", sources)


def _of(sku: Sku, section: Literal["family", "transports", "environment"]) -> str:
    key = sku.section_sources.get(section, "")
    return f" [{key}]" if key else ""


def _levels(limit: Any) -> tuple[str, str, str]:
    return _plain(limit.norm), _plain(limit.warn), _plain(limit.fail)


def _cited(level: Level) -> str:
    others = (
        f"norm {level.norm_source}" * bool(level.norm_source),
        f"warn {level.warn_source}" * bool(level.warn_source),
    )
    cited = ", ".join(part for part in (level.source, *others) if part)
    return f"[{cited}]" + (f" {level.note}" if level.note else "")


def _number(name: str, number: Number) -> tuple[str, ...]:
    return name, _plain(number.value), number.unit, f"[{number.source}]" + (f" {number.note}" if number.note else "")


def _section(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield from ("", title, *(f"  {line}" for line in aligned(rows)))


def _plain(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.12g}"


def _bytes(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if size % 2**power == 0:
            return f"{size >> power} {unit}"
    return f"{size:,} B".replace(",", " ")


def quota(
    size: Annotated[
        str,
        typer.Argument(
            metavar="[SIZE|update]", help="An Azure VM size; `update` fetches the quota of the configuration's account."
        ),
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", help="How many machines of that size.")] = 1,
    days: Annotated[float | None, typer.Option("--days", help="Days that the longest job runs.")] = None,
    region: Annotated[str, typer.Option("--region", help="The region as Azure's API writes it.")] = "eastus",
    low_priority: Annotated[
        bool, typer.Option("--low-priority", help="Use low-priority machines, which Azure may take away.")
    ] = False,
    vms: Annotated[
        bool, typer.Option("--vms", help="The quota of virtual machines (Slurm), which is separate from Azure ML's.")
    ] = False,
    config: Config = None,
    set_: Set = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Show an account's quota; or whether machines of a size fit into it, and if not, what to request from Azure.

    `limits.yaml` of the home holds your limits; `headway quota update -c CONFIG` fetches them. If not enough, the exit code is 3.
    """
    if size == UPDATE:
        return _quota_update(config, set_, as_, as_json)
    from tasks.common.home import home
    from tasks.planning.quota import FETCHED, FILE, Request, judge, read_file, read_limits

    if not size:
        result = {n: read_file(home() / n).model_dump(mode="json") for n in (FILE, FETCHED) if (home() / n).exists()}
        return say({"limits": result}, "\n".join(_limits(result)) or NO_LIMITS, as_json=as_json)
    from tasks.artifacts import require_checks
    from tasks.hardware.sku import load_sku

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
    lines = []
    for check in checks:
        remedy = f"\n  -> {check.remedy}" if check.warned else ""
        lines.append(f"{check.outcome:<8}{check.name}: {check.measured:g}, limit {check.limit}{remedy}")
    return say({**fields, "source": limits.source}, "\n".join(lines), as_json=as_json)


NO_LIMITS = "No limits are known: write limits.yaml of the home, or `headway quota update -c CONFIG` asks Azure ML."


def _limits(result: dict[str, Any]) -> Iterator[str]:
    """A line for each service and region of the files."""
    entries = ((name, service, by) for name, value in result.items() for service, by in value.items())
    for name, service, by_region in entries:
        for region, entry in by_region.items():
            parts = [f"{family} {vcpus} vCPUs" for family, vcpus in entry["dedicated"].items() if vcpus]
            parts += [f"total {entry['total']}"] if entry["total"] is not None else []
            parts += [f"low priority {entry['low_priority']}"] if entry["low_priority"] is not None else []
            yield f"{service} {region}: {', '.join(parts) or 'nothing'}  ({name}, {entry['date'] or 'no date'})"


def _quota_update(config: list[str] | None, set_: list[str] | None, as_: str, as_json: bool) -> None:
    """Ask Azure ML, and keep what it says."""
    from functools import partial

    from deployments.cli.options import parameters_of
    from tasks.common.home import home
    from tasks.compute.azureml.client import account_usages
    from tasks.config.cluster import ClusterConfig
    from tasks.planning.quota import keep_limits, of_usages
    from tasks.security.audit import audited
    from tasks.storage import open_files, open_store

    cluster = ClusterConfig.model_validate(parameters_of("qualify", config, "", set_)["config"]["cluster"])
    with asked("run", as_, what="update the quota"):
        region, usages = account_usages(cluster, partial(open_files, home()))
        payload = of_usages(usages)
        with audited(open_store(home()), "update quota", right="run", what=f"the quota of {region}"):
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
    typer.Option(
        "--region", metavar="REGION", help="The region as Azure's API writes it, such as eastus; may be repeated."
    ),
]


def prices(
    size: Annotated[
        str,
        typer.Argument(
            metavar="[SIZE|update]",
            help="An Azure VM size, a GPU, or a name from your own list; by default all. `update` fetches Azure's prices.",
        ),
    ] = "",
    region: Regions = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Show prices of machines per hour and storage per month; or, with `update`, fetch today's prices from Azure.

    Your own, in `prices/own.yaml` of the home, take precedence over Azure's, and these over the shipped ones. Fetching needs no
    account. Unknown prices are left empty; prices older than 30 days are marked.
    """
    from tasks.common.home import home
    from tasks.planning.prices.book import open_book, storage_prices

    if size == UPDATE:
        from tasks.config.base import prices_url
        from tasks.planning.prices.update import default_regions, known_sizes, update
        from tasks.security.audit import audited
        from tasks.storage import open_store

        where = list(dict.fromkeys(region or [])) or default_regions(home())
        what = f"the prices of {', '.join(where)}"
        with (
            asked("run", as_, what=f"update {what}"),
            audited(open_store(home()), "update prices", right="run", what=what),
        ):
            done = update(home(), prices_url(), regions=where, sizes=known_sizes(open_book(home())), today=_today())
        updated, lines = {}, []
        for place, item in done.found.items():
            updated[place] = {
                "machines": {name: dict(hours) for name, hours in item.machines.items()},
                "storage": dict(item.storage),
                "egress_gb": item.egress,
                "left_out": list(item.left_out),
            }
            lines.append(f"{place}: {len(item.machines)} sizes, {len(item.storage)} kinds of storage")
            lines += (f"  {value}" for value in item.left_out)
        lines.append(f"written to {done.path}; `headway prices` shows them")
        words = "\n".join(lines)
        return say({"file": str(done.path), "regions": updated}, words, as_json=as_json)
    book, today = open_book(home()), _today()
    rows = list(_machines(book, size, region or [], today))
    if size and not any(row["hours"] for row in rows):
        raise ValueError(f"{rows[0]['warnings'][0]}; `headway prices` lists what is known")
    stored = []
    places = {r for one in book.lists for r in (*one.storage, *one.egress) if not region or r in region}
    for place in () if size else sorted(places):
        price = storage_prices(book, region=place, today=today)
        stored.append(
            {
                "region": place,
                "currency": price.currency,
                "gb_month": dict(price.gb_month),
                "egress_gb": price.egress_gb,
                "source": price.source,
                "date": price.date or None,
                "warnings": list(price.warnings),
            }
        )
    warnings = list(dict.fromkeys(value for row in [*rows, *stored] for value in row["warnings"]))
    fields = {"machines": rows, "storage": stored, "warnings": warnings}
    return say(fields, "\n".join(_prices_page(rows, stored, warnings)), as_json=as_json)


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


def _prices_page(rows: list[dict[str, Any]], stored: list[dict[str, Any]], warnings: list[str]) -> Iterator[str]:
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
    old = [value for value in warnings if " days old (" in value]
    if len(old) > 2:
        remedy = old[0].partition("): ")[2]
        warnings = [
            *(value for value in warnings if value not in old),
            f"prices of {len(old)} kinds of machines are old: {remedy}",
        ]
    more = len(warnings) - 6
    shown = [*warnings[:6], *([f"and {more} more of these: see --json"] if more > 0 else [])]
    yield from ("", *shown) if shown else ()
