"""Collects what the report of a run shows from its outcomes and from what its stages published.

How it looks is page.py. An artifact that is missing or damaged leaves its part of the page out: it never fails a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.common.redaction import redact_value
from tasks.registry.ancestry import walk
from tasks.report.data import RunReport
from tasks.report.lineage import drawn
from tasks.report.page import render_page
from tasks.report.training import read_training
from tasks.storage.store import Store, find


def write_report(
    folder: Path,
    name: str,
    *,
    store: Store,
    stages: list[dict[str, Any]],
    parts: Mapping[str, str],
    run: dict[str, Any],
) -> Path:
    """Write `NAME.html`. `run` holds RunReport's own fields; `stages` are outcomes as plain values.

    `parts` names for a stage the file of its output that the page has a part of its own for.
    """
    shown = {**run, **gather(store, stages, parts, run["endpoint"]), "stages": [_stage(s) for s in stages]}
    report = RunReport.model_validate(redact_value(shown))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.html"
    path.write_text(render_page(report), encoding="utf-8")
    return path


def utc(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def gather(
    store: Store, stages: list[dict[str, Any]], files: Mapping[str, str], endpoint: dict[str, Any] | None
) -> dict[str, Any]:
    """The parts of the page that come out of artifacts."""
    by_name = {stage["name"]: stage for stage in stages}
    parts = {file.removesuffix(".json"): _read_json(store, by_name.get(stage), file) for stage, file in files.items()}
    if parts.get("validation"):
        # The verdict on the version that was accepted before.
        reference = parts["validation"].get("reference")
        text = _file(store, reference, "validation.json") if reference else None
        parts["validation"]["before"] = json.loads(text) if text else None
        speed = by_name["validate"]["metrics"].get("megabytes_per_second")
        parts["validation"]["megabytes_per_second"] = speed
    log = _read(store, by_name.get("train"), "training_log.jsonl")
    made = [ref for stage in stages for ref in stage["outputs"]]
    return {
        **parts,
        "parity": _read_json(store, by_name.get("export"), "parity.json"),
        "variants": _read_json(store, by_name.get("export"), "variants.json"),
        "loss": [json.loads(line) for line in log.splitlines()] if log else [],
        "training": _training(by_name.get("train")),
        "lineage": _lineage(store, made[-1], endpoint) if made else {},
    }


def _training(stage: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the job's folder tells; of a stage that was reused, the folder of the job that once ran."""
    return read_training(Path(stage["job"]["folder"])) if stage and stage["job"] else None


def _lineage(store: Store, ref: str, endpoint: dict[str, Any] | None) -> dict[str, Any]:
    result = walk(store, endpoint["ref"], serves=endpoint["model"]) if endpoint else walk(store, ref)
    return drawn(result)


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "status", "seconds", "inputs", "outputs", "metrics", "checks", "job")
    return {**{key: stage[key] for key in kept}, "key": stage["key"] or ""}


def _read_json(store: Store, stage: dict[str, Any] | None, file: str) -> Any:
    text = _read(store, stage, file)
    return json.loads(text) if text else None


def _read(store: Store, stage: dict[str, Any] | None, file: str) -> str | None:
    """A file of a stage's last output; None when the flow has no such stage, or it is not there or not intact."""
    return _file(store, stage["outputs"][-1], file) if stage and stage["outputs"] else None


def _file(store: Store, ref: str, file: str) -> str | None:
    try:
        path = store.fetch(find(store, *parse_ref(ref))) / file
    except HeadwayError:
        return None
    return path.read_text(encoding="utf-8") if path.is_file() else None
