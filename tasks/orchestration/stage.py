"""`@stage`: makes a function a Prefect task whose inputs and output are lineage, and which is not run twice for one key.

Prefect's own cache is off; records (tasks/registry/records.py) decide. What a stage body may use is in
tasks/orchestration/stage_context.py, the run around it in tasks/orchestration/run.py. See docs/DESIGN.md, "Stage".
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ValidationError

from tasks.artifacts import Artifact, Cluster, Gate, Pending, parse_ref, plain
from tasks.common import process
from tasks.common.errors import Cancelled, GateFailed, HeadwayError, IntegrityError, Refused, Unknown
from tasks.common.process import locked
from tasks.common.validation import explain
from tasks.config.base import Settings, digest
from tasks.config.environment import surroundings
from tasks.lineage import messages
from tasks.orchestration.observers import Outcome, Shown, interrupted, stopped_as
from tasks.orchestration.prefect_artifacts import leave_note
from tasks.orchestration.run import Lifecycle, current
from tasks.orchestration.stage_context import Work, clean_up, settle_jobs, working
from tasks.registry import records
from tasks.registry.ancestry import told
from tasks.registry.approvals import require_standing
from tasks.registry.records import Record
from tasks.registry.versions import flat, what_changed
from tasks.storage.store import find


@dataclass(frozen=True)
class Call:
    """One call of a stage: what is in its key, and what only stands around it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        return digest(self.arguments)

    @property
    def handed(self) -> list[Artifact]:
        return [value for value in _single(self.args) if isinstance(value, Artifact)]

    @property
    def context(self) -> list[str]:
        values = [value for value in self.kwargs.values() if isinstance(value, Cluster | Artifact)]
        refs = [value.qualification if isinstance(value, Cluster) else value.ref for value in values]
        return [ref for ref in refs if ref]

    @property
    def pending(self) -> bool:
        return self.without_key or any(isinstance(value, Pending) for value in _single(self.kwargs.values()))

    @property
    def without_key(self) -> bool:
        """What it is to work on is not made yet."""
        return is_pending(self.args)


def is_pending(args: Iterable[Any]) -> bool:
    return any(isinstance(value, Pending) for value in _single(args))


