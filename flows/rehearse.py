"""A rehearsal on a schedule: `headway rehearse` in a process of its own; its report goes to Prefect's page and to MLflow.

The faults and their verdicts are deployments/rehearsal, which no flow imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import flow, task

from flows.support.inputs import configured
from flows.support.prefect_run import flow_run, named, setting, started_by
from tasks.common.errors import GateFailed, Missing
from tasks.common.home import home
from tasks.config.base import experiment, tracking_uri
from tasks.config.flows import RehearseConfig
from tasks.lineage.messages import run_name
from tasks.lineage.spool import Spool
from tasks.orchestration.prefect_artifacts import hand_in, new_artifact, table

STOP_SECONDS = 120.0
"""What a rehearsal that is stopped has to end the platform and the jobs of its own home."""
EXPERIMENT = "rehearsal"
NOTE = "Rehearsals: faults on purpose, in homes of their own, and whether what is promised held (docs/rehearsal.md)."


@flow(  # type: ignore[untyped-decorator]
    name="rehearse",
    flow_run_name=lambda: named(setting("configuration")),
    validate_parameters=False,
)
def rehearse(config: RehearseConfig) -> dict[str, Any]:
    """Make everything go wrong that goes wrong in production, in a home of its own, and check that what is promised holds.

    Raises GateFailed when something did not hold, after the report was handed on.

    Args:
        config: What is rehearsed, where, and which faults are injected.
    """
    config = configured(RehearseConfig, config)
    with started_by("run", f"rehearsal of {config.configuration}"):
        report: dict[str, Any] = inject(config)
        if error := report["error"]:
            raise GateFailed(error["message"], stage="rehearsal", checks=error["checks"], remedy=error["remedy"])
        return report


@task(name="inject", persist_result=False)  # type: ignore[untyped-decorator]
def inject(config: RehearseConfig) -> dict[str, Any]:
    """Run the command; its report is attached to a run of MLflow, its verdicts are a note on the run's page.

    Raises ValueError for settings that cannot be rehearsed, Missing for a rehearsal that came to no verdict.
    """
    began = time.time()
    report = answer_of(words(config))
    if "results" not in report:
        message, remedy = report["error"]["message"], report["error"]["remedy"]
        raise ValueError(f"{message} {remedy}") if report["exit_code"] == 2 else Missing(message, remedy=remedy)
    verdicts = [one["verdict"] for one in report["results"]]
    counts = {verdict: verdicts.count(verdict) for verdict in ("passed", "failed", "not tried")}
    attach(report, counts, began)
    rows = [[one["name"], one["verdict"], one["why"] or one["promise"]] for one in report["results"]]
    title = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    text = f"# {title}\n\nPage: `{report['report']}`\n\n{table(['fault', 'verdict', 'promise'], rows)}"
    hand_in(new_artifact("markdown", "rehearsal", text, f"rehearsal: {title}"))
    return report


def words(config: RehearseConfig) -> Iterator[str]:
    """The options of `headway rehearse`."""
    for name in filter(None, (config.configuration, config.where)):
        yield from ("-c", name)
    for option, values in {"--set": config.set, "--only": config.only}.items():
        for value in values:
            yield from (option, value)
    yield from ("--seed", str(config.seed), "--hours", str(config.hours))
    yield from ("--dataset", config.dataset) if config.dataset else ()
    yield from ("--quick",) if config.quick else ()


def answer_of(options: Iterator[str]) -> dict[str, Any]:
    """What `headway rehearse --json` prints; its progress is in the log of this flow run.

    Interrupted, it ends what runs in its own home first.
    """
    command = [str(Path(sys.executable).with_name("headway")), "rehearse", *options, "--json"]
    process = subprocess.Popen(
        command,
        cwd=home(),
        env={**os.environ, "HEADWAY_HOME": str(home())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        printed = process.communicate()[0]
    except BaseException:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if not printed.strip():
        raise Missing(
            f"`headway rehearse` ended with exit code {process.returncode} and no answer",
            remedy="Its last lines are in the log of this flow run.",
        )
    answer: dict[str, Any] = json.loads(printed)
    return answer


def attach(report: dict[str, Any], counts: dict[str, int], began: float) -> None:
    """Give MLflow the report, the counts, and the seconds until each fault was noticed and all was well again."""
    spool = Spool(home(), tracking_uri(), experiment=experiment(EXPERIMENT), note=NOTE)
    params = {name: report[name] for name in ("backend", "dataset", "seed")} | {
        "configuration": " ".join(report["configuration"])
    }
    run = spool.start_run(run_name("rehearse", began), tags={"headway.flow_run": flow_run()["id"]}, params=params)
    metrics = [(verdict.replace(" ", "_"), float(number), 0) for verdict, number in counts.items()]
    for one in report["results"]:
        times = {name: one[name] for name in ("to_notice", "to_recover")}
        metrics += [(f"{one['name']}.{name}", value, 0) for name, value in times.items() if value is not None]
    spool.log_metrics(run, metrics)
    page = Path(report["report"])
    for path in (page, page.with_suffix(".json")):
        spool.log_file(run, path)
    spool.end_run(run, "FINISHED" if report["passed"] else "FAILED", tags={})
    spool.close()
