"""`headway submit`: the supervisor for a program of the user's own: retries, bad nodes left out, logs, progress, metrics.

Its inputs are fetched, its progress is shown, its metrics go to MLflow. The program learns nothing of Headway but its job folder
(HEADWAY_JOB); what it may write there is docs/compute.md, "A program of your own". What stages submit is
tasks/orchestration/stage_context.py."""

from __future__ import annotations

import hashlib
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.cluster.job import opener
from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set
from deployments.cli.output import CommandError, say
from deployments.cli.progress import Progress, console
from deployments.cli.running import job_may_stop, make_home
from tasks.artifacts import parse_ref
from tasks.common.errors import Conflict
from tasks.common.home import home
from tasks.common.redaction import require_no_secrets
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.submission import settle
from tasks.compute.supervisor import run
from tasks.compute.supervisor_lock import is_supervised
from tasks.config.base import digest, experiment, tracking_uri
from tasks.config.cluster import ClusterConfig, backends_with
from tasks.config.environment import surroundings
from tasks.lineage import messages
from tasks.lineage.messages import run_page
from tasks.lineage.spool import Spool
from tasks.orchestration.job_spec import shape
from tasks.orchestration.observers import Outcome, interrupted, stopped_as
from tasks.registry.records import StoreJournal
from tasks.security.access import note_access
from tasks.security.audit import actor, audit
from tasks.storage import open_store
from tasks.storage.manifest import Manifest
from tasks.storage.store import find


def submit(
    program: Annotated[
        Path, typer.Argument(help="A Python program; all machines must have the packages that it needs.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The arguments of the program.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of machines; by default the configuration's.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes per machine; by default the configuration's.")] = None,
    config: Config = None,
    backend: Annotated[str, typer.Option(help="The backend, instead of the configuration's.")] = "",
    name: Annotated[str, typer.Option(help="The name of the job; by default that of the program's file.")] = "",
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=KIND/NAME[@VERSION]", help="An artifact that the program reads; may be repeated."
        ),
    ] = None,
    time_limit: Annotated[float | None, typer.Option(metavar="MINUTES", help="Time limit of one submission.")] = None,
    array: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Run N independent jobs, each with its HEADWAY_ARRAY_INDEX; Slurm only."),
    ] = 0,
    driver: Annotated[
        bool,
        typer.Option(
            "--driver", help="The program starts Ray tasks and actors itself, with ray.init(); backend ray only."
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Submit a new job even if the same one is running or was cut off.")
    ] = False,
    set_: Set = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Run your own program on a backend until it ends: submitted once, retried when machines fail, adopted after a crash.

    While the same program runs with the same arguments and settings, the command adopts that job.
    """
    from tasks.config.files import load_cluster

    given = {"nodes": nodes, "ranks_per_node": ranks, "backend": backend or None, "time_limit_minutes": time_limit}
    overrides = [*(set_ or []), *(f"cluster.{key}={value}" for key, value in given.items() if value is not None)]
    cluster = load_cluster(config or "local", overrides)
    if driver and not cluster.capabilities.drivers:
        able = backends_with(lambda one: one.drivers)
        raise ValueError(f"--driver is for backend {able}, the backend is {cluster.backend}: leave it out")
    if array and not cluster.capabilities.arrays:
        able = backends_with(lambda one: one.arrays)
        raise ValueError(f"--array is for backend {able}, the backend is {cluster.backend}: leave it out")
    store, inputs = open_store(home()), {}
    for each in input_ or []:
        known_as, equals, ref = each.partition("=")
        if not (known_as and equals and ref):
            raise ValueError(f"--input {each!r} is not of the form NAME=KIND/NAME[@VERSION]")
        inputs[known_as] = find(store, *parse_ref(ref))
    job = job_of_program(
        program, tuple(arguments or ()), cluster, inputs, name=name, driver=driver, array=array, again=again
    )
    what = f"submit {job.id}: {program} on {cluster.backend}"
    with asked("run", as_, what=what):
        audit(open_store(home()), "submit job", right="run", what=what)
        fields, words = run_and_tell(job, cluster, inputs, ask=sys.stdin.isatty() and sys.stderr.isatty())
    say(fields, words, as_json=as_json)


def job_of_program(
    program: Path,
    arguments: tuple[str, ...],
    cluster: ClusterConfig,
    inputs: dict[str, Manifest],
    *,
    name: str = "",
    driver: bool = False,
    array: int = 0,
    again: bool = False,
) -> Job:
    """The job of a user's program. Its token is made of all that it runs with, so the same again is the same job.

    Raises ValueError for a program that is no file, or a secret in its arguments.
    """
    if not program.is_file():
        raise ValueError(f"there is no program {program}: give the path of a Python file")
    require_no_secrets({"arguments": list(arguments), "environment": cluster.environment})
    # A name that schedulers take: lower case letters, digits and dashes.
    text = name or program.stem
    taken = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")[:40]
    if not taken:
        raise ValueError(f"{text!r} has no letter or digit: name the job, --name NAME")
    spec: dict[str, Any] = {
        "name": taken,
        "program": str(program.resolve()),
        "module": False,
        "driver": driver,
        "array": array,
        "arguments": arguments,
        "settings": {},
        "inputs": {},
        "artifacts": {each: manifest.ref for each, manifest in inputs.items()},
        "nodes": 1 if driver else cluster.nodes,
        "ranks_per_node": 1 if driver else cluster.ranks_per_node,
        "threads_per_rank": cluster.threads_per_rank,
        "launcher": cluster.launcher,
        "elastic": cluster.elastic,
        **shape(cluster),
    }
    job = Job(**spec, token="")
    known = {**job.model_dump(mode="json", exclude={"token", "size", "retry", "watch"}), "backend": cluster.backend}
    content = hashlib.sha256(program.read_bytes()).hexdigest()
    return job.model_copy(update={"token": digest([known, content, uuid.uuid4().hex if again else ""])[:32]})


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
            f"the same job is running: {job.id}, in {folder}",
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
            store = open_store(home())
            folders = {name: str(store.fetch(manifest)) for name, manifest in inputs.items()}
            for manifest in inputs.values():
                note_access(home(), manifest.ref, bytes=manifest.bytes, what=f"submit {job.name}")
            job, journal = job.model_copy(update={"inputs": folders}), StoreJournal(store)
            done = run(job, backend=opener()(cluster), folder=folder, journal=journal, watch=watch, cluster=cluster)
            settle(job.token, journal, "done", folder=folder)
    except BaseException as error:
        outcome.status = stopped_as(error)
        raise CommandError(error, fields) from error
    else:
        outcome.status = "ran"
    finally:
        outcome.seconds = time.monotonic() - progress.began
        progress.ended(outcome)
    fields |= {**done.summary(), "id": job.id, "result": done.result}
    return fields, f"{job.id} is done. Its folder: {folder}"


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
    """What MLflow gets of records: every number but those that say where and when."""
    return [
        (name, float(value), int(record.get("step", 0)))
        for record in records
        for name, value in record.items()
        if isinstance(value, int | float) and name not in METRICS
    ]
