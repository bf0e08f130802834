"""`headway up`: the whole platform from nothing, in the order in which its parts need each other; what lives is adopted.

Each part is a supervised process of its own, so one that is killed comes back, and `up` itself may die. What a part is, is in
its own file here; what is deployed is deployments/catalogue/flows.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deployments.catalogue.flows import POOL, catalogue
from deployments.configuration.files import load_with_text
from deployments.configuration.platform import PlatformConfig, kept, load_settings
from deployments.platform.down import take_over
from deployments.services import bridge, checks, mlflow_server, prefect_server, watch, worker
from tasks.common.errors import Missing
from tasks.common.home import stopped_mark
from tasks.common.process import locked, write_text
from tasks.serving.known import settle_all

WORKER_SECONDS = 180.0
"""A worker whose first word to a busy server is lost says it again after ten seconds, and backs off after three times."""
Say = Callable[[str], None]


def given(source: Path) -> tuple[PlatformConfig, str]:
    """The settings of a file, and its text for `keep`. Raises ValueError."""
    config, text = load_with_text(PlatformConfig, source)
    catalogue(config)
    return config, text


def changed(home: Path, config: PlatformConfig) -> list[str]:
    """Names of the settings in which `config` differs from what is kept; all of them when what is kept cannot be read."""
    try:
        before = load_settings(home)
    except ValueError:
        return list(PlatformConfig.model_fields)
    return [name for name in PlatformConfig.model_fields if getattr(before, name) != getattr(config, name)]


def keep(home: Path, text: str) -> None:
    """Keep what `given` has read, for later starts."""
    home.mkdir(parents=True, exist_ok=True)
    write_text(kept(home), text)


def up(home: Path, config: PlatformConfig, say: Say, *, port: int | None, mlflow_port: int | None) -> dict[str, str]:
    """Start what does not run yet, and return when everything answers. A second `up` waits for the first, and then adopts.

    Returns sources of events that are broken, and why: they stop nothing else.

    Raises Missing when something that is needed is not there, ValueError for a mistake in the settings.
    """
    catalogue(config)
    checks.enough_room(home)
    checks.write_layout(home, version("headway"))
    with locked(home / "platform" / "up.lock", waiting=lambda: say("another `headway up` starts this home; waiting")):
        take_over(home)
        stopped_mark(home).unlink(missing_ok=True)
        server = prefect_server.prepare(home, port)
        say("Prefect server")
        tracking = None if os.environ.get("MLFLOW_TRACKING_URI") else mlflow_server.start(home, mlflow_port)
        _deploy(home, server, config, say)
        say("worker")
        worker.start(home)
        watch.start(home)
        bridge.start(home)
        for name, how in settle_all(home).items():
            say(f"a deploy of endpoint/{name} that was interrupted is {how}")
        if tracking:
            say("MLflow server")
            mlflow_server.wait(tracking)
        # Return when the worker has told the server of itself. Raises Missing with the end of its log.
        deadline = time.monotonic() + WORKER_SECONDS
        with prefect_server.client() as client:
            while not any(item.status == "ONLINE" for item in client.read_workers_for_work_pool(POOL)):
                ended = worker.status(home) is None
                if ended or time.monotonic() > deadline:
                    log = home / "platform" / "worker" / "worker.log"
                    reason = "ended" if ended else f"has not reached Prefect's server in {WORKER_SECONDS:.0f} s"
                    raise Missing(
                        f"the worker does not come up: it {reason}; the end of {log}:\n{log.read_text()[-1000:]}",
                        remedy="`headway doctor` tells what is missing; then `headway up` again.",
                    )
                time.sleep(0.2)
        return bridge.first_problems(home, config.events)


def _deploy(home: Path, server: dict[str, Any], config: PlatformConfig, say: Say) -> None:
    """Tell Prefect what is deployed, whom to notify, what events start, and what becomes of missed times, before any worker."""
    from deployments.catalogue import triggers
    from deployments.platform.notifications import apply
    from deployments.services.registration import register
    from deployments.watch.schedules import Schedules

    prefect_server.wait(server)
    say("deployments")
    with prefect_server.client() as client:
        register(client, catalogue(config))
        worker.allow(client, config.parallel_runs)
        apply(client, config)
        triggers.apply(client, config.events)
        Schedules(home, config).tick(client, time.time())
