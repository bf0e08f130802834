"""A real browser for the tests: the system's Chromium, driven by playwright-core, which npm installs once a machine.

`CHROMIUM` names the program, else the one on PATH. Node and npm are those of tests/support/azurite.py.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import azurite
from waiting import limit

VERSION = "1.65.1"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The browser's program; None where the machine has none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def run(script: Path, *words: object, timeout: float = 180.0) -> str:
    """Run a script for Node that drives the browser; returns what it printed."""
    environment = {**os.environ, "NODE_PATH": str(modules()), "CHROMIUM": chromium() or ""}
    argv = [str(azurite.node()), str(script), *map(str, words)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=limit(timeout))
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def modules() -> Path:
    """The folder of Node's modules with playwright-core in it; of several processes one installs it, and the others wait."""
    home = azurite.cache().parent / f"playwright-core-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    with open(home / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not azurite.installed(home):
            _install(home)
    return home / "node_modules"


def _install(home: Path) -> None:
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit=dev", "--prefix", str(home)]
    path = f"{azurite.node().parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [*azurite.npm(), "install", *options, f"playwright-core@{VERSION}"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=limit(600))
    assert done.returncode == 0, f"npm could not install playwright-core:\n{done.stderr[-3000:]}"
