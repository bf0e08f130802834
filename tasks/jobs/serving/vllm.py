"""A model of vLLM: `vllm serve` as a child of the server, asked through its OpenAI API on a Unix socket that nobody else reaches.

It stands where a process of ONNX Runtime does (model_process.py, which starts it again when it ends): verified before it starts,
proven by the golden answers' log probabilities before it is asked. What it is called with is tasks/serving/vllm.py.

vLLM opens the model's files itself. So their bytes are compared first, and once it has loaded them, that nobody has touched one
meanwhile: the kernel keeps the time of a file's last change (ctime), and gives nobody a way to set it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasks.common.errors import IntegrityError
from tasks.common.process import die_with_parent
from tasks.config.serving import VllmConfig
from tasks.jobs.serving.model_process import ModelProcess
from tasks.jobs.serving.runtime import Ask, Ending, Golden, Gone, Piece, Unfit, require_text
from tasks.serving.vllm import OFFLINE, command, golden_question, has_logprobs, require_folder, wrong_golden
from tasks.storage.manifest import FileEntry, check

POLL_SECONDS = 0.2
HEALTH_SECONDS = 5.0
LOOKS = 8
"""How often in `hang_seconds` it is looked whether the process hangs."""
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_sum")
"""Of vLLM's metrics, those that move with the engine's work alone."""
LONGEST_SOCKET = 100
"""Bytes of a Unix socket's path: Linux takes 107."""
END_SECONDS = 10.0
"""Time in which vLLM's processes must have ended after SIGKILL."""


