"""What the body of a stage may use: fetch, publish, run_job. Around it stands tasks/orchestration/stage.py; what is signed and
promoted is tasks/orchestration/promotion.py.

Everything read here becomes an input of the stage's lineage, and everything published an output; an artifact that the stage
was not handed is refused.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tasks.artifacts import Artifact, Cluster, parse_ref
from tasks.common.errors import IntegrityError
from tasks.common.process import read_json, write_json
from tasks.common.redaction import redacted
from tasks.compute import open_backend
from tasks.compute.job import JobResult
from tasks.compute.logs import Thinning
from tasks.compute.polling import OUT_OF_THE_ORDINARY, Event, Watch
from tasks.compute.submission import newest, settle
from tasks.compute.supervisor import run
from tasks.config.base import digest
from tasks.config.environment import surroundings
from tasks.orchestration.job_spec import Program, job_of
from tasks.orchestration.run import Lifecycle, code_version
from tasks.registry import records
from tasks.registry.versions import lineage_conflict, publish_for_signing
from tasks.registry.versions import publish as publish_artifact
from tasks.security.access import note_access
from tasks.security.audit import actor
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.signed import lineage_digest
from tasks.storage.store import find

A = TypeVar("A", bound=Artifact)
KEPT_AFTER_A_JOB = (
    "job.json",
    "config.json",
    "cluster.json",
    "handle.json",
    "attempt.json",
    "exit.json",
    "settled.json",
    "metrics.jsonl",
    "result.json",
    "launcher.log",
    "logs",
    "pictures",
    "profile",
    "nodes",
    "errors",
    "submissions",
)
"""What a person may want to read later; checkpoints and what was published go."""
NO_METRICS = ("step", "time", "attempt", "seconds_left")
"""Numbers in `metrics.jsonl` that only say of what the others are."""
ATTACHED_BYTES = 20_000_000
"""Largest file that is copied to MLflow."""


@dataclass
class Work:
    """One running stage."""

    stage: str
    key: str
    lifecycle: Lifecycle
    run: str
    """Its run in the lineage spool."""
    handed: list[Artifact]
    context: list[str]
    outputs: list[str] = field(default_factory=list)
    job: JobResult | None = None
    """The last one that has a result."""
    done: dict[str, Path] = field(default_factory=dict)
    """Folders of all its jobs that have one, by token."""
    made: dict[str, Manifest] = field(default_factory=dict)
    """What it published, by reference, as it was then: the store may say something else a moment later."""


_work: ContextVar[Work] = ContextVar("headway_work")


@contextmanager
def working(work: Work) -> Iterator[Work]:
    """Make a stage the one that fetch, publish and run_job speak for; no secret leaves it in an error."""
    token = _work.set(work)
    try:
        yield work
    except Exception as error:
        clean = redacted(error)
        if clean is error:
            raise
        raise clean from None
    finally:
        _work.reset(token)


def at_work() -> Work:
    """The stage that is running: for what belongs to a stage and stands in a file of its own
    (tasks/orchestration/promotion.py)."""
    return _work.get()


def fetch(artifact: Artifact) -> Path:
    """A folder with the artifact's files, every byte checked. Raises IntegrityError, Missing."""
    work = _handed(artifact)
    manifest = stored(artifact)
    note_access(work.lifecycle.home, manifest.ref, bytes=manifest.bytes, what=work.stage)
    return work.lifecycle.store.fetch(manifest)


def _handed(artifact: Artifact) -> Work:
    work = _work.get()
    if artifact not in work.handed:
        raise AssertionError(f"{work.stage} was not handed {artifact.ref}; lineage is what was read")
    return work


@contextmanager
def files_of(artifact: Artifact, *names: str) -> Iterator[Path]:
    """A folder with only these files of an artifact, every byte checked; it is deleted afterwards.

    For a stage that reads a description of what may be terabytes. Files that the artifact lacks are left out.
    """
    work = _handed(artifact)
    manifest = stored(artifact)
    size = sum(entry.size for entry in manifest.content.files if entry.path in names)
    note_access(work.lifecycle.home, manifest.ref, bytes=size, what=work.stage)
    with scratch() as folder:
        work.lifecycle.store.copy_files(manifest, names, folder)
        yield folder


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the stage's own files, gone afterwards."""
    base = _work.get().lifecycle.home / "work"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


