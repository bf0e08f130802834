"""`routes.json`: which servers get which share of an endpoint's requests. The deployer writes it, the gateway follows it.

The gateway is tasks/jobs/gateway.py; who decides on shares is tasks/serving/rollout.py. Standard library only: a gateway that
crashed reads this before it listens again.

Gateway and servers share a secret, for other users of this machine reach the servers' private ports: `gateway.secret` in the
endpoint's folder, which only its owner may read; made at the first deploy. Whoever deploys names the file
to both. It is for the private ports only: what callers show is tasks/serving/keys.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.process import read_json, write_json, write_text

COLOURS = ("blue", "green")
TRAFFIC = "x-headway-traffic"
"""Header by which the gateway tells a server whose request it is: a USER's, or MIRROR: a copy whose answer is thrown away."""
USER, MIRROR = "user", "mirror"
WANTED = "wanted"
"""Value of TRAFFIC with which the gateway looks at a server that requests wait for: it loads what may answer them."""
GONE = "x-headway-gone"
"""Header of a 503: the model had the request when it died, maybe of it. It is sent to nobody else."""
LOADING = "x-headway-loading"
"""Header of a 503: no model had the request, and one is being loaded."""
SECRET = "x-headway-gateway"
"""Header with the endpoint's secret, by which a server on its private port knows its gateway
(tasks/serving/protocol/routes.py)."""


@dataclass(frozen=True)
class Place:
    """One server: its id, which is its folder's name below `servers/`, and its private port on loopback."""

    server: str
    port: int


@dataclass(frozen=True)
class Colour:
    """The servers of one model and their share."""

    weight: int
    """Per cent of the requests."""
    model_ref: str
    servers: tuple[Place, ...]
    """Those that were deployed; replicas are the gateway's own copies of the first."""
    replicas: Mapping[str, Any] = field(default_factory=dict)
    """ReplicasConfig of tasks/config/serving.py as JSON; empty: one server, always."""
    until: float | None = None
    """Seconds since the epoch after which the servers are stopped, when they have no share; None: never."""


@dataclass(frozen=True)
class Routes:
    """All of the file. Weights sum to 100."""

    number: int
    """Higher with each change: the gateway tells the last one that it follows."""
    port: int
    """Where callers come in."""
    main: str
    """Colour of the model in service: who else fails or dies, it gets the traffic back."""
    colours: Mapping[str, Colour]
    mirror: int = 0
    """Per cent of the main colour's requests that the other colour gets a copy of."""
    max_error_share: float = 0.02
    """Of another colour's requests; beyond, the gateway sends its share back by itself."""
    deployer: Mapping[str, Any] | None = None
    """pid, start time and boot id of who moves the traffic now: when it died, the traffic goes back to the main colour."""

    def __post_init__(self) -> None:
        weights = {name: colour.weight for name, colour in self.colours.items()}
        if sum(weights.values()) != 100 or min(weights.values()) < 0 or self.main not in weights:
            raise ValueError(f"traffic must sum to 100 and know its main colour: {weights}, main {self.main!r}")


def write_routes(path: Path, routes: Routes) -> None:
    """Replace the file whole."""
    write_json(path, asdict(routes), seal=True)


def read_routes(path: Path) -> Routes | None:
    """None when there is no file. Raises ValueError for one that is no routes."""
    value = read_json(path)
    if value is None:
        return None
    try:
        colours = {
            name: Colour(**{**one, "servers": tuple(Place(**place) for place in one["servers"])})
            for name, one in value["colours"].items()
        }
        return Routes(**{**value, "colours": colours})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} holds no routes: {error}") from error


def other(colour: str) -> str:
    """The colour that is not this one."""
    return COLOURS[1 - COLOURS.index(colour)]


def make_secret(endpoint: Path) -> Path:
    """The file of an endpoint's secret, made when it is not there."""
    path = endpoint / "gateway.secret"
    if not path.exists():
        write_text(path, secrets.token_urlsafe(32))
    return path


def read_secret(path: str | Path | None) -> str:
    """The secret; empty where no file is named, as in homes of a release before it. Raises ValueError for one that is gone."""
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; stop the endpoint, and deploy it again") from error
    if not text:
        raise ValueError(f"{path} is empty: remove it, stop the endpoint, and deploy it again")
    return text
