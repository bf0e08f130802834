"""The checkpoints of a mirrored job folder on one machine: its own ranks' files go to the store, others' come when a rank asks.

A thread of its own, because a shard takes long to send, and marks of life must not wait for it. What ranks write of a checkpoint
is here, shards before the receipts that tell of them; manifests go with all other files (mirror.py), once `sent` allows it. What
ranks and mirror tell each other is tasks/jobs/checkpoint/mirrored.py.

The parts of a mirrored job folder: what machines that read a corpus together made of its units, up to a million files.

They go to the store by themselves, and on to the first machine, which puts them together. A listing costs by all names that are
there. So each machine writes down in its own part of the folder what it sent or removed, by name and etag, and the first one
brings what it has not read of that yet.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.common.errors import HeadwayError, IntegrityError
from tasks.common.process import read_json, write_json
from tasks.jobs.checkpoint.mirrored import PLACE, is_large, is_written_by_ranks
from tasks.storage.blob.folder import BlobFolder

PARTS = "parts/"
SENT = "parts.jsonl"
"""In a machine's part of the folder: what it sent or removed of the parts; without an etag, what it removed."""
SHARE = 0.05
"""Most of the time that a machine spends on looking for parts that its own processes made."""


class PartsMirror:
    """State: when this machine looks at its own parts again, and how far the leader has read what the others sent."""

    def __init__(self, folder: BlobFolder, place: Path, *, leads: bool) -> None:
        """`folder` is of parts alone; `place` is this machine's part of the job's folder."""
        self.folder, self._place, self._leads = folder, place, leads
        self._due, self._read = 0.0, dict[Path, int]()

    def begin(self) -> None:
        """Bring all parts, and announce those that nobody did before it was killed. Raises Missing, IntegrityError."""
        self.folder.pull()
        paths = (path for path in (self.folder.local / PARTS).rglob("*") if path.is_file())
        lying = (path.relative_to(self.folder.local).as_posix() for path in paths)
        lines = (line for path in self._announcements() for line in path.read_bytes().splitlines())
        announced = {json.loads(line)["name"] for line in lines}
        self._announce(sorted(name for name in lying if name not in announced and self.folder.knows(name)))

    def bring(self) -> None:
        """Bring the leader what the others sent since the last time. Raises Missing, IntegrityError."""
        if not self._leads:
            return
        etags, read = dict[str, str](), dict[Path, int]()
        for path in self._announcements():
            if path.parent != self._place:
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    lines = file.read()
                whole = lines[: lines.rfind(b"\n") + 1]
                read[path] = self._read.get(path, 0) + len(whole)
                etags |= {line["name"]: line["etag"] for line in map(json.loads, whole.splitlines())}
        self.folder.bring(etags)
        self._read |= read

    def send(self, *, settled: bool = False) -> None:
        """Send and announce what this machine made, unless it was looked at so long that it must wait. Raises Missing."""
        began = time.monotonic()
        if began < self._due and not settled:
            return
        self._announce(self.folder.push(settled=settled))
        now = time.monotonic()
        self._due = now + (now - began) * (1 / SHARE - 1)

    def comes(self, name: str) -> bool:
        """Whether another machine's announcements come here, by the name of a file of the job's folder."""
        return self._leads and name.endswith(f"/{SENT}") and self.folder.local / name != self._place / SENT

    def _announce(self, names: Iterable[str]) -> None:
        lines = [json.dumps({"name": name, "etag": self.folder.etag(name)}) + "\n" for name in names]
        if lines:
            self._place.mkdir(parents=True, exist_ok=True)
            with open(self._place / SENT, "a", encoding="utf-8") as file:
                file.writelines(lines)

    def _announcements(self) -> list[Path]:
        return sorted(self.folder.local.glob(f"nodes/*/{SENT}"))


EVERY_SECONDS = 2.0
LOOK_SECONDS = 0.1
"""Between two looks for what ranks ask for."""


