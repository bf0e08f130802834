"""Program `tasks.jobs.serving.model_child`: one model in a process of its own, at the other end of a socket.

JSON lines over the socket whose number is its argument. In: `{"load": {"folder", "files", "threads", "named"}}` first, then
`{"ask": {...}, "number"}`, `{"drop": number}`, `{"ping": true}`. Out: `{"ready": {"context_length", "golden"}}`, or `{"refused"}`
for files that are not what they were, or `{"failed"}`; then `{"said": [[number, kind, ...], ...]}` after each step, `{"pong"}`.
It ends when the socket does. Who starts it is model_process.py. HEADWAY_MODEL_FAULT, which only this program reads, makes it
fail for tests and drills: `segfault:TEXT` or `hang:TEXT` when a prompt with TEXT in it is asked; `verified:FOLDER` waits between
the verification of its files and the load, until FOLDER holds `go`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.common.process import die_with_parent
from tasks.jobs.serving.batch import Batch, Said
from tasks.jobs.serving.decoder import ROWS
from tasks.jobs.serving.generation import Generation
from tasks.jobs.serving.runtime import Ask, Ending, read_contents
from tasks.storage.manifest import FileEntry

Message = dict[str, Any]


class Line:
    """The socket: what comes in, read by a thread of its own, and what goes out."""

    def __init__(self, number: int) -> None:
        self._file = socket.socket(fileno=number).makefile("rwb")
        self._came: queue.Queue[Message] = queue.Queue()
        threading.Thread(target=self._read, name="line", daemon=True).start()

    def _read(self) -> None:
        """Without its parent this process is of no use, whatever it does at the moment."""
        for line in self._file:
            self._came.put(json.loads(line))
        os._exit(0)

    def wait(self) -> Message:
        return self._came.get()

    def come(self) -> list[Message]:
        """What has come by now."""
        return [self._came.get_nowait() for _ in range(self._came.qsize())]

    def say(self, message: Message) -> None:
        self._file.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


class Fault:
    """What goes wrong on purpose; nothing where HEADWAY_MODEL_FAULT is not set."""

    def __init__(self, order: str) -> None:
        self._kind, _, self._what = order.partition(":")

    def verified(self) -> None:
        if self._kind == "verified":
            folder = Path(self._what)
            (folder / "verified").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    def asked(self, prompt: str) -> None:
        if self._kind == "segfault" and self._what in prompt:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._kind == "hang" and self._what in prompt:
            time.sleep(3600)


def serve(line: Line, fault: Fault) -> None:
    """Load the model that the first message names, then answer until the socket ends."""
    payload = line.wait()["load"]
    try:
        files = None if payload["files"] is None else [FileEntry.model_validate(file) for file in payload["files"]]
        contents = read_contents(Path(payload["folder"]), files, named=payload["named"])
        fault.verified()
        generation = Generation(contents, int(payload["threads"]), rows=ROWS)
        golden = json.loads(contents.get("golden.json", b'{"prompts": []}'))["prompts"]
    except IntegrityError as error:
        line.say({"refused": {"message": str(error), "problems": error.problems}})
        return
    except (ValueError, OSError) as error:
        line.say({"failed": str(error)})
        return
    del contents
    batch = Batch(generation)
    line.say({"ready": {"context_length": generation.context_length, "golden": golden}})
    while True:
        messages = line.come() if batch.busy else [line.wait()]
        refused = [lines for message in messages if (lines := _heed(batch, line, message=message, fault=fault))]
        lines = [*refused, *map(_told, batch.step() if batch.busy else [])]
        if lines or batch.busy:
            line.say({"said": lines})


def _heed(batch: Batch, line: Line, *, message: Message, fault: Fault) -> list[Any] | None:
    """Do what a message says; the answer to a request that cannot be taken."""
    if "ask" in message:
        ask = Ask.from_json(message["ask"])
        fault.asked(ask.prompt)
        try:
            batch.add(message["number"], ask)
        except ValueError as error:  # Unfit, or what no tokenizer takes
            return [message["number"], "unfit", str(error)]
    elif "drop" in message:
        batch.drop(message["drop"])
    else:
        line.say({"pong": True})
    return None


def _told(output: Said) -> list[Any]:
    number, what = output
    if isinstance(what, Ending):
        return [number, "ending", asdict(what)]
    likely = [[each.text, each.value, each.top] for each in what.logprobs]
    return [number, "piece", what.text, what.tokens, likely, what.of_prompt]


def main() -> None:
    """Signals that are meant for the server's whole group are the server's to heed: it drains, and this ends with it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = Line(int(sys.argv[1]))
    try:
        serve(line, Fault(os.environ.get("HEADWAY_MODEL_FAULT", "")))
    except Exception as error:
        line.say({"failed": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
