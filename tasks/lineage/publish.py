"""Tells the events of one spool to MLflow, in order; a program of its own (`python -m tasks.lineage.publish FOLDER`).

It notes how far it came after every event, so it can be killed and started again; while the tracking server is away, or the
database is locked, it tries again, and gives up after a while without losing anything. An event that MLflow refuses for good is
laid into `refused.jsonl`, and the next one is told. Beside it, only database.py and server.py import mlflow.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Dataset as MlflowDataset
from mlflow.entities import DatasetInput, InputTag, LoggedModelOutput, LoggedModelStatus, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from tasks.common import process
from tasks.lineage.database import SCHEME, artifact_root, prepare
from tasks.lineage.messages import RUN_PAGE
from tasks.lineage.spool import EXPERIMENT

POLL_SECONDS = 0.2
RETRY_SECONDS = 2.0
PATIENCE_SECONDS = 600.0
TEXT_LENGTH = 5000
"""Of a parameter or a tag: what every tracking server takes."""
NOTE = "mlflow.note.content"
DIGEST_LENGTH = 36
"""Of a dataset: what a server takes."""
AWAITED = "headway.previous_ref"
"""Tag of a registered model: the version that the alias `previous` is to have once it is told."""
REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST")
"""What comes back however often the same event is told. A wrong password or a missing server is none of these."""
POINTS_AT_ONCE = 1000
"""What MLflow takes in one call."""
LOADABLE = "models:/"
"""How the source of a version begins that MLflow can open; an older release wrote the place in our store."""
REFUSED_UPLOADS = (400, 403, 404, 405, 413)
"""HTTP's answers to an upload that come back however often it is tried."""
UNKNOWN_THERE = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED")
"""What a server without models of MLflow 3 answers."""
Told = tuple[dict[str, Any], int]
"""An event, and its length in the spool in bytes."""


class RefusedError(Exception):
    """An event that cannot be told because an earlier one was refused."""


