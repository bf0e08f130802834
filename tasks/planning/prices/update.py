"""Writes Azure's prices of today into a home: `prices/azure.yaml`, and the list before beside it.

A region is asked for whole, and everything is written at once or not at all. Prices of regions that were not asked for stay, with
their own date.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices tells the fields: `$filter` in OData, in
values the case counts since 2023-01-01-preview; NextPageLink leads on. What it does not tell: a reservation's price is of all its
term though its unit says 1 Hour; Windows, Spot and Low Priority are told only by names; a meter may stand there twice; a price of
0 is a gap. No account is needed, nothing about us is sent.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tasks.common.errors import Missing
from tasks.common.process import locked, write_text
from tasks.config.planning import PriceKind
from tasks.hardware.sku import plain_name
from tasks.planning.money import HOURS_OF_MONTH, KINDS, Term, hour_of_term
from tasks.planning.prices.book import FETCHED, Book, PriceList, as_plain, open_book, read_list

GB_OF_GIB = 1.073741824
TERMS: Mapping[str, Term] = {"1 Year": "1y", "3 Years": "3y"}
NOT_LINUX = re.compile(r"windows|cloud\s?services|dedicated host", re.IGNORECASE)
UNITS = {"1 Hour": 1.0, "1/Hour": 1.0}
PER_MONTH = {
    "1 GB/Month": 1.0,
    "1 GiB/Month": 1 / GB_OF_GIB,
    "1 GB/Hour": HOURS_OF_MONTH,
    "1 GiB/Hour": HOURS_OF_MONTH / GB_OF_GIB,
}
"""By unit of measure: what makes a price of 10^9 bytes and month of it."""
STORAGE = (
    ("blob-hot", re.compile(r"^Blob Storage$"), re.compile(r"^Hot LRS Data Stored$")),
    ("blob-cool", re.compile(r"^Blob Storage$"), re.compile(r"^Cool LRS Data Stored$")),
    ("netapp-standard", re.compile(r"^Azure NetApp Files$"), re.compile(r"^Standard Capacity$")),
    ("netapp-premium", re.compile(r"^Azure NetApp Files$"), re.compile(r"^Premium Capacity$")),
    ("netapp-ultra", re.compile(r"^Azure NetApp Files$"), re.compile(r"^Ultra Capacity$")),
    *(
        (f"lustre-{mb}", re.compile("Lustre"), re.compile(rf"(?<!\d){mb}(?!\d).*Capacity"))
        for mb in (40, 125, 250, 500)
    ),
)
"""Choice, and the product and meter that it is. Managed Lustre's are a guess at names that no public text shows."""
EGRESS = {
    "serviceName": "Bandwidth",
    "meterName": "Standard Data Transfer Out",
    "productName": "Rtn Preference: MGN",
    "unitOfMeasure": "1 GB",
}
"""The meter of data that leaves Azure."""


@dataclass(frozen=True)
class Found:
    """Prices of one region."""

    machines: Mapping[str, Mapping[PriceKind, float]]
    """By size as Azure spells it; an hour."""
    storage: Mapping[str, float]
    """10^9 bytes for a month, by choice."""
    egress: float | None
    """10^9 bytes that leave Azure, at the dearest step."""
    left_out: tuple[str, ...]
    """What was there and is not believed, in sentences."""


@dataclass(frozen=True)
class _Meter:
    """One price that may count."""

    what: tuple[str, str]
    price: float
    rank: tuple[bool, str]
    """Primary meters come first, then those that began last."""


