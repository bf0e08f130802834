"""A run that begins with another run's checkpoint: which one, what differs, whether somebody may want that, and the audit entry.

What may differ at all is tasks/config/continue_from.py; the job takes the checkpoint over by itself
(tasks/jobs/checkpoint/origins.py, which is called here, too, as a program: it alone can verify one). See docs/training.md, "Go
on from another run".
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts import Artifact, Checkpoint, Pending, Tokens, parse_ref
from tasks.common.errors import IntegrityError, Unknown
from tasks.compute.job import Job
from tasks.compute.jobs_book import find_job, job_of
from tasks.config.base import Settings, digest, has_policy
from tasks.config.continue_from import (
    TOKENS,
    ContinueFrom,
    Difference,
    Origin,
    TakeOver,
    impossible,
    name_of,
    of_another_run,
    position,
    tokens_until,
)
from tasks.config.engines.registry import ENGINES
from tasks.config.flows import RetrainConfig
from tasks.orchestration.run import Lifecycle, current
from tasks.registry.records import StoreJournal
from tasks.security.audit import audit
from tasks.security.policy import require
from tasks.storage import open_folder
from tasks.storage.store import Store, find

TOKENIZER = "tokenizer/tokenizer.json"


class Start(Settings):
    """What training begins with. It is chosen once for a command, and kept: `origins/WHO/WHAT.json`, create-only.

    It lies in the home, and in the store for other homes. Where a policy holds, the home's own counts alone: who may write to the
    store chooses nothing.
    """

    origin: Origin
    taking: TakeOver


@dataclass(frozen=True)
class _Seen:
    """A job's newest good checkpoint."""

    job: Job
    root: Path
    manifest: dict[str, Any]
    sha256: str
    passed_over: tuple[str, ...]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def origin(self) -> Origin:
        return Origin(job=self.job.id, step=self.step, sha256=self.sha256)

    def __str__(self) -> str:
        return _words(self.origin)


def require_possible(home: Path, store: Store, ask: ContinueFrom | None, config: RetrainConfig) -> None:
    """Before anything is spent: whether there is a checkpoint that these settings may go on from. Data is looked at when it is
    there, by `start_of`. What was chosen for these settings before needs none: it was taken over by then, or its job says so.

    Raises Unknown for no such job, IntegrityError when all its checkpoints are bad, ValueError for what differs.
    """
    if not _asked(ask):
        return
    assert ask
    ours: dict[str, Any] = {"training": config.training.model_dump(mode="json")}
    if _kept(home).list(_choices(ask, ours)) or (not has_policy(home) and store.list(_choices(ask, ours))):
        return
    seen = _look(home, store, ask.job)
    _require(_differences(seen, ours, only=("training",)), seen, ask, config)


def start_of(
    ask: ContinueFrom | None,
    config: RetrainConfig,
    *,
    tokens: Tokens,
    base: Checkpoint | None,
    mixed: tuple[Tokens, ...],
) -> tuple[Origin | None, TakeOver | None]:
    """What training begins with, and how that is taken over; None twice: it begins anew. What was forced is in the audit log
    before it is done.

    The same words, settings and data begin with the same checkpoint for good, also when the other job has a newer one by now or
    none is left: that makes a command that is given again the same run. Another reason chooses anew. Raises what
    `require_possible` does, also for another tokenizer or other data.
    """
    run = current()
    if not _asked(ask) or run.beyond("train") or isinstance(tokens, Pending):
        return None, None
    assert ask
    ours: dict[str, Any] = {
        "training": config.training.model_dump(mode="json"),
        TOKENS: _data({"tokens": tokens.ref, **{f"tokens-{other.name}": other.ref for other in mixed}}),
        **({"base": base.ref} if base else {}),
    }
    dry, name = run.spool is None, digest([_named(ask), ours])[:16]
    place = f"{_choices(ask, ours)}/{name}.json"
    if chosen := _chosen(run.home, run.store, place):
        if not dry:
            run.observer.happened(
                "train", "adopted", f"training continues from {_words(chosen.origin)}, as chosen before"
            )
        return chosen.origin, chosen.taking
    seen = _look(run.home, run.store, ask.job)
    differences = _differences(seen, ours)
    _require_same_tokenizer(run.store, seen, tokens)
    _require(differences, seen, ask, config)
    consumed, output = position(int(seen.manifest["consumed_samples"]), differences)
    taking = TakeOver(
        folder=str(seen.root),
        attempt=int(seen.manifest["attempt"]),
        accepted=tuple(sorted({name_of(each.key) for each in differences})),
        consumed_samples=consumed,
        tokens=tokens_until(seen.manifest["identity"], seen.step),
        kept_for=name,
    )
    start = Start(origin=seen.origin, taking=taking)
    if not dry:
        # Its own job does not delete it, now that it was chosen; that it did meanwhile is an IntegrityError.
        _origins(seen.job, seen.root, name, seen.step, seen.manifest["attempt"], seen.sha256)
        _tell(run, seen, ask, differences, output)
        text = start.model_dump_json(indent=1).encode()
        _kept(run.home).create(place, text)
        run.store.create(place, text)
        start = _chosen(run.home, run.store, place) or start
    return start.origin, start.taking


