"""Champions that nobody looked at for a whole period: `model.stale`, once a period, so that a trigger can have it done.

The alert of it is champion_not_revalidated in deployments/telemetry/alert_rules.py; the flow is revalidate.
"""

from __future__ import annotations

from pathlib import Path

from tasks.common import process
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, last_looked_at
from tasks.storage import open_store

EVERY_SECONDS = 60.0
DAY = 86_400.0
SOURCE = "headway/watch"


class Periods:
    """State: when it last looked, and in platform/periods.json what was said of each champion."""

    def __init__(self, home: Path, days: float) -> None:
        self.home, self.period, self._last = home, days * DAY, float("-inf")
        self._path = home / "platform" / "periods.json"

    def tick(self, now: float) -> None:
        """Say what became stale. Raises what the store raises while it is away."""
        if 0 <= now - self._last < EVERY_SECONDS:
            return
        self._last = now
        stale = self._stale(now)
        said = process.read_json(self._path) or {}
        for champion, (looked, periods) in stale.items():
            identity = f"{champion}#{looked:.0f}.{periods}"
            if said.get(champion) != identity:
                Ledger(self.home).receive(_event(champion, identity, looked=looked, now=now))
        after = {champion: f"{champion}#{looked:.0f}.{periods}" for champion, (looked, periods) in stale.items()}
        if after != said:
            process.write_json(self._path, after)

    def _stale(self, now: float) -> dict[str, tuple[float, int]]:
        """When each stale champion was last looked at, and how many whole periods have passed."""
        store, found = open_store(self.home), {}
        for model in champions(store):
            champion, looked = read_ref(store, f"{model}/champion"), last_looked_at(store, model)
            if champion and looked is not None and now - looked >= self.period:
                found[champion] = (looked, int((now - looked) // self.period))
        return found


def _event(champion: str, identity: str, *, looked: float, now: float) -> Event:
    return Event(
        name="model.stale",
        subject=champion.partition("@")[0],
        source=SOURCE,
        identity=identity,
        object=identity,
        occurred=now,
        channel="headway",
        data={"model": champion, "last_looked_at": looked},
    )
