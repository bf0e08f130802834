"""The page of one run of a flow: what its outcomes and what its stages published say, on templates/run.html.

Where the time of a training went, and how fast it was, is read from the folder of its job, also as a picture for MLflow. An
artifact or a folder that is missing or damaged leaves its part of the page out: it never fails a run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.common.redaction import redact_value
from tasks.registry.ancestry import walk
from tasks.report import run_charts
from tasks.report.data import RunReport, duration, percent
from tasks.report.lineage import drawn, lineage_graph
from tasks.report.pages import render, write_page
from tasks.report.pictures import ACCENT, COLOURS, INK, WARN, drawable, picture, plain_numbers
from tasks.report.published import LossPoint, StepTime, TrainingReport
from tasks.report.run_charts import CAUSES, PARTS, figures, shares
from tasks.storage.store import Store, find

MOST_POINTS = 80


def read_training(folder: Path) -> dict[str, Any] | None:
    """What a job's folder tells, as plain values; None when it is gone, or is of a program that tells no times."""
    records: dict[int, dict[str, Any]] = {}
    try:
        with open(folder / "metrics.jsonl", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if isinstance(record.get("step"), int) and "step_seconds" in record:
                    records[record["step"]] = record
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not records:
        return None
    steps = [records[step] for step in sorted(records)]
    heldout = [record for record in steps if "heldout_bits_per_byte" in record]
    return {"steps": list(_thin(steps)), "heldout": heldout, "time": result.get("time")}


def _thin(steps: list[dict[str, Any]]) -> Iterator[dict[str, float]]:
    """Means of as many neighbours as make few enough points."""
    size = math.ceil(len(steps) / MOST_POINTS)
    names = list(StepTime.model_fields)
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        mean = {name: sum(float(record.get(name, 0.0)) for record in group) / len(group) for name in names}
        speeds = [record["tokens_per_second"] for record in group if record.get("tokens_per_second")]
        speed = statistics.harmonic_mean(speeds) if speeds else 0.0
        yield {**mean, "step": group[-1]["step"], "tokens_per_second": speed}


def draw_training(job: Path, log: Path) -> Path | None:
    """Draw a job that is done into `pictures/` of its folder; `log` is its `training_log.jsonl`. None: one of them is gone, or
    nothing can be drawn."""
    payload = read_training(job)
    if payload is None or not log.exists() or not drawable():
        return None
    report = TrainingReport.model_validate(payload)
    points = [LossPoint.model_validate(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]
    path = job / "pictures" / "training.png"
    with picture(path, (12, 7.2), dots=100) as figure:
        (loss, split), (rate, time) = figure.subplots(2, 2)
        _line(loss, [(point.step, point.loss) for point in points], "Training loss, nats a token")
        if report.heldout:
            beside = loss.twinx()
            values = [(point.step, point.heldout_bits_per_byte) for point in report.heldout]
            beside.plot(*zip(*values, strict=True), color=WARN, marker="o", markersize=4)
            beside.set_ylabel("held-out bits per byte")
            beside.set_ylim(bottom=0)
        _line(rate, [(point.step, point.learning_rate or 0.0) for point in points], "Learning rate")
        parts, places = shares(report.steps), [step.step for step in report.steps]
        heights = [[100 * share for share in parts[name]] for name in PARTS]
        split.stackplot(
            places, heights, colors=[COLOURS[name] for name in PARTS.values()], labels=list(PARTS), linewidth=0
        )
        split.set_ylim(0, 100)
        split.set_xlim(places[0], places[-1])
        _about(split, "Where a step's time goes, percent")
        split.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, fontsize=10, labelcolor=INK)
        seconds = dict(report.time.seconds) if report.time else {}
        total = sum(seconds.values()) or 1.0
        for row, (name, (label, colour)) in enumerate(CAUSES.items()):
            value = seconds.get(name, 0.0)
            time.barh(row, value, color=COLOURS[colour], height=0.62)
            time.text(value, row, f"  {label}: {percent(value / total)}, {duration(value)}", va="center", color=INK)
        time.set_xlim(0, 1.6 * max(seconds.values(), default=1.0))
        time.set_ylim(len(CAUSES) - 0.5, -0.5)
        time.set_yticks([])
        time.set_title("What the time went to, all attempts together", loc="left")
        time.set_xlabel("seconds")
    return path


def _line(axes: Any, points: Sequence[tuple[int, float]], title: str) -> None:
    axes.plot(*zip(*points, strict=True), color=ACCENT, linewidth=1.4)
    _about(axes, title)


def _about(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.grid(axis="y", linewidth=0.8)
    axes.locator_params(axis="x", nbins=6, integer=True)
    plain_numbers(axes.xaxis, axes.yaxis)


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
