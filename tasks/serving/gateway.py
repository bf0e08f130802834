"""The gateway of an endpoint, from the deployer's side: start it, have it follow routes, ask what it sees.

The program is tasks/jobs/gateway.py: one supervised process an endpoint, in `ENDPOINT/gateway/`. It outlives whoever started it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import Missing
from tasks.common.process import ProcessSpec, read_json, write_json
from tasks.serving.client import private_state
from tasks.serving.protocol.routes import Routes, make_secret, write_routes

FOLLOW_SECONDS = 30.0


POLL_SECONDS = 0.02


GRACE_SECONDS = 20.0


RESTARTS = 20


STEADY_SECONDS = 2.0


PAUSE_SECONDS = 0.02
"""Before a gateway that crashed is started again: nobody is answered meanwhile."""


class Gateway:
    """All state is in the folder, and in the process that runs there."""

    def __init__(self, endpoint: Path) -> None:
        self.folder = endpoint / "gateway"
        self.routes = endpoint / "routes.json"
        self._endpoint = endpoint

    @property
    def running(self) -> bool:
        """Whether its parent is there; a gateway that crashed is back in a second."""
        return process.alive(read_json(self.folder / "handle.json"))

    @property
    def shows_secret(self) -> bool:
        """Whether servers can ask it for the endpoint's secret: one that a release before this one started has none."""
        payload = read_json(self.folder / "control.json") if self.running else None
        return payload is None or bool(payload.get("secret"))

    def start(self, settings: Mapping[str, Any] | None = None) -> None:
        """Start it if it does not run. `settings` (limits, access) hold from now on; None: those that were there."""
        payload = dict(settings) if settings is not None else read_json(self.folder / "gateway.json") or {}
        places = {"routes": str(self.routes), "servers": str(self._endpoint / "servers")}
        wanted = {
            **payload,
            **places,
            "keys": str(self._endpoint / "keys.json"),
            "secret": str(make_secret(self._endpoint)),
        }
        if read_json(self.folder / "gateway.json") != wanted:
            write_json(self.folder / "gateway.json", wanted, seal=True)
        if not self.running:
            (self.folder / "control.json").unlink(missing_ok=True)
            spec = ProcessSpec(
                argv=[sys.executable, "-m", "tasks.jobs.gateway"],
                env={"HEADWAY_GATEWAY": str(self.folder)},
                secrets=(),
                log="gateway.log",
                restarts=RESTARTS,
                steady=STEADY_SECONDS,
                pause=PAUSE_SECONDS,
                grace=GRACE_SECONDS,
            )
            process.start(self.folder, spec)

    def follow(self, routes: Routes) -> None:
        """Have these routes followed; returns once they are. Raises Missing when the gateway does not, with its reason.

        Without a gateway they are written down for the next one.
        """
        write_routes(self.routes, routes)
        if not self.running:
            return
        deadline, state = time.monotonic() + FOLLOW_SECONDS, None
        while self.running and time.monotonic() < deadline:
            state = self.state()
            if state and state["applied"] == routes.number and state["port"] == routes.port:
                return
            if state and state["applied"] == routes.number and state["problem"]:
                break
            time.sleep(POLL_SECONDS)
        why = (state or {}).get("problem") or "it does not answer"
        raise Missing(f"the gateway does not follow: {why}", remedy=f"See {self.folder / 'gateway.log'}.")

    def state(self) -> dict[str, Any] | None:
        """What it does now; None while it does not answer."""
        return self._ask("/state")

    def observed(self, since: Mapping[str, float]) -> dict[str, Any] | None:
        """What it saw of models since times, by the servers that they were deployed with; None while it does not answer."""
        return self._ask("/observed?" + "&".join(f"{server}={when!r}" for server, when in since.items()))

    def stop(self) -> None:
        """Stop it; requests under way are finished first."""
        process.stop(self.folder, timeout=GRACE_SECONDS + 10)

    def _ask(self, path: str) -> dict[str, Any] | None:
        control = read_json(self.folder / "control.json")
        return private_state(int(control["port"]), path, token=control["token"]) if control else None
