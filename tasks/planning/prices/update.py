"""Writes Azure's prices of today into a home: `prices/azure.yaml`, and the list before beside it.

A region is asked for whole, and everything is written at once or not at all. Prices of regions that were not asked for stay, with
their own date. How it is asked is retail.py, what a meter means meters.py.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tasks.common.errors import Missing
from tasks.common.process import locked, write_text
from tasks.planning.prices.book import FETCHED, Book, PriceList, as_plain, open_book, read_list
from tasks.planning.prices.meters import Found, prices_of
from tasks.planning.prices.retail import Retail, quoted

BEFORE = "prices/azure.before.yaml"
"""The list that the newest one replaced, below the home."""
SIZES_A_QUESTION = 6
HEAD = "# Written by `headway prices update`, which replaces it. Prices of your own go into own.yaml beside it.\n"


@dataclass(frozen=True)
class Updated:
    """What was fetched."""

    path: Path
    found: dict[str, Found]
    """By region."""


def update(home: Path, url: str, *, regions: Sequence[str], sizes: Iterable[str], today: datetime.date) -> Updated:
    """Fetch the prices of some sizes, storage and egress in some regions. Raises Missing, and then nothing is changed."""
    _require_regions(regions)
    wanted = sorted(set(sizes))
    with Retail(url) as retail:
        found = {region: _region(retail, region, wanted, today) for region in regions}
    empty = [region for region, prices in found.items() if not prices.machines]
    if empty:
        raise Missing(
            f"Azure lists no machine with GPUs in {', '.join(empty)}",
            remedy="Write a region as Azure does, eastus and not East US. The prices of before stay.",
        )
    path = home / FETCHED
    with locked(path.with_suffix(".lock")):
        before = _before(path)
        list_ = _on_top(before, found, url, today)
        if path.exists():
            write_text(home / BEFORE, path.read_text(encoding="utf-8"))
        write_text(path, HEAD + yaml.safe_dump(as_plain(list_), sort_keys=True, allow_unicode=True, width=120))
    return Updated(path, found)


def known_sizes(book: Book) -> list[str]:
    """Sizes that any list has, and those that GPUs are priced as."""
    named = [name for one in book.lists for name in one.machines if name.lower().startswith("standard_")]
    return sorted({*named, *(size.size for one in book.lists for size in one.gpus.values())})


def _require_regions(regions: Sequence[str]) -> None:
    for region in regions:
        if not region.isalnum() or region != region.lower():
            raise ValueError(f"region {region!r}: write it as Azure's API does, for example eastus")
    if not regions:
        raise ValueError("no region is named: give --region, for example --region eastus")


def _region(retail: Retail, region: str, sizes: list[str], today: datetime.date) -> Found:
    """Everything that is asked for a region."""
    here = f"armRegionName eq {quoted(region)}"
    conditions = [
        f"serviceName eq 'Virtual Machines' and {here} and "
        f"({' or '.join(f'armSkuName eq {quoted(size)}' for size in some)})"
        for some in _some(sizes)
    ]
    conditions += [
        f"serviceName eq 'Storage' and {here} and productName eq 'Blob Storage'",
        f"serviceName eq 'Azure NetApp Files' and {here}",
        f"{here} and contains(productName, 'Lustre')",
        f"serviceName eq 'Bandwidth' and {here} and meterName eq 'Standard Data Transfer Out'",
    ]
    items = [item for condition in conditions for item in retail.ask(condition)]
    return prices_of(items, sizes, region=region, today=today)


def _some(sizes: list[str]) -> list[list[str]]:
    return [sizes[start : start + SIZES_A_QUESTION] for start in range(0, len(sizes), SIZES_A_QUESTION)]


def _before(path: Path) -> PriceList:
    return read_list(path) if path.exists() else PriceList()


def _on_top(before: PriceList, found: dict[str, Found], url: str, today: datetime.date) -> PriceList:
    """The list before with the regions replaced that were fetched."""
    said = as_plain(before)
    sources = {
        f"azure-{region}": {"what": f"Azure Retail Prices API ({url})", "date": today.isoformat()} for region in found
    }
    machines = {name: {r: h for r, h in by.items() if r not in found} for name, by in said.get("machines", {}).items()}
    for region, prices in found.items():
        for name, hours in prices.machines.items():
            machines.setdefault(name, {})[region] = {**hours, "source": f"azure-{region}"}
    stored = {r: by for r, by in said.get("storage", {}).items() if r not in found}
    left = {r: egress for r, egress in said.get("egress", {}).items() if r not in found}
    for region, prices in found.items():
        source = f"azure-{region}"
        stored[region] = {choice: {"gb_month": price, "source": source} for choice, price in prices.storage.items()}
        left |= {region: {"gb": prices.egress, "source": source}} if prices.egress is not None else {}
    return PriceList.model_validate(
        {
            "currency": "USD",
            "sources": {**said.get("sources", {}), **sources},
            "machines": {name: by for name, by in machines.items() if by},
            "storage": {region: by for region, by in stored.items() if by},
            "egress": left,
        }
    )


def default_regions(home: Path) -> list[str]:
    """Regions that a home has fetched before; else those of the shipped list's machines."""
    fetched = read_list(home / FETCHED) if (home / FETCHED).exists() else open_book().lists[0]
    return sorted({region for by in fetched.machines.values() for region in by})
