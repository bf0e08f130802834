"""A run of a flow as Prefect's page shows it: how far each stage is, and at its end one report, which is attached to MLflow too.

`shown_lifecycle` is the frame of every flow of stages. A stage's own note is tasks/orchestration/prefect_artifacts.py; the whole
report, with its figures, is tasks/report/. Prefect's server may be away: then a bar stands still, and the rest is told later.
"""

from __future__ import annotations

import json
import logging
import os
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefect.client.schemas.actions import ArtifactUpdate
from prefect.logging import get_run_logger

from flows.support.prefect_run import cancelled, flow_run
from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.common.redaction import redact
from tasks.compute.polling import OUT_OF_THE_ORDINARY
from tasks.config.base import Settings
from tasks.lineage.messages import run_page
from tasks.orchestration.observers import Outcome, Unobserved, interrupted
from tasks.orchestration.prefect_artifacts import Away, Request, ask, flush, hand_in, new_artifact, number, table
from tasks.orchestration.result import endpoint_fields
from tasks.orchestration.run import Lifecycle, code_version, lifecycle
from tasks.report.data import duration, short
from tasks.report.page import utc, write_report
from tasks.report.qualification.report import FILE as QUALIFICATION_PAGE
from tasks.report.qualification.report import qualification_markdown
from tasks.report.run_charts import comparison_markdown, draw_comparison
from tasks.storage.store import find

FIRST_AFTER_SECONDS = 2.0
EVERY_SECONDS = 2.0
REPORTS = "reports"
"""Where reports lie in the home."""
PATIENCE_SECONDS = 60.0
"""Time that the end of a run waits for Prefect's server to come back, when there is something left to tell it."""


def shown_lifecycle(
    flow: str,
    config: Settings,
    *,
    subject: str,
    stages: Sequence[str],
    first: str | None = None,
    last: str | None = None,
    approvals: Mapping[str, Callable[..., AbstractContextManager[None]]] | None = None,
) -> AbstractContextManager[Lifecycle]:
    """Open the lifecycle of the flow run that Prefect runs now: shown in its page, ended by whoever cancels it there, and
    reported however it ends. The arguments are those of `lifecycle`.
    """
    return lifecycle(
        flow,
        config,
        subject=subject,
        stages=stages,
        first=first,
        last=last,
        cancelled=cancelled,
        flow_run=flow_run(),
        observers=(PrefectProgress(),),
        approvals=approvals,
        at_end=close,
    )


class PrefectProgress(Unobserved):
    """Shows in Prefect's page how far a stage is: one progress artifact a stage that lasts, moved every two seconds at most.

    State: the bar of the running stage, when it was last moved, and how far.
    """

    def __init__(self) -> None:
        self._artifact: Any = None
        self._told = 0.0
        self._percent = 0.0

    def started(self, stage: str, estimate: float | None) -> None:
        self._artifact, self._percent = None, 0.0
        self._told = time.monotonic() + FIRST_AFTER_SECONDS - EVERY_SECONDS

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        if time.monotonic() - self._told < EVERY_SECONDS:
            return
        self._percent = min(100.0 * done / total, 100.0) if total else self._percent
        left = "" if seconds_left is None else f"about {seconds_left:.0f} s left"
        message = ", ".join(part for part in (stage, text, left) if part)
        try:
            if self._artifact is None:
                self._artifact = ask(new_artifact("progress", f"progress-{stage}", self._percent, message)).id
            else:
                ask(_moved(self._artifact, self._percent, message))
        except Away:
            pass  # the next move tells more than this one
        self._told = time.monotonic()

    def happened(self, stage: str, kind: str, text: str) -> None:
        """In the logs of the page, and beside the bar."""
        get_run_logger().log(logging.WARNING if kind in OUT_OF_THE_ORDINARY else logging.INFO, redact(text))
        if kind != "running":
            self.progress(stage, 0, 0, text, None)

    def ended(self, outcome: Outcome) -> None:
        if self._artifact is None:
            return
        whole = outcome.status in ("ran", "reused")
        text = f"{outcome.name}: {outcome.status.replace('_', ' ')}, {outcome.seconds:.0f} s"
        hand_in(_moved(self._artifact, 100.0 if whole else self._percent, text))
        self._artifact = None


def _moved(artifact: Any, percent: float, text: str) -> Request:
    wanted = ArtifactUpdate(data=percent, description=redact(text))
    return lambda client: client.update_artifact(artifact, wanted)


