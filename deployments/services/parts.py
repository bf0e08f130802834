"""The parts of the platform together: their folders, and starting again those that died. What one part is, is in its own file."""

from __future__ import annotations

import os
from pathlib import Path

from deployments.services import bridge, mlflow_server, prefect_server, watch, worker

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
