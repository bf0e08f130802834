"""The port of serving: what an endpoint can do, and the values that are observed of it.

Who decides which model is served does not live here (tasks/deploy.py, tasks/registry); an endpoint is handed a verified
folder. Before each effect it tells the caller's journal what it is about to do: an interrupted deploy can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tasks.config.base import config_digest
from tasks.config.serving import DeploymentConfig

Journal = Callable[[str, dict[str, Any]], None]
"""Called with `starting`, `answering`, `one way`, `step`, `holding`, `switched` or `stopped` and its details, before the
effect."""


@dataclass(frozen=True)
class Served:
    """What is observed of an endpoint, not what was wished."""

    name: str
    model_ref: str
    url: str
    port: int
    ready: bool
    """False while a server that crashed is being started again."""
    settings: str = ""
    """Digest of the settings that it was deployed with; empty where a release before this one deployed it."""

    def under(self, config: DeploymentConfig) -> bool:
        """Whether it serves under these very settings, as far as anybody wrote down."""
        return self.settings in ("", config_digest(config))


def served(name: str, record: Mapping[str, Any], *, ready: bool = True) -> Served:
    """What an endpoint's record says is served."""
    payload = {key: record[key] for key in ("model_ref", "url", "port")}
    return Served(name, **payload, ready=ready, settings=record.get("settings", ""))


@dataclass(frozen=True)
class ServedFrom:
    """What the server in service was started with; it may be stopped since."""

    model_ref: str
    folder: Path
    """Holds the model's files."""
    files: tuple[Mapping[str, Any], ...]
    """Path, size and sha256 that each file must have."""
    running: bool
    by_vllm: bool = False
    """Whether vLLM served it; else ONNX Runtime."""


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
    config: DeploymentConfig | None = None
    """How it takes the traffic, and how many servers it may have. None: all at once, and one."""
    barred: str = ""
    """Why no request may go back to the model in service, as when its key is revoked; empty: it may."""


class ServingEndpoint(Protocol):
    """One endpoint, by its name."""

    def observe(self) -> Served | None:
        """What is served now; None when no server runs."""

    def serves_from(self) -> ServedFrom | None:
        """The files that are served, or were when it was stopped; None when it never served."""

    def start(
        self,
        model_folder: Path,
        model_ref: str,
        *,
        files: Sequence[Mapping[str, Any]],
        golden: Mapping[str, Any],
        timeout: float,
        port: int | None = None,
        threads: int = 1,
        config: DeploymentConfig | None = None,
        inputs: Sequence[str] = (),
        barred: str = "",
        journal: Journal | None = None,
    ) -> Candidate:
        """Start a server beside the one in service and ask it every prompt of `golden` (the content of golden.json).

        `files` is path, size and sha256 of every file of the model. The server compares each byte at each of its starts, also
        after a crash, and does not get ready when one differs, or when there is a file more. `inputs` are the versions that the
        model was made from, for a server that has only the model's version to go by.

        `barred` says why no request may go to the model in service once this one has the traffic: it is then no rung that answers
        when this one cannot, and `switch` goes one way.

        `timeout` is in seconds. Raises JobFailed when it does not get ready or answers otherwise, and ValueError when
        `port` is taken; the one in service is left alone. What a deployer before left open is finished or reverted first.
        """

    def switch(self, candidate: Candidate, *, journal: Journal | None = None) -> Served:
        """Give the candidate the traffic without losing a request, then stop the server before it.

        With a `config`, in its steps, each judged: raises GateFailed when the candidate lost the traffic again, and is gone. The
        server before it is then kept warm for the way back, for as long as that says. Of a candidate that says why the model
        before is `barred`, only copies of requests are judged: then it takes all of the traffic for good.
        """

    def ask_back(self, reason: str) -> float | None:
        """Have a deploy that is under way give its traffic back, whoever runs it; its time, None when there is none.

        Does not wait, and needs no lock: whoever runs it has the lock.
        """

    def go_back(
        self,
        reason: str,
        *,
        taken: float | None = None,
        require: Callable[[str], None] = lambda model_ref: None,
        journal: Journal | None = None,
    ) -> Served:
        """Give the traffic to the model before the one in service, without losing a request.

        `require` is called with the reference of that model before anything is done, and raises when it must not serve.

        When the deploy that was `taken` back by `ask_back` was reverted, that was all. Raises ValueError when none stood before,
        and JobFailed when it does not get ready again.
        """

    def settle(self) -> str | None:
        """Finish or revert what a deployer that died left open: `done` or `reverted`; None: there was nothing."""

    def stop(self, *, journal: Journal | None = None) -> None:
        """Stop every server of the endpoint; its port is remembered."""
