"""Azure's retail meters as prices. Pure: in go the items of the Retail Prices API, out come prices, and what was left out.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices tells the fields. What it does not tell:
a reservation's price is of its whole term though its unit says 1 Hour; Windows, Spot and Low Priority are told only by names; a
meter may stand there twice; a price of 0 is a gap.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config.planning import PriceKind
from tasks.hardware.sku import plain_name
from tasks.planning.money import HOURS_OF_MONTH, KINDS, Term, hour_of_term

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
    wanted, here = {plain_name(size): size for size in sizes}, [i for i in items if i.get("armRegionName") == region]
    here = [item for item in here if _counts(item, today)]
    left_out: list[str] = []
    chosen = _chosen([meter for item in here for meter in _of_machine(item, wanted)], left_out)
    machines: dict[str, dict[PriceKind, float]] = {}
    for size, kind in chosen:
        machines.setdefault(size, {})[_known(kind)] = chosen[size, kind]
    for size, kinds in machines.items():
        left_out += _disbelieved(size, kinds)
    stored = _chosen([meter for item in here for meter in _of_storage(item)], left_out)
    leaving = [price for item in here if _leaves(item) and (price := _price(item))]
    return Found(
        {size: kinds for size, kinds in machines.items() if kinds},
        {choice: price for (choice, _), price in stored.items()},
        max(leaving, default=None),
        tuple(left_out),
    )


def _counts(item: Mapping[str, Any], today: datetime.date) -> bool:
    """Whether it is in force, and for everybody."""
    began = str(item.get("effectiveStartDate") or "")[:10]
    return began <= today.isoformat() and item.get("type") != "DevTestConsumption"


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


def _known(kind: str) -> PriceKind:
    return next(known for known in KINDS if known == kind)


def _of_storage(item: Mapping[str, Any]) -> Iterator[_Meter]:
    """The first step is the dearest: prices fall with what is stored."""
    product, meter, unit = (str(item.get(key) or "") for key in ("productName", "meterName", "unitOfMeasure"))
    price = _price(item)
    if item.get("type") != "Consumption" or item.get("tierMinimumUnits") or price is None or unit not in PER_MONTH:
        return
    for choice, of_product, of_meter in STORAGE:
        if of_product.search(product) and of_meter.search(meter):
            yield _Meter((choice, ""), price * PER_MONTH[unit], _rank(item))


def _leaves(item: Mapping[str, Any]) -> bool:
    return (
        item.get("serviceName") == "Bandwidth"
        and item.get("meterName") == "Standard Data Transfer Out"
        and item.get("productName") == "Rtn Preference: MGN"
        and item.get("unitOfMeasure") == "1 GB"
    )


def _chosen(meters: list[_Meter], left_out: list[str]) -> dict[tuple[str, str], float]:
    """One price each: of the meter that ranks first; of equals that differ, the dearer one, which is said."""
    best: dict[tuple[str, str], _Meter] = {}
    for meter in meters:
        there = best.get(meter.what)
        if there and there.rank == meter.rank and there.price != meter.price:
            name = " ".join(filter(None, meter.what))
            prices = sorted((there.price, meter.price))
            left_out.append(f"{name} is listed at {prices[0]:g} and at {prices[1]:g}: the dearer one counts")
        if not there or (meter.rank, meter.price) > (there.rank, there.price):
            best[meter.what] = meter
    return {what: meter.price for what, meter in best.items()}


def _disbelieved(size: str, kinds: dict[PriceKind, float]) -> Iterator[str]:
    """Take away what cannot be: a discount that is dearer than none, a spot price that is the on-demand price."""
    whole = kinds.get("on-demand")
    for kind, price in list(kinds.items()):
        if whole is not None and kind != "on-demand" and price >= whole:
            del kinds[kind]
            yield f"{size}: {kind} at {price:g} is not below on-demand at {whole:g}: it counts as not known"


def _price(item: Mapping[str, Any]) -> float | None:
    """What an item costs; None for 0 and for what is no number."""
    price = item.get("retailPrice")
    right = isinstance(price, int | float) and not isinstance(price, bool) and math.isfinite(price) and price > 0
    return float(price) if right else None  # type: ignore[arg-type]


def _rank(item: Mapping[str, Any]) -> tuple[bool, str]:
    return bool(item.get("isPrimaryMeterRegion")), str(item.get("effectiveStartDate") or "")
