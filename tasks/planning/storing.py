"""Which storage for data, scratch and checkpoints: from capacity, bandwidth and price, with the reason in a sentence. Pure.

What there is and how fast it is: storages.py. Prices come in as values, by the names there; None or missing is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.hardware.machine import Machine
from tasks.planning.storages import CHOICES, MB, TIB, Storage, bandwidth_of, capacity_for

Purpose = Literal["data", "scratch", "checkpoints"]
GB_A_TIB = TIB / 1e9
LOCAL_SHARE = 0.8
"""Of the machines' own disks that one purpose may fill."""
HELD_UP_BY = {
    "room": "has no room for it",
    "bandwidth": "is too slow",
    "lost": "goes with its machines",
    "alone": "is not shared",
}


@dataclass(frozen=True)
class Need:
    """What is stored. Bytes, bytes a second."""

    purpose: Purpose
    bytes: float
    bandwidth: float = 0.0
    """Of all machines together."""

    def __post_init__(self) -> None:
        for name in ("bytes", "bandwidth"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} {getattr(self, name)}: give a number, 0 or more")

    @property
    def durable(self) -> bool:
        """Scratch may be lost."""
        return self.purpose != "scratch"

    @property
    def shared(self) -> bool:
        """A checkpoint's parts are read by other machines after a failure; data by all."""
        return self.purpose != "scratch"


@dataclass(frozen=True)
class Choice:
    """A storage for a need."""

    storage: Storage
    tib: float
    bandwidth: float
    month: float | None
    """Price of what is ordered; None: not known."""
    reason: str
    rejected: Mapping[str, str]
    """By name, why not."""


def choose_storage(
    need: Need,
    machine: Machine,
    machines: int,
    *,
    gb_month: Mapping[str, float | None] | None = None,
    local_bytes: float = 0.0,
    measured: Mapping[str, float] | None = None,
) -> Choice | None:
    """The cheapest that is large and fast enough and keeps what must be kept; None when there is none.

    `local_bytes` is the NVMe of one machine; `measured` is bandwidth by name from the qualification, of all machines together,
    and replaces what is known. What the machines bring costs nothing more; of those with no price the first of CHOICES is taken.
    """
    if machines < 1:
        raise ValueError(f"{machines} machines: give a number above 0")
    prices, fits, rejected = gb_month or {}, [], {}
    for storage in CHOICES:
        ordered = _ordered(storage, need, machine, machines, local_bytes=local_bytes)
        rate = (measured or {}).get(storage.name) or bandwidth_of(storage, machine, machines, tib=ordered)
        held = _held_up(storage, need, ordered, rate)
        if held:
            rejected[storage.name] = HELD_UP_BY[held]
            continue
        assert ordered is not None
        month = 0.0 if _comes_along(storage) else _month(prices.get(storage.name), ordered)
        fits.append((storage, ordered, rate, month))
    if not fits:
        return None
    storage, ordered, rate, month = min(fits, key=lambda fit: math.inf if fit[3] is None else fit[3])
    return Choice(storage, ordered, rate, month, _reason(need, storage, ordered, rate, month, fits), rejected)


def _ordered(storage: Storage, need: Need, machine: Machine, machines: int, *, local_bytes: float) -> float | None:
    """TiB of it that there are or that are ordered."""
    if _comes_along(storage):
        return local_bytes * machines * LOCAL_SHARE / TIB if machine.nvme_write_bandwidth else 0.0
    return capacity_for(storage, need.bytes / TIB, need.bandwidth)


def _comes_along(storage: Storage) -> bool:
    return storage.local and not storage.durable


def _held_up(storage: Storage, need: Need, ordered: float | None, rate: float) -> str:
    if need.durable and not storage.durable:
        return "lost"
    if need.shared and not storage.shared:
        return "alone"
    if rate < need.bandwidth:
        return "bandwidth"
    return "" if ordered is not None and ordered * TIB >= need.bytes and ordered > 0 else "room"


def _month(price: float | None, tib: float) -> float | None:
    return None if price is None else price * tib * GB_A_TIB


def _reason(
    need: Need,
    storage: Storage,
    tib: float,
    rate: float,
    month: float | None,
    fits: Sequence[tuple[Storage, float, float, float | None]],
) -> str:
    """In a sentence, with the figures that decided."""
    needs = f"{need.purpose} need {need.bytes / TIB:.2f} TiB at {need.bandwidth / MB:,.0f} MB/s"
    has = f"{storage.said} has {tib:.2f} TiB at {rate / MB:,.0f} MB/s"
    if month == 0.0:
        return f"{needs}; {has}, and comes with the machines"
    if month is None:
        return f"{needs}; {has}; no price is known, so the first that is enough is taken"
    dearer = sorted(fit[3] for fit in fits if fit[3] is not None and fit[3] > month)
    beside = f", the next costs {dearer[0]:,.0f}" if dearer else ""
    return f"{needs}; {has} for {month:,.0f} a month{beside}"
