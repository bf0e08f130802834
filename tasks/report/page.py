"""The page of one run of a flow: what its outcomes and what its stages published say, on templates/run.html.

An artifact that is missing or damaged leaves its part of the page out: it never fails a run.
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
from tasks.report import run_charts
from tasks.report.data import RunReport
from tasks.report.lineage import drawn, lineage_graph
from tasks.report.pages import render, write_page
from tasks.report.run_charts import figures
from tasks.report.training import read_training
from tasks.storage.store import Store, find

KEPT = ("name", "status", "seconds", "inputs", "outputs", "metrics", "checks", "job")
"""Of a stage's outcome."""


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
    shown = {
        **run,
        **gather(store, stages, parts, run["endpoint"]),
        "stages": [{**{key: stage[key] for key in KEPT}, "key": stage["key"] or ""} for stage in stages],
    }
    report = RunReport.model_validate(redact_value(shown))
    return write_page(folder / f"{name}.html", render_page(report))


def render_page(data: RunReport) -> str:
    """The report as one HTML document, UTF-8; equal values give equal text."""
    return render(
        "run",
        title=data.title,
        run=data,
        charts=run_charts,
        compared=figures,
        config=data.model_dump(mode="json", include={"config"})["config"],
        lineage=lineage_graph(data.lineage),
    )


def utc(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def gather(
    store: Store, stages: list[dict[str, Any]], files: Mapping[str, str], endpoint: dict[str, Any] | None
) -> dict[str, Any]:
    """The parts of the page that come out of artifacts."""
    by_name = {stage["name"]: stage for stage in stages}
    made = {stage["name"]: stage["outputs"][-1] for stage in stages if stage["outputs"]}

    def read(stage: str, file: str) -> Any:
        """A JSON file of a stage's last output."""
        text = _text(store, made.get(stage), file)
        return json.loads(text) if text else None

    parts = {file.removesuffix(".json"): read(stage, file) for stage, file in files.items()}
    if parts.get("validation"):
        # The verdict on the version that was accepted before.
        reference = parts["validation"].get("reference")
        text = _text(store, reference, "validation.json")
        parts["validation"]["before"] = json.loads(text) if text else None
        speed = by_name["validate"]["metrics"].get("megabytes_per_second")
        parts["validation"]["megabytes_per_second"] = speed
    log = _text(store, made.get("train"), "training_log.jsonl")
    # Of a stage that was reused, the folder of the job that once ran.
    job = by_name["train"]["job"] if "train" in by_name else None
    newest = [ref for stage in stages for ref in stage["outputs"]][-1:]
    walked = walk(store, endpoint["ref"], serves=endpoint["model"]) if endpoint and newest else None
    return {
        **parts,
        "parity": read("export", "parity.json"),
        "variants": read("export", "variants.json"),
        "loss": [json.loads(line) for line in log.splitlines()] if log else [],
        "training": read_training(Path(job["folder"])) if job else None,
        "lineage": drawn(walked or walk(store, *newest)) if newest else {},
    }


def _text(store: Store, ref: str | None, file: str) -> str | None:
    """A file of an artifact; None where there is no artifact, or it is not intact or has no such file."""
    try:
        path = store.fetch(find(store, *parse_ref(ref))) / file if ref else None
    except HeadwayError:
        return None
    return path.read_text(encoding="utf-8") if path and path.is_file() else None