def publish(
    folder: Path,
    kind: type[A],
    *,
    name: str,
    metrics: dict[str, float] | None = None,
    made_from: tuple[Artifact, ...] | None = None,
    **fields: Any,
) -> A:
    """Make an artifact of a folder; what a job made is taken over, anything else is copied.

    `made_from` are the inputs of its version; without it, what the stage was handed.
    """
    work = _work.get()
    inputs = tuple(work.handed) if made_from is None else made_from
    provenance = _provenance(work, name, inputs, metrics or {})
    manifest = _publish(work, folder, kind.KIND, tuple(a.version for a in inputs), provenance)
    made = kind(
        name=name, version=manifest.version, uri=work.lifecycle.store.uri_of(manifest), metrics=metrics or {}, **fields
    )
    work.made[made.ref] = manifest
    work.outputs.append(made.ref)
    work.handed.append(made)
    return made


def attach(folder: Path) -> None:
    """Show the files of a folder beside the stage's run in MLflow; large ones stay where they are."""
    work = _work.get()
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.stat().st_size <= ATTACHED_BYTES:
            work.lifecycle.need_spool().log_file(work.run, path)


def free_disk_bytes() -> int:
    """Room on the disk that jobs and artifacts are written to."""
    return shutil.disk_usage(_work.get().lifecycle.home).free


def home_folder(name: str) -> Path:
    """A folder of the home: keys, endpoints."""
    return _work.get().lifecycle.home / name


def note(prefix: str, value: dict[str, Any]) -> None:
    """Append to a journal in the store what is about to be done. Raises Superseded where another host has the run."""
    lifecycle = _work.get().lifecycle
    lifecycle.require_ours()
    lifecycle.journal.append(prefix, {**value, "who": actor().name, "time": time.time()})


def noted(prefix: str, most: int) -> list[dict[str, Any]]:
    """What was appended under a prefix last, oldest first."""
    journal = _work.get().lifecycle.journal
    return [result for key in sorted(journal.list(prefix))[-most:] if (result := journal.get(key))]


def attachment(artifact: Artifact, name: str) -> bytes | None:
    """A file that lies beside an artifact's manifest."""
    return _work.get().lifecycle.store.attachment(stored(artifact), name)


def manifest_of(artifact: Artifact) -> Manifest:
    """What an artifact is made of, and where it came from. It must have been handed to the stage, as for `fetch`."""
    work = _work.get()
    if artifact not in work.handed:
        raise AssertionError(f"{work.stage} was not handed {artifact.ref}; lineage is what was read")
    return stored(artifact)


def run_job(program: Program, *, on: Cluster, again: str = "") -> JobResult:
    """Run a program of tasks/jobs to its end, on the cluster. `again` tells a stage's further jobs from its first.

    Raises what tasks.compute.supervisor.run raises.
    """
    work = _work.get()
    # Machines that share no folder with this one fetch their inputs from the store; nothing of them passes through here.
    place = fetch if on.config.shares_folder else _place
    folders = {name: str(place(artifact)) for name, artifact in program.inputs.items()}
    name, key = (f"{work.stage}-{again}", digest([work.key, again])) if again else (work.stage, work.key)
    job = job_of(name, key, program, on=on, folders=folders)
    _close_published_generation(work, job.token)
    folder = work.lifecycle.home / "jobs" / job.id
    work.job = run(
        job,
        backend=open_backend(on.config),
        folder=folder,
        journal=work.lifecycle.journal,
        watch=_watch(work, on),
        cluster=on.config,
    )
    work.done[job.token] = folder
    return work.job


def _place(artifact: Artifact) -> str:
    """Where an input lies in the store."""
    work = _handed(artifact)
    return work.lifecycle.store.uri_of(stored(artifact))


def run_again(program: Program, *, on: Cluster, again: str = "") -> JobResult:
    """The same job again: the result of the last one is not used."""
    work = _work.get()
    settle(next(reversed(work.done)), work.lifecycle.journal, "done")
    return run_job(program, on=on, again=again)


def intended_nodes() -> int | None:
    """Machines of this stage's first job where a submission of it is open: it is adopted as it was meant."""
    work = _work.get()
    token = work.key[:32]
    _close_published_generation(work, token)
    generation = newest(token, work.lifecycle.journal)
    if generation is None or generation.end:
        return None
    return int((generation.intent.get("job") or {}).get("nodes") or 0) or None


def settle_jobs(work: Work) -> None:
    """Close the stage's jobs: whoever wants the stage again runs them anew."""
    for token, folder in work.done.items():
        settle(token, work.lifecycle.journal, "done", folder=folder)


