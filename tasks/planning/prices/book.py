"""The price lists of a home, read and looked into: your own (`prices/own.yaml`), then Azure's as fetched last, then ours.

Kinds of price that your own list leaves out are those of the next one, in the same region and currency.

A list is YAML of the form of list.yaml. Fetching is update.py; what a training costs, tasks/planning/money.py. Old prices are
given with a warning, unknown ones are None.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.common.validation import explain
from tasks.config.planning import PriceKind
from tasks.hardware.sku import plain_name
from tasks.planning.money import KINDS, MachinePrice, Origin, StoragePrices

SHIPPED = Path(__file__).parent / "list.yaml"
OWN, FETCHED = "prices/own.yaml", "prices/azure.yaml"
"""Below the home."""
STALE_DAYS = 30
"""Prices older than this say so wherever they are shown."""
USUAL_REGION = "eastus"
"""That prices are taken of when nobody names a region, where there are any."""
ANYWHERE = "any"
"""A region of an own list that stands for all."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Data(BaseModel):
    """Base of a list's sections: a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Source(Data):
    """Where prices are from."""

    what: str = Field(min_length=1)
    """In a few words: it is told beside every cost."""
    note: str = ""
    date: datetime.date | None = None
    """When they held; empty: nobody says, so they count as old."""


class Hours(Data):
    """One machine an hour, by kind of price."""

    on_demand: Amount | None = Field(None, alias="on-demand")
    spot: Amount | None = None
    low_priority: Amount | None = Field(None, alias="low-priority")
    reserved_1y: Amount | None = Field(None, alias="reserved-1y")
    reserved_3y: Amount | None = Field(None, alias="reserved-3y")
    savings_1y: Amount | None = Field(None, alias="savings-1y")
    savings_3y: Amount | None = Field(None, alias="savings-3y")
    source: str = "list"
    note: str = ""

    @property
    def by_kind(self) -> dict[PriceKind, float | None]:
        """A spot price that equals the on-demand price is what a catalogue writes that knows none."""
        result = {kind: getattr(self, kind.replace("-", "_")) for kind in KINDS}
        return {**result, "spot": None} if self.spot_is_no_price else result

    @property
    def spot_is_no_price(self) -> bool:
        return bool(self.spot) and self.spot == self.on_demand


class Stored(Data):
    """10^9 bytes for a month."""

    gb_month: Amount | None
    source: str = "list"
    note: str = ""


class Egress(Data):
    """10^9 bytes that leave Azure."""

    gb: Amount | None
    source: str = "list"
    note: str = ""


class SizeOfGpu(Data):
    """The size that a GPU is priced as."""

    size: str
    gpus: int = Field(gt=0)


class PriceList(Data):
    """One list. Machines, storage and egress by region, as Azure's API names regions."""

    currency: str = Field("USD", pattern="^[A-Z]{3}$")
    sources: dict[str, Source] = {}
    machines: dict[str, dict[str, Hours]] = {}
    storage: dict[str, dict[str, Stored]] = {}
    egress: dict[str, Egress] = {}
    gpus: dict[str, SizeOfGpu] = {}

    @model_validator(mode="after")
    def _sources_are_there(self) -> PriceList:
        named = {hours.source for by in self.machines.values() for hours in by.values()}
        named |= {stored.source for by in self.storage.values() for stored in by.values()}
        missing = sorted((named | {egress.source for egress in self.egress.values()}) - {*self.sources, "list"})
        if missing:
            raise ValueError(f"sources {', '.join(missing)} are named and not there")
        return self

    def source(self, key: str) -> Source:
        return self.sources.get(key) or Source(what="your own list")

    def regions_of(self, name: str) -> dict[str, Hours]:
        """Of a size, by any spelling of its name."""
        return next((by for known, by in self.machines.items() if plain_name(known) == plain_name(name)), {})


@dataclass(frozen=True)
class Book:
    """All lists, the one that counts most first."""

    lists: tuple[PriceList, ...]
    own: PriceList | None = None
    """Of the lists, yours: what it leaves out of a machine, the next list adds. Others stand for themselves."""

    def size_of_gpu(self, name: str) -> SizeOfGpu | None:
        result = {_bare(gpu): size for one in reversed(self.lists) for gpu, size in one.gpus.items()}
        return result.get(_bare(name))


def open_book(home: Path | None = None) -> Book:
    """The lists of a home; without one, ours. Raises ValueError for a list that cannot be read."""
    own = read_list(home / OWN) if home and (home / OWN).exists() else None
    fetched = [home / FETCHED] if home else []
    others = [read_list(path) for path in [*fetched, SHIPPED] if path.exists()]
    return Book((*([own] if own else ()), *others), own)


def read_list(path: Path) -> PriceList:
    """Raises ValueError that names the file, the key and the value."""
    try:
        output = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        return PriceList.model_validate(output if isinstance(output, dict) else {"a list": output})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"prices {str(path)!r}: {error}") from error
    except ValidationError as error:
        raise ValueError(f"{path} is no price list: {explain(error, PriceList)}") from error


