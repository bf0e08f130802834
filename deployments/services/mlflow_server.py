"""The local MLflow server: a view of the database that publishers write into, so that nothing is lost while it is away.

It listens on loopback and asks for the same login as Prefect's page. It keeps its port as long as nobody else takes it. The
program that it runs is tasks/lineage/server.py.
"""

from __future__ import annotations

import base64
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deployments.services.prefect_server import ANSWER_SECONDS, password
from deployments.services.starting import Say, choose_port, not_locked, require_same_port, wait_until_it_answers
from tasks.common import process
from tasks.config import database


def start(home: Path, port: int | None = None) -> dict[str, Any]:
    """Start the server unless it runs. Does not wait: see `wait`.

    Raises ValueError when a wanted port is taken, Missing when the database is locked.
    """
    result = status(home)
    if result:
        require_same_port(port, result["port"], "MLflow's server")
        return result
    folder = home / "platform" / "mlflow"
    if database.kept(home) is None:
        not_locked(home / "mlflow" / "mlflow.db")
    known = process.read_json(folder / "server.json") or {}
    port = choose_port(port, known.get("port"))
    password(home)  # makes the file that the program reads
    credentials = home / "prefect" / "credentials"
    argv = [sys.executable, "-m", "tasks.lineage.server", str(home), str(port), str(credentials)]
    spec = process.ProcessSpec(argv=argv, log="server.log", restarts=20, steady=20.0, grace=5.0)
    handle = process.start(folder, spec)
    server = {"url": f"http://127.0.0.1:{port}", "port": port, "pid": handle["pid"], "since": time.time()}
    process.write_json(folder / "server.json", {**server, "folder": str(folder), "home": str(home)})
    return {**server, "folder": str(folder), "home": str(home)}


def wait(server: dict[str, Any], say: Say = lambda text: None) -> None:
    """Return when the server answers to our login. Raises Missing with the end of its log."""
    wait_until_it_answers("MLflow's server", server, lambda: _answers(server), say)


def status(home: Path) -> dict[str, Any] | None:
    """The local server when it runs: address, since when, pid."""
    folder = home / "platform" / "mlflow"
    server: dict[str, Any] | None = process.read_json(folder / "server.json")
    return server if server and process.alive(process.read_json(folder / "handle.json")) else None


def down(home: Path) -> bool:
    """Stop the local server; whether one ran."""
    ran = status(home) is not None
    process.stop(home / "platform" / "mlflow")
    return ran


def _answers(server: dict[str, Any]) -> bool:
    login = base64.b64encode(password(Path(server["home"])).encode()).decode()
    address = f"{server['url']}/api/2.0/mlflow/experiments/search?max_results=1"
    request = urllib.request.Request(address, headers={"Authorization": f"Basic {login}"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
