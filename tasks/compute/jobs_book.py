"""The book of jobs: every job of a home, read from its folders and the journal; cancelling one from outside, and settling.

`headway jobs` and `headway job show|cancel|logs` stand on it (deployments/cli). A scheduler is asked only where the caller says
so: what the supervisor saw last is in the folder (`supervisor.json`), and so is how a submission ended.

`headway reconcile`, and every start of a lifecycle, settles jobs whose orchestrator is gone, without ending any. A dead flow run
is the platform's business (deployments/watch/dead_runs.py). A folder whose job is settled has a mark (`settled.json`) and is
passed over; of the others the journal is read, and their own marks. A scheduler is asked only when the caller says so, because a
start must not wait for one that is away: a job that runs there is no worse off for an hour without a supervisor, and the run that
it belongs to adopts it anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tasks.common import process
from tasks.common.errors import Missing, Unknown
from tasks.compute import open_backend
from tasks.compute.failures import close_failed
from tasks.compute.job import Backend, Job, JobState, Journal
from tasks.compute.logs import newest_step
from tasks.compute.nodes import ended_state, read_mark
from tasks.compute.submission import CANCELLED, Generation, mark_settled, newest, settle
from tasks.compute.supervisor_lock import is_supervised, unsupervised
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig, on_this_machine

Opener = Callable[[ClusterConfig], Backend]
"""`open_backend`, with the files of a store handed in where job folders lie in one."""
Verdict = Literal["failed", "waits", "orphan", "unknown", "not_submitted"]


class JobEntry(BaseModel):
    """One job, as a line of the book."""

    model_config = ConfigDict(frozen=True)

    id: str
    """NAME-TOKEN12, the name of its folder; `headway job show` takes it, or the beginning of it."""
    folder: str
    stage: str
    """The stage, or what `headway submit` called it."""
    backend: str
    """Empty when nobody wrote down which one it was submitted to."""
    token: str
    submission: int
    """Which one this is; counts from 1."""
    submission_id: str
    """What the scheduler knows it by."""
    state: str
    """queued, starting, running, lost or unknown while its submission is open; `ended` when it ended and is not settled yet;
    `retrying` between two submissions; then done, failed or cancelled."""
    reason: str = ""
    """Why it waits, in the scheduler's words; or how it failed."""
    failure: str = ""
    """The class of failure, of one that failed."""
    nodes: tuple[str, ...] = ()
    """Machines, as the scheduler calls them."""
    excluded_nodes: tuple[str, ...] = ()
    attempt: int = 0
    """Of this submission, in place; 0 before its first."""
    step: int | None = None
    """The newest one; None of a job that counts none."""
    submitted: float = 0.0
    """Seconds since the epoch."""
    age_seconds: float = 0.0
    """Since it was submitted; of one that is over, how long it took."""
    supervised: bool = False
    """Whether a living process supervises it."""
    flow_run: str = ""
    """Prefect's identity of the flow run that supervises it, or did."""

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")


def list_jobs(
    home: Path, journal: Journal, *, settled: bool = True, ask: bool = False, opener: Opener = open_backend
) -> list[JobEntry]:
    """All jobs of a home, newest first; with `ask`, the schedulers say the states: one call for each cluster.

    Without `settled`, those whose folder has the mark of an end are passed over unread.
    """
    folders = [folder for folder in _folders(home) if settled or not _is_settled(folder)]
    output = _asked(folders, journal, opener) if ask else {}
    entries = [_entry(folder, journal, output.get(folder)) for folder in folders]
    return sorted(entries, key=lambda entry: entry.submitted, reverse=True)


def _folders(home: Path) -> list[Path]:
    """Folders of the jobs of a home."""
    return [path.parent for path in (home / "jobs").glob("*/job.json")]


def _is_settled(folder: Path) -> bool:
    """Whether the newest submission of a job has an end, by the mark in its folder."""
    return (folder / "settled.json").exists()


def find_job(home: Path, name: str, journal: Journal, *, ask: bool = False, opener: Opener = open_backend) -> JobEntry:
    """The one job that a person means: by id, its beginning, or its stage alone; by token; by submission.

    Of several the only one that is not over. Raises Unknown when there is none, ValueError when there are several.
    """
    folders = _folders(home)
    results = [folder for folder in folders if folder.name == name] or [f for f in folders if _means(f, name)]
    if not results:
        raise Unknown(f"no job {name!r} in {home / 'jobs'}", remedy="`headway jobs` lists them.")
    if len(results) > 1:
        results = [f for f in results if not _entry(f, journal, None).over] or results
    if len(results) > 1:
        raise ValueError(f"{name!r} may mean {', '.join(sorted(f.name for f in results))}: write more of it")
    return _entry(results[0], journal, _asked(results, journal, opener).get(results[0]) if ask else None)


