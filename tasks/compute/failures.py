"""Why a submission ended without a result: its class, a sentence and a remedy, from everything that it left.

The rules are data: failures.json has the classes, exit codes and log signatures. What is done about a class is
`decide`, further down; who calls both is supervisor.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.common.errors import IntegrityError, JobFailed, Missing
from tasks.common.redaction import redact
from tasks.compute.job import Failure, Job, JobState, Journal
from tasks.compute.logs import failing_rank, launcher_logs, rank_logs, tail, tail_of_failure
from tasks.compute.nodes import read_mark
from tasks.compute.submission import CANCELLED, Generation, marker, settle

# Resubmission follows the table in failures.json. `retry.attempts` bounds the submissions in a row that make no
# progress, which is new content of the file that `job.progress` names, or a higher step in metrics.jsonl.


@dataclass(frozen=True)
class Decision:
    """What becomes of a job after a failed submission. Of one that is not submitted again only `why_not` counts."""

    again: bool
    why_not: str = ""
    wait: float = 0.0
    """Seconds."""
    excluded_nodes: tuple[str, ...] = ()
    smaller_batches: int = 0
    stuck: int = 0
    """Submissions in a row without progress."""

    def learned(self) -> dict[str, Any]:
        """What the next submission must know, as the journal keeps it."""
        return {
            "excluded_nodes": self.excluded_nodes,
            "smaller_batches": self.smaller_batches,
            "stuck": self.stuck,
        }


@dataclass(frozen=True)
class History:
    """What came before a failure."""

    stuck: int
    """Submissions in a row, up to the one before, without progress."""
    progressed: bool
    """Whether the submission that failed got further."""
    restarted: bool
    """Whether it was started on the same machines as often as the job allows."""
    one_machine: bool
    """Whether a further submission would get the very same machine."""


def decide(job: Job, failed: Failed, history: History) -> Decision:
    """Apply the table to one failure."""
    retry, table = job.retry, rules().classes[failed.failure]
    if retry is None:
        return Decision(False)
    stuck = 0 if history.progressed else history.stuck + 1
    smaller = job.smaller_batches + (failed.failure == "out_of_memory")
    refused = _refusal(job, failed, history, stuck)
    if refused is not None:
        return Decision(False, refused)
    added = failed.nodes if table.excludes_nodes else ()
    return Decision(
        again=True,
        wait=min(retry.back_off_seconds * 2 ** max(stuck - 1, 0), retry.max_back_off_seconds),
        excluded_nodes=tuple(dict.fromkeys([*job.excluded_nodes, *added])),
        smaller_batches=smaller,
        stuck=stuck,
    )


def _refusal(job: Job, failed: Failed, history: History, stuck: int) -> str | None:
    """Why a job is not submitted again; empty where its class says it all, None when it is."""
    assert job.retry is not None
    again = rules().classes[failed.failure].again
    if again == "never" or failed.final:
        return ""
    if again == "smaller_batch" and not job.retry.smaller_batch:
        return "It is tried again only with cluster.retry.smaller_batch."
    if again == "with_progress" and not history.progressed:
        return "It made no progress within the limit, and would make none in a further submission."
    if again == "elsewhere" and history.one_machine and history.restarted and not history.progressed:
        return "This machine has restarted it as often as it may, without progress."
    if stuck >= job.retry.attempts:
        return f"{stuck} submissions in a row made no progress."
    return None


def close_failed(
    generation: Generation,
    job: Job,
    state: JobState,
    folder: Path,
    journal: Journal,
    *,
    one_machine: bool,
    hung: str = "",
) -> tuple[Failed, Decision]:
    """Settle a submission that ended without a result: its class and what becomes of the job are written into its end."""
    failed = classify(job, state, folder, hung=hung)
    failed = replace(failed, what=redact(failed.what))
    before, now = generation.marker, marker(job, folder)
    history = History(
        stuck=generation.stuck,
        progressed=before.is_behind(now),
        restarted=state.state == "ended" and state.attempts - before.attempts > job.restarts,
        one_machine=one_machine,
    )
    decision = decide(job, failed, history)
    outcome = "cancelled" if failed.failure == "cancelled" else "failed"
    facts = {"failure": failed.failure, "message": failed.what, "nodes": failed.nodes}
    settle(job.token, journal, outcome, folder=folder, **facts, again=decision.learned() if decision.again else None)
    return failed, decision


OF_THE_PROGRAM: tuple[Failure, ...] = ("user", "integrity", "missing", "diverged", "limit", "preempted")
"""Classes that a program reports itself, and that no scheduler and no log knows better."""
OF_THE_SCHEDULER: tuple[Failure, ...] = ("cancelled", "preempted", "timeout", "node", "out_of_memory")
"""Classes that a scheduler knows better than the ranks that it ended."""


class Class(BaseModel):
    """What a class of failure means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    again: Literal["never", "always", "elsewhere", "with_progress", "smaller_batch"]
    """Whether the job is submitted again. `elsewhere`: not to the one machine that has restarted it in vain already."""
    excludes_nodes: bool = False
    """Whether the machines that are named are left out from then on."""
    sentence: str
    remedy: str


