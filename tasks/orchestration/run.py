"""One run of a flow: its store, its configuration, what became of each stage. The frame that stages find around them.

No Prefect here: flows open a lifecycle, tasks/orchestration/stage.py runs stages in it, and people watch it through an
`Observer`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Literal

from tasks.artifacts import parse_ref
from tasks.azure.arm_client import use_files
from tasks.common.claims import ALONE, Claim, claimed, run_claim
from tasks.common.errors import Cancelled, GateFailed, Superseded, Suspended
from tasks.common.home import home, stopped_mark
from tasks.common.process import locked
from tasks.common.redaction import clean_logs, redacted, require_no_secrets
from tasks.compute.jobs_book import reconcile
from tasks.config.base import Settings, config_digest, experiment, tracking_uri
from tasks.config.environment import surroundings
from tasks.lineage import messages
from tasks.lineage.spool import Spool
from tasks.orchestration.observers import Observer, Observers, Outcome, Shown, Unobserved, interrupted, status_of
from tasks.orchestration.result import RunResult
from tasks.orchestration.run_log import RunLog, read_question
from tasks.registry.approvals import Approval, Asked
from tasks.registry.records import StoreJournal
from tasks.registry.versions import flat
from tasks.security.audit import actor
from tasks.storage import open_files, open_store
from tasks.storage.manifest import Manifest
from tasks.storage.store import Document, Store, find

SUBJECTS = {"qualify": "headway.cluster", "validate": "headway.dataset"}
"""The tag that names what a flow is about; of all others it is a model."""


@dataclass
class Lifecycle:
    """State of one flow run."""

    flow: str
    subject: str
    """What the run is about: a model's name, or a cluster's. One run of a flow and subject at a time."""
    store: Store
    home: Path
    config: Settings
    stages: tuple[str, ...]
    first: str | None
    """This stage and all later ones run again."""
    last: str | None
    """Stages after this one do not run."""
    spool: Spool | None
    """None in a dry run: nothing runs, and nothing is written down."""
    observer: Observer
    cancelled: Callable[[], bool]
    stop_on_interrupt: Callable[[], bool]
    flow_run: dict[str, str] | None
    approvals: Mapping[str, Callable[..., AbstractContextManager[None]]] = field(default_factory=dict)
    """What asks a person before a stage runs whose result is not recorded, by the stage's name. It is called with what the stage
    is handed; the stage runs inside."""
    run: str | None = None
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    """Of the stages, once they are over: without the report."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    asides: list[Outcome] = field(default_factory=list)
    """Second calls of a stage: the champion's evaluation."""
    error: BaseException | None = None
    champion_place: Document | Literal["now"] | None = "now"
    """Where the champion's ref stood when the model was compared with it; `now`: it was not compared."""
    starters: frozenset[str] | None = frozenset()
    """Persons who handed the run to the platform; None where somebody did, and nobody can tell who."""
    approved: dict[str, tuple[Asked, Approval]] = field(default_factory=dict)
    """What a person said yes to in this run, by its place."""
    claim: Claim = ALONE
    """To this flow run, against the workers of other hosts."""
    place_claim: Claim = ALONE
    """To the flow and subject, while the run is at work."""
    place: ExitStack = field(default_factory=ExitStack)
    """Holds the lock of the flow and subject while the run is at work."""
    suspended: bool = False
    """Whether it ends here only to wait for a person, without a process."""
    versions: dict[str, str] = field(default_factory=dict)
    """What the references that the run was given stand for: it keeps to them when it goes on after somebody's answer."""
    result: RunResult = field(default_factory=RunResult)
    """What the flow leaves for those who ask afterwards, as far as it has come."""

    def __post_init__(self) -> None:
        self.journal = StoreJournal(self.store)
        self.config_digest = config_digest(self.config)
        self.outcomes = {name: Outcome(name) for name in self.stages}

    def beyond(self, stage: str) -> bool:
        """Whether the run was asked to stop before this stage."""
        return self.last is not None and self.stages.index(stage) > self.stages.index(self.last)

    def forced(self, stage: str) -> bool:
        """Whether the stage runs again although its result is recorded."""
        return self.first is not None and self.stages.index(stage) >= self.stages.index(self.first)

    def outcome_for(self, stage: str, shown: Shown = Shown()) -> Outcome:  # noqa: B008 it is frozen
        """The stage's own outcome at its first call; an aside at a later one."""
        if stage not in self.called:
            self.called.add(stage)
            self.outcomes[stage].shown = shown
            return self.outcomes[stage]
        self.asides.append(Outcome(stage, shown=shown))
        return self.asides[-1]

    def take_place(self) -> None:
        """Wait until no other run of the same flow and subject is at work, and hold the place. Raises Cancelled."""

        def waiting() -> None:
            text = f"another {self.flow} of {self.subject} runs; waiting for its end"
            self.observer.progress(self.flow, 0, 0, text, None)
            if self.cancelled():
                raise Cancelled("the flow run was cancelled while it waited for another run's end")

        name = f"{self.flow}-{self.subject}"
        self.place.enter_context(locked(self.home / "locks" / f"run-{name}", waiting=waiting))
        place = claimed(self.store.claims, f"places/{name}", waiting=waiting, sleep=time.sleep)
        self.place_claim = self.place.enter_context(place)

    def require_ours(self) -> None:
        """Return while this process, and no other, works on the run, and no other run on its flow and subject.

        Asked before whatever another must not do at the same time. Raises Superseded; Missing while the store does not answer.
        """
        self.claim.require()
        self.place_claim.require()

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """Let other runs of the same flow and subject be at work while this one waits for a person. Raises Cancelled.

        They may move what this one stands on: whoever goes on compares again (promotion.py, refs).
        """
        self.place.close()
        self.place_claim = ALONE
        yield
        self.take_place()

    @property
    def platform_stops(self) -> bool:
        """Whether somebody stopped the platform while this run was at work."""
        mark = stopped_mark(self.home)
        return mark.exists() and mark.stat().st_mtime > self.began

    @property
    def status(self) -> str:
        """How it ended: completed, gate_closed, cancelled or failed; waiting: it goes on when a person has answered."""
        return "waiting" if self.suspended else status_of(self.error)

    @property
    def stopped_at(self) -> str:
        """The stage that failed, whose gate closed, or that was at work when somebody stopped the run; empty when none was."""
        bad = (o.name for o in self.outcomes.values() if o.status in ("failed", "gate_closed", "cancelled"))
        return next(bad, "")

    def need_spool(self) -> Spool:
        assert self.spool is not None, "a dry run does not write"
        return self.spool


