"""Lines in files of a server's own, of bounded size and number: nobody's lines are torn, and no disk is filled.

`FOLDER/SERVER-NUMBER.jsonl`. Every process of a server begins a file of its own. Which files make room for a new one says who
writes (tasks/jobs/serving/outputs.py, feedback.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SEGMENT_BYTES = 2 << 20


class Segments:
    """State: the file that is written to, and how much is in it. For one thread at a time."""

    def __init__(
        self, folder: Path, server: str, *, make_room: Callable[[Path], None], size: int = SEGMENT_BYTES
    ) -> None:
        """`make_room` is called with the folder before a new file is begun in it."""
        self.folder, self.server, self.size = folder, server, size
        self._make_room = make_room
        self._path, self._written = self._next(), 0

    def write(self, data: bytes) -> None:
        """Append one line. Raises OSError."""
        if self._written and self._written + len(data) > self.size:
            self._path, self._written = self._next(), 0
        if not self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(self.folder)
        with open(self._path, "ab", buffering=0) as file:  # opened anew: another server may have taken it away
            self._written += file.write(data)

    def _next(self) -> Path:
        numbers = (int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"{self.server}-*.jsonl"))
        return self.folder / f"{self.server}-{max(numbers, default=0) + 1:06d}.jsonl"


def oldest_first(paths: list[Path]) -> list[Path]:
    """Files by the time of their last line; one that is gone meanwhile comes first."""
    return sorted(paths, key=_age)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
