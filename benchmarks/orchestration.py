"""What orchestration costs: seconds a stage over the bare work, ours beside plain Prefect with MLflow on SQLite.

Eight trivial stages (each writes one small file) in one flow: called as plain functions; as Prefect tasks with an MLflow run
each; as Headway stages that run; and as Headway stages that are reused. The clock runs from the first stage to the last,
inside the flow. What is published to MLflow in the background is waited for between the repeats. Run by `make bench`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.scratch import scratch

STAGES = tuple(f"step{i}" for i in range(8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with scratch() as folder:
        os.environ["HEADWAY_HOME"] = str(folder)
        from deployments.services import prefect_server

        server = prefect_server.prepare(folder)
        prefect_server.wait(server)
        try:
            rows = measure(folder, repeats)
        finally:
            prefect_server.down(folder)
    print(json.dumps(rows, indent=1))
    table = [f"{name:<34}{value:8.4f} s" + " a stage" for name, value in rows.items()]
    print("\n".join(table), file=sys.stderr)


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Median seconds a stage of each way, less the bare work.

    The ways alternate, so that a drift of the machine cancels.
    """
    ways = {
        "plain Prefect with MLflow": plain(folder),
        "Headway, runs": ours(folder),
        "Headway, reused": reused(folder),
    }
    for way in ways.values():
        way(-1)  # imports, tables, first connections
        settle(folder)
    bare, seconds = [], {name: [] for name in ways}
    for repeat in range(repeats):
        bare.append(timed(bare_chain, folder, repeat))
        for name, way in ways.items():
            seconds[name].append(way(repeat))
            settle(folder)
    base = statistics.median(bare) / len(STAGES)
    over = {name: statistics.median(each) / len(STAGES) - base for name, each in seconds.items()}
    return {"bare work": base, **over}


def timed(work, *arguments) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def bare_chain(folder: Path, repeat: int) -> None:
    for name in STAGES:
        write(folder / "bare", name, repeat)


def settle(folder: Path) -> None:
    """Wait until MLflow knows everything."""
    from tasks.lineage.spool import unpublished

    while unpublished(folder):
        time.sleep(0.1)


def write(folder: Path, name: str, repeat: int) -> Path:
    """The bare work: one small file in a folder of its own."""
    place = folder / f"{name}-{repeat}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "value.json").write_text(json.dumps({"name": name, "repeat": repeat}))
    return place


def plain(folder: Path):
    import mlflow
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    (folder / "plain").mkdir(exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/plain/mlflow.db")
    mlflow.set_experiment("plain")

    @task(cache_policy=NO_CACHE)
    def step(name, repeat):
        with mlflow.start_run(run_name=name, nested=True):
            mlflow.log_metric("value", repeat)
            write(folder / "plain", name, repeat)

    @flow
    def chain(repeat: int):
        with mlflow.start_run(run_name="chain"):
            return timed(lambda: [step(name, repeat) for name in STAGES])

    return chain


def ours(folder: Path):
    chain = headway_flow(folder)
    return lambda repeat: chain(f"v{time.time_ns()}")


def reused(folder: Path):
    chain = headway_flow(folder)
    return lambda repeat: chain("the same")


def headway_flow(folder: Path):
    from prefect import flow

    from tasks.artifacts import Dataset
    from tasks.config.serving import DeploymentConfig
    from tasks.orchestration.run import lifecycle
    from tasks.orchestration.stage import stage
    from tasks.orchestration.stage_context import publish

    def body(value: str) -> Dataset:
        return publish(write(folder / "ours", value.replace(" ", "-"), 0), Dataset, name="bench")

    steps = [stage(version=1, name=name)(body) for name in STAGES]

    @flow
    def chain(value: str):
        with lifecycle("bench", DeploymentConfig(), subject="bench", stages=STAGES):
            return timed(lambda: [step(f"{value} {step.name}") for step in steps])

    return chain


if __name__ == "__main__":
    main()
