"""A whole server: the model, the edge, and the listener, from its settings to its end. Program: tasks/jobs/serve.py.

Standing alone, as in its container, it is its own edge. Else its port is private, on loopback, and the edge stands before the
gateway (tasks/jobs/gateway.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from pydantic import BaseModel, ConfigDict
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.common import http_server
from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import read_json
from tasks.config.access import LOOPBACK, AccessConfig
from tasks.config.base import digest
from tasks.config.serving import AnswersConfig, LimitsConfig, VllmConfig
from tasks.formats.model_folder import smaller_rungs
from tasks.jobs.serving import service
from tasks.jobs.serving.api import make_api
from tasks.jobs.serving.api_middleware import Edge, error_body, send_json
from tasks.jobs.serving.fallback_models import Ladder, Rung, RungName
from tasks.jobs.serving.keys import require_guarded
from tasks.jobs.serving.metrics import Counted, Metrics
from tasks.jobs.serving.outputs import Outputs
from tasks.jobs.serving.passing import PassedOn
from tasks.jobs.serving.runtime import Golden
from tasks.jobs.serving.service import Service
from tasks.serving.protocol.routes import SECRET, read_secret
from tasks.storage.manifest import Content, FileEntry, Manifest

# What a server is started with: `serve.json` in its folder, written by whoever starts it (tasks/serving,
# docker/endpoint.sh).
#
# Fields that it does not know are left alone: who starts a server may be newer than it is.


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GoldenSettings(_Read):
    """A prompt with the greedy answer that proves a model."""

    prompt: str
    tokens: tuple[int, ...]


class RungSettings(_Read):
    """One model that may answer."""

    name: RungName
    model_ref: str
    folder: Path
    files: tuple[FileEntry, ...] | None = None
    """None: whoever mounted the folder has verified it."""
    golden: tuple[GoldenSettings, ...] = ()
    """Empty: those of golden.json in the folder."""
    unless: Path | None = None
    """It answers nothing while this file is there."""
    vllm: VllmConfig | None = None


class ServeSettings(_Read):
    """The whole file."""

    model_folder: Path
    model_ref: str
    files: tuple[FileEntry, ...] | None
    port: int
    outputs: Path
    endpoint: str = ""
    """Name of the endpoint, which requests may give as `model`; empty where nobody knows it."""
    manifest: Path | None = None
    """Where there is no `files`: the manifest of the version that `model_ref` names; what it says of files must hold."""
    content: Content | None = None
    """The same, without a file."""
    threads: int = 1
    vllm: VllmConfig | None = None
    """The model is served by vLLM, under these settings; None: by ONNX Runtime."""
    ladder: tuple[RungSettings, ...] = ()
    """Rungs below the model itself, the best first."""
    variants: bool = False
    """Whether the variants that lie in the model's folder are rungs below those: for who mounts a model and knows no more."""
    hang_seconds: float = 30.0
    limits: LimitsConfig = LimitsConfig()
    answers: AnswersConfig = AnswersConfig()
    access: AccessConfig = AccessConfig()
    keys: Path | None = None
    """keys.json of the endpoint; it need not be there."""
    secret: Path | None = None
    """File of the endpoint's secret, which the gateway before it shows; None: nothing is asked for on the private port."""
    alone: bool = False
    """Whether nothing stands before it: it is its own edge, on the address of `access`. Else `port` is private, on loopback."""

    def rungs(self) -> list[Rung]:
        """The model itself, then what answers when it cannot."""
        below = [one for one in self.ladder if one.name != "full"]
        files = self._files()
        full = RungSettings(
            name="full", model_ref=self.model_ref, folder=self.model_folder, files=files, vllm=self.vllm
        )
        if self.variants and self.vllm is None:
            entries = None if files is None else [file.model_dump() for file in files]
            result = smaller_rungs(self.model_folder, self.model_ref, entries)
            below += [RungSettings.model_validate(one) for one in result]
        return [
            Rung(
                name=one.name,
                model_ref=one.model_ref,
                folder=one.folder,
                files=one.files,
                golden=tuple(Golden(prompt=each.prompt, tokens=each.tokens) for each in one.golden),
                unless=one.unless,
                vllm=one.vllm,
            )
            for one in (full, *below)
        ]

    def _files(self) -> tuple[FileEntry, ...] | None:
        """What each file must be. Raises ValueError for a version that is named and of which nobody says what it holds."""
        version = self.model_ref.partition("@")[2]
        if self.files is not None or not version:
            return self.files
        content = self.content
        if content is None and self.manifest is not None and self.manifest.is_file():
            content = Manifest.model_validate_json(self.manifest.read_bytes()).content
        if content is None or digest(content.model_dump(mode="json")) != version:
            text = "there is no manifest" if content is None else "the manifest is of another version"
            raise ValueError(
                f"{self.model_ref} cannot be verified, {text}: mount the whole version, with its manifest.json"
            )
        return content.files