_current: ContextVar[Lifecycle | None] = ContextVar("headway_lifecycle", default=None)
_observer: ContextVar[Observer] = ContextVar("headway_observer", default=Unobserved())  # noqa: B039
_interrupt: ContextVar[Callable[[], bool]] = ContextVar("headway_interrupt", default=lambda: True)


def pinned(store: Store, ref: str, *, kind: str) -> Manifest:
    """The artifact of a reference that the running lifecycle was given: of the newest version where it names none, and of the
    same one as long as the run lasts, waiting included. Outside of a lifecycle, of the newest version. Raises Unknown."""
    versions = run.versions if (run := _current.get()) else {}
    manifest = find(store, *parse_ref(versions.get(f"{kind} {ref}", ref), kind=kind))
    versions[f"{kind} {ref}"] = manifest.ref
    return manifest


def current() -> Lifecycle:
    """The lifecycle that the calling stage belongs to."""
    run = _current.get()
    assert run is not None, "a stage is called inside `lifecycle(...)`, which every flow opens"
    return run


@contextmanager
def watched(observer: Observer, stop_on_interrupt: Callable[[], bool]) -> Iterator[None]:
    """Have every lifecycle that opens inside report to an observer, and ask before an interrupt stops a job."""
    tokens = _observer.set(observer), _interrupt.set(stop_on_interrupt)
    try:
        yield
    finally:
        _observer.reset(tokens[0])
        _interrupt.reset(tokens[1])


@contextmanager
def lifecycle(
    flow: str,
    config: Settings,
    *,
    subject: str,
    stages: Sequence[str],
    first: str | None = None,
    last: str | None = None,
    dry: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    flow_run: dict[str, str] | None = None,
    observers: Sequence[Observer] = (),
    approvals: Mapping[str, Callable[..., AbstractContextManager[None]]] | None = None,
    at_end: Callable[[Lifecycle], None] = lambda run: None,
) -> Iterator[Lifecycle]:
    """Open the frame of one flow run. Its MLflow run is the parent of the stages' runs, and always gets an end.

    While another run of the same flow and subject is at work, it waits. `at_end` is called however the flow ended, when
    `run.error` and all outcomes are known: it writes the report. `approvals` are those of the `Lifecycle`.
    """
    _check(flow, config, stages, first, last)
    base, name = home(), messages.experiment_name(flow, subject)
    note = messages.experiment_note(flow, subject)
    run = Lifecycle(
        flow=flow,
        subject=subject,
        store=open_store(base),
        home=base,
        config=config,
        stages=tuple(stages),
        first=first,
        last=last,
        spool=None if dry else Spool(base, tracking_uri(), experiment=experiment(name), note=note),
        observer=_observer.get(),
        cancelled=cancelled,
        stop_on_interrupt=_interrupt.get(),
        flow_run=flow_run,
        approvals=approvals or {},
    )
    if flow_run:
        run.versions |= (read_question(base / "runs" / flow_run["id"]) or {}).get("versions", {})
    token = _current.set(run)
    try:
        with _opened(run, observers) if run.spool else nullcontext():
            yield run
    except Suspended:
        run.suspended = True
        raise
    except BaseException as error:
        clean = redacted(error)
        _blame(run, clean)
        if clean is error:
            raise
        raise clean from None
    finally:
        run.seconds = time.time() - run.began
        _close(run, at_end)
        _current.reset(token)


