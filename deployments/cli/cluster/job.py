"""`headway job`: one job, from what would be submitted to its logs and its end. `headway jobs`, `reconcile`: all jobs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Config, Json, Set, look_at_gpus
from deployments.cli.output import aligned, harmless, in_home, say
from tasks.common.home import home
from tasks.common.process import read_json
from tasks.common.redaction import require_no_secrets
from tasks.compute import logs as of
from tasks.compute import open_backend
from tasks.compute.job import Journal
from tasks.registry.records import StoreJournal
from tasks.security.audit import audited
from tasks.storage import open_files, open_store

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
    as placeholders, and are named. Keys of the job are added when it is submitted, and in a home without jobs the digits of the
    home, which its name has.
    """
    from flows.support.planned_jobs import on_which, planned_job
    from tasks.compute.submission import HOME_DIGITS, known_home
    from tasks.config.files import load

    settings = load(config or "local", [*(set_ or []), *([f"cluster.backend={backend}"] if backend else [])])
    require_no_secrets(settings.model_dump(mode="json"))
    look_at_gpus(settings.cluster)
    planned = planned_job(stage, dataset or settings.dataset, settings)
    folder = home() / "jobs" / planned.job.id
    job = planned.job.model_copy(update={"home": known_home(folder)[:HOME_DIGITS]})
    rendered = opener()(on_which(stage, settings).config).render(job, folder)
    fields = {
        "backend": rendered.backend,
        "id": job.id,
        "folder": str(folder),
        **rendered.model_dump(mode="json", exclude={"backend"}),
        "job": job.model_dump(mode="json"),
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
