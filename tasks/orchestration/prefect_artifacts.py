"""What a person reads in Prefect's page: a note a stage, a gate's checks as a table. And the one way to talk to its server.

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
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tasks.common.redaction import redact_value
from tasks.orchestration.observers import Outcome

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
    if not _sending.locked():  # else who sends now sends these too, or the next note, or the end of the run
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
        rows = []
        for check in outcome.checks:
            mark = ("warned" if check.get("warned") else "passed") if check.get("passed") else "**failed**"
            rows.append([mark, check["name"], number(check["measured"]), check["limit"]])
        parts.append(table(["", "check", "measured", "limit"], rows))
        places = {c["name"]: [sample.replace("`", "'") for sample in c.get("samples", ())] for c in outcome.checks}
        entries = [
            f"- {name}: {', '.join(f'`{sample}`' for sample in samples)}" for name, samples in places.items() if samples
        ]
        parts += ["Where:\n\n" + "\n".join(entries)] if entries else []
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
