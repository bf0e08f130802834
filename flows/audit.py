"""An audit of the Azure estate on a schedule: the newest exports and this home's records, judged; the report is an artifact.

Azure is not asked: `headway estate audit --collect` prints what collects exports, on a machine that may.
"""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, task

from flows.support.inputs import configured
from flows.support.prefect_run import flow_run, named, setting, started_by
from tasks.artifacts import Audit
from tasks.common.errors import GateFailed
from tasks.common.home import home
from tasks.config.base import config_digest
from tasks.config.flows import AuditConfig
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.orchestration.prefect_artifacts import hand_in, new_artifact, table
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions
from tasks.registry.versions import publish
from tasks.report.estate.audit import Row, failed, load_waivers
from tasks.report.estate.audit import audit as judge
from tasks.report.estate.exports import Export, read_exports
from tasks.report.estate.records import records
from tasks.report.estate.report import checks_of, counts, fields
from tasks.report.estate.waivers import unnoted
from tasks.report.estate.what_if import WhatIf, read_what_if
from tasks.report.pages import render, write_page
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

NAME = "estate"
"""Of the artifact."""
WHAT_IF = "what-if.json"


@flow(  # type: ignore[untyped-decorator]
    name="audit",
    flow_run_name=lambda: named(setting("exports")),
    validate_parameters=False,
)
def audit(config: AuditConfig) -> dict[str, Any]:
    """Judge the newest exports and this home, publish the report, and say when the estate left its templates.

    Raises GateFailed when a row of the level is not met or the estate drifted, after all of that.

    Args:
        config: Where exports lie, what is waived, and what must be met.
    """
    config = configured(AuditConfig, config)
    with started_by("publish", "audit of the estate"):
        made: dict[str, Any] = report(config)
        if made["failed"]:
            raise GateFailed(
                f"the audit of the estate: {made['failed']}",
                stage="audit",
                checks=made["checks"],
                remedy=f"`headway artifacts {made['ref']}` has the report, with a remedy for each row; collect again after it.",
            )
        return made


@task(name="judge", persist_result=False)  # type: ignore[untyped-decorator]
def report(config: AuditConfig) -> dict[str, Any]:
    """Judge, publish the report, write a note on the run's page, and send `estate.drifted` where that is due."""
    folder = newest(home() / config.exports)
    what_if = folder / (config.what_if or WHAT_IF)
    files = sorted(path for path in folder.glob("*.json") if path != what_if)
    export = read_exports(files, subscription=config.subscription_id) if files else Export()
    if not files:
        export.notes.append(f"there are no exports in {config.exports}: this home's records alone were judged")
    drift = read_what_if(what_if) if config.what_if or what_if.exists() else None
    waivers = load_waivers(home() / config.waivers) if config.waivers else ()
    new = unnoted(open_store(home()), waivers)
    export.notes += [
        f"the waiver of {one.row} by {one.who} does not count: `headway estate audit --waivers` notes it in the audit log first"
        for one in new
    ]
    counting = [one for one in waivers if one not in new]
    rows = judge(export, records(home()), counting, now=datetime.now(UTC))
    payload = fields(
        rows,
        subscription=", ".join(sorted(export.subscriptions)) or "not named by the export",
        notes=export.notes,
        drift=drift,
    )
    ref = _publish(rows, payload, export, drift, config)
    if drift and drift.verdict == "drifted":
        _send_drifted(drift, ref, payload["subscription"])
    bad = failed(rows, config.level, strict=config.strict)
    drifted = drift is not None and (drift.verdict == "drifted" or (config.strict and drift.verdict == "unknown"))
    words = [f"not met: {', '.join(row.recommendation.id for row in bad)}"] if bad else []
    words += [f"against its templates: {drift.verdict}"] if drift and drifted else []
    # The note on the run's page in Prefect: how many rows have which verdict, and those that are not met
    failed_as = "; ".join(words)
    wrong = [
        [row.recommendation.id, row.verdict, row.recommendation.impact] for row in rows if row.verdict == "not met"
    ]
    cells = [[verdict, str(number)] for verdict, number in payload["counts"].items()]
    parts = [f"# Audit of the estate: {failed_as or 'met'}", f"`{ref}`", table(["verdict", "rows"], cells)]
    parts += [table(["not met", "verdict", "impact"], wrong)] if wrong else []
    parts += [f"- {note}" for note in payload["notes"]]
    hand_in(new_artifact("markdown", "audit", "\n\n".join(parts), f"audit of the estate: {failed_as or 'met'}"))
    return {"ref": ref, "counts": counts(rows), "failed": "; ".join(words), "checks": checks_of(bad)}


def newest(folder: Path) -> Path:
    """The newest of the folders in one, by when something in it changed last; itself where there are none."""
    inner = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    changed = {path: max((file.stat().st_mtime for file in path.glob("*.json")), default=0.0) for path in inner}
    return max(changed, key=lambda path: changed[path]) if changed else folder


def _publish(
    rows: list[Row], payload: dict[str, Any], export: Export, drift: WhatIf | None, config: AuditConfig
) -> str:
    """Publish the report as JSON and as a page; returns its reference."""
    now, store = datetime.now(UTC), open_store(home())
    metrics = {verdict.replace(" ", "_"): float(number) for verdict, number in payload["counts"].items()}
    if drift and drift.verdict != "unknown":
        metrics["drifted"] = float(drift.verdict == "drifted")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "audit.json").write_text(json.dumps(payload, indent=1), encoding="utf-8")
        page = render(
            "estate",
            title="Audit of the estate",
            rows=rows,
            notes=export.notes,
            subscription=payload["subscription"],
            now=now,
            drift=drift,
        )
        write_page(folder / "audit.html", page)
        provenance = Provenance(
            name=NAME,
            created=now.isoformat(),
            stage="audit",
            config_digest=config_digest(config),
            config=config.model_dump(mode="json"),
            context=tuple(ref for name in champions(store) if (ref := read_ref(store, f"{name}/champion"))),
            metrics=metrics,
            flow="audit",
            flow_run=flow_run()["id"],
        )
        return publish(store, folder, kind=Audit.KIND, inputs=(), provenance=provenance).ref


def _send_drifted(drift: WhatIf, ref: str, subscription: str) -> None:
    """Send `estate.drifted`: once for the same drift, until the estate was as rendered in between."""
    subject = f"estate/{subscription}"
    audits = open_store(home()).manifests(Audit.KIND, NAME)
    since = max((one.provenance.created for one in audits if one.provenance.metrics.get("drifted") == 0), default="")
    event = Event(
        name="estate.drifted",
        subject=subject,
        source="headway/audit",
        identity=f"{subject} {drift.digest} {since}",
        object=f"{subject}#{drift.digest}.{since}",
        occurred=datetime.now(UTC).timestamp(),
        channel="headway",
        data={"audit": ref, "resources": [one.resource for one in drift.left][:10], "changed": len(drift.left)},
    )
    Ledger(home()).receive(event)
