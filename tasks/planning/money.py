"""What a training costs: machines by the hour (useful work, failures, waiting, tests), storage, data that leaves Azure. Pure.

Prices are values that come in (tasks/planning/prices reads and fetches them), discounts too: no public figure of a GPU's
discount exists. An unknown price is None and a warning, never 0. Limits of an account are in quota.py. See docs/money.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tasks.config.planning import PriceKind, SpendingConfig

Term = Literal["1y", "3y"]
KINDS: tuple[PriceKind, ...] = get_args(PriceKind)
HOURS_OF_TERM: Mapping[Term, float] = {"1y": 8760.0, "3y": 26280.0}
"""365 and 1,095 days: how a reservation's price for its whole term becomes one an hour."""
HOURS_OF_MONTH = 730.0
"""By which Azure's calculator turns hours into months: 8,760 / 12."""


@dataclass(frozen=True)
class Origin:
    """Where a price is from."""

    source: str = ""
    date: str = ""
    """When the prices were read, as YYYY-MM-DD."""
    warnings: tuple[str, ...] = ()
    """That they are old, or of another region, or of another machine."""


@dataclass(frozen=True)
class MachinePrice:
    """What one machine of a size costs an hour, by kind of price. A kind that is missing, or None, is not known."""

    sku: str
    hours: Mapping[PriceKind, float | None]
    region: str = ""
    currency: str = "USD"
    source: str = ""
    date: str = ""
    """When the prices were read, as YYYY-MM-DD."""
    warnings: tuple[str, ...] = ()
    """That they are old, or of another region, or of another machine."""
    elsewhere: Mapping[PriceKind, Origin] = field(default_factory=dict)
    """Of kinds that are from another list than the rest, which source, date and warnings are of."""

    def origin(self, kind: PriceKind) -> Origin:
        """Where the price of a kind is from."""
        return self.elsewhere.get(kind) or Origin(self.source, self.date, self.warnings)


