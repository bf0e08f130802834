"""The traffic of an endpoint on this machine, for tasks/serving/rollout.py: routes for its gateway, and the record of what is in
service.

All that it needs stands in the first line of the change in the journal, so the next deployer can go on where one died. Who is in
service has a colour, and the next model gets the other one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import inf, nextafter
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import HeadwayError, JobFailed
from tasks.common.process import ProcessSpec, read_json, write_json
from tasks.serving.endpoint import Candidate
from tasks.serving.gateway import Gateway
from tasks.serving.journal import Journal, remember_refused
from tasks.serving.protocol.judge import MOST_OLD, Seen
from tasks.serving.protocol.routes import Colour, Place, Routes, read_routes, write_routes
from tasks.serving.rollout import Role, give_back, settle, take_over
from tasks.serving.servers import ask_back, await_ready, port_of, runs, start_limit, stop_server

REMEMBERED_SECONDS = 3600.0
"""Before the rollout, for which the old model's answers count as usual."""
MOST_VALUES = 500
"""Of a measure of answers, the newest."""
Record = dict[str, Any]
"""endpoint.json: name, port, url, model_ref, folder, colour, settings, since, and `previous`, a record without one."""


class LocalTraffic:
    """A TrafficPort. State: since when green's answers count, and what was seen of both until the last look."""

    def __init__(
        self,
        endpoint: Path,
        begun: Mapping[str, Any],
        *,
        report: Callable[[str, dict[str, Any]], None] = lambda event, details: None,
    ) -> None:
        """`begun` is the first line of the change: `blue` and `green`, records, blue may be None, `config`, and what it is."""
        self._endpoint, self._report = endpoint, report
        self.blue: Record | None = begun["blue"]
        self.green: Record = begun["green"]
        self._config: Mapping[str, Any] = begun["config"]
        self._rolled_back: str | None = begun["reason"] if begun.get("what") == "rollback" else None
        """Why a person goes back to green, which stood before blue; None for a deploy."""
        self._gateway = Gateway(endpoint)
        self._blue = _Observed(time.time() - REMEMBERED_SECONDS)
        self._green = _Observed(time.time())

    def set_traffic(self, weights: Mapping[Role, int], *, mirror: int = 0) -> None:
        """See TrafficPort. Of two models of which one has no server, the other one has all of it."""
        roles: dict[Role, Record | None] = {"blue": self.blue, "green": self.green}
        existing = {role: one for role, one in roles.items() if one and _there(one)}
        if not any(weights[role] for role in existing):  # none was in service, and the new one may not be
            return
        shares = dict(weights) if len(existing) > 1 else dict.fromkeys(existing, 100)
        colours = {one["colour"]: self._colour(one, shares[role]) for role, one in existing.items()}
        routes = self._routes(
            colours, self._main(weights, existing), mirror=mirror if len(existing) > 1 else 0, deployer=_me()
        )
        self._carry(routes, any(runs(Path(one["folder"])) for role, one in existing.items() if shares[role]))
        self._green = _Observed(time.time())

    def observe(self) -> Mapping[Role, Seen]:
        """See TrafficPort. Of a gateway that is being started again nothing is lost that was seen at an earlier look."""
        blue, green = (Path(one["folder"]).name if one else "" for one in (self.blue, self.green))
        wanted = {green: self._green.since} | ({blue: self._blue.since} if blue else {})
        seen, state = self._gateway.observed(wanted) or {}, self._gateway.state() or {}
        trip = state.get("tripped") or {}
        lost = str(trip.get("why", "")) if trip.get("server") == green else ""
        lost = lost if self._gateway.running else "the gateway was stopped"
        self._blue.take(seen.get(blue, {}), most=MOST_OLD)
        self._green.take(seen.get(green, {}))
        return {"blue": self._blue.seen, "green": replace(self._green.seen, trip=lost)}

    def asked_back(self) -> str:
        """See TrafficPort."""
        return ask_back(self._endpoint)

    def promote(self) -> None:
        """See TrafficPort. The record first: from then on it is green that is in service."""
        if not self._promoted():
            before = {key: value for key, value in (self.blue or {}).items() if key != "previous"}
            record = {**self.green, "since": time.time(), **({"previous": before} if before else {})}
            write_json(self._endpoint / "endpoint.json", record, seal=True)
        if self.blue and self._rolled_back is not None:
            remember_refused(self._endpoint, self.blue["model_ref"], self._rolled_back)
        warm = float(self._config["keep_warm_seconds"])
        colours = {self.green["colour"]: self._colour(self.green, 100)}
        if self.blue and warm and _there(self.blue):
            colours[self.blue["colour"]] = self._colour(self.blue, 0, until=time.time() + warm)
        if self._gateway.running:
            self._gateway.start(self._config["gateway"])  # what it asks of callers changes with the model
        self._gateway.follow(self._routes(colours, self.green))
        if self.blue and not warm:
            if runs(Path(self.blue["folder"])):
                self._report("stopped", {"server": Path(self.blue["folder"]).name, "model_ref": self.blue["model_ref"]})
            stop_server(Path(self.blue["folder"]))
        (self._endpoint / "abort.json").unlink(missing_ok=True)

    def withdraw(self) -> None:
        """See TrafficPort. Its folder, with its log, stays until the next deploy."""
        if self.blue and _there(self.blue) and read_routes(self._gateway.routes):
            self._gateway.follow(self._routes({self.blue["colour"]: self._colour(self.blue, 100)}, self.blue))
        elif not self.blue:
            self._gateway.stop()
        stop_server(Path(self.green["folder"]))
        (self._endpoint / "abort.json").unlink(missing_ok=True)

    def _promoted(self) -> bool:
        """Whether green is in service already, as when a deployer died after that: blue may be stopped, and is no way back."""
        return bool((read_json(self._endpoint / "endpoint.json") or {}).get("folder") == self.green["folder"])

    def _main(self, weights: Mapping[Role, int], existing: Mapping[Role, Record]) -> Record:
        """Who has the traffic if this deployer dies: not a blue that does not run, as where a stopped endpoint is rolled back."""
        blue = existing.get("blue")
        if blue is None or self._promoted():
            return self.green
        return blue if weights["blue"] or runs(Path(blue["folder"])) else self.green

    def _carry(self, routes: Routes, needed: bool) -> None:
        """Have routes followed, by a gateway that is started where none runs and one is needed; it goes again if it does not.

        A server of an older release that holds the public port itself goes on behind the gateway, which listens there too: the
        kernel gives it the new connections, and what the server had, it finishes.
        """
        servers = [Path(one["folder"]) for one in (self.blue, self.green) if one]
        starts = needed and not self._gateway.running
        if starts:
            write_routes(self._gateway.routes, routes)
            self._gateway.start(self._config["gateway"])
        with ExitStack() as undo:
            if starts:
                undo.callback(self._gateway.stop)
            self._gateway.follow(routes)
            undo.pop_all()
        for folder in servers:  # a server that is started again leaves the port alone
            (folder / "public.json").unlink(missing_ok=True)

    def _routes(
        self,
        colours: Mapping[str, Colour],
        main: Record,
        *,
        mirror: int = 0,
        deployer: Mapping[str, Any] | None = None,
    ) -> Routes:
        before = read_routes(self._gateway.routes)
        return Routes(
            number=(before.number if before else 0) + 1,
            port=int(main["port"]),
            main=main["colour"],
            colours=colours,
            mirror=mirror,
            max_error_share=float(self._config["max_error_share"]),
            deployer=deployer,
        )

    def _colour(self, record: Record, weight: int, *, until: float | None = None) -> Colour:
        folder = Path(record["folder"])
        replicas = (read_json(folder / "serve.json") or {}).get("replicas") or {}
        place = Place(folder.name, port_of(folder))
        return Colour(weight, record["model_ref"], (place,), replicas=replicas, until=until)