def machine_price(
    book: Book, name: str, *, region: str = "", gpus: int | None = None, today: datetime.date
) -> MachinePrice:
    """What a machine costs: a size of Azure, a name of your own list, or a GPU by its name.

    Of a GPU: `gpus` of them, as the size that has it costs, shared out by GPU; without `gpus`, one.
    """
    size = book.size_of_gpu(name) if not any(one.regions_of(name) for one in book.lists) else None
    if not size:
        return _of_size(book, name, region, today)
    price = _of_size(book, size.size, region, today)
    share = (gpus or 1) / size.gpus
    hours = {kind: None if hour is None else hour * share for kind, hour in price.hours.items()}
    text = f"the price of {name} is that of {size.size}, shared out by its {size.gpus} GPU{'s' * (size.gpus > 1)}"
    known = (text, *price.warnings) if any(hour is not None for hour in hours.values()) else price.warnings
    elsewhere = {kind: replace(origin, warnings=(text, *origin.warnings)) for kind, origin in price.elsewhere.items()}
    return replace(price, sku=name, hours=hours, warnings=known, elsewhere=elsewhere)


def storage_prices(book: Book, *, region: str = "", today: datetime.date) -> StoragePrices:
    """Of a region, each choice from the first list that has it there. Without a region: of the usual one."""
    where = region or USUAL_REGION
    result: dict[str, tuple[PriceList, Stored]] = {}
    leaving: tuple[PriceList, Egress] | None = None
    currency = ""
    for one in book.lists:
        local = one.storage.get(where, {}) | one.storage.get(ANYWHERE, {})
        egress = one.egress.get(where) or one.egress.get(ANYWHERE)
        if (local or egress) and one.currency == (currency or one.currency):
            currency = one.currency
            result = {choice: (one, entry) for choice, entry in local.items()} | result
            leaving = leaving or ((one, egress) if egress else None)
    entries = [one.source(entry.source) for one, entry in result.values()]
    entries += [leaving[0].source(leaving[1].source)] if leaving else []
    dates = [source.date for source in entries if source.date]
    old = [value for source in entries for value in staleness("storage", source, today)]
    unknown = () if entries else (f"no prices of storage are known in {where}",)
    return StoragePrices(
        gb_month={choice: entry.gb_month for choice, (_, entry) in result.items()},
        egress_gb=leaving[1].gb if leaving else None,
        currency=currency or "USD",
        source="; ".join(dict.fromkeys(source.what for source in entries)),
        date=min(dates).isoformat() if dates else "",
        warnings=(*dict.fromkeys(old), *unknown),
    )


UPDATE = "`headway prices update` fetches it"


def staleness(what: str, source: Source, today: datetime.date) -> tuple[str, ...]:
    """That prices are old, in a sentence; nothing when they are not."""
    if source.what == "your own list" and source.date is None:
        return ()
    remedy = "`headway prices update` asks for today's"
    if source.date is None:
        return (f"the prices of {what} have no date, so they count as old: {remedy}",)
    days = (today - source.date).days
    return (f"the prices of {what} are {days} days old ({source.date}): {remedy}",) if days > STALE_DAYS else ()


def _of_size(book: Book, name: str, region: str, today: datetime.date) -> MachinePrice:
    elsewhere: set[str] = set()
    for number, one in enumerate(book.lists):
        by_region = one.regions_of(name)
        # When none is wanted the usual region comes first, and any is better than none.
        other = "" if region else min(by_region, default="")
        where = next((place for place in (region or USUAL_REGION, ANYWHERE) if place in by_region), other)
        if where:
            hours = by_region[where]
            source = one.source(hours.source)
            priced = any(hour is not None for hour in hours.by_kind.values())
            of_date = staleness(name, source, today) if priced else (f"no price of {name} is known: {UPDATE}",)
            spot = (f"the spot price of {name} that is listed equals its on-demand price, so it is not known",)
            price = MachinePrice(
                name,
                hours.by_kind,
                "" if where == ANYWHERE else where,
                one.currency,
                source=source.what,
                date=source.date.isoformat() if source.date else "",
                warnings=(*of_date, *(spot if hours.spot_is_no_price else ())),
            )
            if one is not book.own:
                return price
            rest = Book(book.lists[number + 1 :])
            return _completed(price, _of_size(rest, name, region if where == ANYWHERE else where, today))
        elsewhere |= set(by_region)
    known = f"; known are {', '.join(sorted(elsewhere))}" if elsewhere else ""
    text = f"no price of {name}{f' in {region}' if region else ''} is known{known}: {UPDATE}"
    return MachinePrice(name, {}, region, warnings=(text,))


def _completed(own: MachinePrice, other: MachinePrice) -> MachinePrice:
    """Your prices, and of the kinds that they leave out another list's, where it is in the same currency."""
    added = [kind for kind, hour in other.hours.items() if hour is not None and own.hours.get(kind) is None]
    if own.currency != other.currency:
        text = f"is listed in {other.currency} and your own list is in {own.currency}: it is not taken"
        unusable = {kind: Origin(warnings=(f"the {kind} price of {own.sku} {text}",)) for kind in added}
        return replace(own, elsewhere=unusable)
    return replace(
        own,
        hours={**own.hours, **{kind: other.hours[kind] for kind in added}},
        elsewhere={kind: other.origin(kind) for kind in added},
    )


def _bare(gpu: str) -> str:
    """A100 80GB, a100-80gb and A100_80GB are one."""
    return "".join(letter for letter in gpu.lower() if letter.isalnum())


def as_plain(result: PriceList) -> dict[str, Any]:
    """As it stands in a file."""
    return result.model_dump(mode="json", by_alias=True, exclude_defaults=True)
