"""`headway submit`: the supervisor for a program of the user's own: retries, bad nodes left out, logs, progress, metrics.

Its inputs are fetched, its progress is shown, its metrics go to MLflow. The program learns nothing of Headway but its job folder
(HEADWAY_JOB); what it may write there is docs/compute.md, "A program of your own". What stages submit is
tasks/orchestration/stage_context.py.

`headway job`: one job, from what would be submitted to its logs and its end. `headway jobs`, `reconcile`: all jobs.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Config, Json, Set, look_at_gpus
from deployments.cli.output import CommandError, aligned, harmless, in_home, say
from deployments.cli.progress import Progress, console
from deployments.cli.running import job_may_stop, make_home
from tasks.artifacts import parse_ref
from tasks.common.errors import Conflict
from tasks.common.home import home
from tasks.common.process import read_json
from tasks.common.redaction import require_no_secrets
from tasks.compute import logs as of
from tasks.compute import open_backend
from tasks.compute.job import Job, Journal
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
from tasks.registry.refs import StoreJournal
from tasks.security.access import note_access
from tasks.security.audit import actor, audit, audited
from tasks.storage import open_files, open_store
from tasks.storage.manifest import Manifest
from tasks.storage.store import find

if TYPE_CHECKING:
    from tasks.compute.jobs_book import JobEntry, Opener

Ask = Annotated[
    bool, typer.Option("--ask", help="Ask the schedulers now; without it, show the state that was seen last.")
]


def jobs(
    all_: Annotated[bool, typer.Option("--all", help="Include finished jobs.")] = False,
    ask: Ask = False,
    as_json: Json = False,
) -> None:
    """List open jobs: state, machines, attempts, and whether each is supervised."""
    from tasks.compute.jobs_book import list_jobs

    entries = [
        entry
        for entry in list_jobs(home(), journal(), settled=all_, ask=ask, opener=opener())
        if all_ or not entry.over
    ]
    rows = [("job", "stage", "backend", "state", "nodes", "try", "supervised", "age")]
    rows += [
        (
            entry.id,
            entry.stage,
            entry.backend or "?",
            said(entry),
            ",".join(entry.nodes) or "-",
            f"{entry.submission}.{entry.attempt}",
            "-" if entry.over else "yes" if entry.supervised else "no",
            age(entry.age_seconds),
        )
        for entry in entries
    ]
    nothing = in_home("No job yet") if all_ else in_home("No open job", "--all lists those that are over.")
    words = list(aligned(rows)) if entries else nothing
    say({"jobs": [plain(entry) for entry in entries]}, words, as_json=as_json)


def reconcile(
    ask: Annotated[bool, typer.Option("--ask/--no-ask", help="Also ask the schedulers of other machines.")] = True,
    as_json: Json = False,
) -> None:
    """Record the end of jobs that ended unsupervised, and list those that still run unsupervised. Ends none, submits none."""
    from tasks.compute.jobs_book import reconcile as settle

    result = settle(home(), journal(), ask=ask, opener=opener())
    fields = {"found": [{"id": one.entry.id, "verdict": one.verdict, "text": one.text} for one in result]}
    words = [f"{one.entry.id:<24}{one.verdict:<15}{one.text}" for one in result]
    say(fields, words or in_home("No job that is open and unsupervised"), as_json=as_json)


def journal() -> Journal:
    """Where this home remembers what it submitted."""
    return StoreJournal(open_store(home()))


def opener() -> Opener:
    """What opens the backend of a job that lies in this home."""
    return partial(open_backend, files=partial(open_files, home()))


def plain(entry: JobEntry) -> dict[str, Any]:
    """An entry of the book, with its state in words."""
    return {**entry.model_dump(mode="json"), "said": said(entry)}


def said(entry: JobEntry) -> str:
    """How a job is, in words: queued: Resources; running, 120 of 800 steps; failed: node."""
    why = next(iter(entry.reason.splitlines()), "")
    if entry.state == "running":
        payload = read_json(Path(entry.folder) / "progress.json") or {}
        if payload.get("total"):
            progress = f", {payload['done']:.0f} of {payload['total']:.0f}"
        else:
            progress = f", step {entry.step}" if entry.step is not None else ""
        return f"running{progress}"
    if entry.state == "failed":
        return f"failed: {entry.failure or why or 'without a result'}"
    return f"{entry.state}: {why}" if why and entry.state != "done" else entry.state


def age(seconds: float) -> str:
    """A time for people: 42 s, 17 min, 5 h, 3 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


