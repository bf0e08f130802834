"""The endpoints of a home: which there are, what they serve, and asking them. One endpoint's own life is local.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.endpoints import open_endpoint
from tasks.endpoints.client import complete
from tasks.endpoints.endpoint import ServingEndpoint
from tasks.endpoints.keys import own_key
from tasks.endpoints.local import port_free
from tasks.errors import Missing, Unknown
from tasks.process import read_json


def endpoint_of(home: Path, name: str) -> ServingEndpoint:
    """The endpoint of a name, whether it was ever deployed or not."""
    return open_endpoint(home / "endpoints", name)


def known_endpoints(home: Path) -> list[str]:
    """Names of all endpoints that were deployed, sorted."""
    return sorted(path.parent.name for path in (home / "endpoints").glob("*/endpoint.json"))


def require_known(home: Path, name: str) -> str:
    """The name without `endpoint/`. Raises Unknown when there is no such endpoint."""
    bare = name.removeprefix("endpoint/")
    known = known_endpoints(home)
    if bare not in known:
        there = f"There are: {', '.join(known)}." if known else "None was deployed yet."
        raise Unknown(f"there is no endpoint {bare!r}", remedy=f"{there} `headway retrain` deploys one.")
    return bare


def served_model(home: Path, name: str) -> str:
    """Reference of the model that an endpoint serves, or served before it was stopped."""
    record = read_json(home / "endpoints" / require_known(home, name) / "endpoint.json")
    return str(record["model_ref"])


def ask(home: Path, name: str, prompt: str, *, max_tokens: int) -> dict[str, Any]:
    """Ask a served model to go on with a text: completion, model, usage. Raises Missing when it is stopped."""
    bare = require_known(home, name)
    served = endpoint_of(home, bare).observe()
    if served is None:
        raise Missing(f"endpoint/{bare} is stopped", remedy="`headway retrain` starts it again.")
    said = complete(served.url, prompt, max_tokens=max_tokens, key=own_key(home / "endpoints" / bare))
    return {"completion": said["choices"][0]["text"], "model": said["model"], "usage": said["usage"]}


def require_port(home: Path, name: str, port: int | None) -> None:
    """Raise ValueError when a wanted port is taken by something else than this endpoint."""
    if port is None:
        return
    served = endpoint_of(home, name).observe()
    if served is None or served.port != port:
        port_free(port)
