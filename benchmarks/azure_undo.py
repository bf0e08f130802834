"""What the smoke test on Azure (azure.py) made and has not deleted: noted on disk before it is made, and deleted newest first.

A run that is killed deletes nothing. Its notes stay in its folder, and the next run goes by them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.proof import Failed, command
from tasks.common.process import locked, read_json, write_json

NOTES, LOCK = "azure-made.json", "running.lock"
ABSENT = re.compile(r"not ?found|does not exist|there is no", re.IGNORECASE)
"""What is printed of something that was never made, or is deleted already."""
END_SECONDS = 120.0
"""For `headway retrain` to cancel its job and to see it end."""


@dataclass(frozen=True)
class Undo:
    """What was made, and the command that deletes it."""

    what: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.words])


class Made:
    """What a run made. State: azure-made.json in its folder, the newest last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._left = [Undo(**one) for one in read_json(folder / NOTES) or []]

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, undo: Undo) -> None:
        """Call it before the command that makes it: one that fails or is killed may have made it even so."""
        self._left.append(undo)
        self._keep()

    def delete(self, seconds: float) -> tuple[list[str], list[Undo]]:
        """What is deleted now, and what could not be; Ctrl-C skips one."""
        gone, left = [], []
        for number, undo in reversed(list(enumerate(self._left))):
            log = self.folder / f"deleted-{number}.log"
            log.unlink(missing_ok=True)
            try:
                code = command(undo.words, seconds=seconds, log=log, environment=undo.environment)
            except (Failed, KeyboardInterrupt, OSError):
                code = -1
            if code and (code < 0 or not ABSENT.search(log.read_text())):
                left.append(undo)
                continue
            gone += [] if code else [undo.what]
            self._left.remove(undo)
            self._keep()
        return gone, left

    def _keep(self) -> None:
        path = self.folder / NOTES
        if self._left:
            write_json(path, [asdict(one) for one in self._left])
        else:
            path.unlink(missing_ok=True)


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Mark a folder as one whose run is alive. Raises BlockingIOError when another run has it."""

    def leave() -> None:
        raise BlockingIOError(f"another run is at work in {folder}")

    with locked(folder / LOCK, waiting=leave):
        yield


def broken_off(folders: Path) -> Iterator[Path]:
    """Folders of runs that left something and are not alive, each as long as the caller works on it."""
    for notes in sorted(folders.glob(f"*/{NOTES}")):
        with suppress(BlockingIOError), at_work(notes.parent):
            yield notes.parent


def end_commands(home: Path) -> None:
    """End `headway` commands of a home that outlived the run that started them: they would make more."""
    ours = [one for one in psutil.process_iter() if _works_on(one, home)]
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(ours, timeout=END_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _works_on(process: psutil.Process, home: Path) -> bool:
    try:
        named = any(Path(word).name == "headway" for word in process.cmdline()[:2])
        return named and process.pid != os.getpid() and process.environ().get("HEADWAY_HOME") == str(home)
    except psutil.Error:
        return False