def prices_of(items: Iterable[Mapping[str, Any]], sizes: Iterable[str], *, region: str, today: datetime.date) -> Found:
    """The prices of a region out of all items that were answered for it."""
    wanted = {plain_name(size): size for size in sizes}
    local = [
        item
        for item in items
        if item.get("armRegionName") == region
        and str(item.get("effectiveStartDate") or "")[:10] <= today.isoformat()
        and item.get("type") != "DevTestConsumption"  # which is not for everybody
    ]
    left_out: list[str] = []
    chosen = _chosen([meter for item in local for meter in _of_machine(item, wanted)], left_out)
    machines: dict[str, dict[PriceKind, float]] = {}
    for (size, named), hour in chosen.items():
        machines.setdefault(size, {})[next(kind for kind in KINDS if kind == named)] = hour
    for size, kinds in machines.items():
        # What cannot be: a discount that is dearer than none, a spot price that is the on-demand price.
        whole = kinds.get("on-demand")
        for kind, hour in list(kinds.items()):
            if whole is not None and kind != "on-demand" and hour >= whole:
                del kinds[kind]
                left_out.append(
                    f"{size}: {kind} at {hour:g} is not below on-demand at {whole:g}: it counts as not known"
                )
    stored = _chosen([meter for item in local for meter in _of_storage(item)], left_out)
    leaving = [price for item in local if EGRESS.items() <= item.items() and (price := _price(item))]
    return Found(
        {size: kinds for size, kinds in machines.items() if kinds},
        {choice: price for (choice, _), price in stored.items()},
        max(leaving, default=None),
        tuple(left_out),
    )


def _of_machine(item: Mapping[str, Any], wanted: Mapping[str, str]) -> Iterator[_Meter]:
    size = wanted.get(plain_name(str(item.get("armSkuName") or "")))
    if item.get("serviceName") != "Virtual Machines" or not size or NOT_LINUX.search(str(item.get("productName"))):
        return
    if item.get("unitOfMeasure") not in UNITS or item.get("tierMinimumUnits"):
        return
    kind, price = _kind(item), _price(item)
    if price is None or kind is None:
        return
    term = TERMS.get(str(item.get("reservationTerm"))) if item.get("type") == "Reservation" else None
    yield _Meter((size, kind), hour_of_term(price, term) if term else price, _rank(item))
    for plan in item.get("savingsPlan") or () if kind == "on-demand" else ():
        saved = _price(plan)
        if plan.get("term") in TERMS and saved is not None:
            yield _Meter((size, f"savings-{TERMS[plan['term']]}"), saved, _rank(item))


def _kind(item: Mapping[str, Any]) -> str | None:
    if item.get("type") == "Reservation":
        term = TERMS.get(str(item.get("reservationTerm")))
        return f"reserved-{term}" if term else None
    if item.get("type") != "Consumption":
        return None
    names = f"{item.get('skuName')} {item.get('meterName')}"
    return "spot" if "Spot" in names else "low-priority" if "Low Priority" in names else "on-demand"


def _of_storage(item: Mapping[str, Any]) -> Iterator[_Meter]:
    """The first step is the dearest: prices fall with what is stored."""
    product, meter, unit = (str(item.get(key) or "") for key in ("productName", "meterName", "unitOfMeasure"))
    price = _price(item)
    if item.get("type") != "Consumption" or item.get("tierMinimumUnits") or price is None or unit not in PER_MONTH:
        return
    for choice, of_product, of_meter in STORAGE:
        if of_product.search(product) and of_meter.search(meter):
            yield _Meter((choice, ""), price * PER_MONTH[unit], _rank(item))


def _chosen(meters: list[_Meter], left_out: list[str]) -> dict[tuple[str, str], float]:
    """One price each: of the meter that ranks first; of equals that differ, the dearer one, which is said."""
    best: dict[tuple[str, str], _Meter] = {}
    for meter in meters:
        existing = best.get(meter.what)
        if existing and existing.rank == meter.rank and existing.price != meter.price:
            name = " ".join(filter(None, meter.what))
            prices = sorted((existing.price, meter.price))
            left_out.append(f"{name} is listed at {prices[0]:g} and at {prices[1]:g}: the dearer one counts")
        if not existing or (meter.rank, meter.price) > (existing.rank, existing.price):
            best[meter.what] = meter
    return {what: meter.price for what, meter in best.items()}


def _price(item: Mapping[str, Any]) -> float | None:
    """What an item costs; None for 0 and for what is no number."""
    price = item.get("retailPrice")
    right = isinstance(price, int | float) and not isinstance(price, bool) and math.isfinite(price) and price > 0
    return float(price) if right else None  # type: ignore[arg-type]


