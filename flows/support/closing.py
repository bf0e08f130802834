"""How every lifecycle ends: one report, attached to the MLflow run, and told in short in Prefect's page of the flow run.

Called with the outcomes of all stages known, however the flow ended.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flows.support import messages
from flows.support.evaluated import tell_comparison
from tasks.artifacts import Endpoint, parse_ref
from tasks.common.errors import HeadwayError
from tasks.lineage.messages import run_page
from tasks.orchestration.observers import interrupted
from tasks.orchestration.prefect_artifacts import flush, hand_in, new_artifact
from tasks.orchestration.run import Lifecycle, code_version
from tasks.report.page import utc, write_report
from tasks.report.qualification.report import FILE, qualification_markdown
from tasks.storage.store import Store, find

# A qualification for people: its page beside the run in MLflow, the same in short in Prefect's page of the flow run.
#
# Both for a qualification that was made now and for one that still holds. The page itself is
# tasks/report/qualification/report.py.


STAGE = "benchmark"


def tell_qualification(run: Lifecycle) -> None:
    """Attach what the run's qualification says, where it has one."""
    outcome = run.outcomes.get(STAGE)
    folder = folder_of(run.store, outcome.outputs[-1]) if outcome and outcome.outputs else None
    if folder is None or not (folder / FILE).is_file():
        return
    if run.run:
        run.need_spool().log_file(run.run, folder / FILE)
    payload = json.loads((folder / "qualification.json").read_text(encoding="utf-8"))
    what = f"{payload['name']}: {payload['verdict']['verdict']}"
    hand_in(new_artifact("markdown", "qualification", qualification_markdown(payload), what))


def folder_of(store: Store, ref: str) -> Path | None:
    """The folder of a qualification, every byte checked; None where it is not there, or not intact."""
    try:
        return store.fetch(find(store, *parse_ref(ref)))
    except HeadwayError:
        return None


PATIENCE_SECONDS = 60.0
"""Time that the end of a run waits for Prefect's server to come back, when there is something left to tell it."""


def close(run: Lifecycle) -> None:
    """Write the report and tell people where it is."""
    path = write_report(
        run.home / "reports",
        f"{run.flow}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(run.began))}-{(run.run or '')[:8]}",
        store=run.store,
        stages=[outcome.plain() for outcome in run.outcomes.values()],
        parts={outcome.name: outcome.shown.part for outcome in run.outcomes.values() if outcome.shown.part},
        run=_fields(run),
    )
    run.results["report"] = str(path)
    if run.run:
        run.need_spool().log_file(run.run, path)
    tell_qualification(run)
    tell_comparison(run)
    page = run_page(run.home, run.need_spool().folder, run.run) if run.run else None
    text = messages.report(run, html=str(path), mlflow=page)
    hand_in(new_artifact("markdown", "report", text, f"{run.flow} {run.subject}: {run.status.replace('_', ' ')}"))
    stopped = run.error is not None and interrupted(run.error)
    flush(patience=0.0 if stopped else PATIENCE_SECONDS)


def _fields(run: Lifecycle) -> dict[str, Any]:
    commit, dirty = code_version()
    endpoint: Endpoint | None = run.results.get("endpoint")
    return {
        "title": f"{run.flow} {run.results.get('dataset', '').partition('@')[0] or run.subject}",
        "status": run.status,
        "started": utc(run.began),
        "seconds": run.seconds,
        "dataset": run.results.get("dataset", ""),
        "config_digest": run.config_digest,
        "config": run.config.model_dump(mode="json"),
        "commit": commit,
        "dirty": dirty,
        "flow_run": run.flow_run,
        "error": _error(run.error, run.stopped_at or getattr(run.error, "stage", "")),
        "endpoint": {"ref": endpoint.ref, "url": endpoint.url, "model": endpoint.model.ref} if endpoint else None,
        "samples": run.results.get("samples", []),
        "champion": run.results.get("champion"),
        "comparison": run.results.get("comparison"),
    }


def _error(error: BaseException | None, stage: str) -> dict[str, str] | None:
    if error is None:
        return None
    remedy = error.remedy if isinstance(error, HeadwayError) else ""
    return {
        "type": type(error).__name__,
        "stage": stage,
        "message": str(error) or type(error).__name__,
        "remedy": remedy,
    }
