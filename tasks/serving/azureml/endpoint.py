"""An endpoint on Azure ML: a managed online endpoint, a deployment for each of two colours, and our journal beside them.

`ROOT/NAME/endpoint.json` names the model in service, `azureml.json` says where it runs, `journal.jsonl` what is being changed.
What is put is render.py; how a model takes the traffic, tasks/serving/rollout.py and rollout.py. See docs/azureml.md.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import open_files, rest
from tasks.azure.datastore import Datastore
from tasks.common.errors import HeadwayError, JobFailed
from tasks.common.process import read_json, write_json
from tasks.config.base import config_digest
from tasks.config.serving import DeploymentConfig
from tasks.formats.model_folder import quantiles_of
from tasks.serving.azureml.probes import ask_golden
from tasks.serving.azureml.render import (
    COLOURS,
    Rendering,
    autoscale,
    model_name,
    model_prefix,
    require_complete,
    scales,
    scaling_name,
)
from tasks.serving.azureml.rollout import AzureTraffic, Record, delete_deployment, delete_endpoint, online_of
from tasks.serving.endpoint import Candidate, Journal, Served, ServedFrom, served
from tasks.serving.journal import Journal as Changes
from tasks.serving.journal import remember_refused
from tasks.serving.local.rollout import ask_for_traffic_back
from tasks.serving.rollout import finish, give_back, roll_out, settle
from tasks.serving.servers import ask_back

PORT = 443
log = logging.getLogger("headway.azureml")


class AzureMlEndpoint:
    """A ServingEndpoint. State is in the folder and in the workspace; two objects of one name are the same endpoint."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root.absolute() / name
        self.changes = Changes(self.folder / "journal.jsonl")
        self._record = self.folder / "endpoint.json"

    def observe(self) -> Served | None:
        """What is served now; None when the endpoint is gone, or nothing on it has traffic."""
        record: Record | None = read_json(self._record)
        if not record:
            return None
        result = online_of(record).endpoint(record["azure_name"])
        traffic = (result or {}).get("properties", {}).get("traffic") or {}
        if not result or not traffic:
            return None
        deployment = online_of(record).deployment(record["azure_name"], record["colour"]) or {"properties": {}}
        up = deployment["properties"].get("provisioningState") == "Succeeded"
        ready = up and traffic.get(record["colour"]) == 100
        return served(self.name, record, ready=ready)

    def serves_from(self) -> ServedFrom | None:
        """See ServingEndpoint.serves_from. The files are those here; the server there compares its own at each start."""
        record = read_json(self._record)
        started = read_json(Path(record["folder"]) / "serve.json") if record else None
        if not started:
            return None
        files = tuple(started["files"])
        return ServedFrom(str(record["model_ref"]), Path(started["model_folder"]), files, running=False)

    def start(
        self,
        model_folder: Path,
        model_ref: str,
        *,
        files: Sequence[Mapping[str, Any]],
        golden: Mapping[str, Any],
        timeout: float,
        port: int | None = None,
        threads: int = 1,
        config: DeploymentConfig | None = None,
        inputs: Sequence[str] = (),
        barred: str = "",
        journal: Journal | None = None,
    ) -> Candidate:
        """See ServingEndpoint.start. How long it may take is `azureml.create_minutes`; `port` and `threads` are the service's."""
        assert config is not None
        require_complete(config.azureml)
        self.settle()
        azureml = config.azureml
        online = online_of({"azureml": azureml.model_dump(mode="json")})
        made, record = Rendering(self.name, config, azureml.location or online.location()), read_json(self._record)
        green = self._green(made, model_ref, record)
        candidate = Candidate(
            self.name, Path(green["folder"]).name, Path(green["folder"]), model_ref, PORT, PORT, config, barred
        )
        body = made.deployment_body(green["colour"], model_ref, files=files, inputs=inputs)
        payload = {
            "model_folder": str(model_folder.absolute()),
            "model_ref": model_ref,
            "files": [dict(f) for f in files],
        }
        write_json(candidate.folder / "serve.json", payload, seal=True)
        write_json(
            self.folder / "azureml.json", {"azureml": green["azureml"], "azure_name": green["azure_name"]}, seal=True
        )
        blue = {key: value for key, value in record.items() if key != "previous"} if record else None
        warm = {"keep_warm_seconds": config.rollout.keep_warm_seconds}
        self.changes.begin(what="deploy", blue=blue, green=green, config=warm)
        _tell(journal, "starting", server=candidate.server, model_ref=model_ref, folder=str(candidate.folder))
        traffic = self._traffic()
        try:
            self._bring_up(made, traffic, body, model_folder)
            _tell(journal, "answering", server=candidate.server, prompts=len(golden["prompts"]))
            self._prove(traffic, golden)
        except BaseException as error:
            try:
                give_back(traffic, self.changes, why=str(error) or type(error).__name__)
            except (HeadwayError, ValueError) as second:
                # What cannot be taken back now, since the service does not answer, the next start takes back.
                log.warning("%s is taken back at the next start: %s", traffic.green["azure_name"], second)
            raise
        return candidate

    def switch(self, candidate: Candidate, *, journal: Journal | None = None) -> Served:
        """See ServingEndpoint.switch."""
        begun = self.changes.open_change()
        if begun is None or begun.begun["green"]["folder"] != str(candidate.folder):
            raise ValueError(
                f"{candidate.server} is no candidate of {self.name} any more: another deploy came in between"
            )
        traffic = self._traffic()
        green = traffic.green
        details = {"server": candidate.server, "model_ref": candidate.model_ref, "deployment": green["colour"]}

        def told(event: str, more: dict[str, Any]) -> None:
            _tell(journal, event, **details, **more)

        if candidate.config and traffic.has_both():
            folder = Path(read_json(candidate.folder / "serve.json")["model_folder"])
            reference = quantiles_of(read_json(folder / "reference.json"))
            rollout, barred = candidate.config.rollout, candidate.barred
            roll_out(traffic, rollout, self.changes, reference=reference, barred=barred, report=told)
        else:
            self.changes.write("commit")
            told("switched", {})
            finish(traffic, self.changes)
        return served(self.name, green)

    def ask_back(self, reason: str) -> float | None:
        """See ServingEndpoint.ask_back."""
        return ask_for_traffic_back(self.folder, reason)

    def go_back(
        self,
        reason: str,
        *,
        taken: float | None = None,
        require: Callable[[str], None] = lambda model_ref: None,
        journal: Journal | None = None,
    ) -> Served:
        """See ServingEndpoint.go_back: one PUT while the deployment before is kept warm, refused once it was deleted."""
        self.settle()
        record: Record | None = read_json(self._record)
        last = self.changes.last_change()
        if record and taken and last and last.begun["time"] == taken and last.last("reverted"):
            return served(self.name, record)
        before = (record or {}).get("previous")
        if not record or not before:
            raise ValueError(f"no model stood before the one that endpoint/{self.name} serves: there is no way back")
        require(before["model_ref"])
        if online_of(record).deployment(before["azure_name"], before["colour"]) is None:
            raise JobFailed(
                f"the deployment of {before['model_ref']} was deleted after rollout.keep_warm_seconds",
                failure="missing",
                folder=str(self.folder),
                remedy="Deploy it again: `headway retrain` with its settings.",
            )
        warm = self.changes.last_change()
        self.changes.begin(what="rollback", blue=record, green=before, config=warm.begun["config"] if warm else {})
        remember_refused(self.folder, record["model_ref"], reason)
        self.changes.write("commit")
        _tell(journal, "switched", model_ref=before["model_ref"], deployment=before["colour"])
        finish(self._traffic(), self.changes)
        return served(self.name, before)

    def settle(self) -> str | None:
        """See ServingEndpoint.settle."""
        return settle(self._traffic(), self.changes) if self.changes.open_change() else None

    def tidy(self, now: float) -> list[str]:
        """Delete what is over: the model before, once it was kept warm, and a test endpoint that expired. What it deleted.

        Needs the endpoint's lock: nobody is at work on it.
        """
        record: Record | None = read_json(self._record)
        if not record or self.changes.open_change():
            return []
        online, name = online_of(record), record["azure_name"]
        if 0 < float(record.get("expires") or 0) < now:
            delete_endpoint(online, record)
            self._record.unlink()
            return [name]
        before = record.get("previous") or {}
        if not before.get("until") or before["until"] > now:
            return []
        delete_deployment(online, before)
        write_json(self._record, {key: value for key, value in record.items() if key != "previous"}, seal=True)
        return [f"{name}/{before['colour']}"]

    def stop(self, *, journal: Journal | None = None) -> None:
        """See ServingEndpoint.stop: the managed endpoint is deleted, for what stands there costs money."""
        record: Record | None = read_json(self._record)
        if record:
            _tell(journal, "stopped", server=Path(record["folder"]).name, model_ref=record["model_ref"])
        begun = record or read_json(self.folder / "azureml.json")  # of a first deploy that did not end well
        if begun:
            delete_endpoint(online_of(begun), begun)

    def _green(self, made: Rendering, model_ref: str, record: Record | None) -> Record:
        """The record of a model that is to be; its address is known once the endpoint is there."""
        colour = next(colour for colour in COLOURS if not record or colour != record["colour"])
        mark = f"{colour}-{model_name(model_ref)[1]}"
        hours = made.config.expires_hours
        return {
            "name": self.name,
            "backend": "azureml",
            "url": record["url"] if record else "",
            "port": PORT,
            "model_ref": model_ref,
            "folder": str(self.folder / "servers" / mark),
            "colour": colour,
            "azure_name": made.name,
            "azureml": made.config.model_dump(mode="json"),
            "settings": config_digest(made.deployment),
            "expires": time.time() + hours * 3600 if hours else 0.0,
        }

    def _bring_up(self, made: Rendering, traffic: AzureTraffic, body: dict[str, Any], model_folder: Path) -> None:
        """Have the endpoint, the assets and green's deployment; what is there already, and is the same, is taken as it is."""
        green, online = traffic.green, online_of(traffic.green)
        name, colour, ref = green["azure_name"], green["colour"], green["model_ref"]
        files, prefix = open_files(made.config.store), model_prefix(ref)
        for path in sorted(one for one in model_folder.rglob("*") if one.is_file()):
            files.put_once(
                f"{prefix}/files/{path.relative_to(model_folder).as_posix()}", partial(shutil.copyfile, path)
            )
        datastore = Datastore(made.config, files.uri)
        online.put_datastore(datastore)
        model, image = made.model(ref, datastore.address(prefix, by_id=True)), made.environment()
        online.put_asset("models", str(model.name), str(model.version), rest(model._to_rest_object()))
        online.put_asset("environments", str(image.name), str(image.version), rest(image._to_rest_object()))
        if online.settled(partial(online.endpoint, name)) is None:
            online.put_endpoint(name, made.endpoint_body(expires=green["expires"] or None))
        existing = online.settled(partial(online.deployment, name, colour))
        if existing is not None:
            up = existing["properties"].get("provisioningState") == "Succeeded"
            if not up or (existing.get("tags") or {}).get("headway.spec") != body["tags"]["headway.spec"]:
                online.delete_deployment(name, colour)
                existing = None
        if existing is None:
            online.put_deployment(name, colour, body, asked_back=partial(ask_back, self.folder))
        if scales(made.config):
            online.put_scaling(scaling_name(name, colour), autoscale(made, colour))

    def _prove(self, traffic: AzureTraffic, golden: Mapping[str, Any]) -> None:
        """Every golden prompt, past the split; where the endpoint answers is told by the service."""
        green, online = traffic.green, online_of(traffic.green)
        url = str((online.endpoint(green["azure_name"]) or {"properties": {}})["properties"].get("scoringUri", ""))
        write_json(Path(green["folder"]) / "scoring.json", {"url": url}, seal=True)
        green["url"] = url
        ask_golden(
            url,
            golden["prompts"],
            secret=online.secret(green["azure_name"], auth=green["azureml"]["auth"]),
            deployment=green["colour"],
            model_ref=green["model_ref"],
            folder=green["folder"],
        )

    def _traffic(self) -> AzureTraffic:
        change = self.changes.open_change()
        assert change is not None
        green = change.begun["green"]
        payload = read_json(Path(green["folder"]) / "scoring.json") or {}
        return AzureTraffic(
            self.folder, {**change.begun, "green": {**green, "url": payload.get("url") or green["url"]}}
        )


def _tell(journal: Journal | None, event: str, **details: Any) -> None:
    if journal is not None:
        journal(event, details)