@dataclass(frozen=True)
class StoragePrices:
    """What storage costs. All in the currency of the machine's price; None is not known."""

    gb_month: Mapping[str, float | None] = field(default_factory=dict)
    """By choice, such as blob-hot: 10^9 bytes for a month."""
    egress_gb: float | None = None
    """10^9 bytes that leave Azure."""
    currency: str = "USD"
    source: str = ""
    date: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spending:
    """How long which machines work, and what is kept. Times in seconds of all machines together standing reserved."""

    machines: float
    train_seconds: float
    """Of useful training, as the steps' time says: without failures and saving."""
    goodput: float = 1.0
    """Useful seconds of all that training takes, as `goodput.mid` of a plan; in (0, 1]."""
    qualification_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Machines that boot, pull images, wait for the last one: paid for, and nothing runs."""
    mix: Mapping[PriceKind, float] = field(default_factory=lambda: {"on-demand": 1.0})
    """Share of the machines' hours by kind of price; the shares sum to 1."""
    discounts: Mapping[PriceKind, float] = field(default_factory=dict)
    """Off the on-demand price, by kind, as your contract says: 0.4 is 40 %. Given, it stands in place of the list's price."""
    checkpoint_gb: float = 0.0
    """Kept on average, in 10^9 bytes."""
    checkpoint_storage: str = "blob-hot"
    data_gb: float = 0.0
    data_storage: str = "blob-hot"
    kept_days: float | None = None
    """How long checkpoints and data are stored; None: as long as the machines are there."""
    egress_gb: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What it all costs. `total` is the sum of `parts`, and None when a part is not known."""

    currency: str
    total: float | None
    parts: Mapping[str, float | None]
    """training, failures, qualification, idle, checkpoints, data, egress."""
    price_source: str
    price_date: str
    hour: float | None
    """Of one machine, by the mix."""
    machine_hours: float
    warnings: tuple[str, ...] = ()

    @property
    def known(self) -> float:
        """The sum of what is known: the least that it costs."""
        return math.fsum(value for value in self.parts.values() if value is not None)

    def plain(self) -> dict[str, Any]:
        """`cost` of a plan as JSON."""
        return {
            "currency": self.currency,
            "total": self.total,
            "price_source": self.price_source,
            "price_date": self.price_date,
            "parts": dict(self.parts),
            "machine_hour": self.hour,
            "machine_hours": self.machine_hours,
        }


def cost(spending: Spending, machine: MachinePrice, storage: StoragePrices | None = None) -> Cost:
    """What a training costs. Raises ValueError for a spending that cannot be.

    `machine_price` and `storage_prices` of tasks/planning/prices/book.py give the prices, of a size and of a GPU by its name.
    Failures cost what the rest of the time to `goodput` costs: training takes train_seconds / goodput.
    """
    require_possible(spending)
    storage = storage or StoragePrices()
    if storage.currency != machine.currency:  # such prices are no prices here: no rate of exchange is known
        text = (
            f"storage is priced in {storage.currency} and machines in {machine.currency}: what is stored has no price"
        )
        storage = StoragePrices(currency=machine.currency, warnings=(text,))
    hour = hourly(machine, spending.mix, spending.discounts)
    trained = spending.train_seconds / 3600 * spending.machines
    hours = {
        "training": trained,
        "failures": trained / spending.goodput - trained,
        "qualification": spending.qualification_seconds / 3600 * spending.machines,
        "idle": spending.idle_seconds / 3600 * spending.machines,
    }
    parts: dict[str, float | None] = {name: _times(amount, hour) for name, amount in hours.items()}
    wall = math.fsum(hours.values()) / spending.machines
    months = (wall if spending.kept_days is None else spending.kept_days * 24) / HOURS_OF_MONTH
    checkpoints = storage.gb_month.get(spending.checkpoint_storage)
    parts["checkpoints"] = _times(spending.checkpoint_gb * months, checkpoints)
    parts["data"] = _times(spending.data_gb * months, storage.gb_month.get(spending.data_storage))
    parts["egress"] = _times(spending.egress_gb, storage.egress_gb)
    known = [value for value in parts.values() if value is not None]
    origins: list[Origin | StoragePrices] = [
        machine.origin("on-demand" if kind in spending.discounts else kind)
        for kind, share in spending.mix.items()
        if share
    ]
    if spending.checkpoint_gb or spending.data_gb or spending.egress_gb:
        origins.append(storage)
    return Cost(
        currency=machine.currency,
        total=math.fsum(known) if len(known) == len(parts) else None,
        parts=parts,
        price_source="; ".join(dict.fromkeys(one.source for one in origins if one.source)),
        price_date=min((one.date for one in origins if one.date), default=""),
        hour=hour,
        machine_hours=math.fsum(hours.values()),
        warnings=_warnings(spending, machine, parts, origins),
    )


def hourly(machine: MachinePrice, mix: Mapping[PriceKind, float], discounts: Mapping[PriceKind, float]) -> float | None:
    """Of one machine an hour, by the shares of a mix; None when a kind of it has no price."""
    prices = {kind: _price(machine, kind, discounts) for kind, share in mix.items() if share}
    known = {kind: price for kind, price in prices.items() if price is not None}
    if len(known) < len(prices):
        return None
    return math.fsum(mix[kind] * price for kind, price in known.items())


def kept_in(storage: StoragePrices, choice: str, *, gb: float, ordered_gb: float = 0.0) -> tuple[str, float, str]:
    """What is paid for keeping `gb`: the choice, the gigabytes, and a warning or nothing.

    Of a file system all that is ordered is paid for, however little lies in it. One without a price is left out of the cost, with
    what is kept priced as in Blob, and the warning says so.
    """
    if storage.gb_month.get(choice) is not None:
        return choice, max(gb, ordered_gb), ""
    size = f" of {ordered_gb / 1e3:,.0f} TB" if ordered_gb else ""
    text = f"the price of {choice}{size} is not known and not in the cost: checkpoints are in it as if they lay in Blob"
    return "blob-hot", gb, text if choice != "blob-hot" else ""


def discounts_of(paid: SpendingConfig) -> dict[PriceKind, float]:
    """Off the on-demand price, as a configuration says."""
    return {paid.price: paid.discount} if paid.discount else {}


def hour_of_term(total: float, term: Term) -> float:
    """What a reservation costs an hour; `total` is of the whole term, as Azure lists it."""
    return total / HOURS_OF_TERM[term]


def require_possible(spending: Spending) -> None:
    """Raises ValueError that names the value and the remedy."""
    if not (math.isfinite(spending.machines) and spending.machines > 0):
        raise ValueError(f"machines {spending.machines}: give a number above 0")
    if not 0 < spending.goodput <= 1:
        raise ValueError(f"goodput {spending.goodput}: give a share above 0 and at most 1, as 0.9")
    amounts = ("train_seconds", "qualification_seconds", "idle_seconds", "checkpoint_gb", "data_gb", "egress_gb")
    for name, value in [(name, getattr(spending, name)) for name in amounts] + [("kept_days", spending.kept_days or 0)]:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value}: give a number that is not below 0")
    _require_shares(spending)


def _require_shares(spending: Spending) -> None:
    unknown = sorted({*spending.mix, *spending.discounts} - set(KINDS))
    if unknown:
        raise ValueError(f"kind of price {unknown[0]!r}: there is no such; write one of {', '.join(KINDS)}")
    for kind, share in spending.mix.items():
        if not 0 <= share <= 1:
            raise ValueError(f"mix: {kind} {share}: give a share from 0 to 1")
    if not math.isclose(math.fsum(spending.mix.values()), 1.0, abs_tol=1e-9):
        raise ValueError(f"mix: the shares sum to {math.fsum(spending.mix.values()):g}: they must sum to 1")
    for kind, share in spending.discounts.items():
        if not 0 <= share < 1:
            raise ValueError(f"discounts: {kind} {share}: give a share from 0 to below 1, as 0.4 for 40 %")


def _price(machine: MachinePrice, kind: PriceKind, discounts: Mapping[PriceKind, float]) -> float | None:
    """The contract's before the list's."""
    whole = machine.hours.get("on-demand")
    if kind in discounts:
        return None if whole is None else whole * (1 - discounts[kind])
    return machine.hours.get(kind)


def _times(amount: float, price: float | None) -> float | None:
    """Nothing costs nothing, whatever its price."""
    return 0.0 if amount == 0 else None if price is None else amount * price


def _warnings(
    spending: Spending,
    machine: MachinePrice,
    parts: Mapping[str, float | None],
    origins: Iterable[Origin | StoragePrices],
) -> tuple[str, ...]:
    messages = [warning for origin in origins for warning in origin.warnings]
    for kind, share in spending.mix.items():
        if share and _price(machine, kind, spending.discounts) is None:
            where = f" in {machine.region}" if machine.region else ""
            messages.append(
                f"the {kind} price of {machine.sku or 'this machine'}{where} is not known: what its hours cost is left open; "
                "`headway prices update` asks for it, or give your discount"
            )
        if share and kind.partition("-")[0] in ("reserved", "savings"):
            years = "three years" if kind.endswith("3y") else "one year"
            messages.append(
                f"{kind}: the commitment is paid for {years}; the hours that this training does not use are not in it"
            )
    kept = {"checkpoints": "storing checkpoints", "data": "storing data", "egress": "data that leaves Azure"}
    messages += [
        f"the price of {what} is not known: it is not in the cost" for name, what in kept.items() if parts[name] is None
    ]
    return tuple(dict.fromkeys(messages))