class CheckpointMirror(threading.Thread):
    """State: the checkpoints that lay here at the last look, which of them whole, the requests answered, and what came."""

    def __init__(self, folder: BlobFolder, place: Path, *, leads: bool, fenced: Callable[[], bool]) -> None:
        """`place` is this machine's part of the job's folder. What the leader deletes goes in the store, whosever it was."""
        super().__init__(daemon=True)
        self.folder, self._place, self._leads, self._fenced = folder, place, leads, fenced
        self._over = threading.Event()
        self._lay: set[str] = set()
        self._committed: set[str] = set()
        self._answered: dict[Path, str] = {}
        self._came = {"files": 0, "bytes": 0}

    def begin(self) -> None:
        """Bring receipts; the leader deletes what no manifest tells of, for nobody writes yet. Raises Missing, IntegrityError."""
        self.folder.pull(self._comes)
        if self._leads:
            local = self.folder.local
            self.folder.clear(
                lambda name: is_written_by_ranks(name) and not (local / _checkpoint(name) / "manifest.json").exists()
            )
            self._lay = self._lying()

    def run(self) -> None:
        waited = EVERY_SECONDS
        while not self._over.wait(LOOK_SECONDS):
            self._answer()
            waited += LOOK_SECONDS
            if waited >= EVERY_SECONDS:
                waited = 0.0
                self._step()

    def finish(self) -> None:
        """End the thread; `send` is left to do."""
        self._over.set()
        if self.is_alive():
            self.join()

    def send(self) -> None:
        """Send all that is left, when nobody writes any more. Raises Missing, IntegrityError."""
        self.folder.push(is_written_by_ranks, settled=True)
        self._delete_what_was_deleted()

    def sent(self, manifest: str) -> bool:
        """Whether the store has every file that a manifest tells of; the manifest lies here."""
        receipts = (self.folder.local / _checkpoint(manifest)).glob("receipt-*.json")
        return all(self.folder.knows(path.relative_to(self.folder.local).as_posix()) for path in receipts)

    def _step(self) -> None:
        try:
            self.folder.pull(self._comes)
            if not self._fenced():
                self.folder.push(is_written_by_ranks)
                self._delete_what_was_deleted()
        except HeadwayError as error:
            print(f"mirror: {error.message}", file=sys.stderr, flush=True)

    def _comes(self, name: str) -> bool:
        """Others' receipts; of large files none, and none that lies here stays when it is gone there."""
        return is_written_by_ranks(name) and (not is_large(name) or self.folder.knows(name))

    def _delete_what_was_deleted(self) -> None:
        """Retention is the leader's: others' files of a checkpoint go with it, also those of machines that are gone."""
        if not self._leads:
            return
        now = self._lying()
        for gone in sorted(self._lay - now):
            self._drop(gone)
            self._committed.discard(gone)
        self._lay = now

    def _drop(self, checkpoint: str) -> None:
        self.folder.clear(lambda name: is_written_by_ranks(name) and name.startswith(f"{checkpoint}/"))

    def _lying(self) -> set[str]:
        """Checkpoints that are here: that were committed, or are being written; one whose manifest was taken away is not."""
        local = self.folder.local
        lying = {path.relative_to(local).as_posix() for path in (local / "checkpoints").glob("step-*/attempt-*")}
        whole = {name for name in lying if (local / name / "manifest.json").exists()}
        self._committed |= whole
        return lying - (self._committed - whole)

    def _answer(self) -> None:
        """What ranks asked for since the last look."""
        for path in (self.folder.local / PLACE).glob("want-*.json"):
            request: dict[str, Any] = read_json(path) or {}
            if request.get("token") in (None, self._answered.get(path)):
                continue
            answer: dict[str, Any] = {"token": request["token"], "error": "", "integrity": False, "remedy": ""}
            try:
                self._bring(request["names"])
            except HeadwayError as error:
                integrity = isinstance(error, IntegrityError)
                answer |= {"error": error.message, "integrity": integrity, "remedy": error.remedy}
            self._answered[path] = request["token"]
            write_json(path.with_name(path.name.replace("want-", "have-")), answer)

    def _bring(self, names: Sequence[str]) -> None:
        wanted = {name for name in names if not (self.folder.local / name).is_file() and is_large(name)}
        self.folder.pull(lambda name: name in wanted)
        came = [self.folder.local / name for name in wanted if (self.folder.local / name).is_file()]
        self._came["files"] += len(came)
        self._came["bytes"] += sum(path.stat().st_size for path in came)
        write_json(self._place / "came.json", self._came)
        if gone := [name for name in names if not (self.folder.local / name).is_file()]:
            where = f"{self.folder.container.uri}/{self.folder.prefix}{gone[0]}"
            raise IntegrityError(f"{where} is gone, and its checkpoint is there")


def _checkpoint(name: str) -> str:
    """The checkpoint that a file is of: checkpoints/step-S/attempt-A."""
    return "/".join(name.split("/")[:3])