class _Observed:
    """What the gateway saw of one model since a time, look by look: it is asked for what is new only."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.seen = Seen()

    def take(self, payload: Mapping[str, Any], *, most: int | None = None) -> None:
        """Add what is new; of times the newest `most` are kept. A gateway of a release before this one tells all of it again."""
        if "latest" not in payload:
            self.seen = Seen(**payload) if payload else replace(self.seen, waiting=())
            return
        before, measures = self.seen, payload["measures"]
        kept = slice(-most if most else None, None)
        self.seen = Seen(
            requests=before.requests + payload["requests"],
            failures=before.failures + payload["failures"],
            first_token=[*before.first_token, *payload["first_token"]][kept],
            seconds_per_token=[*before.seconds_per_token, *payload["seconds_per_token"]][kept],
            waiting=payload["waiting"],
            longest_wait=max(before.longest_wait, payload["longest_wait"]),
            measures={name: [*before.measures.get(name, ()), *new][-MOST_VALUES:] for name, new in measures.items()},
        )
        if payload["latest"] is not None:
            self.since = nextafter(payload["latest"], inf)


def _there(record: Record) -> bool:
    return (Path(record["folder"]) / "serve.json").exists()


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}


# Going back to the model before, on this machine: a change of the journal like a deploy, committed once the traffic is
# there.
#
# Who may roll back, and the audit log, are the caller's business.


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
    before: Record = {**record["previous"], "port": record["port"], "url": record["url"]}
    if before.get("settings", "") != record.get("settings", ""):  # its servers have its own, the gateway the other's
        before["settings"] = MIXED
    settings = read_json(endpoint / "gateway" / "gateway.json") or {}
    begun = [line for line in changes.lines() if line["event"] == "begin"]
    config = {
        "keep_warm_seconds": float(begun[-1]["config"]["keep_warm_seconds"]) if begun else 0.0,
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
