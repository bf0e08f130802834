"""What tests of serving share: whole answers of a runtime, a server of ours as a process, and a model's files spoilt."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from tiny_model import files_of

from tasks.jobs.serving.runtime import Ask, Ending, Piece

REF = "model/tiny@" + "a" * 64
BEFORE = "model/tiny@" + "b" * 64


@dataclass(frozen=True)
class Whole:
    """An answer: its pieces, and its ending."""

    pieces: list[Piece]
    ending: Ending

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)


async def whole(runtime, ask, *, after=0.0):
    await asyncio.sleep(after)
    async with aclosing(runtime.complete(ask)) as said:
        *pieces, ending = [each async for each in said]
    return Whole(pieces, ending)


async def until(said, *, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


def asked(golden, **more):
    return Ask(golden.prompt, len(golden.tokens), **more)


def flip(path):
    """Change one byte in place and keep size and times, as somebody who knows would."""
    status = path.stat()
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Served:
    """A server of ours that runs."""

    url: str
    process: subprocess.Popen

    def get(self, path):
        """Status and JSON of an answer."""
        return self.ask(urllib.request.Request(self.url + path))[:2]

    def complete(self, prompt, **more):
        """Status, JSON and headers of a completion."""
        body = json.dumps({"prompt": prompt, **more}).encode()
        headers = {"Content-Type": "application/json"}
        return self.ask(urllib.request.Request(f"{self.url}/v1/completions", body, headers))

    def ask(self, request):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as response:
                return response.status, json.load(response), response.headers
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), error.headers


@contextmanager
def serving(folder, model, *, fault="", **settings):
    """A server of a model, ready; `settings` go into its serve.json."""
    folder.mkdir()
    port = free_port()
    told = {"model_folder": str(model), "model_ref": REF, "files": files_of(model), "port": port, "threads": 1}
    (folder / "serve.json").write_text(json.dumps({**told, "outputs": str(folder / "outputs"), **settings}))
    environment = {**os.environ, "HEADWAY_SERVE": str(folder), "HEADWAY_ATTEMPT": "1", "HEADWAY_MODEL_FAULT": fault}
    process = subprocess.Popen([sys.executable, "-m", "tasks.jobs.serve"], env=environment)
    served = Served(f"http://127.0.0.1:{port}", process)
    try:
        deadline = time.monotonic() + 90
        while not is_ready(served):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield served
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(served):
    try:
        return served.get("/readyz")[0] == 200
    except OSError:
        return False
