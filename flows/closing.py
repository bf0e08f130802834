"""How every lifecycle ends: one report, attached to the MLflow run and linked from the Prefect flow run.

Called with the outcomes of all stages known, however the flow ended.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from tasks.artifacts import Endpoint
from tasks.errors import HeadwayError
from tasks.lifecycle import Lifecycle, code_version, status_of
from tasks.report.gather import utc, write_report


def close(run: Lifecycle) -> None:
    """Write the report and tell people where it is."""
    path = write_report(
        run.home / "reports",
        f"{run.flow}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(run.began))}-{(run.run or '')[:8]}",
        store=run.store,
        stages=[outcome.plain() for outcome in run.outcomes.values()],
        run=_fields(run),
    )
    run.results["report"] = str(path)
    if run.run:
        run.need_spool().log_file(run.run, path)
    _link(run, path)


def _fields(run: Lifecycle) -> dict[str, Any]:
    commit, dirty = code_version()
    endpoint: Endpoint | None = run.results.get("endpoint")
    return {
        "title": f"{run.flow} {run.results.get('dataset', '').partition('@')[0]}",
        "status": status_of(run.error),
        "started": utc(run.began),
        "seconds": run.seconds,
        "dataset": run.results.get("dataset", ""),
        "config_digest": run.config_digest,
        "config": run.config.model_dump(mode="json"),
        "commit": commit,
        "dirty": dirty,
        "flow_run": run.flow_run,
        "error": _error(run.error, run.stopped_at),
        "endpoint": {"ref": endpoint.ref, "url": endpoint.url, "model": endpoint.model.ref} if endpoint else None,
        "sample": run.results.get("sample"),
        "champion": run.results.get("champion"),
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


def _link(run: Lifecycle, path: Path) -> None:
    create_link_artifact(key="report", link=path.as_uri(), link_text="Report of this run (HTML)")
    endpoint: Endpoint | None = run.results.get("endpoint")
    served = f"Served at {endpoint.url} as `{endpoint.model.ref}`." if endpoint else "Nothing new is served."
    words = f"**{status_of(run.error).replace('_', ' ')}.** {served}\n\nReport: `{path}`; it is attached to the MLflow run too."
    create_markdown_artifact(key="summary", markdown=words)
