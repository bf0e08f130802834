"""Microsoft Entra's edge, as far as who checks a token sees it: OpenID configuration and keys of one tenant, on loopback.

The answers have the fields of https://login.microsoftonline.com/TENANT/v2.0/.well-known/openid-configuration and of its keys;
PyJWT's own client of such keys reads them in a test. The tokens have the claims of an application's, version 1.0 or 2.0.
"""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

TENANT = "11111111-2222-3333-4444-555555555555"
AUDIENCE = "api://headway-events"
EVENT_GRID = "4962773b-9cdb-44cf-a8bf-237846a00ab7"
"""Client id of Microsoft.EventGrid, the same in every tenant."""
ISSUERS = {"1.0": f"https://sts.windows.net/{TENANT}/", "2.0": f"https://login.microsoftonline.com/{TENANT}/v2.0"}
CLIENTS = {"1.0": "appid", "2.0": "azp"}


@cache
def private_key(name: str) -> rsa.RSAPrivateKey:
    """The key of a name: the same within a process. The one called `short` is."""
    return rsa.generate_private_key(65537, 1024 if name == "short" else 2048)


@dataclass
class Entra:
    """An authority. `published` are the names of its keys; `status` is what it answers instead when it is set."""

    port: int = 0
    published: list[str] = field(default_factory=lambda: ["first"])
    status: int = 0
    asked: list[str] = field(default_factory=list)
    keys_at: str = ""
    """Where it says that its keys are; empty: here."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self) -> dict[str, Any]:
        return {"tenant": TENANT, "audience": AUDIENCE, "applications": [EVENT_GRID], "authority": self.url}

    def answer(self, path: str) -> Any:
        _, tenant, *rest = path.split("/")
        form = "v2.0" if "v2.0" in rest else ""
        if tenant != TENANT:
            return None
        if rest[-1] == "openid-configuration":
            keys = "/".join(part for part in (self.url, TENANT, "discovery", form, "keys") if part)
            issuer = ISSUERS["2.0" if form else "1.0"]
            return {
                "issuer": issuer,
                "jwks_uri": self.keys_at or keys,
                "id_token_signing_alg_values_supported": ["RS256"],
            }
        return {"keys": [public_jwk(name) for name in self.published]}


def public_jwk(name: str) -> dict[str, str]:
    numbers = private_key(name).public_key().public_numbers()
    return {"kty": "RSA", "use": "sig", "kid": name, "n": _number(numbers.n), "e": _number(numbers.e)}


def claims(version: str = "2.0", **changed: Any) -> dict[str, Any]:
    """What a token of Event Grid says; None takes a claim away."""
    now = int(time.time())
    said = {"aud": AUDIENCE, "iss": ISSUERS[version], "iat": now, "nbf": now, "exp": now + 3600, "tid": TENANT}
    said |= {"ver": version, CLIENTS[version]: EVENT_GRID, "sub": "b1", "oid": "b1"}
    return {name: value for name, value in (said | changed).items() if value is not None}


def token(key: str = "first", *, kid: str | None = None, version: str = "2.0", **changed: Any) -> str:
    """A signed token."""
    return jwt.encode(claims(version, **changed), private_key(key), "RS256", headers={"kid": kid or key})


def forged(header: dict[str, Any], sign: Any = lambda _: b"") -> str:
    """A token as no library makes it, with right claims."""
    parts = (json.dumps(part).encode() for part in (header, claims()))
    head = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    return (head + b"." + base64.urlsafe_b64encode(sign(head)).rstrip(b"=")).decode()


@contextmanager
def serving() -> Iterator[Entra]:
    """The authority answers while the block runs."""
    entra = Entra()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.entra = entra  # type: ignore[attr-defined]
    entra.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield entra
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        entra: Entra = self.server.entra  # type: ignore[attr-defined]
        entra.asked.append(self.path)
        said = entra.answer(self.path)
        data = json.dumps(said).encode()
        self.send_response(entra.status or (200 if said else 404))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _number(value: int) -> str:
    return base64.urlsafe_b64encode(value.to_bytes((value.bit_length() + 7) // 8)).rstrip(b"=").decode()
