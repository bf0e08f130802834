"""Tells the events of one spool to MLflow, in order; a program of its own (`python -m tasks.lineage.publish FOLDER`).

It notes how far it came after every batch, so it can be killed and started again; while the tracking server is away it tries
again, and gives up after a while without losing anything. Nothing else imports mlflow.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Dataset as MlflowDataset
from mlflow.entities import DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException, RestException

from tasks import process

EXPERIMENT = "headway"
POLL_SECONDS = 0.2
RETRY_SECONDS = 2.0
PATIENCE_SECONDS = 600.0
PARAM_LENGTH = 5000


class Publisher:
    """Applies events. State on disk: the offset into the events, and MLflow's id of each of our runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = process.read_json(folder / "published.json") or {"offset": 0, "runs": {}}
        self.offset: int = state["offset"]
        self.runs: dict[str, dict[str, str]] = state["runs"]
        self.open: set[str] = set(state.get("open", []))
        self.writer: dict[str, Any] = state.get("writer", {})
        self.tracking_uri: str = state.get("tracking_uri", "")
        self.client: mlflow.MlflowClient = mlflow.MlflowClient(self.tracking_uri) if self.tracking_uri else None
        self.closed = False

    def follow(self) -> None:
        """Publish until the spool is closed, or its writer is dead and every event is told."""
        since = time.monotonic()
        while not self.closed:
            alive = process.alive(self.writer) if self.writer else True
            try:
                moved = self._batch()
            except (MlflowException, OSError) as error:
                if not self.folder.is_dir():
                    return
                if time.monotonic() - since > PATIENCE_SECONDS:
                    print(f"no answer: {error}; `headway lineage --sync` goes on later", file=sys.stderr)
                    return
                time.sleep(RETRY_SECONDS)
                continue
            since = time.monotonic()
            if not moved and not alive:
                self._bury()
                break
            if not moved:
                time.sleep(POLL_SECONDS)
        (self.folder / "done").touch()

    def _batch(self) -> bool:
        with open(self.folder / "events.jsonl", "rb") as file:
            file.seek(self.offset)
            lines = [line for line in file if line.endswith(b"\n")]
        for line in lines:
            self._apply(json.loads(line))
            self.offset += len(line)
            self._save()
        return bool(lines)

    def _save(self) -> None:
        state = {"offset": self.offset, "runs": self.runs, "open": sorted(self.open), "writer": self.writer}
        process.write_json(self.folder / "published.json", {**state, "tracking_uri": self.tracking_uri})

    def _apply(self, event: dict[str, Any]) -> None:
        getattr(self, f"_on_{event['event']}")(event)

    def _on_open(self, event: dict[str, Any]) -> None:
        self.writer, self.tracking_uri = event["writer"], event["tracking_uri"]
        if self.tracking_uri.startswith("sqlite:///"):
            Path(self.tracking_uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self.client = mlflow.MlflowClient(self.tracking_uri)

    def _on_start_run(self, event: dict[str, Any]) -> None:
        experiment = self._experiment()
        found = self.client.search_runs([experiment], f"tags.`headway.run` = '{event['run']}'", max_results=1)
        tags = {**event["tags"], "headway.run": event["run"]}
        if event["parent"]:
            tags["mlflow.parentRunId"] = self.runs[event["parent"]]["id"]
        run = (
            found[0]
            if found
            else self.client.create_run(experiment, start_time=event["time"], tags=tags, run_name=event["name"])
        )
        self.runs[event["run"]] = {"id": run.info.run_id, "experiment": experiment}
        self.open.add(event["run"])
        params = [Param(key, str(value)[:PARAM_LENGTH]) for key, value in event["params"].items()]
        self.client.log_batch(run.info.run_id, params=params)

    def _on_inputs(self, event: dict[str, Any]) -> None:
        inputs = [
            DatasetInput(
                MlflowDataset(i["name"], i["digest"][:36], "headway", json.dumps({"uri": i["uri"], "ref": i["ref"]})),
                [InputTag("mlflow.data.context", i["kind"])],
            )
            for i in event["inputs"]
        ]
        self.client.log_inputs(self._id(event), inputs)

    def _on_metrics(self, event: dict[str, Any]) -> None:
        metrics = [Metric(key, value, event["time"], step) for key, value, step in event["metrics"]]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self._id(event), metrics=metrics[start : start + 1000])

    def _on_file(self, event: dict[str, Any]) -> None:
        if Path(event["path"]).is_file():
            self.client.log_artifact(self._id(event), event["path"])

    def _on_register(self, event: dict[str, Any]) -> None:
        try:
            self.client.create_registered_model(event["name"])
        except (MlflowException, RestException) as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = self._source(event)
        known = [v for v in self.client.search_model_versions(f"name='{event['name']}'") if v.source == source]
        version = known[0] if known else self._new_version(event, source)
        self.client.set_registered_model_alias(event["name"], event["alias"], version.version)

    def _new_version(self, event: dict[str, Any], source: str) -> Any:
        tags = {**event["tags"], "headway.uri": event["uri"]}
        return self.client.create_model_version(event["name"], source=source, run_id=self._id(event), tags=tags)

    def _source(self, event: dict[str, Any]) -> str:
        """A server refuses local paths outside of its own files: there, the source is our reference."""
        foreign = event["uri"].startswith("file:") and not self.tracking_uri.startswith("sqlite:///")
        return f"headway:///{event['tags']['headway.ref']}" if foreign else str(event["uri"])

    def _on_end_run(self, event: dict[str, Any]) -> None:
        tags = [RunTag(key, value) for key, value in event["tags"].items()]
        self.client.log_batch(self._id(event), tags=tags)
        self.client.set_terminated(self._id(event), status=event["status"], end_time=event["time"])
        self.open.discard(event["run"])

    def _on_close(self, event: dict[str, Any]) -> None:
        self.closed = True

    def _bury(self) -> None:
        """Runs whose orchestrator died do not stay Running."""
        for run in sorted(self.open):
            self.client.set_terminated(self.runs[run]["id"], status="KILLED")
        self.open.clear()
        self._save()

    def _id(self, event: dict[str, Any]) -> str:
        return self.runs[event["run"]]["id"]

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self.client.get_experiment_by_name(name)
        if found:
            return str(found.experiment_id)
        place = self._artifact_root()
        return str(self.client.create_experiment(name, artifact_location=place))

    def _artifact_root(self) -> str | None:
        """With a database file, attached files lie beside it; a server decides for itself."""
        if not self.tracking_uri.startswith("sqlite:///"):
            return None
        return (Path(self.tracking_uri.removeprefix("sqlite:///")).parent / "artifacts").as_uri()


if __name__ == "__main__":
    Publisher(Path(sys.argv[1])).follow()
