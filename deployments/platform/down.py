"""`headway down`: no process of the platform is left; what was at work goes on at the next `headway up`.

Jobs of this machine stop with it. Jobs elsewhere (Slurm, SSH, Azure ML, a Ray cluster) go on, and are told; the next start of
their run adopts them.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from deployments.services import prefect_server
from deployments.services.parts import LAST_LOOK, PARTS
from tasks.common import process
from tasks.common.errors import HeadwayError
from tasks.common.home import stopped_mark
from tasks.compute.jobs_book import list_jobs
from tasks.compute.ray.local import stop_local_cluster
from tasks.config.cluster import on_this_machine
from tasks.orchestration.run_log import LoggedRun, logged_runs, note_stopped
from tasks.registry.records import StoreJournal
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
    for run in logged_runs(home):
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
    return [run for run in logged_runs(home) if run.here and run.alive]


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
        open_ones = [job for job in list_jobs(home, StoreJournal(open_store(home))) if not job.over]
    except HeadwayError as error:  # the platform stops, also while its store is away
        return [f"jobs are not known: {error.message}"]
    return [f"{job.id} on {job.backend}" for job in open_ones if job.backend and not on_this_machine(job.backend)]


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
