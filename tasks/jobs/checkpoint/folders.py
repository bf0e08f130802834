"""Checkpoints of engines that write their own files: in the same protocol, hashed, receipted, committed, verified before a load.

    checkpoints/step-S/attempt-A/own/...     what the engine wrote; every rank sees the same folder

Ranks write together; then each rank's writer process hashes its share of the files. Nothing here reads the
files, and none is read before `verify` (files.py) went over all of them. No tensor library is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.jobs.checkpoint.files import place_of
from tasks.jobs.checkpoint.process import WriterProcess
from tasks.jobs.checkpoint.writer import OWN, Writing


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
