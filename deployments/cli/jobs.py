"""`headway jobs` and `headway reconcile`: all jobs of a home, and those whose orchestrator is gone. One job is job.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.checks import Json
from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.compute.job import Journal
    from tasks.compute.jobs_book import JobEntry, Opener

Ask = Annotated[bool, typer.Option("--ask", help="Ask the schedulers now; without it, what was seen last is told.")]


def jobs(
    all_: Annotated[bool, typer.Option("--all", help="Also those that are over.")] = False,
    ask: Ask = False,
    as_json: Json = False,
) -> None:
    """List the jobs that are not over: state, machines, attempts, and whether somebody supervises each."""
    from tasks.common.home import home
    from tasks.compute.jobs_book import list_jobs

    entries = [entry for entry in list_jobs(home(), journal(), ask=ask, opener=opener()) if all_ or not entry.over]
    say({"jobs": [plain(entry) for entry in entries]}, _table(entries) or _none(all_), as_json=as_json)


def reconcile(
    ask: Annotated[bool, typer.Option("--ask/--no-ask", help="Ask the schedulers of other machines too.")] = True,
    as_json: Json = False,
) -> None:
    """Settle jobs that ended while nobody looked, and tell of those that go on without anybody. Ends none, submits none."""
    from tasks.common.home import home
    from tasks.compute.reconcile import reconcile as settle

    found = settle(home(), journal(), ask=ask, opener=opener())
    fields = {"found": [{"id": one.entry.id, "verdict": one.verdict, "text": one.text} for one in found]}
    words = [f"{one.entry.id:<24}{one.verdict:<15}{one.text}" for one in found]
    say(fields, words or "Every job is settled, or somebody supervises it.", as_json=as_json)


def journal() -> Journal:
    """Where this home remembers what it submitted."""
    from tasks.common.home import home
    from tasks.registry.journal import StoreJournal
    from tasks.storage import open_store

    return StoreJournal(open_store(home()))


def opener() -> Opener:
    """What opens the backend of a job that lies in this home."""
    from tasks.common.home import home
    from tasks.compute import open_backend
    from tasks.storage import open_files

    return partial(open_backend, files=partial(open_files, home()))


def plain(entry: JobEntry) -> dict[str, Any]:
    """An entry of the book, with its state in words."""
    return {**entry.model_dump(mode="json"), "said": said(entry)}


def said(entry: JobEntry) -> str:
    """How a job is, in words: queued: Resources; running, 120 of 800 steps; failed: node."""
    why = next(iter(entry.reason.splitlines()), "")
    if entry.state == "running":
        return f"running{_progress(entry)}"
    if entry.state == "failed":
        return f"failed: {entry.failure or why or 'without a word'}"
    return f"{entry.state}: {why}" if why and entry.state != "done" else entry.state


def age(seconds: float) -> str:
    """A time for people: 42 s, 17 min, 5 h, 3 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _progress(entry: JobEntry) -> str:
    from tasks.common.process import read_json

    told = read_json(Path(entry.folder) / "progress.json") or {}
    if told.get("total"):
        return f", {told['done']:.0f} of {told['total']:.0f}"
    return f", step {entry.step}" if entry.step is not None else ""


def _table(entries: list[JobEntry]) -> list[str]:
    rows = [
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
    if not rows:
        return []
    head = ("job", "stage", "backend", "state", "nodes", "try", "supervised", "age")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def _none(all_: bool) -> str:
    return "No job yet." if all_ else "No job is open; --all lists those that are over."
