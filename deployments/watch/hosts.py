"""The watches of the hosts of one platform: which one acts for all, and which host is gone.

Each watch holds the claim to its host, and one of them the claim to act (tasks/common/claims.py). What concerns all hosts, such
as missed schedules and runs whose host is gone, only that one does; another has its place within half a minute. What concerns one
host, its own processes above all, each does for itself. A platform without a PostgreSQL, or with a store in a folder, has one
host: there the one watch acts, and other homes in the same store are none of its business.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tasks.common.claims import Claim, Claims, host_claim, run_claim, watch_claim
from tasks.common.errors import HeadwayError, Missing
from tasks.config.database import platform_of
from tasks.storage import open_store

GONE_SECONDS = 10.0
"""A claim that nobody holds for so long, while the store answers, is of nobody any more: a holder that lives, and that only the
store was away from, has it again within some seconds."""


class Hosts:
    """State: our claims, who gives them out, and since when nobody holds those that were asked for."""

    def __init__(
        self,
        home: Path,
        *,
        claims: Callable[[Path], Claims | None] = lambda home: open_store(home).claims,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.home, self._now, self._given = home, now, claims
        self._platform = platform_of(home)
        self._host: Claim | None = None
        self._acting: Claim | None = None
        self._known: Claims | None = None
        self._free: dict[str, float] = {}

    def tick(self, now: float) -> None:
        """Take what is ours, or what became free. Raises Missing while the store does not answer, or another has our name."""
        claims = self._claims()
        if claims is None:
            return
        if self._acting is None or self._acting.lost:
            before, self._acting = self._acting, claims.take(watch_claim(self._platform))
            if self._acting:
                logging.info("this watch acts for all hosts of the store from now on")
            elif before:
                logging.warning("the watch of another host acts for all now")
        if self._host is None or self._host.lost:
            name = socket.gethostname()
            self._host = claims.take(host_claim(self._platform, name))
            if self._host is None:
                raise Missing(
                    f"another host of this platform is called {name}, or its watch has just ended",
                    remedy="If this message stays, give each host a name of its own: a run tells by it where it is.",
                )

    def act(self) -> bool:
        """Whether this watch, and no other, is to do what concerns all hosts; no while the store does not answer."""
        if self._claims() is None:
            return True
        try:
            if self._acting is not None:
                self._acting.require()
        except Missing:  # Superseded among it
            return False
        return self._acting is not None

    def gone(self, host: str, flow_run: str) -> bool:
        """Whether nobody has held the claims to a host and to a flow run of it for a while; no while no store answers."""
        claims = self._claims()
        if claims is None:
            return False
        names = host_claim(self._platform, host), run_claim(flow_run)
        for name in names:
            try:
                held = claims.held(name)
            except HeadwayError:
                self._free.clear()
                return False
            if held:
                self._free.pop(name, None)
                return False
            self._free.setdefault(name, self._now())
        return all(self._now() - self._free[name] >= GONE_SECONDS for name in names)

    def end(self) -> None:
        """Give back what is ours: another watch need not wait."""
        for claim in (self._acting, self._host):
            if claim:
                claim.give_back()
        self._acting = self._host = None

    def _claims(self) -> Claims | None:
        if not self._platform:
            return None
        try:
            self._known = self._given(self.home)
        except (
            HeadwayError,
            ValueError,
        ) as error:  # stores.yaml is broken for now: the store is the one that was known
            logging.info("hosts: %s", error)
        return self._known
