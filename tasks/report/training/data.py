"""What the report of a run shows of its training beside the loss: where the time went, how fast it was.

Read from the job's folder, which is kept for people, and may be gone: then this part of the page is left out. How it looks is
section.py.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.report.published import Published

MOST_POINTS = 80


class StepTime(Published):
    """One step, or the mean of neighbouring ones: its parts in seconds, and its speed."""

    step: int
    step_seconds: float
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    tokens_per_second: float = 0.0


class HeldoutPoint(Published):
    """A measurement on held-out text."""

    step: int
    heldout_bits_per_byte: float


class TimeReport(Published):
    """`time` of a training's `result.json`."""

    seconds: Mapping[str, float] = {}
    """By cause: useful, stalled, lost, restarting, starting, idle."""
    flops_convention: str = ""
    peak: Mapping[str, Any] = {}
    memory_gib: float | None = None
    gpu_memory_gib: float | None = None


class TrainingReport(Published):
    """The steps, thinned, and what all attempts together took."""

    steps: tuple[StepTime, ...] = ()
    heldout: tuple[HeldoutPoint, ...] = ()
    time: TimeReport | None = None


def read_training(folder: Path) -> dict[str, Any] | None:
    """What a job's folder tells, as plain values; None when it is gone, or is of a program that tells no times."""
    try:
        records = {record["step"]: record for record in _records(folder / "metrics.jsonl") if "step_seconds" in record}
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not records:
        return None
    steps = [records[step] for step in sorted(records)]
    heldout = [record for record in steps if "heldout_bits_per_byte" in record]
    return {"steps": list(_thin(steps)), "heldout": heldout, "time": result.get("time")}


def _records(log: Path) -> Iterator[dict[str, Any]]:
    with open(log, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if isinstance(record.get("step"), int):
                yield record


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
