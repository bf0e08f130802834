"""The bridge as a part of the platform: `python -m deployments.bridge HOME`, supervised like the servers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tasks import process


def start(home: Path) -> dict[str, Any]:
    """Start the bridge, unless it runs. The environment must be that of `prepare`, and hold the secrets that settings name."""
    found = status(home)
    if found:
        return found
    folder = home / "platform" / "bridge"
    argv = [sys.executable, "-m", "deployments.bridge", str(home)]
    spec = process.ProcessSpec(argv=argv, log="bridge.log", restarts=20, steady=20.0, grace=5.0)
    handle = process.start(folder, spec)
    part = {"pid": handle["pid"], "since": time.time()}
    process.write_json(folder / "part.json", part)
    return part


def status(home: Path) -> dict[str, Any] | None:
    """The bridge when it runs: pid of its supervising parent, since when."""
    folder = home / "platform" / "bridge"
    part: dict[str, Any] | None = process.read_json(folder / "part.json")
    return part if part and process.alive(process.read_json(folder / "handle.json")) else None
