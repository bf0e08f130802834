"""`headway prices`: what machines and storage cost, with source and date; `headway prices update` asks Azure.

The lists are tasks/prices. See docs/planning.md, "Money".
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.hardware import _aligned
from deployments.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.planning.prices.book import Book
    from tasks.planning.prices.update import Updated

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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
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
    return say(_updated(done), "\n".join(_updated_in_words(done)), as_json=as_json)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _machines(book: Book, size: str, regions: list[str], today: datetime.date) -> Iterator[dict[str, Any]]:
    """One row a machine and region, as the lists say in their order."""
    from tasks.planning.prices.book import machine_price

    if size:
        asked = [(size, region) for region in regions or _regions_of(book, size) or [""]]
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


def _regions_of(book: Book, size: str) -> list[str]:
    of_gpu = book.size_of_gpu(size)
    return sorted({r for one in book.lists for r in one.regions_of(of_gpu.size if of_gpu else size)})


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
        yield from _aligned([(*HEAD[:2], *(("currency",) if several else ()), *HEAD[2:]), *cells])
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


def _updated(done: Updated) -> dict[str, Any]:
    return {
        "file": str(done.path),
        "regions": {
            region: {
                "machines": {name: dict(hours) for name, hours in item.machines.items()},
                "storage": dict(item.storage),
                "egress_gb": item.egress,
                "left_out": list(item.left_out),
            }
            for region, item in done.found.items()
        },
    }


def _updated_in_words(done: Updated) -> Iterator[str]:
    for region, item in done.found.items():
        yield f"{region}: {len(item.machines)} sizes, {len(item.storage)} kinds of storage"
        yield from (f"  {value}" for value in item.left_out)
    yield f"written to {done.path}; `headway prices` shows them"
