"""How long a run has held its machines: starts, checkpoints, restarts and standstills are paid for as steps are.

Rank 0 leaves when a submission's first process began and when one was last alive, in `safety/held-NNNN.json` of the job folder.
Between two submissions no machine is held. What a limit does with it is stops.py.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from tasks.common.process import read_json, write_json
from tasks.jobs.node.elastic import process_age
from tasks.jobs.training.safety import FOLDER

EVERY_SECONDS = 5.0
"""How often it is written; what a submission's last process did after that is not counted."""


class Held:
    """State: when this process and the first one of its submission began. `before` are all seconds before this process."""

    def __init__(self, job: Path) -> None:
        self._path = job / FOLDER / f"held-{_submission(job):04d}.json"
        self._age, self._made = process_age(), time.monotonic()
        start = time.time() - self._age
        mine = read_json(self._path)
        self._began = min(float(mine["began"]), start) if mine else start
        others = (path for path in self._path.parent.glob("held-*.json") if path != self._path)
        self.before = sum(map(_seconds, others)) + start - self._began

    def seconds(self) -> float:
        """All of them until now."""
        return self.before + self._age + time.monotonic() - self._made

    def note(self) -> None:
        """Write down that this process is alive."""
        write_json(self._path, {"began": self._began, "latest": time.time()})

    def keep(self) -> None:
        """Note it from now on, beside the training; rank 0 does."""
        self.note()
        threading.Thread(target=self._keep, name="held", daemon=True).start()

    def _keep(self) -> None:
        while True:
            time.sleep(EVERY_SECONDS)
            with suppress(OSError):  # a folder that is away for a moment: the next note counts this time too
                self.note()


def _submission(job: Path) -> int:
    known = os.environ.get("HEADWAY_SUBMISSION") or (read_json(job / "job.json") or {}).get("submission")
    return int(known or 1)


def _seconds(path: Path) -> float:
    noted = read_json(path)
    return max(0.0, float(noted["latest"]) - float(noted["began"]))
