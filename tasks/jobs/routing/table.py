"""Who gets the next request: a colour by its share, then the server of it with the least under way.

Routes come from tasks/serving/protocol/routes.py; what is known of a server's health, from gateway.py; how many there are, from
there too. Sending is proxy.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.jobs.routing.upstream import Upstream
from tasks.serving.protocol.routes import Colour, Routes

PATIENCE_SECONDS = 10.0
"""Time that a request waits for a server that crashed and is being started again."""
WAKING_SECONDS = 5.0
"""Time in which a server that was just started need not be seen to run."""
MOST_WAITING = 64
"""Requests that may wait for a server to come; more are answered 503."""
Health = Literal["ready", "live", "loading", "mute", "down", "gone"]
"""What is known of a server. `live`: it answers, but not with its full model. `loading`: no model answers there, and one is being
loaded; `mute`: nor is one. `down`: the server does not answer. `gone`: and nobody starts it again."""


@dataclass(eq=False)
class Replica:
    """One server and what is known of it."""

    server: str
    colour: str
    upstream: Upstream
    health: Health = "down"
    inflight: int = 0
    leaving: bool = False
    """Gets no new request: it is being stopped."""

    @property
    def port(self) -> int:
        return self.upstream.port


@dataclass
class Group:
    """The servers of a colour. `asleep`: all were stopped because nobody asked."""

    colour: Colour
    replicas: list[Replica] = field(default_factory=list)
    credit: float = 0.0
    asleep: bool = False
    busy: float = field(default_factory=time.monotonic)
    """When all servers were needed last, by time.monotonic."""
    asked: float = field(default_factory=time.monotonic)
    """When a request came, or was under way, last."""
    woken: float = 0.0
    """When its servers were started again after a sleep, by time.monotonic."""
    waiting: int = 0
    """Requests that wait for a server to come."""
    arrived: int = 0
    """Requests since scaling (gateway.py) looked last."""


class Table:
    """State: the routes that hold, the servers of each colour, and who lost its share."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret
        """What servers are shown; empty: nothing."""
        self.routes: Routes | None = None
        self.groups: dict[str, Group] = {}
        self.tripped: dict[str, Any] | None = None
        """`server`, `why`, `time`: the colour with this server gets nothing while another is in service."""
        self.changed = asyncio.Event()
        self._mirror_credit = 0.0

    def apply(self, routes: Routes) -> list[Replica]:
        """Follow new routes; returns servers that are in none any more: they finish what they have."""
        dropped: list[Replica] = []
        groups = {}
        for name, colour in routes.colours.items():
            before = self.groups.get(name)
            if before and before.colour.servers == colour.servers:
                before.colour = colour
                groups[name] = before
                continue
            replicas = [
                Replica(place.server, name, Upstream(place.port, self.secret), "live") for place in colour.servers
            ]
            groups[name] = Group(colour, replicas)
        for name, group in self.groups.items():
            if groups.get(name) is not group:
                dropped += group.replicas
        self.routes, self.groups = routes, groups
        self.notify()
        return dropped

    @property
    def waiting(self) -> int:
        """Requests that wait for a server to come, of any colour."""
        return sum(group.waiting for group in self.groups.values())

    def weights(self) -> dict[str, int]:
        """Shares as they hold: a colour that was tripped has none, the main colour has its share too."""
        routes = self.routes
        assert routes is not None
        weights = {name: colour.weight for name, colour in routes.colours.items()}
        if self.lost():
            weights = {name: 100 if name == routes.main else 0 for name in weights}
        return weights

    def lost(self) -> str:
        """The colour that was tripped, when the routes still give it a share or copies; empty: none."""
        if not self.tripped or self.routes is None:
            return ""
        for name, colour in self.routes.colours.items():
            is_local = any(place.server == self.tripped["server"] for place in colour.servers)
            if is_local and name != self.routes.main:
                return name
        return ""

    def next_colour(self, without: Collection[str] = ()) -> str | None:
        """Shares by turns, so that they hold over any hundred requests (smooth weighted round robin)."""
        weights = {name: w for name, w in self.weights().items() if w and name not in without}
        if not weights:
            return None
        for name, weight in weights.items():
            self.groups[name].credit += weight
        best = max(weights, key=lambda name: self.groups[name].credit)
        self.groups[best].credit -= sum(weights.values())
        return best

    def best(self, colour: str, without: Collection[Replica] = ()) -> Replica | None:
        """The server of a colour with the least under way: a ready one, else one that answers at all."""
        existing = [one for one in self.groups[colour].replicas if not one.leaving and one not in without]
        for health in ("ready", "live"):
            fit = [one for one in existing if one.health == health]
            if fit:
                return min(fit, key=lambda one: one.inflight)
        return None

    async def take(self, colour: str, without: Collection[Replica] = (), *, patience: float) -> Replica | None:
        """A server of a colour, another than those, if there is one; waits, within bounds, for one that is being started.

        `patience`: seconds that a model which is being loaded is waited for. None: there will be none soon. A server that
        answers nothing is had where waiting is of no use: it says why.
        """
        group = self.groups[colour]
        group.arrived += 1
        if result := self.best(colour, without) or self.best(colour):
            return result
        if self.waiting >= MOST_WAITING:
            return None
        group.waiting += 1
        try:
            return await self._wait_for(colour, patience)
        finally:
            group.waiting -= 1

    async def _wait_for(self, colour: str, patience: float) -> Replica | None:
        began = time.monotonic()
        while (group := self.groups.get(colour)) and not (result := self.best(colour)):
            if not _comes(group, since=began, patience=patience):
                return next((one for one in group.replicas if one.health == "mute" and not one.leaving), None)
            try:
                async with asyncio.timeout(0.25):
                    await self.changed.wait()
            except TimeoutError:
                continue
        return result if group else None

    def lost_model(self, replica: Replica) -> None:
        """Its model went away: no more requests until one is loaded, or it says that it answers all the same."""
        if replica.health in ("ready", "live"):
            replica.health = "loading"
            self.notify()

    def lost_sight(self, replica: Replica) -> None:
        """It did not answer: no more requests until it does."""
        if replica.health != "gone":
            replica.health = "down"
            self.notify()

    def mirrors_to(self, colour: str) -> str | None:
        """The colour that gets a copy of this request, when its turn has come."""
        routes = self.routes
        if routes is None or not routes.mirror or colour != routes.main or self.lost():
            return None
        self._mirror_credit += routes.mirror / 100
        if self._mirror_credit < 1:
            return None
        self._mirror_credit -= 1
        return next((name for name in self.groups if name != routes.main), None)

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


def _comes(group: Group, *, since: float, patience: float) -> bool:
    """Whether a request that waits since a time, by time.monotonic, may still get a server."""
    now = time.monotonic()
    known = {one.health for one in group.replicas if not one.leaving}
    if group.asleep:
        return now - since < max(patience, PATIENCE_SECONDS)
    if "loading" in known:
        return now - since < patience
    if now - group.woken <= WAKING_SECONDS:
        return True
    return "down" in known and now - max(since, group.woken) <= PATIENCE_SECONDS
