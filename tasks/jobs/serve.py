"""Program `tasks.jobs.serve`: one model behind HTTP on loopback, with OpenAI's completions for a shape.

The folder named by HEADWAY_SERVE holds `serve.json` {"model_folder", "model_ref", "files", "port", "threads", "outputs"}. Once it
also holds `public.json` {"port"}, and the model is ready, the server listens there too, beside its predecessor. At each start
every byte is compared with `files`; a difference ends it, and its parent does not try again. What is measured of answers goes to
`outputs`. Starting, switching and stopping servers live in tasks/endpoints/local.py; the model itself in generation.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from tasks.errors import IntegrityError
from tasks.jobs.generation import Completion, Generation
from tasks.jobs.outputs import Outputs, measures
from tasks.jobs.try_page import PAGE
from tasks.process import read_json, write_json
from tasks.storage.manifest import FileEntry, check

HOST = "127.0.0.1"
QUEUE = 32
MAX_TOKENS = 512
POLL_SECONDS = 0.1
DRAIN_SECONDS = 0.3
REFUSED_SECONDS = 2.0
"""Time for which /readyz says why the server ends."""
SO_ATTACH_REUSEPORT_CBPF = 51
log = logging.getLogger("headway.serve")


class CompletionRequest(BaseModel):
    """Body of POST /v1/completions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 64
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    model: str | None = None


class Service:
    """The model and its queue. State: the loaded model, whether it is ready and why not, and how many wait."""

    def __init__(self, folder: Path) -> None:
        settings = read_json(folder / "serve.json")
        self.server = folder.name
        self.model_folder = Path(settings["model_folder"])
        self.model_ref = str(settings["model_ref"])
        self.port = int(settings["port"])
        self.threads = int(settings["threads"])
        self.outputs = Outputs(Path(settings["outputs"]), self.server)
        # None: the image of docker/endpoint.Dockerfile serves a mounted folder that whoever mounted it has verified.
        handed = settings["files"]
        self._files = None if handed is None else [FileEntry.model_validate(file) for file in handed]
        self.ready = asyncio.Event()
        self.reason = ""
        """Why it will never be ready; empty while it loads and when it is."""
        self._generation: Generation | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._pending = 0

    async def load(self) -> None:
        """Load the model and ask it one golden prompt: only a right answer makes it ready.

        Raises IntegrityError, with nothing loaded, for files that are not what they were when it was deployed.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, self._require_intact)
        self._generation = await loop.run_in_executor(self._worker, Generation, self.model_folder, self.threads)
        golden = (read_json(self.model_folder / "golden.json") or {"prompts": []})["prompts"]
        if not golden:
            self.reason = f"{self.model_folder} has no golden.json to prove the model with"
            return
        said = await self.complete(golden[0]["prompt"], len(golden[0]["tokens"]), 0.0)
        if said[1].tokens != golden[0]["tokens"]:
            self.reason = f"the golden prompt {golden[0]['prompt']!r} was answered {said[1].text!r}"
            return
        self.ready.set()

    def _require_intact(self) -> None:
        problems = [] if self._files is None else check(self.model_folder, self._files)
        if problems:
            said = ", ".join(f"{problem.path} ({problem.problem})" for problem in problems[:5])
            self.reason = f"the files of {self.model_ref} are not what was deployed: {said}"
            raise IntegrityError(self.reason, problems=[problem.model_dump() for problem in problems])

    async def complete(self, prompt: str, max_tokens: int, temperature: float) -> tuple[int, Completion]:
        """The prompt's tokens and its completion, one at a time; 429 when too many wait, 400 for a bad prompt."""
        if self._pending > QUEUE:
            raise HTTPException(429, f"{QUEUE} requests wait already: try again in a second", {"Retry-After": "1"})
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._worker, self._complete, prompt, max_tokens, temperature)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        finally:
            self._pending -= 1

    def _complete(self, prompt: str, max_tokens: int, temperature: float) -> tuple[int, Completion]:
        assert self._generation is not None
        tokens = self._generation.encode(prompt)
        return len(tokens), self._generation.complete(tokens, max_tokens, temperature=temperature, measure=True)


