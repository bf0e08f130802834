"""The newest checkpoint is read again in the background, so that a disk that forgets is noticed before it is needed.

What was found is in `checkpoints/SCRUBBED`. Runs in rank 0's writer process (writer.py); standard library only.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.common.process import write_json
from tasks.jobs.checkpoint.files import age, manifests, quarantine, quarantined, verify

EVERY_SECONDS = 600.0


class Scrubber(threading.Thread):
    """Reads the newest checkpoint again, every so often, until the process ends."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._root, self._over = root, threading.Event()

    def run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            try:
                scrub(self._root)
            except (OSError, ValueError) as error:
                print(f"the newest checkpoint could not be read again: {error}", file=sys.stderr, flush=True)


def scrub(root: Path) -> bool | None:
    """Verify the newest checkpoint, and quarantine it when it is bad; whether it is good, None when there is none."""
    newest = next((path for path in manifests(root) if not quarantined(path.parent)), None)
    if newest is None:
        return None
    try:
        verify(newest)
    except IntegrityError as error:
        if not newest.exists():
            return None  # retention deleted it meanwhile
        print(f"quarantined: {error}", file=sys.stderr, flush=True)
        quarantine(newest.parent, str(error))
        return _told(root, newest, good=False)
    return _told(root, newest, good=True)


def _told(root: Path, newest: Path, *, good: bool) -> bool:
    step, attempt = age(newest)
    write_json(root / "SCRUBBED", {"step": step, "attempt": attempt, "good": good, "time": time.time()})
    return good
