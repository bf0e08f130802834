"""Watched folders: a file that landed or changed, and then settled, becomes one event `data.arrived`.

Looked at by listing: links are not followed, and FIFOs, devices, hidden names and names that end in .tmp or .part are left alone.
What was told of is known by the ledger, so there is no second book that a kill could leave behind. Making a dataset version of
the files is arrivals.py.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from deployments.configuration.events import EventsConfig, FolderConfig
from tasks.events.event import Event
from tasks.events.ledger import Ledger

UNFINISHED = (".tmp", ".part")
"""Ends of names that writers use for what is not whole yet."""
SHARE = 0.1
"""Most of the time that goes into looking: a folder that takes a second to list is listed every ten seconds."""
LONGEST_REST_SECONDS = 60.0
AT_ONCE = 5000
"""Events of one transaction."""
LONGEST_NAME = 1700
log = logging.getLogger("headway.folders")


class Stamp(NamedTuple):
    """What a file is known by. Not by a hash: that would read every byte again at every look, and once more when it is published.

    Times are in ns. The second one is the system's own and cannot be set, so a file that was put back with its old time, or
    replaced by one of the same size and time, shows too.
    """

    size: int
    modified: int
    changed: int

    def __str__(self) -> str:
        return f"{self.size}-{self.modified}-{self.changed}"


class Look(NamedTuple):
    """What a folder holds now: files by their path, and what could not be looked at, with the reason."""

    files: dict[str, Stamp]
    problems: dict[str, str]


class Changed(Exception):
    """What is being published was written or deleted meanwhile: it is to be done again."""


class Folders:
    """All watched folders. State: what was told of, what is still moving, and when each folder is looked at again."""

    def __init__(self, home: Path, config: EventsConfig, ledger: Ledger) -> None:
        self._watches = [_Watch(folder, config.settle_seconds, ledger) for folder in config.folders]

    def problems(self) -> dict[str, str]:
        """What could not be looked at last time, and why."""
        return {f"folder {_shown(path)}": why for watch in self._watches for path, why in watch.problems.items()}

    def tick(self, now: float) -> None:
        """Look at each folder whose rest is over, and tell the ledger what has settled."""
        for watch in self._watches:
            watch.tick(now)


def look(root: Path, include: str) -> Look:
    """The files of a folder and of the folders in it that count; nothing is followed, opened or read."""
    result = Look({}, {})
    waiting = [str(root)]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name.endswith(UNFINISHED) or entry.name == "__pycache__":
                        continue
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        elif entry.is_file(follow_symlinks=False) and fnmatch.fnmatchcase(entry.name, include):
                            status = entry.stat(follow_symlinks=False)
                            stamp = Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                            result.files[entry.path] = stamp
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        result.problems[entry.path] = error.strerror or type(error).__name__
        except OSError as error:
            result.problems[folder] = error.strerror or type(error).__name__
    return result


def place_of(folder: FolderConfig) -> Path:
    """Where a watched folder is."""
    return Path(folder.path).expanduser().absolute()


class _Watch:
    def __init__(self, folder: FolderConfig, settle: float, ledger: Ledger) -> None:
        self.folder, self.settle, self.ledger, self.root = folder, settle, ledger, place_of(folder)
        self._told: dict[str, str] | None = None
        self._moving: dict[str, tuple[Stamp, float]] = {}
        self._next = 0.0
        self.problems: dict[str, str] = {}

    def tick(self, now: float) -> None:
        if 0 < self._next - now <= LONGEST_REST_SECONDS:
            return
        began = time.perf_counter()
        result = look(self.root, self.folder.include)
        # What cannot be looked at is said in the log, once. It is no event: nothing arrived.
        for path, why in result.problems.items():
            if self.problems.get(path) != why:
                log.warning("%s is watched for dataset/%s, and cannot be looked at: %s", path, self.folder.dataset, why)
        for path in self.problems.keys() - result.problems.keys():
            log.info("%s can be looked at again", path)
        self.problems = result.problems
        # Files that are not told of, and have not changed for long enough.
        known, before, self._moving = self._known(), self._moving, {}
        for path, stamp in result.files.items():
            if known.get(_shown(path)) != str(stamp):
                was, since = before.get(path, (stamp, now))
                self._moving[path] = (stamp, since if was == stamp and since <= now else now)
        settled = [(path, stamp) for path, (stamp, since) in self._moving.items() if now - since >= self.settle]
        self._tell(sorted(settled))
        if not result.problems:  # what is gone is known by the ledger
            existing = {_shown(path) for path in result.files}
            self._told = {path: stamp for path, stamp in self._known().items() if path in existing}
        took = time.perf_counter() - began
        self._next = now + min(LONGEST_REST_SECONDS, took / SHARE)

    def _tell(self, settled: list[tuple[str, Stamp]]) -> None:
        """Have the ledger take files in, many at once."""
        for start in range(0, len(settled), AT_ONCE):
            events = []
            for path, stamp in settled[start : start + AT_ONCE]:
                what = f"{_shown(path)}#{stamp}:{self.folder.dataset}"
                event = Event(
                    name="data.arrived",
                    subject=f"dataset/{self.folder.dataset}",
                    source=_shown(str(self.root)),
                    identity=what,
                    object=f"file:{what}",
                    occurred=stamp.modified / 1e9,
                    channel="folder",
                    data={"bytes": stamp.size},
                )
                events.append(event)
            self.ledger.receive_all(events)
            for path, stamp in settled[start : start + AT_ONCE]:
                self._known()[_shown(path)] = str(stamp)
                del self._moving[path]

    def _known(self) -> dict[str, str]:
        """What was told of each file last, by its name; read from the ledger once."""
        if self._told is None:
            end = f":{self.folder.dataset}"
            query = "SELECT object FROM events WHERE status = 'accepted' AND name = 'data.arrived' AND source = ? ORDER BY number"
            with self.ledger.snapshot() as db:
                rows = db.execute(query, (_shown(str(self.root)),)).fetchall()
            paths = (str(row["object"]).removeprefix("file:") for row in rows)
            pairs = (text.removesuffix(end).rpartition("#") for text in paths if text.endswith(end))
            self._told = {name: stamp for name, _, stamp in pairs}
        return self._told


def _shown(path: str) -> str:
    """A path as text that can be kept and shown, whatever bytes it is made of."""
    if path.isascii() and path.isprintable() and len(path) <= LONGEST_NAME:
        return path
    text = "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in path
    )
    return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + hashlib.sha256(os.fsencode(path)).hexdigest()
