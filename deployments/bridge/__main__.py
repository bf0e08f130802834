"""The bridge's process: every source of events, and what turns events into flow runs, each in a thread of its own.

A thread takes its duty every second. One that fails is logged and taken again; the others go on, for a folder that cannot be
read says nothing about a queue. New settings (`headway up --config`) start the process anew, by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from deployments.configuration.events import EventsConfig
from deployments.configuration.platform import current_settings, load_settings
from deployments.services import prefect_server
from deployments.services.parts import Duty, bridge, take
from tasks.common.redaction import clean_logs
from tasks.events.ledger import Ledger

EVERY_SECONDS = 1.0


def duties(home: Path, config: EventsConfig, ledger: Ledger) -> dict[str, Callable[[], Duty]]:
    """What there is to do, by name, and how to begin it: what a source needs is imported when there is such a source.

    Each takes the time, in seconds since the epoch.
    """
    made: dict[str, Callable[[], Duty]] = {
        "dispatch": lambda: _part("dispatch").Dispatch(home, config, ledger).tick,
        "store": lambda: _part("arrivals").StoreHistory(home, ledger).tick,
        # Also where nothing is watched any more: what had landed until then comes to an end.
        "arrivals": lambda: _part("arrivals").Arrivals(home, config, ledger).tick,
    }
    if config.folders:
        made["folders"] = lambda: _asked(_part("folders").Folders(home, config, ledger)).tick
    if config.queues:
        made["queues"] = lambda: _asked(_part("queues").Queues(home, config, ledger)).tick
    if config.webhook:
        made["webhook"] = lambda: _listen(home, config, ledger)
    return made


def main(home: Path) -> None:
    """Take events in until somebody stops it."""
    os.environ["HEADWAY_HOME"] = str(home)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    clean_logs()
    for noisy in ("httpx", "azure"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    prefect_server.prepare(home)
    os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "0"  # the next turn is the retry; Prefect's own would outlast an outage
    bridge.forget_problems(home)
    config, ledger = load_settings(home), Ledger(home)
    todo = duties(home, config.events, ledger)
    for name, begin in todo.items():
        threading.Thread(target=_turns, args=(name, begin), name=name, daemon=True).start()
    try:
        while current_settings(home, config) == config:
            if _taken.keys() >= todo.keys() - {"dispatch"}:  # which waits for Prefect
                # Which sources are broken, for `up`, `status`, `doctor` and the alerts.
                result = {name: why for name, why in list(_taken.items()) if why and name != "dispatch"}
                for problems in list(_sources):
                    result |= problems()
                bridge.tell_problems(home, config.events, result)
            time.sleep(EVERY_SECONDS)
    finally:
        for close in _open:
            close()
    logging.info("the settings have changed: restarting")
    os.execv(sys.executable, [sys.executable, "-m", "deployments.bridge", str(home)])


_open: list[Callable[[], None]] = []
"""What is to be closed before the process ends."""
_taken: dict[str, str] = {}
"""Duties that were taken, and what went wrong with each the last time; empty: nothing."""
_sources: list[Callable[[], dict[str, str]]] = []
"""Sources that go on when a part of them does not answer: what that is, and why."""


def _part(name: str) -> ModuleType:
    return importlib.import_module(f"deployments.bridge.{name}")


def _listen(home: Path, config: EventsConfig, ledger: Ledger) -> Duty:
    """Open the HTTP bridge, whose server has a thread of its own: nothing is left to do."""
    _open.append(_asked(_part("webhook").start(home, config, ledger)).stop)
    return lambda now: None


def _asked(part: Any) -> Any:
    """A part whose problems are told."""
    _sources.append(part.problems)
    return part


def _turns(name: str, begin: Callable[[], Duty]) -> None:
    """Begin a duty, and take it again and again; a beginning that fails is tried again too."""
    failing, duty = "", None

    def turn(now: float) -> None:
        nonlocal duty
        duty = duty or begin()
        duty(now)

    while True:
        _taken[name] = failing = take(name, turn, failing)
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