def _asked(ask: ContinueFrom | None) -> bool:
    """Whether a run is to be gone on from. Raises ValueError for a force or a reason of nothing."""
    if not ask:
        return False
    if not ask.job and (ask.force or ask.reason):
        raise ValueError("--force and --reason are for --continue-from JOB: name the job, or leave them out")
    if ask.force and not ask.reason.strip():
        raise ValueError(f"say why: --reason TEXT goes into the audit log with --force and --continue-from {ask.job}")
    return bool(ask.job)


def _named(ask: ContinueFrom) -> str:
    """The job, also where a folder was named from another one."""
    return str(Path(ask.job).absolute()) if "/" in ask.job else ask.job


def _choices(ask: ContinueFrom, ours: Mapping[str, Any]) -> str:
    """Where the choices of one command lie, whatever its data is: what nobody forced once is not forced by a choice."""
    return f"origins/{digest([_named(ask), ask.force, ask.reason, ours['training']])[:16]}"


def _kept(home: Path) -> Store:
    """The home's own documents of what was chosen."""
    return open_folder(home / "origins")


def _chosen(home: Path, store: Store, place: str) -> Start | None:
    document = _kept(home).read(place) or (None if has_policy(home) else store.read(place))
    return Start.model_validate_json(document.data) if document else None


def _words(origin: Origin) -> str:
    return f"step {origin.step} of {origin.job}, checkpoint {origin.sha256[:12]}"


def _look(home: Path, store: Store, name: str) -> _Seen:
    folder = _folder(home, store, name)
    job, root = job_of(folder), folder / "checkpoints"
    able = {engine: one for engine, one in ENGINES.items() if not one.cannot_continue}
    if job.program not in {one.program for one in able.values()}:
        whys = (one.cannot_continue for one in ENGINES.values() if one.program == job.program)
        raise ValueError(
            f"--continue-from {name}: {job.id} runs {job.program}, and {next(whys, 'it trains nothing')}: name a job of the "
            f"engine {' or '.join(able)}"
        )
    if not root.is_dir():
        raise ValueError(
            f"--continue-from {name}: {root} is not there. A job that is done has no checkpoints left: start from its result "
            "with --set training.base=checkpoint/NAME. Those of a job on Azure ML or behind a login node are not on this machine"
        )
    output = json.loads(_origins(job, root))
    if not output["found"]:
        why = "; ".join(output["passed_over"]) or "none was committed yet"
        raise IntegrityError(
            f"{job.id} has no checkpoint to continue from: {why}", remedy="Name another job: `headway jobs --all`."
        )
    return _Seen(job, root, output["found"], output["sha256"], tuple(output["passed_over"]))