def make_app(service: Service) -> FastAPI:
    """The routes over one service. No page of FastAPI's own: they load scripts from elsewhere."""
    app = FastAPI(title="headway endpoint", docs_url=None, redoc_url=None)
    # A page on the web could have its own name resolve to loopback; its requests carry that name.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    @app.get("/livez")
    async def livez() -> dict[str, bool]:
        return {"alive": True}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = service.ready.is_set()
        state = {"ready": ready, "model": service.model_ref, "server": service.server, "reason": service.reason}
        return JSONResponse(state, 200 if ready else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": service.model_ref, "object": "model", "owned_by": "headway"}]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> JSONResponse:
        if not service.ready.is_set():
            raise HTTPException(
                503, f"the model is not ready: {service.reason or 'it is being loaded'}", {"Retry-After": "1"}
            )
        if body.model not in (None, service.model_ref):
            raise HTTPException(404, f"the model {body.model!r} is not served here: this is {service.model_ref}")
        with service.outputs.measuring(body.max_tokens) as found:
            read, said = await service.complete(body.prompt, body.max_tokens, body.temperature)
            found |= measures(read, said)
        answer = render_completion(service.model_ref, prompt_tokens=read, said=said)
        return JSONResponse(answer, headers={"X-Request-Id": answer["id"]})

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        said = "; ".join(f"{'.'.join(str(p) for p in e['loc'][1:]) or 'body'}: {e['msg']}" for e in error.errors())
        return _error(400, said, headers={})

    return app


def render_completion(model_ref: str, *, prompt_tokens: int, said: Completion) -> dict[str, Any]:
    """OpenAI's text_completion object. `completion_tokens` counts the end-of-text token when there is one."""
    count = len(said.tokens)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model_ref,
        "choices": [{"index": 0, "text": said.text, "finish_reason": said.finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
        },
    }


def _error(status: int, message: str, *, headers: dict[str, str]) -> JSONResponse:
    kind = "invalid_request_error" if status < 429 else "unavailable"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)


class _Server(uvicorn.Server):
    """A listener of this process; signals are handled once, in `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(port: int) -> socket.socket:
    """A listening socket that shares its port with the server before it; on Linux the newest takes all connections."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((HOST, port))
    listener.listen(1024)
    if sys.platform == "linux":
        _take_all_connections(listener)
    return listener


def _take_all_connections(listener: socket.socket) -> None:
    """Have the kernel give new connections to the second socket of the port's group, or to the first if it is alone.

    So the old server's queue runs dry before it closes: connections that wait on a closed listener are reset. The
    program is `return 1`; an index out of range leaves the choice to the kernel (net/core/sock_reuseport.c).
    """
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)


async def serve(folder: Path) -> None:
    """Serve until SIGTERM; then requests under way are finished. Raises when the model cannot be loaded."""
    service = Service(folder)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    app = make_app(service)
    async with asyncio.TaskGroup() as group:
        servers = [_start(group, app, service.port)]
        opening = group.create_task(_open_public(group, app, folder, service=service, servers=servers))
        await stopping.wait()
        opening.cancel()
        # The new server takes what connects from now on; what connected before is still accepted and answered.
        await asyncio.sleep(DRAIN_SECONDS)
        for server in servers:
            server.should_exit = True
    service.outputs.close()


async def _open_public(
    group: asyncio.TaskGroup, app: FastAPI, folder: Path, *, service: Service, servers: list[_Server]
) -> None:
    try:
        await service.load()
    except IntegrityError:
        await asyncio.sleep(REFUSED_SECONDS)
        raise
    await service.ready.wait()
    while not (public := read_json(folder / "public.json")):
        await asyncio.sleep(POLL_SECONDS)
    service.outputs.counting = True
    servers.append(_start(group, app, int(public["port"])))
    log.warning("listening on %s:%s for %s", HOST, public["port"], service.model_ref)


def _start(group: asyncio.TaskGroup, app: FastAPI, port: int) -> _Server:
    """Listen on one more port. Connections are not kept: a client that reuses one would meet a server that has gone."""
    config = uvicorn.Config(
        app, http="h11", lifespan="off", access_log=False, log_level="warning", headers=[("Connection", "close")]
    )
    server = _Server(config)
    group.create_task(server.serve(sockets=[listen(port)]))
    return server


def main(folder: Path) -> None:
    """Serve a folder. What starting again cannot mend is written down for the parent, which then leaves it."""
    try:
        asyncio.run(serve(folder))
    except* IntegrityError as group:
        said = str(group.exceptions[0])
        (folder / "errors").mkdir(exist_ok=True)
        report = {"class": "integrity", "message": said, "attempt": int(os.environ["HEADWAY_ATTEMPT"])}
        write_json(folder / "errors" / "serve.json", report)
        log.error("%s", said)
        raise SystemExit(IntegrityError.exit_code) from None


if __name__ == "__main__":
    main(Path(os.environ["HEADWAY_SERVE"]))