class Code(BaseModel):
    """What an exit code means where nothing else says more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failure: Failure = Field(alias="class")
    sentence: str


class Signature(BaseModel):
    """What a line of a log means. A group called `node` names a machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str
    failure: Failure = Field(alias="class")
    sentence: str
    remedy: str


class Rules(BaseModel):
    """failures.json. Signatures are tried in their order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: dict[Failure, Class]
    codes: dict[int, Code]
    signatures: tuple[Signature, ...]


@dataclass(frozen=True)
class Failed:
    """Why a submission has no result."""

    failure: Failure
    what: str
    """What happened, in the words of who saw it."""
    sentence: str
    """What that means."""
    remedy: str
    nodes: tuple[str, ...] = ()
    """Machines that are the cause."""
    final: bool = False
    """Whether it would end the same way however often it is tried, whatever its class says."""


@cache
def rules() -> Rules:
    """The rules, read once."""
    return Rules.model_validate_json((Path(__file__).parent / "failures.json").read_text(encoding="utf-8"))


def classify(job: Job, state: JobState, folder: Path, *, hung: str = "") -> Failed:
    """Decide from: whether the supervisor ended it, or a person; the program's own report; the scheduler; machines' reports;
    logs; the exit code. `hung` says what the supervisor saw stand still."""
    paths = sorted((folder / "errors").glob("*.json"), key=lambda path: path.stat().st_mtime)
    # One that a dying machine left torn has no class. An attempt before the last one was got over.
    reports = [
        report
        for path in paths
        if "class" in (report := read_mark(path))
        if int(report.get("attempt", 0)) >= state.attempts or report["class"] == "node"
    ]
    own = next((report for report in reports if report["class"] in OF_THE_PROGRAM), None)
    machines = [report for report in reports if report["class"] == "node"]
    nodes = tuple(dict.fromkeys([*state.failed_nodes, *(name for r in machines for name in r.get("nodes", ()))]))
    if hung:
        return _as("infrastructure", hung, sentence="The job hung.")
    if bool(read_mark(folder / CANCELLED).get("submission") == job.submission):
        return _as("cancelled", "it was cancelled by hand")
    if state.failure == "integrity":  # what the folder has cannot be trusted, and says less
        return _as("integrity", state.reason)
    if own:
        return _as(own["class"], _said(own), remedy=own.get("remedy", ""))
    if state.failure in OF_THE_SCHEDULER:
        return _as(state.failure, _scheduler_said(state), nodes=nodes)
    if state.reason in ("timeout", "cancelled"):
        return _as("timeout" if state.reason == "timeout" else "cancelled", _scheduler_said(state))
    if machines:
        return _as("node", _said(machines[0]), remedy=machines[0].get("remedy", ""), nodes=nodes)
    return _from_traces(state, folder, reports, nodes)


def error_of(
    job: Job, failed: Failed, state: JobState, folder: Path, *, submissions: int, why_not_again: str
) -> Exception:
    """The error that the caller gets: the failing rank's lines come with it."""
    what = redact(failed.what)
    if failed.failure == "user":
        return ValueError(what)
    if failed.failure == "integrity":
        return IntegrityError(what, remedy=failed.remedy)
    if failed.failure == "missing":
        return Missing(what, remedy=failed.remedy)
    tried = f"{state.attempts} attempt(s)" + (f" and {submissions} submissions" if submissions > 1 else "")
    lines = [f"the job of {job.name} failed after {tried}: {what}", f"{failed.sentence} {why_not_again}".strip()]
    return JobFailed(
        "\n".join(filter(None, [*lines, tail_of_failure(folder)])),
        failure=failed.failure,
        folder=str(folder),
        remedy=f"{failed.remedy} Its logs are in {folder}.",
    )