class VllmProcess:
    """A ModelProcess. State: the child, what it has under way, and when it last said something."""

    def __init__(self, config: VllmConfig, *, hang_seconds: float) -> None:
        self._config, self._hang_seconds = config, hang_seconds
        self._scratch = Path(tempfile.mkdtemp(prefix="vllm-"))
        self._socket = self._scratch / "s"
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self._socket), limits=httpx.Limits(max_connections=None)),
            base_url="http://vllm",
            timeout=None,  # the service has the request's own limit, and `_watch` sees what says nothing
        )
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._prompts: Sequence[Mapping[str, Any]] = ()
        self._model_ref = ""
        self._silent_requests, self._requests = 0, 0
        self._heard = time.monotonic()
        self._counted: list[str] = []
        self._hung = ""
        self.reason = ""
        """Why it ended; empty while it runs."""
        self.ended_at: float | None = None
        """When that was seen, by the monotonic clock."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.reason

    @property
    def waiting(self) -> int:
        return self._silent_requests

    @property
    def under_way(self) -> int:
        return self._requests

    async def load(self, payload: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """See ModelProcess.load. `seconds` are from the start of vLLM on; the verification takes what it takes."""
        folder, self._model_ref = Path(payload["folder"]), str(payload["named"])
        files = None if payload["files"] is None else [FileEntry.model_validate(file) for file in payload["files"]]
        before = await asyncio.to_thread(_verified, folder, files, named=self._model_ref)
        require_folder(folder, named=self._model_ref)
        golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        if not has_logprobs(golden["prompts"]):
            raise ValueError(f"{self._model_ref} has no log probabilities in golden.json: export it again for vLLM")
        self._prompts = golden["prompts"]
        context = self._config.max_model_len or int(golden["context_length"])
        if len(str(self._socket)) > LONGEST_SOCKET:
            raise ValueError(f"{self._socket} is too long a path for a socket: set TMPDIR to a shorter one")
        argv = command(self._config, folder, self._model_ref, context=context, socket=self._socket)
        self._process = await asyncio.create_subprocess_exec(
            *argv, env={**os.environ, **OFFLINE}, stdin=asyncio.subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        self._tasks = [asyncio.create_task(self._wait())]
        try:
            async with asyncio.timeout(seconds):
                while not await self._healthy():
                    if self.reason:
                        raise Gone(self.reason)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise Gone(f"vLLM was not ready within {seconds:g} s (deployment.vllm.start_seconds)") from None
        if before != _states(folder):
            raise IntegrityError(
                f"the files of {self._model_ref} were changed while vLLM loaded them", problems=[{"path": str(folder)}]
            )
        self._heard = time.monotonic()
        self._tasks.append(asyncio.create_task(self._watch()))
        return {"context_length": context, "golden": [{"prompt": p["prompt"], "tokens": ()} for p in self._prompts]}

    async def prove(self, golden: Sequence[Golden], *, seconds: float) -> None:
        """See ModelProcess.prove: by log probabilities, so `golden` says no more than that there are prompts."""
        try:
            async with asyncio.timeout(seconds):
                for entry in self._prompts:
                    body = golden_question(entry, self._model_ref)
                    async with self.forward("/v1/completions", body) as reply:
                        output = json.loads(await reply.aread())
                    if wrong := wrong_golden(entry, output, most=self._config.max_logprob_error):
                        raise Gone(f"vLLM {wrong}{_message(output)}")
        except TimeoutError:
            raise Gone(f"the golden prompts were not answered within {seconds:g} s") from None

    async def complete(self, ask: Ask) -> AsyncGenerator[Piece | Ending, None]:
        """As Runtime.complete."""
        require_text(ask.prompt)
        body: dict[str, Any] = {
            "model": self._model_ref,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "stop": list(ask.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        } | ({} if ask.seed is None else {"seed": ask.seed})
        tokens: list[int] = []
        finish, usage, yielded = "", None, 0
        async with self.forward("/v1/completions", body) as reply:
            if reply.status_code != 200:
                raise _refusal(reply.status_code, await reply.aread())
            async for event in _events(reply):
                if "error" in event:
                    raise Gone(f"vLLM broke off:{_message(event)}", taken=True)
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or []
                    finish = choice.get("finish_reason") or finish
                    if choice["text"]:
                        yield Piece(choice["text"], len(tokens) - yielded)  # a character may come in several tokens
                        yielded = len(tokens)
        if not finish or usage is None:
            raise Gone("vLLM ended an answer before its end", taken=True)
        yield Ending(finish, int(usage["prompt_tokens"]), int(usage["completion_tokens"]), tuple(tokens))

    @asynccontextmanager
    async def forward(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """vLLM's own answer to a request, its body not yet read. Raises Gone, also while the body is read."""
        if self.reason:
            raise Gone(self.reason)
        if not self._requests:
            self._heard = time.monotonic()
        self._requests, self._silent_requests, begun = self._requests + 1, self._silent_requests + 1, False
        try:
            request = self._client.build_request("POST", path, json=dict(body))
            reply = await self._client.send(request, stream=True)
            try:
                self._heard = time.monotonic()
                self._silent_requests, begun = self._silent_requests - 1, True
                reply.stream = _Heard(reply.stream, self._hear)
                yield reply
            finally:
                await reply.aclose()
        except httpx.HTTPError as error:
            with suppress(TimeoutError):  # its end says more than the broken connection
                async with asyncio.timeout(1.0):
                    await self.ended()
            raise Gone(self.reason or f"vLLM broke off: {error!r}", taken=True) from error
        finally:
            self._requests -= 1
            self._silent_requests -= not begun

    async def figures(self) -> str:
        """vLLM's own metrics, in Prometheus' text format; empty where it says none."""
        try:
            reply = await self._client.get("/metrics", timeout=HEALTH_SECONDS)
        except httpx.HTTPError:
            return ""
        lines = reply.text.splitlines() if reply.status_code == 200 else []
        return "".join(
            f"{line}\n" for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("vllm:")
        )

    async def ended(self) -> None:
        """Return when the process has ended."""
        if self._tasks:
            await asyncio.wait([self._tasks[0]])

    async def kill(self) -> None:
        """End vLLM with all of its processes; the engine's hold the GPU."""
        try:
            if self._process is not None:
                await self._end_all()
        finally:
            for task in self._tasks[1:]:
                task.cancel()
            await self._client.aclose()
            shutil.rmtree(self._scratch, ignore_errors=True)

    async def _end_all(self) -> None:
        assert self._process is not None
        below: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            self._process.kill()
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        await self.ended()
        await asyncio.to_thread(psutil.wait_procs, below, timeout=END_SECONDS)

    async def _wait(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self.reason, self.ended_at = f"vLLM ended: {self._hung or how}", time.monotonic()

    async def _healthy(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=HEALTH_SECONDS)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _moved(self) -> bool:
        """Whether tokens were computed since the last question: an answer that is not streamed says nothing until its end."""
        before = self._counted
        self._counted = [line for line in (await self.figures()).splitlines() if line.startswith(COUNTERS)]
        return bool(self._counted) and self._counted != before

    async def _watch(self) -> None:
        """Kill vLLM when it has work and neither says nor counts anything, or is idle and does not answer its own probe."""
        while not self.reason:
            await asyncio.sleep(self._hang_seconds / LOOKS)
            silent = time.monotonic() - self._heard
            if silent > self._hang_seconds / 2 and await (self._moved() if self._requests else self._healthy()):
                self._heard = time.monotonic()
            if time.monotonic() - self._heard > self._hang_seconds and not self.reason:
                self._hung = f"it said nothing for {self._hang_seconds:g} s and was killed"
                await self._end_all()

    def _hear(self) -> None:
        self._heard = time.monotonic()


class _Heard(httpx.AsyncByteStream):
    """A body that tells of each piece of it."""

    def __init__(self, stream: Any, hear: Any) -> None:
        self._stream, self._hear = stream, hear

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._hear()
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def opener(config: VllmConfig) -> Any:
    """What starts such processes, as ProcessRuntime takes it."""

    async def open_process(*, hang_seconds: float) -> ModelProcess:
        return VllmProcess(config, hang_seconds=hang_seconds)

    return open_process


def _verified(folder: Path, files: Sequence[FileEntry] | None, *, named: str) -> dict[str, tuple[int, ...]]:
    """The state of each file before its bytes were compared. Raises IntegrityError when one is not what it must be."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name the one that was exported")
    before = _states(folder)
    problems = [] if files is None else check(folder, files)
    if problems:
        text = ", ".join(f"{problem.path} ({problem.problem})" for problem in problems[:5])
        raise IntegrityError(
            f"the files of {named or folder} are not what was deployed: {text}",
            problems=[problem.model_dump() for problem in problems],
        )
    return before


def _states(folder: Path) -> dict[str, tuple[int, ...]]:
    """Which file each name is, and when it was last changed."""
    states: dict[str, tuple[int, ...]] = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        states[str(path)] = (
            state.st_dev,
            state.st_ino,
            state.st_mode,
            state.st_size,
            state.st_mtime_ns,
            state.st_ctime_ns,
        )
    return states


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, without its end."""
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _refusal(status: int, body: bytes) -> Exception:
    try:
        text = _message(json.loads(body)).removeprefix(" ")
    except ValueError:
        text = body[:200].decode(errors="replace")
    return Unfit(text) if 400 <= status < 429 else Gone(f"vLLM answered {status}: {text}", taken=True)


def _message(output: Mapping[str, Any]) -> str:
    """What an answer of vLLM says of an error, behind a space; empty without one."""
    error = output.get("error")
    return f" {error['message']}" if isinstance(error, dict) and error.get("message") else ""
