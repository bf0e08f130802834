"""The gateway's private port: what the deployer asks it, on loopback, with the token of `control.json`. Callers never come here.

`GET /state`: what holds. `GET /observed?SERVER=SECONDS`: what was seen of the model that was deployed with a server, since then.
`GET /metrics`: the same for Prometheus.
"""

from __future__ import annotations

import hmac
import os
from typing import Any
from urllib.parse import parse_qsl

from tasks.jobs.routing.counts import Counts
from tasks.jobs.routing.proxy import Message, Receive, Send, say
from tasks.jobs.routing.table import Table


class Control:
    """State: none of its own. `problem` is why the newest routes or settings are not followed."""

    def __init__(self, token: str, table: Table, counts: Counts) -> None:
        self._token, self._table, self._counts = token.encode(), table, counts
        self.problem = ""
        self.listening: int | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        payload = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(payload, b"Bearer " + self._token):
            await say(send, 401, {"error": "the token is in control.json"})
        elif scope["path"] == "/state":
            await say(send, 200, self.state())
        elif scope["path"] == "/observed":
            asked = parse_qsl(scope["query_string"].decode())
            await say(send, 200, {server: self._counts.seen(server, float(since)) for server, since in asked})
        elif scope["path"] == "/metrics":
            await _text(send, self.metrics())
        else:
            await say(send, 404, {"error": "there is /state, /observed and /metrics"})

    def state(self) -> dict[str, Any]:
        """What the gateway does now."""
        table, routes = self._table, self._table.routes
        return {
            "pid": os.getpid(),
            "applied": routes.number if routes else None,
            "port": self.listening,
            "problem": self.problem,
            "weights": table.weights() if routes else {},
            "tripped": table.tripped if table.lost() else None,
            "waiting": table.waiting,
            "colours": {
                name: {
                    "asleep": group.asleep,
                    "totals": vars(self._counts.totals[name]) if name in self._counts.totals else {},
                    "servers": [
                        {"server": one.server, "port": one.port, "health": one.health, "inflight": one.inflight}
                        for one in group.replicas
                    ],
                }
                for name, group in table.groups.items()
            },
        }

    def metrics(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        lines: dict[str, list[str]] = {}
        weights = self._table.weights() if self._table.routes else {}
        for name, group in self._table.groups.items():
            lines.setdefault("weight", []).append(f'{{colour="{name}"}} {weights[name]}')
            ready = sum(one.health == "ready" for one in group.replicas)
            lines.setdefault("servers_ready", []).append(f'{{colour="{name}"}} {ready}')
            inflight = sum(one.inflight for one in group.replicas)
            lines.setdefault("requests_under_way", []).append(f'{{colour="{name}"}} {inflight}')
        for name, totals in self._counts.totals.items():
            for what, value in vars(totals).items():
                lines.setdefault(f"{what}_total", []).append(f'{{colour="{name}"}} {value}')
        text = ""
        for what, rows in lines.items():
            kind = "counter" if what.endswith("_total") else "gauge"
            text += f"# TYPE headway_gateway_{what} {kind}\n" + "".join(
                f"headway_gateway_{what}{row}\n" for row in rows
            )
        return text.encode()


async def _text(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain; version=0.0.4"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