def _check(flow: str, config: Settings, stages: Sequence[str], first: str | None, last: str | None) -> None:
    """Refuse what cannot run before anything is written, and see to it that no log holds a secret."""
    for name in (first, last):
        if name is not None and name not in stages:
            raise ValueError(f"{name!r} is not a stage of {flow}; the stages are {', '.join(stages)}")
    if first and last and stages.index(first) > stages.index(last):
        raise ValueError(f"--from {first} comes after --to {last}: nothing would run; the order is {', '.join(stages)}")
    clean_logs()
    require_no_secrets(config.model_dump(mode="json"))


@contextmanager
def _opened(run: Lifecycle, observers: Sequence[Observer]) -> Iterator[None]:
    """Tell MLflow and all observers of the run, and hold its place against a second run of the same flow and subject."""
    use_files(partial(open_files, run.home))
    settings = flat("", run.config.model_dump(mode="json"))
    params = {"config_digest": run.config_digest, **{key.removeprefix("."): value for key, value in settings.items()}}
    run.run = run.need_spool().start_run(messages.run_name(run.flow, run.began), tags=_tags(run), params=params)
    log = RunLog(run.home, (run.flow_run or {}).get("id") or run.run)
    run.observer = Observers([run.observer, log, *observers])
    run.observer.opened(run)

    def waiting() -> None:
        run.observer.progress(run.flow, 0, 0, "the claim of the host that worked on this run before runs out", None)
        if run.cancelled():
            raise Cancelled("the flow run was cancelled while it waited for the end of its process on another host")

    claims = run.store.claims if run.flow_run else None
    mine = claimed(claims, run_claim((run.flow_run or {}).get("id", "")), waiting=waiting, sleep=time.sleep)
    with run.place, mine as run.claim:
        run.take_place()
        for item in reconcile(run.home, run.journal):
            run.observer.happened(run.flow, item.verdict, item.text)
        run.began = time.time()
        yield


def _close(run: Lifecycle, at_end: Callable[[Lifecycle], None]) -> None:
    if run.spool is None:
        return
    try:
        if not isinstance(run.error, Superseded):  # what the run leaves for people is written by whoever took it over
            at_end(run)
    finally:
        run.observer.closed(run)
        if run.run:
            status = "FINISHED" if run.error is None else "KILLED" if interrupted(run.error) else "FAILED"
            run.spool.log_metrics(run.run, messages.headlines(run.outcomes.values(), run.seconds))
            why, report = messages.why(run.error, run.stopped_at), Path(run.result.report or "").name
            result = {
                **{f"headway.{o.name}": o.status for o in run.outcomes.values()},
                "headway.status": run.status,
                "headway.dataset": run.result.dataset or "",
                **run.result.tags,
                "mlflow.note.content": messages.run_note(
                    run.flow_run, run.status, why=why, report=report, facts=_facts(run)
                ),
            }
            run.spool.end_run(run.run, status, tags={key: value for key, value in result.items() if value})
        run.spool.close()


def _tags(run: Lifecycle) -> dict[str, str]:
    commit, dirty = code_version()
    result = {
        "headway.flow": run.flow,
        SUBJECTS.get(run.flow, "headway.model"): run.subject,
        "headway.status": "running",
        "headway.commit": commit,
        "headway.config_digest": run.config_digest,
        "headway.prefect_flow_run": (run.flow_run or {}).get("id"),
        "mlflow.user": actor().name,
        "mlflow.source.name": f"headway {run.flow}",
        "mlflow.note.content": messages.run_note(run.flow_run, "running", facts=_facts(run)),
        "mlflow.source.git.commit": commit,
        "headway.dirty": None if dirty is None else str(dirty).lower(),
        **messages.surroundings_tags(surroundings()),
    }
    return {key: value for key, value in result.items() if value}


def _facts(run: Lifecycle) -> dict[str, str]:
    made = [ref for outcome in run.outcomes.values() for ref in outcome.outputs if ref.startswith("model/")]
    return {
        "Dataset": run.result.dataset or "",
        "Model": made[-1] if made else "",
        "Code": code_version()[0] or "",
        "Configuration": run.config_digest,
    }


def _blame(run: Lifecycle, error: BaseException) -> None:
    """A gate that is closed between two stages belongs to the stage that it judges."""
    run.error = error
    if isinstance(error, GateFailed) and error.stage in run.outcomes:
        outcome = run.outcomes[error.stage]
        known = outcome.status, outcome.checks
        failed = [{**check, "passed": False} for check in error.checks]  # the error has the failed ones only
        outcome.status, outcome.checks = "gate_closed", outcome.checks or failed
        if (outcome.status, outcome.checks) != known:
            run.observer.ended(outcome)


CODE = ("flows", "tasks", "deployments", "pyproject.toml", "constraints.txt")
"""What runs, below the root of a checkout: a file of the user's beside it changes nothing."""


@cache
def code_version() -> tuple[str | None, bool | None]:
    """Commit of the code that runs, and whether any of it was changed since; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    completed = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain", "--", *CODE], capture_output=True, text=True, check=False
    )
    if completed.returncode or changed.returncode:
        return None, None
    return completed.stdout.strip(), bool(changed.stdout.strip())