def _origins(job: Job, root: Path, *words: object) -> str:
    """What the program says, which alone can read checkpoints."""
    # -P: nothing is imported from the folder that somebody's command was typed in.
    argv = [sys.executable, "-P", "-m", "tasks.jobs.checkpoint.origins", str(root), *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IntegrityError(
            f"checkpoints of {job.id} cannot be read: {(done.stderr.strip().splitlines() or [''])[-1]}"
        )
    return done.stdout


def _folder(home: Path, store: Store, name: str) -> Path:
    """The folder of a job of this home, or of any home that can be read.

    What training makes is signed, so whoever has it begin with weights from elsewhere vouches for them, as with
    `headway checkpoint publish`. Raises Unknown; Refused for a folder outside of this home's jobs without the right `publish`.
    """
    if "/" in name:
        given = Path(name).resolve()  # a link could lead elsewhere once it has been looked at
        if not (given / "job.json").is_file():
            raise Unknown(
                f"{given} is no job's folder: job.json is not there", remedy="`headway jobs --all` lists jobs."
            )
        if given.parent != (home / "jobs").resolve():
            require(home, "publish", what=f"training from {given}")
        return given
    return Path(find_job(home, name, StoreJournal(store)).folder)


def _data(refs: Mapping[str, str]) -> dict[str, str]:
    """Versions of the tokens among a job's inputs."""
    return {name: parse_ref(ref)[2] for name, ref in refs.items() if name.startswith(TOKENS)}


def _differences(seen: _Seen, ours: Mapping[str, Any], *, only: tuple[str, ...] = ()) -> list[Difference]:
    result = {**seen.manifest["identity"], TOKENS: _data(seen.job.artifacts)}
    return of_another_run({key: part for key, part in result.items() if not only or key in only}, ours)


def _require(differences: list[Difference], seen: _Seen, ask: ContinueFrom, config: RetrainConfig) -> None:
    cluster = config.cluster
    never = impossible(differences, config.training, seen.step)
    if not cluster.jobs_see_home:
        never.append(f"machines of the backend {cluster.backend} do not see {seen.root}")
    if never:
        raise ValueError(f"cannot continue from {seen}, not even with --force: {'; '.join(never)}")
    if differences and not ask.force:
        raise ValueError(
            f"cannot continue from {seen}: {'; '.join(map(str, differences))}. Undo the change, or continue anyway with "
            "--force --reason TEXT, which goes into the audit log"
        )


def _require_same_tokenizer(store: Store, seen: _Seen, tokens: Artifact) -> None:
    """Ids of one vocabulary are nothing in another one. Raises ValueError, also when nobody can tell any more."""
    theirs = seen.job.artifacts.get(TOKENS, "")
    if parse_ref(theirs)[2] == tokens.version:
        return
    try:
        remote, local = _tokenizer(store, theirs), _tokenizer(store, tokens.ref)
    except Unknown as error:
        raise ValueError(
            f"cannot continue from {seen}, not even with --force: its {theirs} is not in this store, so it is not known whether "
            "it has the same tokenizer"
        ) from error
    if remote != local:
        raise ValueError(
            f"cannot continue from {seen}, not even with --force: {tokens.ref} has another tokenizer than its {theirs}. "
            "Preprocess with that one, which `headway lineage` shows of the tokens: "
            "--set preprocessing.tokenizer.ref=tokenizer/NAME@VERSION"
        )


def _tokenizer(store: Store, ref: str) -> str:
    files = find(store, *parse_ref(ref, kind=TOKENS)).content.files
    return next((entry.sha256 for entry in files if entry.path == TOKENIZER), "")


def _tell(run: Lifecycle, seen: _Seen, ask: ContinueFrom, differences: list[Difference], position: str) -> None:
    if differences:
        audit(
            run.store,
            "continue from another run",
            right="run",
            what=f"training of {run.subject} from {seen} (manifest {seen.sha256})",
            reason=ask.reason,
            before=json.dumps({each.key: each.there for each in differences}),
            after=json.dumps({each.key: each.here for each in differences}),
        )
    for reason in seen.passed_over:
        run.observer.happened("train", "retrying", f"a newer checkpoint of {seen.job.id} is passed over: {reason}")
    run.observer.happened("train", "adopted", f"training continues from {seen}: {position}")
