"""What runs on each machine of a job on Ray: one actor that starts the machine's part (tasks/jobs/node/__main__.py under its
parent) and watches it.

The process dies with the actor, and the actor with the job's driver or its machine. Who makes the actors is driver.py.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.common.process import die_with_parent, read_json

STOP_SECONDS = 35.0
"""For the parent of a machine's part to end it; it gives the ranks 30 s."""


class Agent:
    """One machine's process. All methods return at once but `sees` and `stop`, for an actor does one thing at a time."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None

    def where(self) -> str:
        """The id of the node that it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def sees(self, folder: str, submission: int, seconds: float) -> bool:
        """Whether this machine sees the job folder as it is now, at the latest after `seconds`: file systems have caches."""
        until = time.monotonic() + seconds
        while (read_json(Path(folder) / "ray.json") or {}).get("submission") != submission:
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the machine's part; it dies with this process. Returns its process id."""
        self.child = subprocess.Popen(
            list(command),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            preexec_fn=_fresh,
        )
        atexit.register(self.stop)
        return self.child.pid

    def poll(self) -> int | None:
        """The exit code of the machine's part; None while it runs."""
        return self.child.poll() if self.child else None

    def stop(self) -> int | None:
        """End the machine's part and all of its ranks; returns when they are gone."""
        if self.child is None or self.child.poll() is not None:
            return self.poll()
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()


def _fresh() -> None:
    """In the new process: Ray's workers ignore signals that a program of its own must hear."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
