"""The parts of the platform together: their folders, and starting again those that died. What one part is, is in its own file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.services import bridge, mlflow_server, prefect_server, watch, worker

# A duty that is taken again and again by a process that must not die of it: the watch's and the bridge's.


Duty = Callable[[float], Any]
"""Takes the time, in seconds since the epoch."""


def take(name: str, duty: Duty, before: str) -> str:
    """Do one duty; what goes wrong is said once, not at every turn. Returns what went wrong, to be handed in as `before`."""
    try:
        duty(time.time())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if text != before:
            logging.exception("%s: %s", name, text)
        return text
    if before:
        logging.info("%s: well again", name)
    return ""


PARTS = ("platform/watch", "platform/bridge", "platform/worker", "platform/mlflow", "prefect")
"""In the order in which they stop: nobody restarts or starts what is being stopped."""
LAST_LOOK = "platform/watch/dead_runs.json"
"""When the watch last looked for runs that died."""


def restart_what_died(home: Path) -> None:
    """Start again every part whose supervising parent is gone. For whoever stays: the watch, and `up` in the foreground."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow_server.start(home, None)
    prefect_server.prepare(home)
    worker.start(home)
    watch.start(home)
    bridge.start(home)
