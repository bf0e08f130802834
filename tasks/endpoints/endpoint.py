"""The port of serving: what an endpoint can do, and the values that are observed of it.

Who decides which model is served does not live here (tasks/deploy.py, tasks/registry); an endpoint is handed a verified
folder. Before each effect it tells the caller's journal what it is about to do: an interrupted deploy can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Journal = Callable[[str, dict[str, Any]], None]
"""Called with `starting`, `answering`, `switched` or `stopped` and its details, before the effect."""


@dataclass(frozen=True)
class Served:
    """What is observed of an endpoint, not what was wished."""

    name: str
    model_ref: str
    url: str
    port: int
    ready: bool
    """False while a server that crashed is being started again."""


@dataclass(frozen=True)
class Candidate:
    """A server that runs beside the one in service, has answered every golden prompt, and has no traffic yet."""

    name: str
    server: str
    folder: Path
    model_ref: str
    private_port: int
    public_port: int | None
    """The port that was asked for; None: the endpoint's own."""


class ServingEndpoint(Protocol):
    """One endpoint, by its name."""

    def observe(self) -> Served | None:
        """What is served now; None when no server runs."""

    def start(
        self,
        model_folder: Path,
        model_ref: str,
        *,
        golden: Mapping[str, Any],
        timeout: float,
        port: int | None = None,
        threads: int = 1,
        journal: Journal | None = None,
    ) -> Candidate:
        """Start a server beside the one in service and ask it every prompt of `golden` (the content of golden.json).

        `timeout` is in seconds. Raises JobFailed when it does not get ready or answers otherwise, and ValueError when
        `port` is taken; the one in service is left alone.
        """

    def switch(self, candidate: Candidate, *, journal: Journal | None = None) -> Served:
        """Give the candidate the traffic without losing a request, then stop the server before it."""

    def stop(self, *, journal: Journal | None = None) -> None:
        """Stop every server of the endpoint; its port is remembered."""
