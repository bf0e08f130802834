"""`headway up` and `headway down`: the whole platform from nothing, and no process of it left.

Parts start in the order in which they need each other; what lives is adopted. Each is a supervised process of its own, so one
that is killed comes back, and `up` itself may die. What was at work when the platform was stopped goes on at the next `up`.
Jobs of this machine stop with it. Jobs elsewhere (Slurm, SSH, Azure ML, a Ray cluster) go on, and are told; the next start of
their run adopts them. What a part is, is deployments/services; what is deployed is deployments/catalogue/flows.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from deployments.bridge.folders import place_of
from deployments.catalogue.flows import POOL, catalogue
from deployments.configuration.platform import PlatformConfig, kept, load_settings
from deployments.services import database, mlflow_server, prefect_server
from deployments.services.parts import LAST_LOOK, PARTS, bridge, watch, worker, worker_name
from deployments.services.starting import SAY_SECONDS, START_SECONDS, Say, end_of_log, enough_room, write_layout
from tasks.common import process
from tasks.common.errors import HeadwayError, Missing
from tasks.common.home import stopped_mark
from tasks.common.process import locked, write_text
from tasks.compute.jobs_book import list_jobs
from tasks.compute.ray.local import stop_local_cluster
from tasks.config.cluster import on_this_machine
from tasks.config.files import Loader, load_with_text, validated
from tasks.orchestration import run_log
from tasks.orchestration.run_log import LoggedRun, logged_runs, note_stopped
from tasks.registry.records import StoreJournal
from tasks.serving.known import settle_all
from tasks.storage import open_store

FLOW_SECONDS = 30.0


def stopped(home: Path) -> bool:
    """Whether somebody stopped the platform since it was last started: an `up` in the foreground ends then."""
    return stopped_mark(home).exists()


def take_over(home: Path) -> None:
    """Note what `headway down` of an earlier release did not: which runs it stopped, and when the watch last looked."""
    mark = process.read_json(stopped_mark(home))
    if not mark:
        return
    for run in logged_runs(home, since=mark["time"]):
        closed = run.last("opened", "closed")
        signalled = ((closed or {}).get("error") or {}).get("type") == "TerminationSignal"
        if closed and run.status == "cancelled" and signalled and closed["time"] >= mark["time"]:
            note_stopped(run.folder)
    if not (home / LAST_LOOK).exists():
        process.write_json(home / LAST_LOOK, {"time": mark["time"]})


def running(home: Path) -> list[str]:
    """Parts of the platform whose process lives."""
    return [part for part in PARTS if process.alive(process.read_json(home / part / "handle.json"))]


def runs_at_work(home: Path) -> list[LoggedRun]:
    """Flow runs whose process lives on this machine."""
    return [run for run in run_log.runs_at_work(home, closed=True) if run.here and run.alive]


def down(home: Path) -> list[str]:
    """Stop every part, every flow run and every job of this machine; returns the names of the parts that ran."""
    process.write_json(stopped_mark(home), {"time": time.time()})
    ran = [_stop(home, part) for part in PARTS[:2]]
    _stop_runs(home)
    ran.append(_stop(home, PARTS[2]))
    _stop_runs(home)  # what the worker took up meanwhile, as the first ones left their slots
    ran += [_stop(home, part) for part in PARTS[3:]]
    shutil.rmtree(home / "platform" / "worker" / "tmp", ignore_errors=True)
    for handle in (home / "jobs").glob("*/handle.json"):
        process.stop(handle.parent)  # a handle of another machine, or of a scheduler, names no process of ours
    ran.append("ray" if stop_local_cluster(home) else "")
    for events in (home / "lineage").glob("*/handle.json"):
        process.stop(events.parent)
    return [part for part in ran if part]


def going_on(home: Path) -> list[str]:
    """Jobs elsewhere that are not over, each as `ID on BACKEND`. No scheduler is asked."""
    try:
        open_ones = [job for job in list_jobs(home, StoreJournal(open_store(home)), settled=False) if not job.over]
    except HeadwayError as error:  # the platform stops, also while its store is away
        return [f"jobs are not known: {error.message}"]
    return [f"{job.id} on {job.backend}" for job in open_ones if job.backend and not on_this_machine(job.backend)]


def serving_endpoints(home: Path) -> list[str]:
    """Endpoints whose gateway runs on this machine."""
    gateways = sorted(home.glob("endpoints/*/gateway/handle.json"))
    return [f"endpoint/{path.parents[1].name}" for path in gateways if process.alive(process.read_json(path))]


def _stop(home: Path, part: str) -> str:
    if part == "prefect":
        return "prefect" if prefect_server.down(home) else ""
    folder = home / part
    ran = process.alive(process.read_json(folder / "handle.json"))
    process.stop(folder)
    return folder.name if ran else ""


def _stop_runs(home: Path) -> None:
    """SIGTERM lets a flow run end its job and write its report; who does not end in time is killed.

    Each is told first that it is stopped, so that it goes on at the next `up` however often and for however long it was.
    """
    runs = runs_at_work(home)
    for run in runs:
        note_stopped(run.folder)
        _signal(run, signal.SIGTERM)
    deadline = time.monotonic() + FLOW_SECONDS
    while any(run.alive for run in runs) and time.monotonic() < deadline:
        time.sleep(0.1)
    for run in runs:
        _signal(run, signal.SIGKILL)


def _signal(run: LoggedRun, number: signal.Signals) -> None:
    if run.alive:
        os.kill(int(run.handle["pid"]), number)


def given(source: Path) -> tuple[PlatformConfig, str]:
    """The settings of a file, and its text for `keep`, with relative folders below the working directory. Raises ValueError."""
    config, text = load_with_text(PlatformConfig, source)
    folders = [str(place_of(folder)) for folder in config.events.folders]
    if folders != [folder.path for folder in config.events.folders]:  # later starts may be in another directory
        value = yaml.load(text, Loader)
        for folder, path in zip(value["events"]["folders"], folders, strict=True):
            folder["path"] = path
        text = f"# Made of {source.absolute()}, with the whole paths of its folders.\n{yaml.safe_dump(value, sort_keys=False)}"
        config = validated(PlatformConfig, value, str(source))
    catalogue(config)
    return config, text


def changed(home: Path, config: PlatformConfig) -> list[str]:
    """Names of the settings in which `config` differs from what is kept; all of them when what is kept cannot be read."""
    try:
        before = load_settings(home)
    except ValueError:
        return list(PlatformConfig.model_fields)
    return [name for name in PlatformConfig.model_fields if getattr(before, name) != getattr(config, name)]


def keep(home: Path, text: str) -> None:
    """Keep what `given` has read, for later starts."""
    home.mkdir(parents=True, exist_ok=True)
    write_text(kept(home), text)


def up(home: Path, config: PlatformConfig, say: Say, *, port: int | None, mlflow_port: int | None) -> dict[str, str]:
    """Start what does not run yet, and return when everything answers. A second `up` waits for the first, and then adopts.

    Returns sources of events that are broken, and why: they stop nothing else.

    Raises Missing when something that is needed is not there, ValueError for a mistake in the settings.
    """
    catalogue(config)
    enough_room(home)
    write_layout(home, version("headway"))
    with locked(home / "platform" / "up.lock", waiting=lambda: say("another `headway up` starts this home; waiting")):
        take_over(home)
        stopped_mark(home).unlink(missing_ok=True)
        database.settle(home, config)
        server = prefect_server.prepare(home, port)
        say("Prefect server")
        tracking = None if os.environ.get("MLFLOW_TRACKING_URI") else mlflow_server.start(home, mlflow_port)
        _deploy(home, server, config, say)
        say("worker")
        worker.start(home)
        watch.start(home)
        bridge.start(home)
        for name, how in settle_all(home).items():
            say(f"a deploy of endpoint/{name} that was interrupted is {how}")
        if tracking:
            say("MLflow server")
            mlflow_server.wait(tracking, say)
        _wait_for_the_worker(home, say)
        return bridge.first_problems(home, config.events)


def _wait_for_the_worker(home: Path, say: Say) -> None:
    """Return when the worker has told the server of itself. Raises Missing with the end of its log."""
    log = home / "platform" / "worker" / "worker.log"
    began = last = time.monotonic()
    with prefect_server.client() as client:
        while not any(
            item.status == "ONLINE" and item.name == worker_name() for item in client.read_workers_for_work_pool(POOL)
        ):
            now = time.monotonic()
            if worker.status(home) is None:
                raise Missing(
                    f"the worker ended before it reached Prefect's server{end_of_log(log)}",
                    remedy="`headway doctor` reports what is missing; then `headway up` again.",
                )
            if now - began > START_SECONDS:
                raise Missing(
                    f"the worker runs, and has not reached Prefect's server in {now - began:.0f} s{end_of_log(log)}",
                    remedy="`headway up` again: it waits further. `headway down` stops the worker.",
                )
            if now - last >= SAY_SECONDS:
                last = now
                say(f"the worker is still starting, for {now - began:.0f} s so far")
            time.sleep(0.2)


def _deploy(home: Path, server: dict[str, Any], config: PlatformConfig, say: Say) -> None:
    """Tell Prefect what is deployed, whom to notify, what events start, and what becomes of missed times, before any worker."""
    from deployments.catalogue import triggers
    from deployments.platform.notifications import apply
    from deployments.services.registration import register
    from deployments.watch.schedules import Schedules
    from flows.support.blocks import HeadwayCluster

    prefect_server.wait(server, say)
    say("deployments")
    with prefect_server.client() as client:
        register(client, catalogue(config))
        HeadwayCluster.register_type_and_schema(_sync=True)  # and, with it, the types of its fields
        worker.allow(client, config.parallel_runs)
        apply(client, config)
        triggers.apply(client, config.events)
        Schedules(home, config).tick(client, time.time())