Id = Annotated[
    str, typer.Argument(metavar="ID", help="The job's ID as `headway jobs` prints it, or its first characters.")
]

LOOK_SECONDS = 2.0


def render(
    config: Config = None,
    stage: Annotated[
        str, typer.Option(help="The stage that runs the job: validate, preprocess, benchmark, train, evaluate, export.")
    ] = "train",
    backend: Annotated[
        str, typer.Option(help="The backend, instead of the configuration's: local, ssh, slurm, azureml, ray.")
    ] = "",
    dataset: Annotated[
        str, typer.Option(help="NAME or dataset/NAME@VERSION; by default the configuration's dataset.")
    ] = "",
    to: Annotated[
        Path | None, typer.Option(help="Also write the files to this folder; by default they are only printed.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Print exactly what would be submitted for a stage, without submitting it. Contacts no scheduler.

    The store is read for the versions of the inputs; a store on Azure Blob needs a login. Inputs that do not exist yet are shown
    as placeholders, and are named. Keys of the job are added when it is submitted.
    """
    from flows.support.planned_jobs import on_which, planned_job
    from tasks.config.files import load

    settings = load(config or "local", [*(set_ or []), *([f"cluster.backend={backend}"] if backend else [])])
    require_no_secrets(settings.model_dump(mode="json"))
    look_at_gpus(settings.cluster)
    planned = planned_job(stage, dataset or settings.dataset, settings)
    folder = home() / "jobs" / planned.job.id
    rendered = opener()(on_which(stage, settings).config).render(planned.job, folder)
    fields = {
        "backend": rendered.backend,
        "id": planned.job.id,
        "folder": str(folder),
        **rendered.model_dump(mode="json", exclude={"backend"}),
        "job": planned.job.model_dump(mode="json"),
        "pending": list(planned.pending),
        "placeholders": settings.cluster.placeholders,
    }
    lines = [f"# a placeholder, to change before you submit: {each}" for each in fields["placeholders"]]
    lines += [f"# not known yet: {each}" for each in fields["pending"]]
    lines += [f"# job folder: {fields['folder']}"]
    texts = {**fields["files"], "job.json": json.dumps(fields["job"], indent=1)}
    texts |= {"request.json": json.dumps(fields["request"], indent=1)} if fields["request"] is not None else {}
    for name, text in texts.items():
        if to:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_text(text.rstrip("\n") + "\n")
            lines.append(f"# file {to / name}")
        elif name == "request.json":
            lines += ["# request", text, ""]
        else:
            lines += [f"# file {name}", text.rstrip("\n"), ""]
    lines += [f"{name}={shlex.quote(value)}" for name, value in fields["environment"].items()]
    say(fields, "\n".join([*lines, shlex.join(fields["command"])]).rstrip(), as_json=as_json)


def show(id_: Id, ask: Ask = False, as_json: Json = False) -> None:
    """Show everything about one job: its state, its request, each submission and how it ended, what ranks reported."""
    from tasks.compute.jobs_book import find_job, job_of

    book = journal()
    entry = find_job(home(), id_, book, ask=ask, opener=opener())
    folder = Path(entry.folder)
    submissions: list[dict[str, Any]] = []
    for key in sorted(key for key in book.list(f"jobs/{entry.token}/") if key.endswith("/intent")):
        at = key.removesuffix("/intent")
        intent, end = book.get(key) or {}, book.get(f"{at}/end") or {}
        spec, cluster = intent.get("job", {}), intent.get("cluster") or {}
        submissions.append(
            {
                "number": int(at.rpartition("/")[2]),
                "backend": cluster.get("backend", ""),
                "time": intent.get("time"),
                "excluded_nodes": spec.get("excluded_nodes", []),
                "handle": book.get(f"{at}/handle"),
                "outcome": end.get("outcome", "open"),
                "failure": end.get("failure", ""),
                "message": end.get("message", ""),
                "ended": end.get("time"),
            }
        )
    fields = {
        **plain(entry),
        "job": job_of(folder).model_dump(mode="json"),
        "submissions": submissions,
        "errors": [read_json(path) for path in sorted((folder / "errors").glob("*.json"))],
    }
    job = fields["job"]
    lines = [
        f"{fields['id']}: {fields['said']}",
        f"  known to the scheduler as {fields['submission_id']} on {fields['backend'] or 'an unknown backend'}",
        f"  program {job['program']}, {job['nodes']} node(s) of {job['ranks_per_node']} rank(s)"
        + (f": {', '.join(fields['nodes'])}" if fields["nodes"] else ""),
        f"  folder {fields['folder']}",
        f"  {'supervised' if fields['supervised'] else 'nobody supervises it'}"
        + (f" by flow run {fields['flow_run']}" if fields["flow_run"] else ""),
    ]
    for one in fields["submissions"]:
        message = next(iter(one["message"].splitlines()), "")
        ended = ": ".join(part for part in (one["outcome"], one["failure"], message) if part)
        left_out = f" without {', '.join(one['excluded_nodes'])}" if one["excluded_nodes"] else ""
        lines.append(f"  submission {one['number']}{left_out}: {ended}")
    lines += [f"  {each.get('type')}: {each.get('message')}" for each in fields["errors"] if each]
    say(fields, "\n".join(lines), as_json=as_json)


def cancel(id_: Id, reason: Reason = "", as_: As = "", as_json: Json = False) -> None:
    """Cancel a job on its backend. Its checkpoints stay; the command that ran it reports that it was cancelled."""
    from tasks.compute.jobs_book import cancel_job, find_job

    entry = find_job(home(), id_, journal())
    what = f"job {entry.id}, submission {entry.submission} on {entry.backend or 'an unknown backend'}"
    noted = {"right": "run", "what": what, "reason": reason, "before": entry.state}
    with asked("run", as_, what=f"cancel {what}", reason=reason), audited(open_store(home()), "cancel job", **noted):
        before = cancel_job(home(), entry.id, journal(), opener=opener())
    say({**plain(before), "cancelled": True}, f"{before.id} is cancelled; it was {said(before)}", as_json=as_json)


def logs(
    id_: Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job is over.")
    ] = False,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="The number of lines to print from the end of each log.")] = 20,
    as_json: Json = False,
) -> None:
    """Print the logs of a job's ranks, the failing rank first; with --follow as they are written."""
    from tasks.compute.jobs_book import find_job

    if follow and as_json:
        raise ValueError("--json is one object: leave --follow out, and ask again")
    book = journal()
    entry = find_job(home(), id_, book)
    folder = Path(entry.folder)
    if follow:
        for name, line in of.follow(folder, rank, over=_over(entry.id, book), lines=lines):
            print(harmless(f"{name} | {line}"), flush=True)
        return
    failing = None if rank else of.failing_rank(folder)
    places: list[tuple[str, Path]] = []
    result = of.rank_logs(folder, rank)
    first = f"rank-{failing}"
    places += ((name, path) for name, path in result.items() if name == first)
    places += ((name, path) for name, path in result.items() if name != first)
    if not rank:
        places += ((str(path.relative_to(folder)), path) for path in of.launcher_logs(folder))
    results = [{"name": name, "lines": of.relevant(of.tail(path), lines).splitlines()} for name, path in places]
    words = "\n".join(f"{each['name']} | {line}" for each in results for line in each["lines"])
    fields = {"id": entry.id, "failing_rank": failing, "logs": results}
    say(fields, words or "Nothing is written yet.", as_json=as_json)


def _over(id_: str, book: Journal) -> Callable[[], bool]:
    """Says whether a job is over, looked up every two seconds at most."""
    from tasks.compute.jobs_book import find_job

    looked, over = 0.0, False

    def ask() -> bool:
        nonlocal looked, over
        if time.monotonic() - looked > LOOK_SECONDS:
            over, looked = find_job(home(), id_, book).over, time.monotonic()
        return over

    return ask


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