class Publisher:
    """Applies events. State on disk: the offset into the events, and MLflow's id of each of our runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder.parents[1]
        state = process.read_json(folder / "published.json") or {"offset": 0, "runs": {}}
        self.offset: int = state["offset"]
        self.runs: dict[str, dict[str, str]] = state["runs"]
        self.open: set[str] = set(state.get("open", []))
        self.writer: dict[str, Any] = state.get("writer", {})
        self.tracking_uri: str = state.get("tracking_uri", "")
        self.experiment: dict[str, str] = state.get("experiment", {"name": EXPERIMENT, "note": ""})
        self.client: mlflow.MlflowClient = _client(self.tracking_uri) if self.tracking_uri else None
        self.closed = False

    def follow(self) -> None:
        """Publish until the spool is closed, or its writer is dead and every event is told."""
        since = time.monotonic()
        while not self.closed:
            alive = process.alive(self.writer) if self.writer else True
            try:
                with open(self.folder / "events.jsonl", "rb") as file:
                    file.seek(self.offset)
                    lines = [line for line in file if line.endswith(b"\n")]
                for group in _grouped([(json.loads(line), len(line)) for line in lines]):
                    self._tell_group(group)
                moved = bool(lines)
            except (MlflowException, SQLAlchemyError, OSError) as error:
                if not self.folder.is_dir():
                    return
                if time.monotonic() - since > PATIENCE_SECONDS:
                    print(f"no answer: {error}; run `headway lineage --sync` again later", file=sys.stderr)
                    return
                time.sleep(RETRY_SECONDS)
                continue
            since = time.monotonic()
            if not moved and not alive:
                # Runs whose orchestrator died do not stay Running.
                for run in sorted(self.open):
                    self.client.set_tag(self.runs[run]["id"], "headway.status", "died")
                    self.client.set_terminated(self.runs[run]["id"], status="KILLED")
                self.open.clear()
                self._save()
                break
            if not moved:
                time.sleep(POLL_SECONDS)
        (self.folder / "done").touch()

    def _tell_group(self, group: list[Told]) -> None:
        """Several small events as one call, for a server that was away is far behind; one by one when that is refused."""
        try:
            if len(group) > 1:
                self._log_metrics([event for event, _ in group])
                return self._advance(sum(size for _, size in group))
        except (RefusedError, MlflowException) as error:
            if getattr(error, "error_code", REFUSED[0]) not in REFUSED:
                raise
        for event, size in group:
            try:
                getattr(self, f"_on_{event['event']}")(event)
            except RefusedError as error:
                self._lay_aside(event, str(error))
            except MlflowException as error:
                if error.error_code not in REFUSED:
                    raise
                self._lay_aside(event, str(error))
            self._advance(size)
        return None

    def _advance(self, size: int) -> None:
        self.offset += size
        self._save()

    def _save(self) -> None:
        state = {"offset": self.offset, "runs": self.runs, "open": sorted(self.open), "writer": self.writer}
        where = {"tracking_uri": self.tracking_uri, "experiment": self.experiment}
        process.write_json(self.folder / "published.json", {**state, **where})

    def _lay_aside(self, event: dict[str, Any], why: str) -> None:
        """Once an event: who is killed here and started again comes back to the same offset."""
        path = self.folder / "refused.jsonl"
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if known and json.loads(known[-1])["offset"] == self.offset:
            return
        print(f"refused: {why}", file=sys.stderr)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"offset": self.offset, "why": why, "event": event}) + "\n")

    def _on_open(self, event: dict[str, Any]) -> None:
        self.writer, self.tracking_uri = event["writer"], event["tracking_uri"]
        self.experiment = {"name": event.get("experiment", EXPERIMENT), "note": event.get("note", "")}
        prepare(self.tracking_uri, self.home)
        self.client = _client(self.tracking_uri)

    def _on_start_run(self, event: dict[str, Any]) -> None:
        experiment = self._experiment()
        result = self.client.search_runs([experiment], f"tags.`headway.run` = '{event['run']}'", max_results=1)
        tags = {key: value[:TEXT_LENGTH] for key, value in event["tags"].items()} | {"headway.run": event["run"]}
        if event["parent"] in self.runs:
            tags["mlflow.parentRunId"] = self.runs[event["parent"]]["id"]
        run = (
            result[0]
            if result
            else self.client.create_run(experiment, start_time=event["time"], tags=tags, run_name=event["name"])
        )
        self.runs[event["run"]] = {"id": run.info.run_id, "experiment": experiment}
        self.open.add(event["run"])
        params = [Param(key, str(value)[:TEXT_LENGTH]) for key, value in event["params"].items()]
        self.client.log_batch(run.info.run_id, params=params, tags=self._tags(event))

    def _on_inputs(self, event: dict[str, Any]) -> None:
        inputs = [
            DatasetInput(
                MlflowDataset(
                    each["name"],
                    each["digest"][:DIGEST_LENGTH],
                    "headway",
                    json.dumps(each.get("source") or {"uri": each["uri"], "ref": each["ref"]}),
                    profile=json.dumps(each["profile"]) if "profile" in each else None,
                ),
                [InputTag("mlflow.data.context", each["kind"])],
            )
            for each in event["inputs"]
        ]
        self.client.log_inputs(self._id(event), inputs)

    def _on_metrics(self, event: dict[str, Any]) -> None:
        self._log_metrics([event])

    def _log_metrics(self, events: list[dict[str, Any]]) -> None:
        metrics = [Metric(key, value, e["time"], step) for e in events for key, value, step in e["metrics"]]
        for start in range(0, len(metrics), POINTS_AT_ONCE):
            self.client.log_batch(self._id(events[0]), metrics=metrics[start : start + POINTS_AT_ONCE])

    def _on_file(self, event: dict[str, Any]) -> None:
        if Path(event["path"]).is_file():
            self.client.log_artifact(self._id(event), event["path"])

    def _on_register(self, event: dict[str, Any]) -> None:
        name = event["name"]
        try:
            self.client.create_registered_model(name, description=event.get("about"))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # MLflow compares nothing when it sets an alias: two publishers that look first and set then would undo each other's.
        with process.locked(self.folder.parent.with_name("lineage.lock")):
            version = self._version(event)
            self._point(name, event, str(version.version))
            # The version before the champion may be told after it, by a spool of its own: then its alias waits for it
            ref = event["tags"].get("headway.ref")
            if ref and self.client.get_registered_model(name).tags.get(AWAITED) == ref:
                self.client.set_registered_model_alias(name, "previous", str(version.version))
                self.client.set_registered_model_tag(name, AWAITED, "")

    def _version(self, event: dict[str, Any]) -> Any:
        """The version of an event's model, made where there is none. One that MLflow can load comes before one that it cannot."""
        # A server refuses local paths outside of its own files: there, the source is our reference
        foreign = event["uri"].startswith("file:") and not self.tracking_uri.startswith(SCHEME)
        place = f"headway:///{event['tags']['headway.ref']}" if foreign else str(event["uri"])
        ref = event["tags"].get("headway.ref")
        versions = self.client.search_model_versions(f"name='{event['name']}'")
        known = [each for each in versions if each.source == place or (ref and each.tags.get("headway.ref") == ref)]
        known.sort(key=lambda each: not each.source.startswith(LOADABLE))
        loadable = bool(known) and known[0].source.startswith(LOADABLE)
        model_id = known[0].source.removeprefix(LOADABLE) if loadable else self._logged_model(event)
        if model_id and "model" in event:
            try:
                self._link_model(event, model_id)
            except MlflowException as error:
                if error.error_code not in (*REFUSED, *UNKNOWN_THERE):
                    raise
                print(f"{event['name']} is registered without what was measured of it: {error}", file=sys.stderr)
        if known and (loadable or not model_id):
            return known[0]
        return self.client.create_model_version(
            event["name"],
            source=f"{LOADABLE}{model_id}" if model_id else place,
            run_id=self._id(event),
            tags={**event["tags"], "headway.uri": event["uri"]},
            description=event.get("note"),
            model_id=model_id,
        )

    def _logged_model(self, event: dict[str, Any]) -> str | None:
        """MLflow's identity of the model of an event, with its folder uploaded.

        None without a folder, and where the server knows no such models: the version is registered all the same.
        """
        if "model" not in event:
            return None
        try:
            return self._log_model(event)
        except (OSError, MlflowException) as error:  # an upload's HTTPError is an OSError
            status = getattr(getattr(error, "response", None), "status_code", None)
            refused = isinstance(error, FileNotFoundError) or status in REFUSED_UPLOADS
            if isinstance(error, MlflowException):
                refused = error.error_code in (*REFUSED, *UNKNOWN_THERE)
            if not refused:
                raise
            print(f"{event['name']} is registered by its place alone: {error}", file=sys.stderr)
            return None

    def _log_model(self, event: dict[str, Any]) -> str:
        from mlflow.models import Model  # it takes seconds to import, and most spools register nothing

        from tasks.lineage.model_folder import write_model_folder

        self._id(event)  # raises RefusedError where the start of the run was laid aside
        known, given = self.runs[event["run"]], event["model"]
        ref = event["tags"].get("headway.ref", "")
        logged = self.client.search_logged_models([known["experiment"]], f"tags.`headway.ref` = '{ref}'", max_results=1)
        model = (
            logged[0]
            if logged
            else self.client.create_logged_model(
                known["experiment"], re.sub(r"[/:.%\"']", "_", event["name"]), known["id"], tags=event["tags"]
            )
        )
        if model.status != LoggedModelStatus.READY:
            with tempfile.TemporaryDirectory(dir=self.folder) as place:
                folder, weights = Path(place) / "model", Path(given["weights"]) if given["weights"] else None
                about = Model(artifact_path=model.artifact_location, run_id=known["id"], model_id=model.model_id)
                write_model_folder(folder, Path(given["path"]), weights=weights, model=about)
                self.client.log_model_artifacts(model.model_id, str(folder))
            self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        return str(model.model_id)

    def _link_model(self, event: dict[str, Any], model_id: str) -> None:
        """Have the model be an output of the run, and carry what was measured of it, each value with the run that measured it."""
        run = self._id(event)
        outputs = self.client.get_run(run).outputs
        if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run, [LoggedModelOutput(model_id, 0)])  # which MLflow refuses the second time
        for measured in event["model"]["measured"]:
            by = self.runs.get(measured["run"], {"id": run})["id"]
            on = measured.get("dataset", {})
            named = {"dataset_name": on["name"], "dataset_digest": on["digest"][:DIGEST_LENGTH]} if on else {}
            # The very points that the run has: another time would be a second point of the same step.
            points = [
                next(iter(self.client.get_metric_history(by, key)[-1:]), Metric(key, value, event["time"], 0))
                for key, value in measured["metrics"].items()
            ]
            metrics = [Metric(p.key, p.value, p.timestamp, p.step, model_id=model_id, **named) for p in points]
            for start in range(0, len(metrics), POINTS_AT_ONCE):
                self.client.log_batch(by, metrics=metrics[start : start + POINTS_AT_ONCE])

    def _point(self, name: str, event: dict[str, Any], version: str) -> None:
        """Move an alias, unless a spool that was told earlier moved it later; with the champion's, what hangs on it."""
        model, alias, since = self.client.get_registered_model(name), event["alias"], str(event["time"])
        before, moved = model.aliases.get(alias), f"headway.{alias}_since"
        if int(model.tags.get(moved, 0)) > int(since):
            return
        if alias == "champion":
            self._point_previous(name, event, version, str(before) if before is not None else "")
            if str(model.aliases.get("challenger")) == version:
                self.client.delete_registered_model_alias(name, "challenger")
        self.client.set_registered_model_alias(name, alias, version)
        self.client.set_registered_model_tag(name, moved, since)

    def _point_previous(self, name: str, event: dict[str, Any], version: str, before: str) -> None:
        """As the event says; one of an older release says nothing: then what the champion's alias pointed to before."""
        if "previous" not in event:
            wanted = before if before != version else ""
        else:
            versions = self.client.search_model_versions(f"name='{name}'") if event["previous"] else []
            known = [each for each in versions if each.tags.get("headway.ref") == event["previous"]]
            known.sort(key=lambda each: not each.source.startswith(LOADABLE))
            wanted = str(known[0].version if known else "")
        if wanted:
            self.client.set_registered_model_alias(name, "previous", wanted)
        elif "previous" in event:
            self.client.delete_registered_model_alias(name, "previous")
        self.client.set_registered_model_tag(name, AWAITED, event.get("previous") or "" if not wanted else "")

    def _on_end_run(self, event: dict[str, Any]) -> None:
        self.client.log_batch(self._id(event), tags=self._tags(event))
        self.client.set_terminated(self._id(event), status=event["status"], end_time=event["time"])
        self.open.discard(event["run"])

    def _on_close(self, event: dict[str, Any]) -> None:
        self.closed = True

    def _id(self, event: dict[str, Any]) -> str:
        if event["run"] not in self.runs:
            raise RefusedError("the start of its run was refused")
        return self.runs[event["run"]]["id"]

    def _tags(self, event: dict[str, Any]) -> list[RunTag]:
        known = self.runs[event["run"]]
        tags = dict(event["tags"])
        if NOTE in tags:
            page = f"#/experiments/{known['experiment']}/runs/{known['id']}"
            tags[NOTE] = tags[NOTE].replace(RUN_PAGE, page)
        return [RunTag(key, value[:TEXT_LENGTH]) for key, value in tags.items()]

    def _experiment(self) -> str:
        """The experiment, made when there is none of the name; one that somebody put away comes back."""
        name, note = self.experiment["name"], self.experiment["note"]
        result = self.client.get_experiment_by_name(name)
        if result is None:
            place = artifact_root(self.tracking_uri, self.home)
            tags = {NOTE: note, "mlflow.experimentKind": "custom_model_development"} if note else {}
            return str(self.client.create_experiment(name, artifact_location=place, tags=tags))
        if result.lifecycle_stage != "active":
            self.client.restore_experiment(result.experiment_id)
        return str(result.experiment_id)


def _client(tracking_uri: str) -> mlflow.MlflowClient:
    """A client; what MLflow itself looks up on the way (`models:/ID` as a source) goes to the same place."""
    mlflow.set_tracking_uri(tracking_uri)
    return mlflow.MlflowClient(tracking_uri)


def _grouped(entries: list[Told]) -> Iterator[list[Told]]:
    """Neighbouring metrics of one run together, as many as one call takes; everything else alone."""
    group: list[Told] = []
    for event, size in entries:
        alike = (
            bool(group) and event["event"] == "metrics" == group[0][0]["event"] and event["run"] == group[0][0]["run"]
        )
        points = sum(len(one["metrics"]) for one, _ in [*group, (event, size)]) if alike else 0
        if group and not (alike and points <= POINTS_AT_ONCE):
            yield group
            group = []
        group.append((event, size))
    if group:
        yield group


if __name__ == "__main__":
    Publisher(Path(sys.argv[1])).follow()
