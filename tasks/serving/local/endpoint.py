"""An endpoint on this machine: a gateway on its port, supervised server processes behind it, and a journal.

`ROOT/NAME/endpoint.json` names the model in service; `routes.json` says who gets which share of the requests, `journal.jsonl`
what is being changed. How servers run is tasks/serving/servers.py; how a model takes the traffic, tasks/serving/rollout.py and
rollout.py; going back, rollout.py; requests are in tasks/serving/client.py. Deploys of one endpoint at a time are the caller's
business.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.process import read_json, write_json
from tasks.config.base import config_digest
from tasks.config.serving import DeploymentConfig
from tasks.formats.model_folder import quantiles_of, smaller_rungs
from tasks.serving.client import ready_state
from tasks.serving.endpoint import Candidate, Journal, Served, ServedFrom, served
from tasks.serving.gateway import Gateway
from tasks.serving.journal import Journal as Changes
from tasks.serving.keys import require_guarded
from tasks.serving.local.rollout import LocalTraffic, Record, ask_for_traffic_back, go_back
from tasks.serving.protocol.routes import COLOURS, make_secret, other
from tasks.serving.rollout import give_back, roll_out, settle, take_over
from tasks.serving.servers import (
    HOST,
    POLL_SECONDS,
    ask_back,
    ask_golden,
    await_ready,
    barring,
    free_port,
    port_free,
    runs,
    servers_of,
    spec_of,
    start_limit,
    stop_strays,
    stopping_on_failure,
)
from tasks.serving.vllm import settings_of

STOP_SECONDS = 30.0
TAKE_BACK_SECONDS = 5.0


class LocalEndpoint:
    """The local ServingEndpoint. All state is in the folder; two objects of one name are the same endpoint."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root.absolute() / name
        self.changes = Changes(self.folder / "journal.jsonl")
        self._record = self.folder / "endpoint.json"
        self._gateway = Gateway(self.folder)
        self._held = ExitStack()
        """A port that was found free, until the gateway has it."""

    def observe(self) -> Served | None:
        """What is served now; None when no server runs, and none would be started for a request."""
        record = read_json(self._record)
        if not record or not self._in_service(record):
            return None
        state = ready_state(record["url"]) or {}
        answers = bool(state.get("ready")) and state.get("model") == record["model_ref"]
        return served(self.name, record, ready=answers or self._asleep(record))

    def serves_from(self) -> ServedFrom | None:
        """See ServingEndpoint.serves_from."""
        record = read_json(self._record)
        started = read_json(Path(record["folder"]) / "serve.json") if record else None
        if not started:
            return None
        return ServedFrom(
            model_ref=str(record["model_ref"]),
            folder=Path(started["model_folder"]),
            files=tuple(started.get("files", ())),
            running=self._in_service(record),
            by_vllm=bool(started.get("vllm")),
        )

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
        """See ServingEndpoint.start."""
        self.settle()
        self._stop_strays()
        # The port that is asked for, or else the one before, must be free, or be this endpoint's own.
        record = read_json(self._record) or {}
        wanted = port or record.get("port")
        ours = record and record["port"] == wanted and (self._gateway.running or self._in_service(record))
        if wanted and not ours:
            port_free(wanted)
        require_guarded((config or DeploymentConfig()).access, self.folder)
        (self.folder / "abort.json").unlink(missing_ok=True)  # it was about a deploy that is over
        server = uuid.uuid4().hex[:8]
        folder = self.folder / "servers" / server
        with free_port() as private_port:
            candidate = Candidate(self.name, server, folder, model_ref, private_port, port, config, barred)
            self.changes.begin(**self._change(candidate))
            _tell(journal, "starting", server=server, model_ref=model_ref, folder=str(folder))
            settings = {
                "model_folder": str(model_folder.absolute()),
                "model_ref": model_ref,
                "endpoint": self.name,
                "files": [dict(file) for file in files],
                "threads": threads,
                "outputs": str(outputs_of(self.folder, model_ref)),
                "port": private_port,
                "start_timeout_seconds": timeout,
                "secret": str(make_secret(self.folder)) if self._gateway.shows_secret else None,
                **self._asked_of_servers(model_folder, candidate, files),
            }
            write_json(folder / "serve.json", settings, seal=True)
            by_vllm = settings_of(config) if config else None
            limit = start_limit(files, patience=max(timeout, by_vllm["start_seconds"]) if by_vllm else timeout)
            try:
                with stopping_on_failure(folder):
                    process.start(folder, spec_of(folder))
                    await_ready(candidate, timeout=limit, asked_back=lambda: ask_back(self.folder))
                    _tell(journal, "answering", server=server, prompts=len(golden["prompts"]))
                    ask_golden(candidate, golden)
            except BaseException as error:
                give_back(self._traffic(), self.changes, why=str(error) or type(error).__name__)
                raise
        return candidate

    def switch(self, candidate: Candidate, *, journal: Journal | None = None) -> Served:
        """See ServingEndpoint.switch. Raises JobFailed or Missing when the gateway does not follow; the old one stays."""
        begun = self.changes.open_change()
        if begun is None or begun.begun["green"]["folder"] != str(candidate.folder):
            raise ValueError(
                f"{candidate.server} is no candidate of {self.name} any more: another deploy came in between"
            )
        traffic = self._traffic(journal)
        port = int(traffic.green["port"])
        details = {"server": candidate.server, "model_ref": candidate.model_ref, "port": port}

        def told(event: str, more: dict[str, Any]) -> None:
            _tell(journal, event, **details, **more)

        if candidate.config and traffic.blue and runs(Path(traffic.blue["folder"])):
            reference = read_json(Path(read_json(candidate.folder / "serve.json")["model_folder"]) / "reference.json")
            rollout, usual = candidate.config.rollout, quantiles_of(reference)
            roll_out(traffic, rollout, self.changes, reference=usual, barred=candidate.barred, report=told)
        else:
            take_over(traffic, self.changes, report=told)
        self._held.close()
        self._stop_strays()
        return served(self.name, traffic.green)

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
        """See ServingEndpoint.go_back."""
        report = journal or (lambda event, details: None)
        record = go_back(self.folder, self.changes, reason=reason, taken=taken, require=require, report=report)
        return served(self.name, record)

    def settle(self) -> str | None:
        """See ServingEndpoint.settle."""
        return settle(self._traffic(), self.changes) if self.changes.open_change() else None

    def stop(self, *, journal: Journal | None = None) -> None:
        """See ServingEndpoint.stop. The gateway first: what it has begun, the servers still finish."""
        # Whoever deploys would start again what is stopped. One that died ends nothing, and is not waited for long.
        why = "the endpoint is being stopped"
        deadline = time.monotonic() + TAKE_BACK_SECONDS
        while self.ask_back(why) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        record = read_json(self._record) or {}
        if record:
            _tell(journal, "stopped", server=Path(record["folder"]).name, model_ref=record["model_ref"])
        self._gateway.stop()
        for folder in servers_of(self.folder):
            process.stop(folder, timeout=STOP_SECONDS)

    def _traffic(self, journal: Journal | None = None) -> LocalTraffic:
        change = self.changes.open_change()
        assert change is not None
        return LocalTraffic(self.folder, change.begun, report=lambda event, details: _tell(journal, event, **details))

    def _change(self, candidate: Candidate) -> dict[str, Any]:
        """The first line of a deploy: all that finishing or reverting it needs."""
        before: Record | None = read_json(self._record)
        port = candidate.public_port or (before["port"] if before else self._held.enter_context(free_port()))
        green = {
            "name": self.name,
            "port": port,
            "url": f"http://{HOST}:{port}",
            "model_ref": candidate.model_ref,
            "folder": str(candidate.folder),
            "colour": other(before.get("colour", COLOURS[0])) if before else COLOURS[0],
            "settings": config_digest(candidate.config) if candidate.config else "",
        }
        blue = {**before, "colour": before.get("colour", COLOURS[0])} if before else None
        config = candidate.config or DeploymentConfig()
        return {
            "what": "deploy",
            "blue": blue,
            "green": green,
            "config": {
                "keep_warm_seconds": candidate.config.rollout.keep_warm_seconds if candidate.config else 0.0,
                "max_error_share": config.rollout.max_error_share,
                "gateway": {
                    "limits": config.limits.model_dump(mode="json"),
                    "access": config.access.model_dump(mode="json"),
                },
            },
        }

    def _asked_of_servers(
        self, model_folder: Path, candidate: Candidate, files: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """What the settings say of servers, for serve.json."""
        if candidate.config is None:
            return {}
        config = candidate.config
        return {
            "limits": config.limits.model_dump(mode="json"),
            "answers": config.answers.model_dump(mode="json"),
            "replicas": config.replicas.model_dump(mode="json"),
            "vllm": settings_of(config),
            "ladder": self._ladder(model_folder, candidate.model_ref, files, barred=candidate.barred)
            if config.degrade
            else [],
        }

    def _ladder(
        self, folder: Path, ref: str, files: Sequence[Mapping[str, Any]], *, barred: str
    ) -> list[dict[str, Any]]:
        """What answers when the model cannot: the one that is in service now, unless barred, then the new one's variants."""
        before = self.serves_from()
        plain = (
            before is not None and not before.by_vllm
        )  # two of vLLM do not fit on one GPU beside the one that takes over
        older = before if before and before.files and before.model_ref != ref and not barred and plain else None
        previous = {
            "name": "previous",
            "model_ref": older.model_ref,
            "folder": str(older.folder),
            "files": [dict(file) for file in older.files],
            "unless": str(barring(self.folder, older.model_ref)),
        } if older else None  # fmt: skip
        return [*([previous] if previous else []), *smaller_rungs(folder, ref, files)]

    def _in_service(self, record: Record) -> bool:
        folder = Path(record["folder"])
        old = (folder / "public.json").exists()  # of a release before this one: it holds the port itself
        return (runs(folder) and (old or self._gateway.running)) or self._asleep(record)

    def _asleep(self, record: Record) -> bool:
        """Whether nobody asked for so long that there is no server: the next request starts one."""
        state = self._gateway.state() if self._gateway.running and not runs(Path(record["folder"])) else None
        return bool(state and state["colours"].get(record["colour"], {}).get("asleep"))

    def _stop_strays(self) -> None:
        """Servers that are neither in service nor what stood before, which may be needed for the way back."""
        record = read_json(self._record) or {}
        kept = [record.get("folder"), (record.get("previous") or {}).get("folder")]
        stop_strays(self.folder, [folder for folder in kept if folder])


def outputs_of(endpoint: Path, model_ref: str) -> Path:
    """Where an endpoint's servers write what they measure of a model's answers. Not in a server's folder: that goes with it."""
    return endpoint / "outputs" / model_ref.rpartition("@")[2]


def _tell(journal: Journal | None, event: str, **details: Any) -> None:
    if journal is not None:
        journal(event, details)