def _rank(item: Mapping[str, Any]) -> tuple[bool, str]:
    return bool(item.get("isPrimaryMeterRegion")), str(item.get("effectiveStartDate") or "")


API_VERSION = "2023-01-01-preview"
"""The only one that tells savings plans."""
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 4
"""Of one page; between them 1, 2 and 4 seconds, or what Retry-After says."""
LONGEST_WAIT_SECONDS = 60.0
"""That a Retry-After is followed for; a longer one is an error that says so."""
MOST_PAGES = 200
"""Of one question; a region's GPU sizes take a few."""
MOST_BYTES = 20_000_000
"""Of one page; a thousand items take about one million."""
PORTS = {"http": 80, "https": 443}
TRY_LATER = "The prices of before stay. Try again later; `headway prices` shows what is known."


class Retail:
    """A connection to the API at `url`; State: the open connection."""

    def __init__(self, url: str, *, currency: str = "USD") -> None:
        self._url, self._currency = url, currency
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, headers={"User-Agent": "headway"})

    def __enter__(self) -> Retail:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, condition: str) -> Iterator[dict[str, Any]]:
        """All items for a condition, page by page. Raises Missing where an answer cannot be had whole."""
        query = {"api-version": API_VERSION, "currencyCode": f"'{self._currency}'", "$filter": condition}
        link: str | None = str(httpx.URL(self._url, params=query))
        seen: set[str] = set()
        while link:
            if link in seen:
                raise Missing(f"{self._url} leads in a circle: a page was given twice", remedy=TRY_LATER)
            if len(seen) >= MOST_PAGES:
                raise Missing(f"{self._url} gave {MOST_PAGES} pages and more for one question", remedy=TRY_LATER)
            seen.add(link)
            page = self._page(link)
            yield from page["Items"]
            link = page.get("NextPageLink")
            if link and (not isinstance(link, str) or _place(link) != _place(self._url)):
                raise Missing(
                    f"{self._url} leads on to another place, {str(link)[:80]!r}: it is not asked", remedy=TRY_LATER
                )

    def _page(self, link: str) -> dict[str, Any]:
        """One page. An answer that may be better the next time is asked for again."""
        why = ""
        for attempt in range(ATTEMPTS):
            wait = float(2**attempt)
            try:
                answer = self._client.get(link)
                if answer.status_code == 200:
                    return self._checked(answer)
                why = f"it answers {answer.status_code}"
                if answer.status_code not in (408, 429) and answer.status_code < 500:
                    raise Missing(f"{self._url}: {why}: {answer.text[:200]}", remedy=TRY_LATER)
                # Retry-After in seconds; a date is not followed.
                payload = answer.headers.get("Retry-After", "")
                wait = float(payload) if payload.isdigit() else wait
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
            if wait > LONGEST_WAIT_SECONDS:
                raise Missing(f"{self._url}: {why}, and asks to wait {wait:.0f} s", remedy=TRY_LATER)
            if attempt < ATTEMPTS - 1:
                time.sleep(wait)
        raise Missing(f"{self._url} gave no prices in {ATTEMPTS} attempts: {why}", remedy=TRY_LATER)

    def _checked(self, answer: httpx.Response) -> dict[str, Any]:
        """Raises ValueError for what may be right the next time, and Missing for what is wrong for good."""
        if len(answer.content) > MOST_BYTES:
            raise Missing(f"{self._url}: a page of {len(answer.content)} bytes", remedy=TRY_LATER)
        page = answer.json()
        if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
            raise ValueError("the answer has no Items")
        if not all(isinstance(item, dict) for item in page["Items"]):
            raise ValueError("an item of the answer is no object")
        given = {page.get("BillingCurrency"), *(item.get("currencyCode") for item in page["Items"])}
        if given != {self._currency}:
            wrong = ", ".join(sorted(str(one) for one in given - {self._currency}))
            raise Missing(f"{self._url} was asked for {self._currency} and answers in {wrong}", remedy=TRY_LATER)
        return page


