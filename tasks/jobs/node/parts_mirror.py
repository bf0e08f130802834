"""The parts of a mirrored job folder: what machines that read a corpus together made of its units, up to a million files.

They go to the store by themselves, and on to the first machine, which puts them together. A listing costs by all names that are
there. So each machine writes down in its own part of the folder what it sent or removed, by name and etag, and the first one
brings what it has not read of that yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

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
