"""The submissions of one job as the journal and the job folder have them: who was asked for what, and how it ended.

A *generation* is one submission: `jobs/TOKEN/NNNN/{intent,handle,end}` in the journal. It is open until it has an end, and the
next one begins only after that. Who decides is supervisor.py; what a new submission finds in an old folder is made here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.common.claims import Claims, host_claim
from tasks.common.errors import Conflict
from tasks.common.process import read_json, write_json, write_text
from tasks.compute.job import Job, Journal
from tasks.compute.job_folder import key_of as folder_key
from tasks.compute.logs import newest_step
from tasks.config.cluster import ClusterConfig
from tasks.config.database import platform_of

MAY_DIFFER = (
    "submission",
    "home",
    "excluded_nodes",
    "only_nodes",
    "admission",
    "smaller_batches",
    "size",
    "retry",
    "watch",
)
"""Of two jobs under one token: what a further submission changes, or an earlier release did not know; and what concerns the
supervisor only."""
HOME = ".home"
"""File beside the jobs' folders, with what tells their home from others."""
HOME_DIGITS = 6
"""Of what tells a home from others, in the names of its submissions."""
OF_ITS_END = (
    "result.json", "exit.json", "handle.json", "attempt.json", "progress.json", "settled.json", "cancelled.json", "launcher.log",
)  # fmt: skip
FOLDERS_OF_ITS_END = ("elements", "errors", "logs", "nodes", "ranks", "rendezvous")
LOCK, SUPERVISOR = "supervisor.lock", "supervisor.json"
CANCELLED = "cancelled.json"
"""Somebody cancelled the submission that it names, from outside."""


@dataclass(frozen=True)
class Generation:
    """One submission. `handle` is missing when nobody noted one, `end` while it is open."""

    token: str
    number: int
    intent: dict[str, Any]
    handle: dict[str, Any] | None
    end: dict[str, Any] | None

    @property
    def outcome(self) -> str:
        """open, done, failed or cancelled."""
        return str(self.end["outcome"]) if self.end else "open"

    @property
    def marker(self) -> Marker:
        """How far the work was when this submission began."""
        return Marker(**self.intent.get("marker", {}))

    @property
    def stuck(self) -> int:
        """Submissions in a row before this one that made no progress."""
        return int(self.intent.get("stuck", 0))


@dataclass(frozen=True)
class Marker:
    """How far a job's work is: two that differ are progress, but for `attempts`, which only counts starts."""

    progress: str = ""
    """Digest of the file that `job.progress` names."""
    step: int = -1
    """The newest step of metrics.jsonl."""
    attempts: int = 0

    def is_behind(self, other: Marker) -> bool:
        """Whether the other one is further."""
        return other.step > self.step or bool(other.progress and other.progress != self.progress)


def marker(job: Job, folder: Path) -> Marker:
    """How far the work in a folder is now."""
    file = folder / job.progress
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if job.progress and file.is_file() else ""
    attempts = int((read_json(folder / "attempts.json") or {}).get("attempts", 0))
    return Marker(digest, newest_step(folder), attempts)


def newest(token: str, journal: Journal) -> Generation | None:
    """The newest submission under a token."""
    keys = journal.list(f"jobs/{token}/")
    number = max((int(key.split("/")[-2]) for key in keys if key.endswith("/intent")), default=0)
    if not number:
        return None
    at = key_of(token, number)
    parts = {part: journal.get(f"{at}/{part}") if f"{at}/{part}" in keys else None for part in ("handle", "end")}
    return Generation(token, number, journal.get(f"{at}/intent") or {}, parts["handle"], parts["end"])


def intend(job: Job, folder: Path, journal: Journal, *, stuck: int, cluster: ClusterConfig | None) -> Generation | None:
    """Write down that a job is about to be submitted; None when somebody else did."""
    home = folder.parents[1]
    intent = {
        "job": job.model_dump(mode="json"),
        "spec": job.spec_digest,
        "time": time.time(),
        "stuck": stuck,
        "marker": asdict(marker(job, folder)),
        "cluster": cluster.model_dump(mode="json") if cluster else None,
        "home": home_of(folder),
        "host": socket.gethostname(),
        **({"folder_key": _fingerprint(folder)} if cluster and not cluster.shares_folder else {}),
        **({"host_claim": host_claim(platform, socket.gethostname())} if (platform := platform_of(home)) else {}),
    }
    if not journal.put(f"{key_of(job.token, job.submission)}/intent", intent):
        return None
    return Generation(job.token, job.submission, intent, None, None)


