"""Where a run can be looked at in MLflow's page: the local server's, or that of the server that the environment named.

No mlflow here; what runs are called there is read from what the publisher noted down.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tasks.common import process
from tasks.lineage.database import SCHEME

TRAINING = "workflowType=machine_learning"
"""Has MLflow's page show what belongs to training; otherwise it starts with what belongs to applications of language models."""


def run_page(home: Path, spool: Path, run: str) -> str | None:
    """Address of a run's page; None while MLflow does not know it, or no server shows it.

    `spool` is the folder of the run's spool, `run` its identity there.
    """
    told = process.read_json(spool / "published.json") or {}
    known = told.get("runs", {}).get(run)
    base = _server(home, told.get("tracking_uri", ""))
    return f"{base}/#/experiments/{known['experiment']}/runs/{known['id']}?{TRAINING}" if known and base else None


def _server(home: Path, tracking_uri: str) -> str | None:
    if tracking_uri.startswith(("http://", "https://")):
        return _without_login(tracking_uri).rstrip("/")
    if tracking_uri != f"{SCHEME}{home / 'mlflow' / 'mlflow.db'}":
        return None
    folder = home / "platform" / "mlflow"
    server = process.read_json(folder / "server.json")
    runs = server and process.alive(process.read_json(folder / "handle.json"))
    return str(server["url"]) if runs else None


def _without_login(address: str) -> str:
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
