"""What became of each stage, and who watches a lifecycle: the terminal, Prefect's page, the run's own log.

The frame that calls them is tasks/orchestration/run.py. A person reads in Prefect's page a note a stage, and a gate's checks as a
table; `ask` is the one way to talk to its server.

The server may be away at any moment: killed, restarted, hung. A run never fails by that here, and waits seconds at most: what
could not be told is kept, and told with the next note or at the end of the run. Notes of stages are sent while the run goes on.
Belongs to tasks/orchestration/stage.py and flows/.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tasks.common.errors import Cancelled, GateFailed, Superseded
from tasks.common.redaction import redact_value

T = TypeVar("T")
Request = Callable[[Any], Any]
"""Takes Prefect's synchronous client."""

TIMEOUT_SECONDS = 5.0
TRY_AGAIN = (408, 429)
"""Answers of 400 and more that are a matter of time only."""
log = logging.getLogger("headway.prefect")
_kept: deque[Request] = deque()
_sending = threading.Lock()


class Away(Exception):
    """Prefect's server did not answer, or `refused`: it answered that it would not."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


def ask(request: Callable[[Any], T]) -> T:
    """What Prefect's server answers to one request, tried once. Raises Away.

    Prefect's own client tries again for minutes, with whoever asked standing still meanwhile.
    """
    import httpx
    from prefect.context import SettingsContext, get_settings_context
    from prefect.exceptions import ObjectNotFound

    try:
        with SettingsContext(profile=get_settings_context().profile, settings=_trying_once()):
            return request(_client())
    except ObjectNotFound as error:
        raise Away(str(error), refused=True) from error
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise Away(str(error), refused=400 <= code < 500 and code not in TRY_AGAIN) from error
    except httpx.HTTPError as error:
        raise Away(f"{type(error).__name__}: {error}", refused=False) from error


def hand_in(*requests: Request) -> None:
    """Have requests made in their order: now when Prefect's server answers, else later. One that it refuses is dropped."""
    _kept.extend(requests)
    flush()


def flush(patience: float = 0.0) -> None:
    """Make the requests that were kept, for so many seconds while the server does not answer."""
    deadline = time.monotonic() + patience
    with _sending:
        while _kept:
            try:
                ask(_kept[0])
            except Away as away:
                if not away.refused and time.monotonic() < deadline:
                    time.sleep(1.0)
                    continue
                log.warning("Prefect was not told: %s", away)
                if not away.refused:
                    return
            _kept.popleft()


def leave_note(outcome: Outcome, pages: Sequence[Path]) -> None:
    """Attach a stage's summary, its checks as a table, and links to its pages in the home to the running task."""
    described = f"{outcome.name}: {outcome.status.replace('_', ' ')}"
    notes = [new_artifact("markdown", outcome.name, as_markdown(outcome), described)]
    if outcome.checks:
        rows = [{key: check.get(key) for key in ("passed", "name", "measured", "limit")} for check in outcome.checks]
        notes.append(new_artifact("table", f"{outcome.name}-checks", json.dumps(rows), f"Checks of {described}"))
    for page in pages:
        link = f"[{page.stem}]({page.as_uri()})"  # as Prefect's own artifacts of links are written
        key = re.sub("[^a-z0-9-]", "-", f"{outcome.name}-{page.stem}".lower())  # Prefect takes no other characters
        notes.append(new_artifact("markdown", key, link, f"A page of {described}, which a browser opens from the disk"))
    _kept.extend(notes)
    if (
        not _sending.locked()
    ):  # who sends now sends these too; what it missed goes with the next note, or at the end of the run
        threading.Thread(target=contextvars.copy_context().run, args=(flush,), daemon=True).start()


def new_artifact(kind: str, key: str, data: Any, description: str) -> Request:
    """A request that attaches an artifact of Prefect's (a note, no artifact of ours) to the running task and flow."""
    from prefect.client.schemas.actions import ArtifactCreate
    from prefect.utilities.context import get_task_and_flow_run_ids

    task_run, flow_run = get_task_and_flow_run_ids()
    payload = redact_value({"data": data, "description": description})
    wanted = ArtifactCreate(type=kind, key=key, task_run_id=task_run, flow_run_id=flow_run, **payload)
    return lambda client: client.create_artifact(wanted)


