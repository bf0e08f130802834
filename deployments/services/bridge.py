"""The bridge as a part of the platform: `python -m deployments.bridge HOME`, supervised like the servers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from deployments.configuration.events import EventsConfig
from tasks.common import process
from tasks.common.redaction import redact
from tasks.config.base import config_digest

LOOKED_SECONDS = 15.0
"""In which a bridge that starts has looked at its sources once."""


def start(home: Path) -> dict[str, Any]:
    """Start the bridge, unless it runs. The environment must be that of `prepare`, and hold the secrets that settings name."""
    result = status(home)
    if result:
        return result
    forget_problems(home)
    folder = home / "platform" / "bridge"
    argv = [sys.executable, "-m", "deployments.bridge", str(home)]
    started_from = str(Path.cwd())  # folders in the settings may be relative to where `headway up` was started
    spec = process.ProcessSpec(argv=argv, directory=started_from, log="bridge.log", restarts=20, steady=20.0, grace=5.0)
    handle = process.start(folder, spec)
    part = {"pid": handle["pid"], "since": time.time()}
    process.write_json(folder / "part.json", part)
    return part


def status(home: Path) -> dict[str, Any] | None:
    """The bridge when it runs: pid of its supervising parent, since when."""
    folder = home / "platform" / "bridge"
    part: dict[str, Any] | None = process.read_json(folder / "part.json")
    return part if part and process.alive(process.read_json(folder / "handle.json")) else None


def problems(home: Path) -> dict[str, str]:
    """Sources of events that are broken, and why, as the bridge says; empty while it does not run."""
    payload = process.read_json(_told_at(home)) or {}
    return dict(payload.get("problems", {})) if status(home) else {}


def first_problems(home: Path, config: EventsConfig) -> dict[str, str]:
    """The same of these settings, once a bridge that starts with them, or starts anew, has looked at its sources."""
    deadline = time.monotonic() + LOOKED_SECONDS
    while time.monotonic() < deadline:
        payload = process.read_json(_told_at(home)) or {}
        if payload.get("settings") == config_digest(config):
            break
        time.sleep(0.2)
    return problems(home)


def tell_problems(home: Path, config: EventsConfig, result: dict[str, str]) -> None:
    """Keep what the bridge found broken."""
    payload = {"settings": config_digest(config), "problems": {name: redact(why) for name, why in result.items()}}
    if process.read_json(_told_at(home)) != payload:
        process.write_json(_told_at(home), payload)


def forget_problems(home: Path) -> None:
    """Nothing is known of the sources until they are looked at."""
    _told_at(home).unlink(missing_ok=True)


def _told_at(home: Path) -> Path:
    return home / "platform" / "bridge" / "sources.json"
