"""The answers of endpoints on a schedule: what stands out becomes an event, and everything that was looked at a note."""

from __future__ import annotations

import json
import time
from typing import Any

from prefect import flow, task

from flows.support.inputs import configured
from flows.support.prefect_run import named, setting, started_by
from tasks.common.home import home
from tasks.config.flows import WatchConfig
from tasks.orchestration.prefect_artifacts import hand_in, new_artifact, number, table
from tasks.serving.known import known_endpoints, require_known
from tasks.serving.monitor.watch import Seen, brief, history, look


@flow(  # type: ignore[untyped-decorator]
    name="watch",
    flow_run_name=lambda: named(setting("endpoints").strip("[](),").replace("'", "") or "all endpoints"),
    validate_parameters=False,
)
def watch(config: WatchConfig) -> list[dict[str, Any]]:
    """Look at what endpoints answered since the last look, and say what stands out, with the evidence.

    Nothing that is served changes: what an anomaly leads to, the events say. Raises Unknown for an endpoint that there is not.

    Args:
        config: Which endpoints, and how much of the past is shown.
    """
    config = configured(WatchConfig, config)
    with started_by("run", f"watch {', '.join(config.endpoints) or 'all endpoints'}"):
        names = tuple(require_known(home(), name) for name in config.endpoints)
        seen = {one.endpoint: one for one in look(home(), time.time(), only=names)}
        return [tell(name, seen.get(name), config) for name in names or known_endpoints(home())]


@task(name="tell", persist_result=False)  # type: ignore[untyped-decorator]
def tell(name: str, seen: Seen | None, config: WatchConfig) -> dict[str, Any]:
    """Leave a note of one endpoint: the verdict, what moved, and the last windows."""
    rows = history(home(), name, requests=config.window_requests, windows=config.windows)
    payload = brief(name, seen)
    columns = (seen.told or {}).get("columns", []) if seen else []
    cells = [
        [each["name"], each["verdict"], *map(_cell, (each["reference"], each["new"], each["p_value"]))]
        for each in columns
    ]
    news = f"Said now: {', '.join(payload['said'])}; evidence: `{payload['evidence']}`. " if payload["said"] else ""
    stands = f"Stands: {', '.join(payload['standing'])}." if payload["standing"] else "Nothing stands."
    words = f"{payload['requests']} requests since the last window. {news}{stands}"
    parts = [f"# endpoint/{name}: {payload['verdict']}", words]
    parts += [table(["measure", "verdict", "before", "now", "p"], cells)] if cells else []
    notes = [new_artifact("markdown", "answers", "\n\n".join(parts), f"endpoint/{name}: {payload['verdict']}")]
    shown = [{key: _cell(value) for key, value in row.items()} for row in rows]
    notes += (
        [new_artifact("table", "answers-over-time", json.dumps(shown), f"endpoint/{name}, window by window")]
        if shown
        else []
    )
    hand_in(*notes)
    return payload


def _cell(value: object) -> str:
    return "" if value is None else number(value)
