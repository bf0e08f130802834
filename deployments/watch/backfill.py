"""Times of schedules that passed while nothing ran, for schedules that make up for all of them (`missed: run_all`).

Prefect makes a schedule's runs ahead of their time, three at least and one hour at least, and never for a time that is over. So
after a longer silence there are fewer runs than times. Here the server is asked for the rest; it makes no run twice.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import DeploymentResponse

from deployments.catalogue.flows import OURS
from tasks.common import process

MOST = 100
"""Times made up for after one silence."""
NOTED_EVERY_SECONDS = 30.0


class Backfill:
    """State: a file that says when this was last called, so that a silence is known after it."""

    def __init__(self, home: Path, deployments: list[str]) -> None:
        self.path = home / "platform" / "watch" / "looked.json"
        self.deployments = sorted(set(deployments))

    def tick(self, client: SyncPrefectClient, now: float, grace: float) -> None:
        """Ask for the runs of a silence that just ended, if there was one."""
        last = float((process.read_json(self.path) or {}).get("time", now))
        if now - last > grace:
            for name in self.deployments:
                _fill(client, client.read_deployment_by_name(name), last, now)
        if not self.path.exists() or abs(now - last) >= NOTED_EVERY_SECONDS:
            process.write_json(self.path, {"time": now})


def _fill(client: SyncPrefectClient, deployment: DeploymentResponse, since: float, until: float) -> None:
    """Prefect makes them for all schedules of a deployment: so not where a person added one that we know nothing about."""
    foreign = [one for one in deployment.schedules if one.active and not (one.slug or "").startswith(OURS)]
    if deployment.paused or foreign:
        return
    between = {"start_time": _iso(since), "end_time": _iso(until), "min_runs": MOST, "max_runs": MOST}
    client.request(
        "POST", "/deployments/{id}/schedule", path_params={"id": deployment.id}, json=between
    ).raise_for_status()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
