"""Going back to the model before, on this machine: a change of the journal like a deploy, committed once the traffic is there.

What was rolled back is remembered when it is finished (rollout.py, tasks/serving/refused.py). Who may roll back, and the audit
log, are the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import HeadwayError, JobFailed
from tasks.common.process import ProcessSpec, read_json, write_json
from tasks.serving.endpoint import Candidate
from tasks.serving.journal import Journal
from tasks.serving.local.rollout import LocalTraffic, Record
from tasks.serving.rollout import give_back, settle, take_over
from tasks.serving.servers import await_ready, port_of, runs, start_limit

START_SECONDS = 60.0
"""For a server of a release that did not write down what its deploy was given."""
MIXED = "mixed"
"""In the place of a digest of settings: those of two deploys hold."""
Told = Callable[[str, dict[str, Any]], None]


def ask_for_traffic_back(endpoint: Path, reason: str) -> float | None:
    """Have a deploy that is under way take its traffic back, whoever runs it; its time, or None. Does not wait."""
    change = Journal(endpoint / "journal.jsonl").open_change()
    if change is None or change.committed:
        return None
    begun = float(change.begun["time"])
    write_json(endpoint / "abort.json", {"reason": reason, "time": time.time(), "change": begun}, seal=True)
    return begun


def go_back(
    endpoint: Path,
    changes: Journal,
    *,
    reason: str,
    taken: float | None,
    require: Callable[[str], None] = lambda model_ref: None,
    report: Told,
) -> Record:
    """Give the traffic to the model before; returns its record. Needs the endpoint's lock.

    `taken` is the time of a deploy that was asked to go back: when it did, that is all. `require` raises for a model that must
    not serve, by its reference, before anything is done. Raises ValueError and JobFailed.
    """
    if change := changes.open_change():
        settle(LocalTraffic(endpoint, change.begun, report=report), changes)
    record: Record | None = read_json(endpoint / "endpoint.json")
    last = changes.last_change()
    if record and taken and last and last.begun["time"] == taken and last.last("reverted"):
        return record
    if not record or not record.get("previous"):
        raise ValueError(f"no model stood before the one that endpoint/{endpoint.name} serves: there is no way back")
    require(record["previous"]["model_ref"])
    return _swap(endpoint, changes, record, reason=reason, report=report)


def _swap(endpoint: Path, changes: Journal, record: Record, *, reason: str, report: Told) -> Record:
    before: Record = {**record["previous"], "port": record["port"], "url": record["url"]}
    if before.get("settings", "") != record.get("settings", ""):  # its servers have its own, the gateway the other's
        before["settings"] = MIXED
    settings = read_json(endpoint / "gateway" / "gateway.json") or {}
    config = {
        "keep_warm_seconds": _keep_warm(endpoint, changes),
        "max_error_share": 1.0,
        "gateway": {name: settings[name] for name in ("limits", "access") if name in settings},
    }
    changes.begin(what="rollback", blue=record, green=before, config=config, reason=reason)
    change = changes.open_change()
    assert change is not None
    traffic = LocalTraffic(endpoint, change.begun, report=report)
    try:
        _have_running(endpoint, before)
    except HeadwayError as error:
        give_back(traffic, changes, why=str(error))
        raise
    output = {"server": Path(before["folder"]).name, "model_ref": before["model_ref"], "port": before["port"]}
    take_over(traffic, changes, report=lambda event, details: report(event, {**output, **details}))
    done: Record = read_json(endpoint / "endpoint.json")
    return done


def _have_running(endpoint: Path, record: Record) -> None:
    """The server of the model before, kept warm or started again; returns once it has proven itself."""
    folder = Path(record["folder"])
    if not (folder / "process.json").exists():
        raise JobFailed(
            f"the server of {record['model_ref']} is gone",
            failure="missing",
            folder=str(folder),
            remedy="Deploy it again: `headway retrain` with its settings.",
        )
    candidate = Candidate(endpoint.name, folder.name, folder, record["model_ref"], port_of(folder), None)
    if not runs(folder):
        process.start(folder, ProcessSpec(**read_json(folder / "process.json")))
    output = read_json(folder / "serve.json")
    patience = float(output.get("start_timeout_seconds", START_SECONDS))
    await_ready(candidate, timeout=start_limit(output.get("files"), patience=patience), again=True)


def _keep_warm(endpoint: Path, changes: Journal) -> float:
    """As the last deploy wanted it."""
    begun = [line for line in changes.lines() if line["event"] == "begin"]
    return float(begun[-1]["config"]["keep_warm_seconds"]) if begun else 0.0