def as_markdown(outcome: Outcome) -> str:
    """A stage's outcome as a short page: status, checks, metrics, artifacts, job."""
    parts = [f"# {outcome.name}: {outcome.status.replace('_', ' ')}", f"{outcome.seconds:.1f} s. {outcome.why}"]
    if outcome.checks:
        rows = [[_mark(c), c["name"], number(c["measured"]), c["limit"]] for c in outcome.checks]
        parts.append(table(["", "check", "measured", "limit"], rows))
        parts += _places(outcome.checks)
    if outcome.metrics:
        parts.append(table(["metric", "value"], [[name, number(value)] for name, value in outcome.metrics.items()]))
    parts += _refs("Made from", outcome.inputs) + _refs("Made", outcome.outputs)
    if outcome.job:
        job = outcome.job
        more = f", {job['submissions']} submissions" if job["submissions"] > 1 else ""
        more += f", resumed from step {job['resumed_from_step']}" if job["resumed_from_step"] else ""
        more += f", without {', '.join(job['excluded_nodes'])}" if job.get("excluded_nodes") else ""
        parts.append(f"Job `{job['id']}`: {job['attempts']} attempt(s){more}. Folder: `{job['folder']}`")
    return "\n\n".join(parts)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown. A cell stays one line without links, pictures or HTML, whatever it says: some are of the store."""
    inert = str.maketrans({"|": "\\|", "[": "\\[", "<": "&lt;"})
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).translate(inert) for cell in line) + " |" for line in lines
    )


def number(value: object) -> str:
    """A measured value for people."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@cache
def _trying_once() -> Any:
    from prefect.context import get_settings_context
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    return get_settings_context().settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})


@cache
def _client() -> Any:
    """A client of our own: those that Prefect's engine uses wait for a minute before they give up."""
    from prefect.client.orchestration import get_client

    return get_client(httpx_settings={"timeout": TIMEOUT_SECONDS}, sync_client=True)


def _refs(title: str, refs: list[str]) -> list[str]:
    return [f"{title}:\n\n" + "\n".join(f"- `{ref}`" for ref in refs)] if refs else []


def _places(checks: list[dict[str, Any]]) -> list[str]:
    """Where what was found stands, check by check."""
    result = {check["name"]: [sample.replace("`", "'") for sample in check.get("samples", ())] for check in checks}
    entries = [
        f"- {name}: {', '.join(f'`{sample}`' for sample in samples)}" for name, samples in result.items() if samples
    ]
    return ["Where:\n\n" + "\n".join(entries)] if entries else []


def _mark(check: dict[str, object]) -> str:
    if not check.get("passed"):
        return "**failed**"
    return "warned" if check.get("warned") else "passed"


Status = Literal["ran", "reused", "failed", "gate_closed", "cancelled", "pending", "not_run"]


@dataclass(frozen=True)
class Shown:
    """What people see of a stage beside its result; the stage declares it (`@stage`), and nobody else asks for its name."""

    line: str = ""
    """Its few numbers in the terminal, as a format of its metrics."""
    unless_zero: Mapping[str, str] = field(default_factory=dict)
    """What follows in that line when a metric is not 0, by the metric."""
    metrics: tuple[str, ...] = ()
    """Those that stand in Prefect's pages."""
    headlines: tuple[str, ...] = ()
    """Those that stand on the flow's run in MLflow as well; all are on the stage's own."""
    part: str = ""
    """A file of its last output that the run's report has a part of its own for."""
    pages: str = ""
    """Pattern of the pages that it leaves in the home, with the first 16 digits of its key as `{key}`: linked from the report,
    Prefect's page and its run in MLflow, also where its result is reused."""
    table: str = ""
    """A JSON file of its last output that holds a table by columns: MLflow's page shows it as results of an evaluation."""

    def text(self, metrics: dict[str, float]) -> str:
        """The line with its numbers; empty where one of them is not known."""
        try:
            further = [form.format_map(metrics) for name, form in self.unless_zero.items() if metrics.get(name)]
            return ", ".join([self.line.format_map(metrics), *further])
        except KeyError:
            return ""


