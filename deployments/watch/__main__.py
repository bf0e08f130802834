"""The watch: one process that looks after everything that can die, be missed or go wrong while nobody looks.

Every few seconds it takes its duties in turn, each in a file beside this one: flow runs whose process died, schedules, what
MLflow missed, files of models, answers of endpoints, champions that nobody looked at, alerts, telemetry, the audit log's copy,
and the other parts of the platform. A duty that fails is logged and taken again at the next turn; what takes long is done in the
background (duties.py). The process itself is supervised. Nothing here decides about a model.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deployments.configuration.platform import PlatformConfig, current_settings, load_settings
from deployments.services import prefect_server
from deployments.services.parts import Duty, restart_what_died, take
from deployments.watch.hosts import Hosts
from tasks.azure.arm_client import use_files
from tasks.common.redaction import clean_logs
from tasks.storage import open_files

EVERY_SECONDS = 5.0
SPOOLS_EVERY_SECONDS = 15.0


def duties(home: Path, config: PlatformConfig, hosts: Hosts) -> dict[str, Duty]:
    """What there is to do, by name, in its order. Each takes the time, in seconds since the epoch."""
    from deployments.telemetry.export import Telemetry
    from deployments.watch.alerts import Alerts, platform_sources
    from deployments.watch.dead_runs import DeadRuns
    from deployments.watch.duties import Anomalies, AuditCopy, CloudEndpoints, Integrity, Periods, Spools, Trusted
    from deployments.watch.schedules import Schedules
    from deployments.watch.waiting import Waiting

    dead, schedules, spools = DeadRuns(home, config, hosts), Schedules(home, config), Spools(home, SPOOLS_EVERY_SECONDS)
    alerts, telemetry = Alerts(home, config, platform_sources(home, config)), Telemetry(home, config)

    def asked(work: Callable[[Any, float], Any]) -> Duty:
        def duty(now: float) -> None:
            with prefect_server.client() as client:
                work(client, now)

        return duty

    def for_all(work: Duty) -> Duty:
        """A duty that one watch has for all hosts of a store."""
        return lambda now: work(now) if hosts.act() else None

    return {
        "hosts": hosts.tick,
        "parts": lambda now: restart_what_died(home),
        "telemetry": telemetry.tick,
        "dead flow runs": asked(dead.tick),
        "waiting flow runs": asked(Waiting(home).tick),
        "schedules": for_all(asked(schedules.tick)),
        "spools": spools.tick,
        "integrity": Integrity(home, config.events.integrity_minutes * 60).tick,
        "trusted": Trusted(home).tick,
        "anomalies": Anomalies(home).tick,
        "periods": for_all(Periods(home, config.alerts.champion_revalidated_days).tick),
        "alerts": alerts.tick,
        "audit copy": for_all(AuditCopy(home).tick),
        "cloud endpoints": for_all(CloudEndpoints(home).tick),
    }


def main(home: Path) -> None:
    """Watch until somebody stops it, or the settings change: then the process starts anew, by itself."""
    os.environ["HEADWAY_HOME"] = str(home)
    use_files(partial(open_files, home))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    clean_logs()
    for requests in ("httpx", "azure"):  # each of them says every request that it sends
        logging.getLogger(requests).setLevel(logging.WARNING)
    prefect_server.prepare(home)
    config, hosts = load_settings(home), Hosts(home)
    todo = duties(home, config, hosts)
    failing: dict[str, str] = {}
    while current_settings(home, config) == config:
        for name, duty in todo.items():
            failing[name] = take(name, duty, failing.get(name, ""))
        time.sleep(EVERY_SECONDS)
    logging.info("the settings have changed: restarting")
    hosts.end()
    os.execv(sys.executable, [sys.executable, "-m", "deployments.watch", str(home)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
