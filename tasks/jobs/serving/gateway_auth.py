"""What stands before a server on its private port: only its gateway is answered, which shows the endpoint's secret.

The secret is tasks/serving/protocol/secret.py. Probes are answered to everybody: they say no more than whether a model is up.
What stands before a server that is alone, and before the gateway, is api_middleware.py.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.jobs.serving.api_middleware import error_body, send_json
from tasks.serving.protocol.routes import SECRET

PROBES = ("/livez", "/readyz")


class Behind:
    """The middleware. State: the secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES and not self._shown(scope):
            said = "this port is the gateway's: ask the endpoint's own address"
            await send_json(send, 401, error_body(401, said), headers={"Connection": "close"})
            return
        await self._app(scope, receive, send)

    def _shown(self, scope: Scope) -> bool:
        shown = next((value for name, value in scope["headers"] if name == SECRET.encode()), b"")
        return hmac.compare_digest(shown, self._secret)
