"""What the verdict on a champion leads to: events, a note that alerts and the next window read, MLflow, Prefect's page.

Events come before the note: who is killed in between says them again, and they are taken once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tasks.artifacts import Evaluation, Revalidation, parse_ref
from tasks.events.event import Event, EventName
from tasks.events.ledger import Ledger
from tasks.orchestration.run import Lifecycle
from tasks.registry.revalidations import note_revalidation
from tasks.report.revalidation.report import FILE as PAGE
from tasks.report.revalidation.report import evidence_markdown
from tasks.revalidate import FILE
from tasks.storage.store import Store, find

SOURCE = "headway/revalidate"


def concluded(
    run: Lifecycle, result: Revalidation, *, scores: Evaluation | None = None, promoted: Evaluation | None = None
) -> None:
    """Tell everybody who must know of a verdict."""
    folder, payload = evidence_of(run.store, result.ref)
    kept = {
        "ref": result.ref,
        "champion": payload["model"],
        "verdict": payload["verdict"],
        "why": payload["why"],
        "parts": [{key: part[key] for key in ("name", "status", "said")} for part in payload["parts"]],
        "window": payload["window"],
        "acts": payload["acts"],
        "passed": payload["verdict"] == "valid",
        "evaluation": scores.ref if scores else None,
        "bits_per_byte": scores.metrics["bits_per_byte"] if scores else None,
        "bits_per_byte_at_promotion": promoted.metrics["bits_per_byte"] if promoted else None,
    }
    answers = (payload["service"] or {}).get("requests", 0)
    run.results["revalidation"] = {**kept, "evidence": str(folder / PAGE)}
    run.results["evidence"] = evidence_markdown(payload)
    run.results.setdefault("tags", {})["headway.verdict"] = payload["verdict"]
    # The page and its pictures, to the run in MLflow.
    if run.run:
        for path in (folder / PAGE, *sorted(folder.glob("*.png"))):
            run.need_spool().log_file(run.run, path)
    say(run.home, payload, result.ref)
    noted = {**kept, "dataset": payload["dataset"], "flow_run": (run.flow_run or {}).get("url"), "answers": answers}
    noted["documents"] = payload["documents"]
    note_revalidation(run.journal, result.name, noted)


def evidence_of(store: Store, revalidation: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a revalidation, every byte checked, and what it says. Raises Unknown, IntegrityError."""
    folder = store.fetch(find(store, *parse_ref(revalidation)))
    return folder, json.loads((folder / FILE).read_text(encoding="utf-8"))


def say(home: Path, payload: dict[str, Any], ref: str) -> None:
    """`model.revalidated` always; `model.degraded` when it was found in as many windows as were asked for."""
    names: tuple[EventName, ...] = (
        ("model.revalidated", "model.degraded") if payload["acts"] else ("model.revalidated",)
    )
    data = {
        "revalidation": ref,
        "verdict": payload["verdict"],
        "dataset": payload["dataset"],
        "model": payload["model"],
    }
    subject, now = payload["model"].partition("@")[0], time.time()
    events = [
        Event(
            name=name,
            subject=subject,
            source=SOURCE,
            identity=f"{name} {ref}",
            object=ref,
            occurred=now,
            channel="headway",
            data=data,
        )
        for name in names
    ]
    Ledger(home).receive_all(events)