def read_settings(folder: Path) -> ServeSettings:
    """The settings of a server's folder. Raises Missing without them."""
    output = read_json(folder / "serve.json")
    if output is None:
        raise Missing(
            f"{folder} holds no serve.json", remedy="Servers are started by `headway retrain`, or by the container."
        )
    return ServeSettings.model_validate(output)


# What stands before a server on its private port: only its gateway is answered, which shows the endpoint's secret.
#
# The secret is tasks/serving/protocol/routes.py. Probes are answered to everybody: they say no more than whether a
# model is up. What stands before a server that is alone, and before the gateway, is api_middleware.py.


PROBES = ("/livez", "/readyz")


class Behind:
    """The middleware. State: the secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            shown = next((value for name, value in scope["headers"] if name == SECRET.encode()), b"")
            if not hmac.compare_digest(shown, self._secret):
                text = "this port is the gateway's: ask the endpoint's own address"
                await send_json(send, 401, error_body(401, text), headers={"Connection": "close"})
                return
        await self._app(scope, receive, send)


HOST = "127.0.0.1"
POLL_SECONDS = 0.05
TOLD_SECONDS = 0.3
"""Time for which a server that has nothing left to do still says 503: balancers notice."""
CLOSE_SECONDS = 2
REFUSED_SECONDS = 2.0
"""Time for which /readyz says why the server ends."""


class _Server(uvicorn.Server):
    """A listener of this process; signals are handled once, in `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Program:
    """The server as a whole. State: the model, and what stands before it."""

    def __init__(self, folder: Path, *, collector: str = "") -> None:
        """`collector`: where traces are sent. Raises ValueError for an address that others reach and nobody guards."""
        self.folder, self.settings = folder, read_settings(folder)
        if self.settings.alone:
            require_guarded(self.settings.access, self.settings.keys)
        metrics = Metrics()
        self.outputs = Outputs(self.settings.outputs, folder.name, self.settings.answers)
        self.outputs.counting = True  # of each request, who asks says whether it counts
        ladder = Ladder(self.settings.rungs(), threads=self.settings.threads, hang_seconds=self.settings.hang_seconds)
        self.service = Service(
            ladder,
            model_ref=self.settings.model_ref,
            endpoint=self.settings.endpoint,
            server=folder.name,
            outputs=self.outputs,
            metrics=metrics,
            limits=self.settings.limits,
        )
        self._provider = service.provider(collector, server=folder.name)
        routes: ASGIApp = make_api(self.service)
        api: ASGIApp = Counted(PassedOn(routes, self.service) if ladder.by_vllm else routes, metrics)
        api = service.Traced(api, self._provider) if self._provider else api
        self.front: ASGIApp
        if not self.settings.alone:  # a private port: others are kept out, and pages on the web with names of loopback
            known = Behind(api, read_secret(self.settings.secret)) if self.settings.secret else api
            self.front = TrustedHostMiddleware(known, allowed_hosts=[*LOOPBACK, "[::1]"])
        else:
            self.front = Edge(
                api,
                limits=self.settings.limits,
                access=self.settings.access,
                keys_file=self.settings.keys,
                metrics=metrics,
                model=lambda: self.settings.model_ref,
            )

    async def run(self) -> None:
        """Serve until SIGTERM; then requests under way are finished. Raises when the model cannot be loaded."""
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            async with asyncio.TaskGroup() as group:
                limits = self.settings.limits
                server = _Server(
                    uvicorn.Config(
                        self.front,
                        http=http_server.impatient(read_seconds=limits.read_seconds, connections=limits.connections),
                        ws="none",
                        lifespan="off",
                        access_log=False,
                        log_level="error",
                        server_header=False,
                        proxy_headers=False,
                        limit_concurrency=limits.connections,
                        timeout_graceful_shutdown=CLOSE_SECONDS if self.settings.alone else round(limits.drain_seconds),
                    )
                )
                # Whoever started a private server may hold its port, without listening, so that nobody else is given
                # it.
                settings = self.settings
                host = settings.access.host if settings.alone else HOST
                group.create_task(
                    server.serve(sockets=[http_server.listen(host, settings.port, shared=not settings.alone)])
                )
                loading = group.create_task(self._load())
                await stopping.wait()
                loading.cancel()
                # Finish what is under way, and tell 503 to what comes meanwhile. Behind a gateway, nothing comes any
                # more.
                if isinstance(self.front, Edge):
                    self.front.draining = True
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self.settings.limits.drain_seconds):
                            while self.front.under_way:
                                await asyncio.sleep(POLL_SECONDS)
                    await asyncio.sleep(TOLD_SECONDS)
                server.should_exit = True
        finally:
            await self.service.ladder.close()
            self.outputs.close()
            if self._provider:
                self._provider.shutdown()

    async def _load(self) -> None:
        """Load the model. Changed files are told to whoever asks for a moment, before they end the server."""
        try:
            await self.service.ladder.start()
            await self.service.ladder.lost()
        except IntegrityError:
            await asyncio.sleep(REFUSED_SECONDS)
            raise