def home_of(folder: Path) -> str:
    """What tells the home that a job's folder lies in from others on the same store; made when it is first asked for."""
    path = folder.parent / HOME
    if not path.exists():
        draft = path.with_name(f".home.{uuid.uuid4().hex}")
        write_text(draft, uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_text(encoding="utf-8")


def known_home(folder: Path) -> str:
    """The same, and empty where nobody asked for it yet."""
    path = folder.parent / HOME
    return path.read_text(encoding="utf-8") if path.exists() else ""


def require_reachable(
    generation: Generation, folder: Path, cluster: ClusterConfig | None, claims: Claims | None
) -> Literal["ours", "another's", "gone"]:
    """Whose an open submission is: this home's, another's whose folder lies in a store, or one of a machine that is gone.

    With `claims`, the caller holds the one to the job. Raises Conflict for one that cannot be taken over.
    """
    intent = generation.intent
    if intent.get("home") in (None, home_of(folder)):
        return "ours"
    where = f"the same work is open in another home of this store, on {intent.get('host')}"
    end = "Wait for its end, or end it there: headway job cancel. The same command then takes its result."
    if claims is None or cluster is None:
        raise Conflict(where, remedy=end)
    if cluster.capabilities.this_machine:
        watched = intent.get("host_claim")  # of a host that no watch stands for, nobody can tell that it is gone
        if not watched or intent.get("host") == socket.gethostname() or claims.held(watched):
            raise Conflict(where, remedy=end)
        return "gone"
    if cluster.shares_folder:
        raise Conflict(
            f"{where}, and only there is the folder of its job",
            remedy=f"{end} Hosts take each other's jobs over where cluster.mirror is set, and on Azure ML.",
        )
    elastic = (intent.get("job") or {}).get("elastic")
    if why := cluster.capabilities.cannot_move or (
        "an elastic job has its meeting place on the host" if elastic else ""
    ):
        raise Conflict(f"{where}, and cannot be taken over: {why}", remedy=end)
    if intent.get("folder_key") != _fingerprint(folder):
        raise Conflict(
            f"{where}, whose keys/jobs.key is not the one of this home: files of the job could not be read",
            remedy="Copy keys/jobs.key from that home to this one (docs/platform.md, Several hosts), and run the same again.",
        )
    return "another's"


def _fingerprint(folder: Path) -> str:
    """What tells whether two homes have the same key for a job's folder, and nothing of the key."""
    return hashlib.sha256(folder_key(folder)).hexdigest()[:16]


def note_handle(token: str, number: int, handle: dict[str, Any], journal: Journal) -> None:
    """Write down what the scheduler calls a submission."""
    journal.put(f"{key_of(token, number)}/handle", handle)


def settle(token: str, journal: Journal, outcome: str, *, folder: Path | None = None, **facts: Any) -> None:
    """Close the open generation of a token: done, failed or cancelled; `facts` say more, for those who ask later.

    With `folder`, its mark there too: a folder with one needs no look into the journal (jobs_book.py).
    """
    generation = newest(token, journal)
    if generation is None:
        return
    if not generation.end:
        end = {"outcome": outcome, "time": time.time(), **facts}
        journal.put(f"{key_of(token, generation.number)}/end", end)
        generation = replace(generation, end=end)
    if folder is not None:
        mark_settled(folder, generation)


def mark_settled(folder: Path, generation: Generation) -> None:
    """Leave the mark of a submission's end in its folder."""
    if folder.is_dir():
        write_json(folder / "settled.json", {"submission": generation.number, **(generation.end or {})})


def key_of(token: str, number: int) -> str:
    return f"jobs/{token}/{number:04d}"


def differences(job: Job, intent: dict[str, Any]) -> list[str]:
    """What of a job is not as in an intent, each as `name: there OLD, here NEW`."""
    remote, local = intent.get("job"), job.model_dump(mode="json")
    if remote is None:
        return [] if intent.get("spec") in (None, job.spec_digest) else ["its specification"]
    remote = Job.model_validate(remote).model_dump(mode="json")  # what came with a later release has its default
    names = [name for name in local if name not in MAY_DIFFER and remote.get(name) != local[name]]
    return [entry for name in names for entry in _differences(name, remote.get(name), local[name])]


def _differences(name: str, remote: Any, local: Any) -> Iterator[str]:
    if isinstance(remote, dict) and isinstance(local, dict):
        for key in sorted({*remote, *local}):
            if remote.get(key) != local.get(key):
                yield from _differences(f"{name}.{key}", remote.get(key), local.get(key))
    else:
        yield f"{name}: there {remote!r}, here {local!r}"


def clear(folder: Path) -> None:
    """Empty the folder of work that is done and wanted again."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in (LOCK, SUPERVISOR):
            _remove(path)


def set_aside(folder: Path, number: int) -> None:
    """Before a new submission in an old folder: what the last one left of its end must not be read as the new one's.

    It is kept under submissions/NNNN, for people. Checkpoints, metrics and everything else stay where they are.
    """
    aside = folder / "submissions" / f"{number:04d}"
    for name in (*OF_ITS_END, *FOLDERS_OF_ITS_END):
        if not (folder / name).exists():
            continue
        if (aside / name).exists():  # a machine that is cut off still wrote here
            _remove(folder / name)
            continue
        aside.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, aside / name)
    shutil.rmtree(folder / "out", ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