def _as(failure: Failure, what: str, *, sentence: str = "", remedy: str = "", nodes: tuple[str, ...] = ()) -> Failed:
    known = rules().classes[failure]
    return Failed(failure, what, sentence or known.sentence, remedy or known.remedy, nodes)


def _from_traces(state: JobState, folder: Path, reports: list[dict[str, Any]], nodes: tuple[str, ...]) -> Failed:
    """From logs, the exit code and reports of what may pass."""
    report = reports[0] if reports else None
    what = _said_in_full(report) if report else _end(state, folder)
    for signature, line, named in _signed(folder, state, report):
        all_nodes = nodes or (named if signature.failure == "node" else ())
        text = what if report else f"{what}: {line}"
        return Failed(signature.failure, text, signature.sentence, signature.remedy, all_nodes)
    if state.code == 0:
        return replace(_as("infrastructure", what, sentence="The program ended well and wrote nothing."), final=True)
    code = rules().codes.get(state.code or 0)
    if code and not report:
        return _as(code.failure, what, sentence=code.sentence)
    return _as(report["class"] if report else state.failure or "infrastructure", what, nodes=nodes)


def _signed(
    folder: Path, state: JobState, report: dict[str, Any] | None
) -> list[tuple[Signature, str, tuple[str, ...]]]:
    """The first signature that a log has, the failing rank's before all others, with its line and the machine it is of."""
    texts: list[tuple[str, Path | None]] = [(_said_in_full(report), None)] if report else []
    rank = failing_rank(folder, since_attempt=state.attempts)
    ranks = rank_logs(folder, None if rank is None else [rank])
    texts += [(tail(path), path) for path in (*ranks.values(), *launcher_logs(folder))]
    for signature in rules().signatures:
        for text, path in texts:
            match = re.search(signature.pattern, text)
            if match:
                named = match.groupdict().get("node") or _machine_of(folder, path)
                # The whole line that a match stands in
                begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
                line = text[begin : end if end >= 0 else len(text)].strip()[:400]
                return [(signature, line, (named,) if named else ())]
    return []


def _machine_of(folder: Path, log: Path | None) -> str:
    """The scheduler's name for the machine that wrote a log; empty where the folder does not tell."""
    if log is None:
        return ""
    nodes = [read_mark(path) for path in (folder / "nodes").glob("*/node.json")]
    if log.parent.parent.name == "nodes":
        return str(read_mark(log.parent / "node.json").get("name", ""))
    host = read_mark(folder / "ranks" / f"{log.stem.removeprefix('rank-')}.json").get("host")
    return next((str(node["name"]) for node in nodes if host and node.get("host") == host), "")


def _said(report: dict[str, Any]) -> str:
    """A program's own words for a user's error come without their type."""
    plain = report["class"] in ("user", "integrity", "missing", "limit", "preempted", "node")
    return str(report["message"]) if plain else _said_in_full(report)


def _said_in_full(report: dict[str, Any]) -> str:
    return f"{report['type']}: {report['message']}"


def _scheduler_said(state: JobState) -> str:
    named = f" ({', '.join(state.failed_nodes)})" if state.failed_nodes else ""
    code = "" if state.code in (None, 0) else f", exit code {state.code}"
    return f"{state.reason or state.failure}{named}{code}"


def _end(state: JobState, folder: Path) -> str:
    if state.state == "lost":
        ran_here = (folder / "process.json").exists()
        gone = "its parent process ended without a result"
        return gone if ran_here else "the scheduler does not know it any more, and it left no mark of its end"
    if state.code == 0:
        empty = (folder / "result.json").exists()
        return f"it ended with exit code 0 and {'an empty' if empty else 'without a'} result"
    return f"{state.reason or 'ended'}, exit code {state.code}"
