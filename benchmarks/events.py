"""How fast events are taken in, and how soon one starts a flow run, with the platform's own parts.

`python -m benchmarks.events [--events N] [--times N]`. Taken in: what a reader of a queue and the HTTP bridge do, in the batches
in which they get events, on disk when a call returns; half of them come twice. To the flow run: from `receive` until the flow
run's own process says that it works, on a real Prefect server with the platform's worker and the dispatch of the bridge, which
looks every second. The load of the machine is told beside each figure. Run by `make bench`.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time

from benchmarks.scratch import scratch

BATCHES = {"single calls": 1, "messages of a queue": 32, "requests of a webhook": 100}
AGAIN_SECONDS = 120.0
FLOW = """
import os, time
from pathlib import Path
from prefect import flow
from flows.support.prefect_run import covered_elsewhere


@flow(name="timed", validate_parameters=False)
def timed(dataset: str = "", cause: str = "", folder: str = ""):
    if not covered_elsewhere(cause):
        (Path(folder) / cause).write_text(str(time.time()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    with scratch() as folder:
        told = {
            "taken in": taken_in(folder, chosen.events),
            "to the flow run": started(folder, chosen.times),
        }
    print(json.dumps(told, indent=1))
    for name, row in told["taken in"].items():
        rate = f"{row['events'] / row['seconds']:8.0f} a second"
        print(f"{row['events']} events, {name:<24}{row['seconds']:7.2f} s, {rate}", file=sys.stderr)
    row = told["to the flow run"]
    each = ", ".join(f"{seconds:.1f}" for seconds in row["seconds"])
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["parts"].items())
    print(f"from the event to its flow run at work: median {row['median']:.1f} s ({each}): {parts}", file=sys.stderr)


def taken_in(folder, count):
    """Seconds until all events are on disk, for each size of a batch."""
    from tasks.events.ledger import Ledger

    rows = {}
    for name, size in BATCHES.items():
        ledger = Ledger(folder / f"ledger{size}")
        ledger.receive(event("first"))  # tables and connection
        told = [event(f"{n % (count * 2 // 3)}") for n in range(count)]
        began = time.perf_counter()
        for start in range(0, count, size):
            ledger.receive_all(told[start : start + size])
        rows[name] = {
            "events": count,
            "batch": size,
            "seconds": time.perf_counter() - began,
            "load": os.getloadavg()[0],
        }
    return rows


def event(identity):
    from tasks.events.event import Event

    told = {"name": "dataset.published", "subject": "dataset/web", "source": "bench", "channel": "queue"}
    return Event(**told, identity=identity, object=f"dataset/web@{identity:0>64}", occurred=time.time())


def started(folder, times):
    """Seconds from an event to its flow run at work, one after the other."""
    home, modules, marks = folder / "home", folder / "modules", folder / "marks"
    for made in (home, modules, marks):
        made.mkdir()
    (modules / "timed.py").write_text(FLOW)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    os.environ.clear()
    os.environ.update({**kept, "HEADWAY_HOME": str(home), "PYTHONPATH": str(modules)})
    from deployments.services import prefect_server
    from deployments.services.parts import worker
    from tasks.common import process

    try:
        prefect_server.wait(prefect_server.prepare(home))
        worker.start(home)
        return timed(home, marks, times)
    finally:
        process.stop(home / "platform" / "worker")
        process.stop(home / "prefect")


def timed(home, marks, times):
    from deployments.bridge.dispatch import Dispatch
    from tasks.events.ledger import Ledger

    ledger, dispatch = Ledger(home), Dispatch(home, deployed(marks), Ledger(home))
    stop = threading.Event()
    turns = threading.Thread(target=turn, args=(dispatch, stop))
    turns.start()
    seconds, parts = [], []
    try:
        for number in range(times + 1):
            began = time.time()
            ledger.receive(event(str(number)))
            ended = wait(marks, number)
            seconds.append(ended - began)
            while not idle(ledger):
                time.sleep(0.2)
            parts.append(ways(ledger, began, ended))
    finally:
        stop.set()
        turns.join()
    seconds, parts = seconds[1:], parts[1:]  # the first one warms the worker up
    medians = {name: round(statistics.median(part[name] for part in parts), 2) for name in parts[0]}
    return {"median": statistics.median(seconds), "seconds": seconds, "parts": medians, "load": os.getloadavg()[0]}


def ways(ledger, began, ended):
    """Seconds of each part of the way of the newest batch."""
    from uuid import UUID

    from prefect.client.orchestration import get_client

    with ledger.snapshot() as db:
        batch = db.execute("SELECT made, flow_run FROM batches ORDER BY rowid DESC LIMIT 1").fetchone()
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(batch["flow_run"]))
    when = {state.name: state.timestamp.timestamp() for state in reversed(states)}
    marks = [began, batch["made"], when["Scheduled"], when["Pending"], when["Running"], ended]
    names = ("the bridge's turn", "the automation", "the worker's turn", "the process starts", "the claim")
    return {name: after - before for name, before, after in zip(names, marks[:-1], marks[1:], strict=True)}


def deployed(marks):
    """The settings of one trigger, whose deployment and automation are registered."""
    from prefect.client.orchestration import get_client

    from deployments.catalogue import triggers
    from deployments.catalogue.flows import POOL
    from deployments.configuration.events import EventsConfig, TriggerConfig
    from deployments.services import registration

    config = EventsConfig(triggers=(TriggerConfig(event="dataset.published", start="timed/bench", cooldown_minutes=0),))
    with get_client(sync_client=True) as client:
        registration.register(client, [])
        client.create_deployment(
            flow_id=client.create_flow_from_name("timed"),
            name="bench",
            entrypoint="timed.timed",
            work_pool_name=POOL,
            parameters={"folder": str(marks)},
            enforce_parameter_schema=False,
            pull_steps=[],
        )
        triggers.apply(client, config)
    return config


def turn(dispatch, stop):
    """The bridge's loop (deployments/bridge/__main__.py)."""
    from deployments.bridge.__main__ import EVERY_SECONDS

    while not stop.wait(EVERY_SECONDS):
        dispatch.tick(time.time())


def wait(marks, number):
    deadline = time.monotonic() + AGAIN_SECONDS
    while time.monotonic() < deadline:
        found = sorted(marks.iterdir(), key=lambda path: path.stat().st_mtime)
        if len(found) > number and found[number].read_text():
            return float(found[number].read_text())
        time.sleep(0.05)
    raise SystemExit(f"event {number} started nothing within {AGAIN_SECONDS} s")


def idle(ledger):
    from tasks.events import batches

    return not batches.open_batches(ledger)


if __name__ == "__main__":
    main()