def _single(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments one by one, also those that come as a tuple."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def key_part(value: Any) -> Any:
    if isinstance(value, Artifact):
        return {"kind": value.KIND, "version": value.version}
    if isinstance(value, tuple):
        return [key_part(each) for each in value]
    assert isinstance(value, Settings | str | int | float | None), f"{type(value).__name__} has no place in a key"
    return plain(value)


P = ParamSpec("P")
R = TypeVar("R")


class Stage:
    """A stage of a lifecycle. Calling it runs it, reuses its record, or says that it is pending."""

    def __init__(
        self,
        body: Callable[..., Any],
        version: int,
        expires: Callable[[Record, tuple[Any, ...]], bool] | None,
        reconciles: Callable[..., Any] | None,
        name: str,
        same_context: bool,
        shown: Shown,
    ) -> None:
        self.body, self.version, self.expires, self.reconciles, self.name = body, version, expires, reconciles, name
        self.same_context, self.shown = same_context, shown
        update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current()
        if run.beyond(self.name):
            return Pending(stage=self.name)
        call = self._call(args, kwargs)
        if call.pending and (call.without_key or self.same_context or run.spool is not None):
            outcome = run.outcome_for(self.name, self.shown)
            return (
                self._pending(run, outcome, "an earlier stage runs first")
                if run.spool is None
                else Pending(stage=self.name)
            )
        if run.spool is None:
            outcome = run.outcome_for(self.name, self.shown)
            record, why = self._reusable(run, call)
            outcome.key, outcome.why = call.key, why
            if record is None:
                return self._pending(run, outcome, why)
            _fill(outcome, record)
            return self._value(record)
        with self._approval(run, call):
            return self._task(call)

    def _approval(self, run: Lifecycle, call: Call) -> AbstractContextManager[None]:
        """What waits until a person agrees to this call; nothing where the flow asks nobody, or a record stands for it.

        `_execute` looks again whether somebody agreed: the record may be gone by then.
        """
        ask = run.approvals.get(self.name)
        return nullcontext() if ask is None or self._reusable(run, call)[0] else ask(*call.args, **call.kwargs)

    def _pending(self, run: Lifecycle, outcome: Outcome, why: str) -> Pending:
        """Note in a dry run why the stage would run, and that somebody is asked before."""
        asks = "approval required" if self.name in run.approvals else ""
        outcome.status, outcome.why = "pending", "; ".join(part for part in (why, asks) if part)
        return Pending(stage=self.name)

    @cached_property
    def _task(self) -> Callable[[Call], Any]:
        """Prefect's task, made at the first call: importing Prefect takes seconds."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        made: Callable[[Call], Any] = task(
            self._run, name=self.name, task_run_name=self.name, cache_policy=NO_CACHE, persist_result=False
        )
        return made

    def _run(self, call: Call) -> Any:
        run = current()
        outcome = run.outcome_for(self.name, self.shown)
        outcome.key = call.key
        began = time.monotonic()
        run.require_ours()
        last = self._last(run, call)
        run.observer.started(self.name, last.seconds if last else None)
        try:
            with locked(run.home / "locks" / f"{self.name}-{call.key[:16]}", waiting=lambda: self._wait(run)):
                value = self._reuse_or_execute(run, outcome, call)
        except BaseException as error:
            outcome.status = stopped_as(error)
            if isinstance(error, GateFailed) and error.stage == self.name:
                outcome.checks = outcome.checks or [{**check, "passed": False} for check in error.checks]
            raise
        finally:
            outcome.seconds = round(time.monotonic() - began, 3)
            run.observer.ended(outcome)
            leave_note(outcome, outcome.pages(run.home))
        return value

    def _wait(self, run: Lifecycle) -> None:
        """Another run of this home is at the same work: wait for its result, unless somebody cancels us meanwhile."""
        run.observer.progress(self.name, 0, 0, "another run works on this stage; waiting for its result", None)
        if run.cancelled():
            raise Cancelled("the flow run was cancelled while it waited for another run's result")

    def _reuse_or_execute(self, run: Lifecycle, outcome: Outcome, call: Call) -> Any:
        record, outcome.why = self._reusable(run, call)
        outcome.inputs = [a.ref for a in call.handed] + call.context
        spool = run.need_spool()
        tags = {"headway.stage": self.name, "headway.key": call.key, "headway.reused": str(record is not None).lower()}
        tags |= messages.surroundings_tags(surroundings())
        handed = [told(run.store, artifact.ref) for artifact in call.handed]
        parts = call.arguments["arguments"].items()
        params = {key: part for name, value in parts for key, part in flat(name, value).items()}
        identity = spool.start_run(self.name, parent=run.run, tags=tags, params=params)
        outcome.run = identity
        spool.log_inputs(identity, [messages.as_input(each) for each in handed])
        if run.run:
            spool.log_inputs(run.run, [messages.as_input(each) for each in handed if each["kind"] == "dataset"])
        status = "FINISHED"
        try:
            if record:
                value = self._value(record)
                _fill(outcome, record)
            else:
                value = self._execute(run, outcome, call, identity)
            # Final values at the last step, so that they end a series of the same name instead of starting it.
            spool.log_metrics(
                identity, [(key, value, int(outcome.metrics.get("steps", 0))) for key, value in outcome.metrics.items()]
            )
            return value
        except BaseException as error:
            status = "KILLED" if interrupted(error) else "FAILED"
            raise
        finally:
            for page in outcome.pages(run.home):
                spool.log_file(identity, page)
            made = [told(run.store, ref) for ref in outcome.outputs]
            spool.log_json(identity, "lineage.json", {"inputs": handed, "context": call.context, "outputs": made})
            tags = messages.output_tags(made) | self._log_table(run, outcome, identity)
            spool.end_run(identity, status, tags=tags)

    def _log_table(self, run: Lifecycle, outcome: Outcome, identity: str) -> dict[str, str]:
        """Attach the table of the stage's output where `mlflow.evaluate` puts one; returns the tag that has it shown.

        Of an output that cannot be read there is none: a run is not stopped by what is only shown.
        """
        if not self.shown.table or not outcome.outputs:
            return {}
        try:
            folder = run.store.fetch(find(run.store, *parse_ref(outcome.outputs[-1])))
            table = process.read_json(folder / self.shown.table)
            rows = messages.results_table(table) if table else None
        except (HeadwayError, OSError, ValueError, TypeError, AttributeError):  # whatever a record's output holds
            return {}
        if rows is None:
            return {}
        run.need_spool().log_json(identity, messages.RESULTS_TABLE, rows)
        return messages.RESULTS_TAG

    def _execute(self, run: Lifecycle, outcome: Outcome, call: Call, identity: str) -> Any:
        self._require_agreed(run)
        began = time.monotonic()
        work = Work(self.name, call.key, run, identity, handed=call.handed, context=call.context)
        try:
            with working(work):
                value = self.body(*call.args, **call.kwargs)
        except GateFailed:  # what was measured is judged, and published nowhere: the next run measures again
            settle_jobs(work)
            raise
        finally:
            outcome.outputs, outcome.job = work.outputs, work.job.summary() if work.job else None
        record = Record(
            stage=self.name,
            key=call.key,
            arguments=call.arguments,
            inputs=tuple(artifact.ref for artifact in call.handed),
            context=tuple(call.context),
            outputs=tuple(work.outputs),
            value=plain(value),
            metrics=getattr(value, "metrics", {}),
            seconds=time.monotonic() - began,
            created=time.time(),
            flow_run=(run.flow_run or {}).get("id"),
            run=identity,
            job=outcome.job,
        )
        run.require_ours()
        records.save(run.store, record)
        clean_up(work)
        _fill(outcome, record)
        outcome.status = "gate_closed" if isinstance(value, Gate) and not value.passed else "ran"
        outcome.checks = [check.model_dump() for check in value.checks] if isinstance(value, Gate) else []
        return value

    def _require_agreed(self, run: Lifecycle) -> None:
        """Raise Refused where somebody has to be asked before this stage, and no approval that was given counts now."""
        if self.name not in run.approvals:
            return
        given = [one for one in run.approved.values() if one[0].kind == self.name]
        if not given:
            raise Refused(
                f"nobody was asked before {self.name}: the record that stood for it is gone",
                remedy="Start the run again: it reuses what is finished, and asks.",
            )
        for asked, approval in given:
            require_standing(run.home, run.store, asked, approval)

    def _last(self, run: Lifecycle, call: Call) -> Record | None:
        """The newest record of this stage on artifacts of the same names: another dataset or model tells nothing of this one."""
        names = [artifact.ref.partition("@")[0] for artifact in call.handed]
        return records.newest(run.store, self.name, of=lambda one: [i.partition("@")[0] for i in one.inputs] == names)

    def _reusable(self, run: Lifecycle, call: Call) -> tuple[Record | None, str]:
        """The record that stands for a run of this call, or None and why there is none."""
        if run.forced(self.name):
            return None, f"--from {run.first}"
        record = records.load(run.store, self.name, call.key)
        if record is None:
            last = self._last(run, call)
            return None, what_changed(last.arguments, call.arguments) if last else "no earlier result with these inputs"
        value = self._value(record)
        if isinstance(value, Gate) and not value.passed:
            return None, "its gate was closed last time"
        if self.expires and self.expires(record, call.args):
            return None, "the last result is too old"
        if self.same_context and list(record.context) != list(call.context):
            return None, "it was made under another qualification"
        if self.reconciles and not self.reconciles(*call.args):
            return None, "what is there is not what is wanted"
        for ref in record.outputs:
            if not _present(run, ref):
                return None, f"{ref[:40]} is gone or damaged"
        return record, f"recorded {time.strftime('%Y-%m-%d %H:%M', time.localtime(record.created))}"

    def _value(self, record: Record) -> Any:
        kind: type[BaseModel] = get_type_hints(self.body)["return"]
        try:
            return kind.model_validate(record.value)
        except ValidationError as error:
            raise IntegrityError(
                f"the record of {self.name} {record.key[:12]} is damaged: {explain(error, kind)}",
                remedy=f"Run it again: `--from {self.name}`. Find out who wrote the record.",
            ) from error

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = inspect.signature(self.body).bind(*args, **kwargs)
        parameters, values = list(bound.signature.parameters.values()), list(bound.args)
        # Last arguments that have their default are left out: a stage that learns to take more keeps the keys that it has.
        while values and values[-1] == parameters[len(values) - 1].default:
            values.pop()
        named = {parameter.name: value for parameter, value in zip(parameters, values, strict=False)}
        parts = {} if is_pending(args) else {name: key_part(value) for name, value in named.items()}
        return Call(tuple(values), bound.kwargs, {"stage": self.name, "version": self.version, "arguments": parts})


def stage(
    *,
    version: int,
    name: str = "",
    expires: Callable[[Record, tuple[Any, ...]], bool] | None = None,
    reconciles: Callable[..., Any] | None = None,
    same_context: bool = False,
    shown: Shown = Shown(),  # noqa: B008 it is frozen
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a stage. Positional arguments are its key, keyword-only ones say where and within which limits. Of those
    with a default the last ones are in the key only where they have another value.

    Raise `version` when the same arguments shall give another result. `expires` says that a record is too old; `reconciles`
    compares what the record says with what is there now; with `same_context` a record holds only under what it was made under.
    `shown` is what people see of it in the terminal, in Prefect's pages, in MLflow and in the report.
    """

    def make(body: Callable[P, R]) -> Callable[P, R]:
        return cast(
            Callable[P, R], Stage(body, version, expires, reconciles, name or body.__name__, same_context, shown)
        )

    return make


def _fill(outcome: Outcome, record: Record) -> None:
    outcome.status = "reused"
    outcome.inputs = [*record.inputs, *record.context]
    outcome.outputs, outcome.metrics, outcome.job = list(record.outputs), dict(record.metrics), record.job


def _present(run: Lifecycle, ref: str) -> bool:
    try:
        return run.store.present(find(run.store, *parse_ref(ref)))
    except Unknown:
        return False