def quoted(value: str) -> str:
    """A text of a condition. OData doubles a quotation mark."""
    return "'" + value.replace("'", "''") + "'"


def _place(link: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(link)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)


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
    for region in regions:
        if not region.isalnum() or region != region.lower():
            raise ValueError(f"region {region!r}: write it as Azure's API does, for example eastus")
    if not regions:
        raise ValueError("no region is named: give --region, for example --region eastus")
    wanted = sorted(set(sizes))
    with Retail(url) as retail:
        result = {region: _region(retail, region, wanted, today) for region in regions}
    empty = [region for region, prices in result.items() if not prices.machines]
    if empty:
        raise Missing(
            f"Azure lists no machine with GPUs in {', '.join(empty)}",
            remedy="Write a region as Azure does, eastus and not East US. The prices of before stay.",
        )
    path = home / FETCHED
    with locked(path.with_suffix(".lock")):
        list_ = _on_top(read_list(path) if path.exists() else PriceList(), result, url, today)
        if path.exists():
            write_text(home / BEFORE, path.read_text(encoding="utf-8"))
        write_text(path, HEAD + yaml.safe_dump(as_plain(list_), sort_keys=True, allow_unicode=True, width=120))
    return Updated(path, result)


def known_sizes(book: Book) -> list[str]:
    """Sizes that any list has, and those that GPUs are priced as."""
    named = [name for one in book.lists for name in one.machines if name.lower().startswith("standard_")]
    return sorted({*named, *(size.size for one in book.lists for size in one.gpus.values())})


def _region(retail: Retail, region: str, sizes: list[str], today: datetime.date) -> Found:
    """Everything that is asked for a region."""
    local = f"armRegionName eq {quoted(region)}"
    conditions = [
        f"serviceName eq 'Virtual Machines' and {local} and "
        f"({' or '.join(f'armSkuName eq {quoted(size)}' for size in some)})"
        for some in (sizes[start : start + SIZES_A_QUESTION] for start in range(0, len(sizes), SIZES_A_QUESTION))
    ]
    conditions += [
        f"serviceName eq 'Storage' and {local} and productName eq 'Blob Storage'",
        f"serviceName eq 'Azure NetApp Files' and {local}",
        f"{local} and contains(productName, 'Lustre')",
        f"serviceName eq 'Bandwidth' and {local} and meterName eq 'Standard Data Transfer Out'",
    ]
    items = [item for condition in conditions for item in retail.ask(condition)]
    return prices_of(items, sizes, region=region, today=today)


def _on_top(before: PriceList, result: dict[str, Found], url: str, today: datetime.date) -> PriceList:
    """The list before with the regions replaced that were fetched."""
    output = as_plain(before)
    sources = {
        f"azure-{region}": {"what": f"Azure Retail Prices API ({url})", "date": today.isoformat()} for region in result
    }
    machines = {
        name: {r: h for r, h in by.items() if r not in result} for name, by in output.get("machines", {}).items()
    }
    for region, prices in result.items():
        for name, hours in prices.machines.items():
            machines.setdefault(name, {})[region] = {**hours, "source": f"azure-{region}"}
    stored = {r: by for r, by in output.get("storage", {}).items() if r not in result}
    left = {r: egress for r, egress in output.get("egress", {}).items() if r not in result}
    for region, prices in result.items():
        source = f"azure-{region}"
        stored[region] = {choice: {"gb_month": price, "source": source} for choice, price in prices.storage.items()}
        left |= {region: {"gb": prices.egress, "source": source}} if prices.egress is not None else {}
    return PriceList.model_validate(
        {
            "currency": "USD",
            "sources": {**output.get("sources", {}), **sources},
            "machines": {name: by for name, by in machines.items() if by},
            "storage": {region: by for region, by in stored.items() if by},
            "egress": left,
        }
    )


def default_regions(home: Path) -> list[str]:
    """Regions that a home has fetched before; else those of the shipped list's machines."""
    fetched = read_list(home / FETCHED) if (home / FETCHED).exists() else open_book().lists[0]
    return sorted({region for by in fetched.machines.values() for region in by})