def cancel_job(home: Path, name: str, journal: Journal, *, opener: Opener = open_backend) -> JobEntry:
    """End a job on its backend, and settle it as cancelled; returns the entry from before.

    A supervisor that lives sees the end and reports that somebody cancelled the job. Raises Unknown, ValueError when the job
    is over already, Missing when the backend does not answer or nobody wrote down which one it is.
    """
    entry = find_job(home, name, journal)
    if entry.over:
        raise ValueError(f"job {entry.id} is over: it is {entry.state}")
    folder = Path(entry.folder)
    backend = backend_of(folder, opener)
    handle = handle_of(folder, journal, backend)
    process.write_json(folder / CANCELLED, {"submission": entry.submission, "time": time.time()})
    if handle and entry.state != "retrying":
        try:
            backend.cancel(handle, folder)
        except BaseException:
            (folder / CANCELLED).unlink(missing_ok=True)
            raise
    if not entry.supervised:
        settle(entry.token, journal, "cancelled", folder=folder, message="cancelled by hand")
    return entry


def cluster_of(folder: Path) -> ClusterConfig | None:
    """The cluster that a job was submitted to; None when nobody wrote it down."""
    output = process.read_json(folder / "cluster.json")
    return ClusterConfig.model_validate(output) if output else None


def known_cluster(home: Path, name: str) -> ClusterConfig | None:
    """How this home reached a cluster last; None when no job of it went there."""
    marks = sorted((home / "jobs").glob("*/cluster.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    result = (cluster_of(mark.parent) for mark in marks)
    return next((cluster for cluster in result if cluster and cluster.name == name), None)


def backend_of(folder: Path, opener: Opener) -> Backend:
    """The backend that a job was submitted to. Raises Missing when nobody wrote it down."""
    cluster = cluster_of(folder)
    if cluster is None:
        raise Missing(
            f"{folder} does not say which cluster its job was submitted to (cluster.json is not there)",
            remedy="Ask the scheduler itself, by the name in `headway job show`.",
        )
    return opener(cluster)


def handle_of(folder: Path, journal: Journal, backend: Backend) -> dict[str, Any] | None:
    """The handle of a job's newest submission: noted in the journal, or found by its name. Raises Missing as `find` does."""
    job = job_of(folder)
    generation = newest(job.token, journal)
    if generation is None:
        return None
    return generation.handle or backend.find(job.model_copy(update={"submission": generation.number}), folder)


def job_of(folder: Path) -> Job:
    """The job that a folder was written for."""
    return Job.model_validate(process.read_json(folder / "job.json"))


def _means(folder: Path, name: str) -> bool:
    job = job_of(folder)
    begins = any(word.startswith(name) for word in (folder.name, job.token))
    return (len(name) >= 4 and begins) or name in (job.name, job.submission_id)


def _entry(folder: Path, journal: Journal, asked: JobState | None) -> JobEntry:
    job, cluster = job_of(folder), read_mark(folder / "cluster.json")
    generation = newest(job.token, journal) or Generation(job.token, job.submission, {}, None, None)
    seen = read_mark(folder / "supervisor.json")
    nodes = [read_mark(path) for path in sorted((folder / "nodes").glob("*/node.json"))]
    attempt = read_mark(folder / "attempt.json")
    step = newest_step(folder)
    end = generation.end or {}
    submitted = float(generation.intent.get("time", (folder / "job.json").stat().st_mtime))
    return JobEntry(
        id=folder.name,
        folder=str(folder),
        stage=job.name,
        backend=str(cluster.get("backend", "")),
        token=job.token,
        submission=generation.number,
        submission_id=job.model_copy(update={"submission": generation.number}).submission_id,
        **_state(folder, generation, asked or _seen(folder, seen)),
        failure=str(end.get("failure", "")),
        nodes=tuple(str(node["name"]) for node in nodes if "name" in node),
        excluded_nodes=job.excluded_nodes,
        attempt=int(attempt.get("attempt", 0)),
        step=step if step >= 0 else None,
        submitted=submitted,
        age_seconds=float(end.get("time", time.time())) - submitted,
        supervised=is_supervised(folder),
        flow_run=str(seen.get("flow_run", "")),
    )


def _state(folder: Path, generation: Generation, known: JobState) -> dict[str, str]:
    end = generation.end
    if not end:
        return {"state": known.state, "reason": known.reason}
    if end.get("again") and is_supervised(folder):
        return {"state": "retrying", "reason": str(end.get("message", ""))}
    return {"state": generation.outcome, "reason": str(end.get("message", ""))}


def _seen(folder: Path, seen: dict[str, Any]) -> JobState:
    """The state without asking a scheduler: the mark of the end, the process of a local job, what its supervisor saw last."""
    ended = ended_state(folder)
    if ended:
        return ended
    cluster = read_mark(folder / "cluster.json")
    handle = process.read_json(folder / "handle.json")
    if handle and on_this_machine(backend := cluster.get("backend", "")):
        return open_backend(ClusterConfig.model_validate({"backend": backend})).states([(handle, folder)])[0]
    return JobState(state=seen.get("state") or "unknown", reason=str(seen.get("reason", "")))


def _asked(folders: Sequence[Path], journal: Journal, opener: Opener) -> dict[Path, JobState]:
    """What the schedulers say of the open jobs among some, by one call for each cluster."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        cluster = cluster_of(folder)
        generation = newest(job_of(folder).token, journal)
        if cluster and generation and generation.handle and not generation.end:
            groups.setdefault(digest(cluster.model_dump(mode="json")), []).append(folder)
    return {folder: state for group in groups.values() for folder, state in _states(group, journal, opener)}


def _states(folders: list[Path], journal: Journal, opener: Opener) -> Iterator[tuple[Path, JobState]]:
    try:
        backend = backend_of(folders[0], opener)
        handles = [(handle_of(folder, journal, backend) or {}, folder) for folder in folders]
        yield from zip(folders, backend.states(handles), strict=True)
    except (Missing, ValueError) as error:  # one cluster that cannot be asked hides no other's jobs
        yield from ((folder, JobState(state="unknown", reason=str(error))) for folder in folders)


class Reconciled(BaseModel):
    """A job that nobody supervises, and what was found of it."""

    model_config = ConfigDict(frozen=True)

    entry: JobEntry
    verdict: Verdict
    """`failed`: it ended without a result, and is settled now. `waits`: it ended with a result, and is adopted by the next run of
    the same command. `orphan`: it runs, or waits in a queue. `unknown`: its scheduler was not asked, or gave no answer.
    `not_submitted`: it was about to be submitted, and its scheduler does not have it."""
    text: str
    """What it is and what to do, for people: names the command."""


def reconcile(home: Path, journal: Journal, *, ask: bool = False, opener: Opener = open_backend) -> list[Reconciled]:
    """Settle what ended while nobody looked, and tell of the rest; never cancels, never submits.

    With `ask`, schedulers other than this machine are asked. A job that somebody supervises is not touched.
    """
    open_ones = (folder for folder in sorted(_folders(home)) if not _is_settled(folder))
    result = (_reconciled(home, folder, journal, opener if ask else None) for folder in open_ones)
    return [one for one in result if one]


def _reconciled(home: Path, folder: Path, journal: Journal, opener: Opener | None) -> Reconciled | None:
    """One job; None when it is settled, or somebody supervises it."""
    token = job_of(folder).token
    with unsupervised(folder, token, journal.claims) as mine:
        generation = newest(token, journal) if mine else None
        if generation is None:
            return None
        if generation.end:
            mark_settled(folder, generation)
            return None
        state = _open_state(folder, journal, opener)
        if state is None:
            verdict: Verdict = "not_submitted"
        elif state.over:
            verdict = "waits" if (folder / "result.json").exists() and state.code in (0, None) else "failed"
        else:
            verdict = "unknown" if state.state == "unknown" else "orphan"
        if verdict == "failed" and state:
            cluster = cluster_of(folder)
            is_local = cluster is not None and cluster.capabilities.this_machine
            job = Job.model_validate(generation.intent.get("job") or process.read_json(folder / "job.json"))
            close_failed(generation, job, state, folder, journal, one_machine=is_local)
    entry = find_job(home, folder.name, journal)
    asked = opener is not None
    again = "run the same command again"
    if asked:
        why = f"its scheduler gave no answer ({state.reason if state else ''}). When it answers: headway reconcile"
    else:
        why = "its scheduler was not asked. To ask it: headway reconcile"
    words = {
        "failed": f"{entry.id} ended without a result ({entry.failure}: {entry.reason}); settled. To continue, {again}.",
        "waits": f"{entry.id} ended with a result that nobody took; to take it, {again}.",
        "orphan": f"{entry.id} is {entry.state} and nobody supervises it. To continue with it, {again}; "
        f"to end it: headway job cancel {entry.id}",
        "unknown": f"{entry.id} is open and nobody supervises it; {why}",
        "not_submitted": f"{entry.id} was about to be submitted, and its scheduler does not have it; to submit it, {again}.",
    }[verdict]
    return Reconciled(entry=entry, verdict=verdict, text=words)


def _open_state(folder: Path, journal: Journal, opener: Opener | None) -> JobState | None:
    """The state of an open submission: None when its scheduler does not have it, `unknown` when it was not asked."""
    cluster, ended = cluster_of(folder), ended_state(folder)
    final = (
        cluster is None
        or not cluster.capabilities.starts_again  # else the mark of an end may be of the start before
        or (ended and ended.code == 0 and not job_of(folder).elastic)
    )
    if ended and final:
        return ended
    if cluster is None or (opener is None and not cluster.capabilities.this_machine):
        return JobState(state="unknown", reason="its scheduler was not asked")
    try:
        backend = (opener or open_backend)(cluster)
        handle = handle_of(folder, journal, backend)
    except Missing as away:
        return JobState(state="unknown", reason=f"{away.message}. {away.remedy}".rstrip())
    return backend.states([(handle, folder)])[0] if handle else None