def close(run: Lifecycle) -> None:
    """Write the report, whatever ended the run, attach it to the MLflow run, and tell people where it is."""
    (commit, dirty), result, error = code_version(), run.result, run.error
    failure = None
    if error is not None:
        failure = {
            "type": "Interrupted" if interrupted(error) else type(error).__name__,
            "stage": run.stopped_at or getattr(error, "stage", ""),
            "message": str(error) or ("by Ctrl-C or SIGTERM" if interrupted(error) else type(error).__name__),
            "remedy": error.remedy if isinstance(error, HeadwayError) else "",
        }
    path = write_report(
        run.home / REPORTS,
        f"{run.flow}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(run.began))}-{(run.run or '')[:8]}",
        store=run.store,
        stages=[outcome.plain() for outcome in run.outcomes.values()],
        parts={outcome.name: outcome.shown.part for outcome in run.outcomes.values() if outcome.shown.part},
        run={
            "title": f"{run.flow} {(result.dataset or '').partition('@')[0] or run.subject}",
            "status": run.status,
            "started": utc(run.began),
            "seconds": run.seconds,
            "dataset": result.dataset or "",
            "config_digest": run.config_digest,
            "config": run.config.model_dump(mode="json"),
            "commit": commit,
            "dirty": dirty,
            "flow_run": run.flow_run,
            "error": failure,
            "endpoint": endpoint_fields(result.endpoint),
            "samples": result.samples or [],
            "champion": asdict(result.champion) if result.champion else None,
            "comparison": result.comparison,
            "pages": {page.stem: os.path.relpath(page, run.home / REPORTS) for page in _pages(run)},
        },
    )
    run.result = replace(run.result, report=str(path))
    if run.run:
        run.need_spool().log_file(run.run, path)
    _tell_qualification(run)
    _tell_comparison(run)
    page = run_page(run.home, run.need_spool().folder, run.run) if run.run else None
    text = report(run, html=str(path), mlflow=page)
    hand_in(new_artifact("markdown", "report", text, f"{run.flow} {run.subject}: {run.status.replace('_', ' ')}"))
    stopped = run.error is not None and interrupted(run.error)
    flush(patience=0.0 if stopped else PATIENCE_SECONDS)


def _pages(run: Lifecycle) -> list[Path]:
    """Pages beside the report: a validation's Data Docs."""
    return [page for outcome in run.outcomes.values() for page in outcome.pages(run.home)]


def _tell_qualification(run: Lifecycle) -> None:
    """Attach what a qualification says for people, one that was made now or one that still holds: its page to the run in MLflow,
    the same in short to Prefect's page. Nothing where it is gone or damaged."""
    outcome = run.outcomes.get("benchmark")
    if not outcome or not outcome.outputs:
        return
    try:
        folder = run.store.fetch(find(run.store, *parse_ref(outcome.outputs[-1])))
    except HeadwayError:
        return
    if not (folder / QUALIFICATION_PAGE).is_file():
        return
    if run.run:
        run.need_spool().log_file(run.run, folder / QUALIFICATION_PAGE)
    payload = json.loads((folder / "qualification.json").read_text(encoding="utf-8"))
    what = f"{payload['name']}: {payload['verdict']['verdict']}"
    hand_in(new_artifact("markdown", "qualification", qualification_markdown(payload), what))


def _tell_comparison(run: Lifecycle) -> None:
    """Attach champion against challenger by slice: the picture and its figures in MLflow, the table in Prefect's page."""
    payload = run.result.comparison
    if not payload:
        return
    spool = run.need_spool()
    picture = draw_comparison(run.home / "reports" / (run.run or run.flow)[:8], payload)
    if run.run:
        loss = payload["rows"][0]["loss"] or {}
        figures = {"loss_to_champion": "estimate", "loss_to_champion_low": "low", "loss_to_champion_high": "high"}
        spool.log_metrics(run.run, [(name, loss[key], 0) for name, key in figures.items() if key in loss])
        spool.log_json(run.run, "comparison.json", payload)
        spool.log_file(run.run, picture)
    image, title = b64encode(picture.read_bytes()).decode(), "Champion against challenger by slice"
    hand_in(new_artifact("image", "comparison-picture", f"data:image/png;base64,{image}", title))
    hand_in(new_artifact("markdown", "comparison", comparison_markdown(payload), title))


def report(run: Lifecycle, *, html: str, mlflow: str | None) -> str:
    """The report of a run in short, in Markdown."""
    result, error = run.result, run.error
    remedy = getattr(error, "remedy", "")
    samples = [f"```\n{each['prompt']}{each['completion']}\n```" for each in result.samples or ()]
    where = f"The evidence, with figures: `{result.revalidation.evidence}`." if result.revalidation else ""
    stages = []
    for outcome in run.outcomes.values():
        metrics = outcome.metrics
        shown = ", ".join(f"{name} {number(metrics[name])}" for name in outcome.shown.metrics if name in metrics)
        stages.append([outcome.name, outcome.status.replace("_", " "), f"{outcome.seconds:.1f}", shown])
    parts = [
        f"# {run.flow} {run.subject}: {run.status.replace('_', ' ')}",
        f"**{type(error).__name__}**: {error}" + (f"\n\n{remedy}" if remedy else "") if error is not None else "",
        f"{duration(run.seconds)}. Dataset `{result.dataset or 'none'}`.",
        table(["stage", "result", "seconds", ""], stages),
        result.approval,
        f"Served at {result.endpoint.url} as `{result.endpoint.model.ref}`."
        if result.endpoint
        else "Nothing new is served.",
        champion_table(run),
        f"{result.evidence}\n\n{where}" if where else "",
        "\n\n".join(["What it says:", *samples]) if samples else "",
        "## Where the rest is",
        *(f"- {page.stem}: `{page}`" for page in _pages(run)),
        f"- The whole report, with its figures: `{html}`. A browser opens it from the disk, not from this page.",
        f"- [This run in MLflow]({mlflow}), with the report attached to it." if mlflow else "- MLflow has it too.",
    ]
    return "\n\n".join(part for part in parts if part)


def champion_table(run: Lifecycle) -> str:
    """The new model beside the champion, in Markdown; empty where they were not compared."""
    champion = run.result.champion
    scores = run.outcomes["evaluate"].metrics if "evaluate" in run.outcomes else {}
    if not champion or "bits_per_byte" not in scores:
        return ""
    head = ["bits per byte on the same held-out text", ""]
    theirs = [f"champion `{short(champion.ref)}`", number(champion.bits_per_byte)]
    return table(head, [["this model", number(scores["bits_per_byte"])], theirs])