def clean_up(work: Work) -> None:
    """After the stage is recorded: its jobs are done, and only what a person may want to read stays."""
    settle_jobs(work)
    for folder in work.done.values():
        for path in folder.iterdir():
            if path.name not in KEPT_AFTER_A_JOB and not path.name.startswith("published-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _publish(work: Work, folder: Path, kind: str, inputs: tuple[str, ...], provenance: Provenance) -> Manifest:
    """A job's output is linked into the store, noted, and only then deleted: a kill in between loses nothing."""
    work.lifecycle.require_ours()
    store = work.lifecycle.store
    if work.job is None or not folder.is_relative_to(work.job.folder):
        return publish_artifact(store, folder, kind=kind, inputs=inputs, provenance=provenance)
    note = Path(work.job.folder) / f"published-{kind}.json"
    if folder.exists():
        manifest = publish_for_signing(
            store, work.lifecycle.home, folder, kind=kind, inputs=inputs, provenance=provenance, link=True
        )
        write_json(note, {"version": manifest.version, "lineage": lineage_digest(manifest.provenance)})
        shutil.rmtree(folder)
        return manifest
    output = read_json(note)
    if not output:
        raise IntegrityError(f"{folder} is gone, and was not published", remedy="Run again with --from this stage.")
    manifest = find(store, kind, provenance.name, output["version"])
    lineage = lineage_digest(manifest.provenance)
    if output.get("lineage", lineage) != lineage:
        raise lineage_conflict(manifest)
    return manifest


def _provenance(work: Work, name: str, inputs: tuple[Artifact, ...], metrics: dict[str, float]) -> Provenance:
    commit, dirty = code_version()
    return Provenance(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        inputs=tuple(artifact.ref for artifact in inputs),
        context=tuple(work.context),
        stage=work.stage,
        commit=commit,
        dirty=dirty,
        config_digest=work.lifecycle.config_digest,
        config=work.lifecycle.config.model_dump(mode="json"),
        metrics=metrics,
        flow=work.lifecycle.flow,
        flow_run=(work.lifecycle.flow_run or {}).get("id"),
        key=work.key,
        **surroundings(),
    )


def stored(artifact: Artifact) -> Manifest:
    """What the store has of an artifact; stages ask by `manifest_of`."""
    kind, name, version = parse_ref(artifact.ref)
    return find(_work.get().lifecycle.store, kind, name, version)


def _close_published_generation(work: Work, token: str) -> None:
    """A kill between record and settle leaves a generation open whose result was published: close it."""
    record = records.load(work.lifecycle.store, work.stage, work.key)
    if not record:
        return
    intents = [key for key in work.lifecycle.journal.list(f"jobs/{token}") if key.endswith("/intent")]
    newest = work.lifecycle.journal.get(intents[-1]) if intents else None
    if newest and newest["time"] < record.created:
        settle(token, work.lifecycle.journal, "done")


def _watch(work: Work, on: Cluster) -> Watch:
    observer, spool, thinning = work.lifecycle.observer, work.lifecycle.need_spool(), Thinning()

    def forward(batch: list[dict[str, Any]]) -> None:
        rows = [
            (name, float(value), int(record.get("step", 0)))
            for record in thinning.of(batch)
            for name, value in record.items()
            if isinstance(value, int | float) and name not in NO_METRICS
        ]
        spool.log_metrics(work.run, rows)
        observer.measured(work.stage, batch)

    def tell(output: dict[str, Any]) -> None:
        observer.progress(work.stage, output["done"], output["total"], output["text"], output["seconds_left"])

    entries: list[dict[str, Any]] = []

    def happened(event: Event) -> None:
        """For people at once; what is out of the ordinary, for those who read the run in MLflow later."""
        observer.happened(work.stage, event.kind, event.text)
        if event.kind in OUT_OF_THE_ORDINARY:
            entries.append({"time": time.time(), **asdict(event)})
            spool.log_json(work.run, "job-events.json", entries)

    def ends_with_the_run() -> bool:
        """When the platform stops, what runs elsewhere goes on: the next start adopts it."""
        goes_on = not on.config.capabilities.this_machine and work.lifecycle.platform_stops
        return not goes_on and work.lifecycle.stop_on_interrupt()

    return Watch(
        metrics=forward,
        progress=tell,
        event=happened,
        cancelled=work.lifecycle.cancelled,
        stop_on_interrupt=ends_with_the_run,
        flow_run=(work.lifecycle.flow_run or {}).get("id", ""),
    )
