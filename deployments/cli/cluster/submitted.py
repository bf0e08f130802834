"""A user's program, run to its end under the supervisor: its inputs fetched, its progress shown, its metrics told to MLflow.

The command is submit.py; what a program may write into its job folder is docs/compute.md, "A program of your own".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.cli.cluster.job import opener
from deployments.cli.output import CommandError
from deployments.cli.progress import Progress, console
from deployments.cli.running import job_may_stop, make_home
from tasks.common.errors import Conflict
from tasks.common.home import home
from tasks.compute.job import Job, JobResult
from tasks.compute.polling import Watch
from tasks.compute.submission import settle
from tasks.compute.supervisor import run
from tasks.compute.supervisor_lock import is_supervised
from tasks.config.base import experiment, tracking_uri
from tasks.config.cluster import ClusterConfig
from tasks.config.environment import surroundings
from tasks.lineage import messages
from tasks.lineage.messages import run_page
from tasks.lineage.spool import Spool
from tasks.orchestration.observers import Outcome, interrupted
from tasks.registry.records import StoreJournal
from tasks.security.access import note_access
from tasks.security.audit import actor
from tasks.storage import open_store
from tasks.storage.manifest import Manifest

PUBLISH_SECONDS = 30.0
NOTE = "Runs of the program **{name}**, by `headway submit`: what it writes into `metrics.jsonl` of its job folder."
METRICS = ("step", "time", "attempt", "seconds_left")
"""Numbers of a record that are none of its metrics."""


def run_and_tell(
    job: Job, cluster: ClusterConfig, inputs: Mapping[str, Manifest], *, ask: bool
) -> tuple[dict[str, Any], str]:
    """Run a job to its end; its fields for programs, and words for people.

    Raises what the supervisor raises, in a CommandError with the fields; Conflict while another process supervises the same job.
    """
    make_home()
    folder = home() / "jobs" / job.id
    if is_supervised(folder):
        raise Conflict(
            f"the same job is at work: {job.id}, in {folder}",
            remedy=f"`headway job logs -f {job.id}` follows it; --again makes another one.",
        )
    out = console()
    progress, outcome = Progress(out), Outcome(job.name)
    fields: dict[str, Any] = {"id": job.id, "folder": str(folder), "backend": cluster.backend, "mlflow_run": None}
    progress.started(job.name, None)
    try:
        with _told(job, cluster, fields) as (spool, identity):
            watch = Watch(
                metrics=lambda records: spool.log_metrics(identity, _rows(records)),
                progress=lambda output: progress.progress(
                    job.name, output["done"], output["total"], output["text"], output["seconds_left"]
                ),
                event=lambda event: progress.happened(job.name, event.kind, event.text),
                stop_on_interrupt=lambda: job_may_stop(progress, ask=ask),
            )
            done = _run(job, cluster, folder, inputs, watch)
    except BaseException as error:
        outcome.status = "failed"
        raise CommandError(error, fields) from error
    else:
        outcome.status = "ran"
    finally:
        outcome.seconds = time.monotonic() - progress.began
        progress.ended(outcome)
    fields |= {**done.summary(), "id": job.id, "result": done.result}
    return fields, f"{job.id} is done. Its folder: {folder}"


def _run(job: Job, cluster: ClusterConfig, folder: Path, inputs: Mapping[str, Manifest], watch: Watch) -> JobResult:
    store = open_store(home())
    folders = {name: str(store.fetch(manifest)) for name, manifest in inputs.items()}
    for manifest in inputs.values():
        note_access(home(), manifest.ref, bytes=manifest.bytes, what=f"submit {job.name}")
    job, journal = job.model_copy(update={"inputs": folders}), StoreJournal(store)
    done = run(job, backend=opener()(cluster), folder=folder, journal=journal, watch=watch, cluster=cluster)
    settle(job.token, journal, "done", folder=folder)
    return done


@contextmanager
def _told(job: Job, cluster: ClusterConfig, fields: dict[str, Any]) -> Iterator[tuple[Spool, str]]:
    """An MLflow run around the job, with an end however it ends."""
    spool = Spool(home(), tracking_uri(), experiment=experiment(f"job-{job.name}"), note=NOTE.format(name=job.name))
    tags = {
        "headway.job": job.id,
        "headway.backend": cluster.backend,
        "mlflow.user": actor().name,
        "mlflow.source.name": job.program,
        **messages.surroundings_tags(surroundings()),
    }
    shape = ("nodes", "ranks_per_node", "gpus_per_node", "image", "launcher")
    params = {"arguments": " ".join(job.arguments), **{name: getattr(job, name) for name in shape}, **job.artifacts}
    identity, status = spool.start_run(messages.run_name(job.name, time.time()), tags=tags, params=params), "FINISHED"
    try:
        yield spool, identity
    except BaseException as error:
        status = "KILLED" if interrupted(error) else "FAILED"
        raise
    finally:
        spool.end_run(identity, status, tags={})
        spool.close()
        if known := spool.published(timeout=PUBLISH_SECONDS).get(identity):
            fields["mlflow_run"] = {"id": known["id"], "url": run_page(home(), spool.folder, identity)}


def _rows(records: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """What MLflow is told of records: every number but those that place it."""
    return [
        (name, float(value), int(record.get("step", 0)))
        for record in records
        for name, value in record.items()
        if isinstance(value, int | float) and name not in METRICS
    ]
