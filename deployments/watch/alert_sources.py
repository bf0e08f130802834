"""Who is asked for what alerts want to know beside run folders: Prefect for schedules, the folders of the platform's parts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deployments.configuration.platform import PlatformConfig
from deployments.services import bridge, mlflow_server, prefect_server, worker
from deployments.watch.alerts import Sources
from deployments.watch.schedules import Schedules


def platform_sources(home: Path, config: PlatformConfig) -> Sources:
    """The sources of a home whose environment is that of `prefect_server.prepare`."""
    schedules = Schedules(home, config)

    def late(now: float) -> Sequence[Mapping[str, Any]]:
        with prefect_server.client() as client:
            return [asdict(run) for run in schedules.late_runs(client, now)]

    return Sources(late=late, down=lambda: parts_down(home), broken=lambda: bridge.problems(home))


def parts_down(home: Path) -> list[dict[str, str]]:
    """Parts that do not run or do not answer, and where their logs are."""
    parts = {
        "prefect": (prefect_server.reachable(home), "prefect/server.log"),
        "mlflow": (
            bool(os.environ.get("MLFLOW_TRACKING_URI") or mlflow_server.status(home)),
            "platform/mlflow/server.log",
        ),
        "worker": (worker.status(home) is not None, "platform/worker/worker.log"),
        "bridge": (bridge.status(home) is not None, "platform/bridge/bridge.log"),
    }
    return [{"name": name, "details": f"its log: {log}"} for name, (runs, log) in parts.items() if not runs]