@dataclass
class Outcome:
    """What became of one stage."""

    name: str
    status: Status = "not_run"
    seconds: float = 0.0
    key: str | None = None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    job: dict[str, Any] | None = None
    why: str = ""
    """Why it would run, or is reused; for people."""
    shown: Shown = Shown()
    run: str = ""
    """Its run in the flow's spool, by the spool's own identity."""

    def pages(self, home: Path) -> list[Path]:
        """The pages about it that lie in the home; of one name the newest, by the name of its folder."""
        pattern = self.shown.pages.format(key=self.key[:16]) if self.key else ""
        pages = sorted(home.glob(pattern), key=lambda page: page.parent.name) if pattern else []
        return sorted({page.name: page for page in pages}.values())

    def plain(self) -> dict[str, Any]:
        """What is written down; how it is shown is declared in the code, and the spool knows its runs."""
        return {name: value for name, value in asdict(self).items() if name not in ("shown", "run")}


class Observer(Protocol):
    """Who watches a lifecycle. `run` is the `Lifecycle` that is watched."""

    def opened(self, run: Any) -> None: ...

    def started(self, stage: str, estimate: float | None) -> None:
        """A stage began; the estimate is what it took last time, in seconds."""
        ...

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None: ...

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Records of the stage's job came, as metrics.jsonl of its folder has them: in training one a step."""
        ...

    def happened(self, stage: str, kind: str, text: str) -> None:
        """Something happened to the stage's job: `kind` as tasks/compute/polling.py names it, and a sentence."""
        ...

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        """The run waits for a person: `reason` is "approval"; since when, in seconds since the epoch.

        `exercises` is the right that an answer exercises: promote, where it deploys. An answer names the question by its `key`.
        """
        ...

    def ended(self, outcome: Outcome) -> None: ...

    def closed(self, run: Any) -> None:
        """The run is over; `run.error` says how."""
        ...


class Unobserved:
    """An observer that looks away; a base for those that look at some things only."""

    def opened(self, run: Any) -> None:
        return None

    def started(self, stage: str, estimate: float | None) -> None:
        return None

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        return None

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        return None

    def happened(self, stage: str, kind: str, text: str) -> None:
        return None

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        return None

    def ended(self, outcome: Outcome) -> None:
        return None

    def closed(self, run: Any) -> None:
        return None


@dataclass(frozen=True)
class Observers:
    """Several observers as one."""

    all: Sequence[Observer]

    def opened(self, run: Any) -> None:
        for one in self.all:
            one.opened(run)

    def started(self, stage: str, estimate: float | None) -> None:
        for one in self.all:
            one.started(stage, estimate)

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        for one in self.all:
            one.progress(stage, done, total, text, seconds_left)

    def measured(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        for one in self.all:
            one.measured(stage, records)

    def happened(self, stage: str, kind: str, text: str) -> None:
        for one in self.all:
            one.happened(stage, kind, text)

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        for one in self.all:
            one.waiting(reason, question, since, exercises, key)

    def ended(self, outcome: Outcome) -> None:
        for one in self.all:
            one.ended(outcome)

    def closed(self, run: Any) -> None:
        for one in self.all:
            one.closed(run)


SIGNALS = ("KeyboardInterrupt", "Terminated", "TerminationSignal")
"""What Ctrl-C and SIGTERM raise: Python's, the command line's, Prefect's."""


def status_of(error: BaseException | None) -> str:
    """How a run ended, in a word: completed, gate_closed, cancelled or failed."""
    return "completed" if error is None else stopped_as(error)


def stopped_as(error: BaseException) -> Literal["gate_closed", "failed", "cancelled"]:
    """How what ended a run, or one of its stages, is shown."""
    if interrupted(error):
        return "cancelled"
    return "gate_closed" if isinstance(error, GateFailed) else "failed"


def interrupted(error: BaseException) -> bool:
    """Whether somebody stopped the run, and it did not fail: Ctrl-C, SIGTERM, a cancelled flow run, or another host that has it.

    A signal may come while an extension calls Python: it raises an error of its own then, with the signal's as its cause. That of
    pydantic's serializer has it in its words alone.
    """
    if isinstance(error, Cancelled | Superseded) or not isinstance(error, Exception):
        return True
    if type(error).__name__ == "PydanticSerializationError" and any(f"{name}: " in str(error) for name in SIGNALS):
        return True
    return type(error.__cause__).__name__ in SIGNALS
