"""What happens, written down as events in order: one folder a flow, `events.jsonl` in it.

No mlflow here: publish.py reads the events in its own process. An event that was appended is never lost; `close` ends a spool.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.redaction import redact, redact_value
from tasks.config.base import copies_weights

EXPERIMENT = "headway"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"}
LOGINS = ("MLFLOW_*", "AZURE_*", "AWS_*", "GOOGLE_*", "DATABRICKS_*")
"""What a publisher may need to be let in: by the tracking server, and by the storage behind it."""
STRUCTURE = ("run", "parent", "path", "writer")
"""What holds the events together, and is ours alone: everything else that leaves for MLflow is redacted first."""
PROMPT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""The publisher tries again by itself every two seconds; the client's own retries stand still for minutes."""


class Spool:
    """Appends the events of one flow, and starts the process that publishes them."""

    def __init__(self, home: Path, tracking_uri: str, *, experiment: str = EXPERIMENT, note: str = "") -> None:
        if redact(tracking_uri) != tracking_uri:
            raise ValueError(
                "MLFLOW_TRACKING_URI holds a password, and addresses are written down: name the server without it, and put user "
                "and password into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        copies_weights()  # a wrong word is refused as the run begins, and not when its model is registered
        self.folder = home / "lineage" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir(parents=True)
        self._events = open(self.folder / "events.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
        self._append("open", tracking_uri=tracking_uri, writer=me, experiment=experiment, note=note)
        start_publisher(self.folder)

    def start_run(self, name: str, *, parent: str | None = None, tags: dict[str, str], params: dict[str, Any]) -> str:
        """Open a run under the name; returns its identity, which MLflow's run carries as tag `headway.run`.

        In the tag `mlflow.note.content`, here and at the end, words.RUN_PAGE becomes the address of the run's page.
        """
        run = uuid.uuid4().hex
        self._append("start_run", run=run, name=name, parent=parent, tags=tags, params=params)
        return run

    def log_inputs(self, run: str, inputs: list[dict[str, Any]]) -> None:
        """Artifacts that a run read, each as words.as_input says it."""
        self._append("inputs", run=run, inputs=inputs)

    def log_metrics(self, run: str, metrics: list[tuple[str, float, int]]) -> None:
        """Values by name and step."""
        if metrics:
            self._append("metrics", run=run, metrics=metrics)

    def log_file(self, run: str, path: Path) -> None:
        """Attach a file to a run; it is read when the event is published."""
        self._append("file", run=run, path=str(path))

    def log_json(self, run: str, name: str, value: Any) -> None:
        """Attach a value as a file; it waits in the spool's own folder until it is published."""
        path = self.folder / "files" / run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(redact(json.dumps(value, indent=1)), encoding="utf-8")
        self.log_file(run, path)

    def register(
        self,
        run: str,
        *,
        name: str,
        uri: str,
        alias: str,
        tags: dict[str, str],
        note: str = "",
        about: str = "",
        previous: str | None = None,
        model: dict[str, Any] | None = None,
    ) -> None:
        """Register a model version and point an alias to it. Whom the champion's alias moves to challenges nobody any more.

        `note` describes the version, `about` the model. `previous` is the reference of the version that the alias of this name
        stands for then; empty: none; None: what the champion's alias pointed to before. `model` is what MLflow makes a model of
        that can be loaded (tasks/registry/logged_model.py); without it, only the name and place are registered.
        """
        output = {"run": run, "name": name, "uri": uri, "alias": alias, "tags": tags, "note": note, "about": about}
        more = {"previous": previous, "model": model}
        self._append("register", **output, **{name: value for name, value in more.items() if value is not None})

    def end_run(self, run: str, status: str, *, tags: dict[str, str]) -> None:
        """Close a run: FINISHED, FAILED or KILLED."""
        self._append("end_run", run=run, status=status, tags=tags)

    def close(self) -> None:
        self._append("close")
        self._events.close()

    def published(self, *, timeout: float) -> dict[str, dict[str, str]]:
        """MLflow's ids of this spool's runs, once all events are published or the time is over."""
        deadline = time.monotonic() + timeout
        while not (self.folder / "done").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        state = process.read_json(self.folder / "published.json") or {}
        runs: dict[str, dict[str, str]] = state.get("runs", {})
        return runs

    def _append(self, event: str, **values: Any) -> None:
        output = {name: value if name in STRUCTURE else redact_value(value) for name, value in values.items()}
        self._events.write(json.dumps({"event": event, "time": int(time.time() * 1000), **output}) + "\n")


def start_publisher(folder: Path) -> None:
    """Have a spool published by a process of its own; starting it twice starts one."""
    spec = process.ProcessSpec(
        argv=[sys.executable, "-m", "tasks.lineage.publish", str(folder)],
        env={**QUIET, **PROMPT},
        secrets=LOGINS,
        log="publish.log",
        restarts=1,
    )
    process.start(folder, spec)


def unpublished(home: Path) -> list[Path]:
    """Spools that still hold events which MLflow does not know, oldest first."""
    results = sorted((home / "lineage").glob("*/events.jsonl"))
    return [path.parent for path in results if not (path.parent / "done").exists()]


def refused(home: Path) -> dict[Path, int]:
    """Files that hold events which MLflow refused for good, each with its count; what else their spools hold was published."""
    results = sorted((home / "lineage").glob("*/refused.jsonl"))
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in results}


def sync(home: Path, *, timeout: float = 60.0) -> list[Path]:
    """Publish what MLflow missed, oldest first; returns the spools that are still behind."""
    deadline = time.monotonic() + timeout
    for folder in unpublished(home):
        start_publisher(folder)
        while not (folder / "done").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    return unpublished(home)
