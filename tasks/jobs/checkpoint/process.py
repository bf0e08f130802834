"""A rank's end of its writer process: one save in flight, and what became of it.

What the process does: writer.py. What it is given: a snapshot (snapshot.py) or a folder. A save
that fails is told and training goes on; how often it may is decided by all ranks together (training/saves.py).
"""

from __future__ import annotations

import errno
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.jobs.checkpoint.files import place_of
from tasks.jobs.checkpoint.writer import OWN, Writing


class WriterProcess:
    """State: the process, whether a save is in flight, how the last one ended and how long it took."""

    def __init__(self, writing: Writing) -> None:
        self.writing = writing
        self.failure = ""
        """Why the last save failed; empty when it did not, or is still in flight."""
        self.seconds = 0.0
        """How long the last save took to be written; on rank 0: to be committed."""
        self._in_flight = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")))
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.checkpoint.writer", json.dumps(asdict(self.writing)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            pass_fds=[self.writing.buffer] if self.writing.buffer >= 0 else [],
            process_group=0,  # torchrun signals a rank's whole group, and a rank that is asked to stop saves first
        )

    def busy(self) -> bool:
        """Whether the last save is still being written; on rank 0: not yet committed."""
        assert self._process.stdout
        if self._in_flight:
            # By poll: select knows no descriptor above 1023, and large jobs have as many sockets.
            poll = select.poll()
            poll.register(self._process.stdout, select.POLLIN)
            if poll.poll(0):
                self.wait()
        return bool(self._in_flight)

    def ask(self, *, step: int, consumed_samples: int, local: bool = False) -> None:
        """Have what is there now written."""
        assert self._process.stdin and not self._in_flight
        self.failure, self._in_flight = "", step
        request = {"step": step, "consumed_samples": consumed_samples, "local": local}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def wait(self) -> None:
        """Wait until nothing is in flight. Raises OSError when a newer attempt has taken this job over."""
        assert self._process.stdout
        if not self._in_flight:
            return
        line = self._process.stdout.readline()
        if not line:
            self._died()
            return
        self._in_flight = 0
        answer = json.loads(line)
        self.seconds = answer["seconds"]
        if answer["errno"] == errno.ESTALE:
            raise OSError(errno.ESTALE, f"checkpoint of step {answer['step']} failed: {answer['error']}")
        if answer["errno"]:
            self.fail(f"checkpoint of step {answer['step']} failed: {answer['error']}")

    def fail(self, why: str) -> None:
        """The last save failed, here or in the process."""
        self.failure = why
        print(f"{why}; training continues", file=sys.stderr, flush=True)

    def _died(self) -> None:
        step, code = self._in_flight, self._process.wait()
        self._restart()
        rank = self.writing.rank
        self.fail(f"checkpoint of step {step} failed: the checkpoint writer of rank {rank} died with code {code}")

    def _restart(self) -> None:
        """A new process, with nothing in flight."""
        self._process.kill()
        self._process.communicate()
        self._in_flight, self._process = 0, self._start()

    def abandon(self) -> None:
        """Another rank failed: what is in flight will never be committed."""
        if self._in_flight:
            self._restart()

    def close(self) -> None:
        """Wait for the last save, then end the process."""
        self.wait()
        self._process.communicate()


# Checkpoints of engines that write their own files: in the same protocol, hashed, receipted, committed, verified before
# a load.
#
#     checkpoints/step-S/attempt-A/own/...     what the engine wrote; every rank sees the same folder
#
# Ranks write together; then each rank's writer process hashes its share of the files. Nothing here reads the files, and
# none is read before `verify` (files.py) went over all of them. No tensor library is needed.


class FolderSaver(WriterProcess):
    """A rank's checkpoints, of which the engine writes the files while training stands still; hashing goes on beside it."""

    def __init__(self, write: Callable[[Path], None], **writing: Any) -> None:
        """`write` puts this rank's files into a folder that all ranks share; `writing` are fields of Writing."""
        self._write = write
        super().__init__(Writing(**writing, own=True))

    def save(self, *, step: int, consumed_samples: int, local: bool = False) -> None:
        """Have the engine write, and its files hashed and committed; waits while a save is in flight.

        There is no tier of the machine's own disk: `local` must be False.

        What an engine cannot write, for a full disk as for any OSError, is a save that failed.
        """
        assert not local
        self.wait()
        folder = place_of(Path(self.writing.root), step, self.writing.attempt) / OWN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write(folder)
        except OSError as error:
            self.fail(f"checkpoint of step {step} failed: {error}")
            return
        self.ask(step=step, consumed_samples=consumed_samples)
