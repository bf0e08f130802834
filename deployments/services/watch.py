"""The watch as a part of the platform: `python -m deployments.watch HOME`, supervised like the servers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tasks.common import process


def start(home: Path) -> dict[str, Any]:
    """Start the watch, unless it runs. The environment must be that of `prepare`."""
    result = status(home)
    if result:
        return result
    folder = home / "platform" / "watch"
    argv = [sys.executable, "-m", "deployments.watch", str(home)]
    started_from = str(Path.cwd())  # folders in the settings may be relative to where `headway up` was started
    spec = process.ProcessSpec(argv=argv, directory=started_from, log="watch.log", restarts=20, steady=20.0, grace=5.0)
    handle = process.start(folder, spec)
    part = {"pid": handle["pid"], "since": time.time()}
    process.write_json(folder / "part.json", part)
    return part


def status(home: Path) -> dict[str, Any] | None:
    """The watch when it runs: pid of its supervising parent, since when."""
    folder = home / "platform" / "watch"
    part: dict[str, Any] | None = process.read_json(folder / "part.json")
    return part if part and process.alive(process.read_json(folder / "handle.json")) else None
