"""What a server keeps of its answers: measures, a line a request, in files of its own that stay bounded. No text is kept.

`ROOT/MODEL_VERSION/SERVER-NUMBER.jsonl`, where ROOT is one endpoint's. A thread writes, so no request waits for a disk; a kill
loses the lines of its last milliseconds. Every process of a server begins a file of its own: nobody's lines are torn. The form of
a line is tasks/formats/answers.py; reading is tasks/service_outputs.py.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.formats.answers import Answer, line, odd_share, repetition
from tasks.jobs.generation import Completion

SEGMENT_BYTES = 2 << 20
MOST_SEGMENTS = 25
"""Of an endpoint: 50 MB, a quarter of a million requests."""
FIRST_SEGMENTS = 5
"""The first of a model are kept: what it answered after its promotion is what later answers are compared with."""
WAITING = 10_000
"""Lines that may wait for the disk; what comes beyond is not kept."""
CLOSE_SECONDS = 2.0
log = logging.getLogger("headway.serve")


class Outputs:
    """Takes measures from a server. State: what waits, and the file that is written to."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder, self.server = folder, server
        self.counting = False
        """Whether requests are users'. Whoever proves a new server with golden prompts is none."""
        self._waiting: queue.Queue[Answer | None] = queue.Queue(WAITING)
        self._path, self._written = self._next(), 0
        self._thread = threading.Thread(target=self._write_all, name="outputs", daemon=True)
        self._thread.start()

    @contextmanager
    def measuring(self, max_tokens: int) -> Iterator[dict[str, Any]]:
        """Measure a request; what `measures` says of its answer is put into the yielded dictionary."""
        began, clock = time.time(), time.perf_counter()
        found: dict[str, Any] = {}
        try:
            yield found
        except BaseException as error:
            found |= {"status": getattr(error, "status_code", 500), "error": type(error.__cause__ or error).__name__}
            raise
        finally:
            self.add(Answer(time=began, seconds=round(time.perf_counter() - clock, 6), max_tokens=max_tokens, **found))

    def add(self, answer: Answer) -> None:
        """Have a line written, once requests count. Never waits."""
        if not self.counting:
            return
        try:
            self._waiting.put_nowait(answer)
        except queue.Full:
            log.warning("outputs: the disk does not keep up, an answer was not measured")

    def close(self) -> None:
        """Write what waits."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _write_all(self) -> None:
        while (answer := self._waiting.get()) is not None:
            try:
                self._write(line(answer))
            except OSError as error:
                log.warning("outputs: %s", error)

    def _write(self, data: bytes) -> None:
        if self._written + len(data) > SEGMENT_BYTES:
            self._path, self._written = self._next(), 0
        if not self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            prune(self.folder)
        with open(self._path, "ab", buffering=0) as file:  # opened anew: another server may have taken it away
            self._written += file.write(data)

    def _next(self) -> Path:
        numbers = (int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"{self.server}-*.jsonl"))
        return self.folder / f"{self.server}-{max(numbers, default=0) + 1:06d}.jsonl"


def measures(prompt_tokens: int, said: Completion) -> dict[str, Any]:
    """What there is to measure of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(said.tokens),
        "finish_reason": said.finish_reason,
        "repetition": repetition(said.tokens),
        "entropy": None if said.entropy is None else round(said.entropy, 4),
        "odd": odd_share(said.text),
    }


def prune(folder: Path) -> None:
    """Make room for one more file of a model's folder: other models' go first, the oldest first; its own first ones stay."""
    segments = sorted(folder.parent.glob("*/*.jsonl"), key=_age)
    own = [path for path in segments if path.parent == folder]
    others = [path for path in segments if path.parent != folder]
    excess = len(segments) + 1 - MOST_SEGMENTS
    for path in [*others, *own[FIRST_SEGMENTS:]][: max(excess, 0)]:
        path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
