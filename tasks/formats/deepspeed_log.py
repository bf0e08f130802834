"""Training logs of DeepSpeed's own engine, without Megatron: steps, learning rates, speed; of pipelines losses too. Pure.

Two lines of DeepSpeed 0.19 (deepspeed/runtime/engine.py, deepspeed/utils/timer.py), of rank 0 and every `steps_per_print` steps:
`step=10, skipped=0, lr=[0.001], mom=[[0.9, 0.95]]` and `epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=41.2,
CurrSamplesPerSec=40.7, MemAllocated=0.5GB, MaxMemAllocated=0.6GB`; of a pipeline `steps: 10 loss: 2.3456 iter time (s): 0.5
samples/sec: 16.0`. Nothing is raised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))"


_RATE = re.compile(rf"\bstep=(\d+), skipped=(\d+), lr=\[{_NUMBER}")


_SPEED = re.compile(rf"global_step=(\d+), RunningAvgSamplesPerSec={_NUMBER}, CurrSamplesPerSec={_NUMBER}")


_PIPELINE = re.compile(rf"steps: (\d+) loss: {_NUMBER} iter time \(s\): {_NUMBER} samples/sec: {_NUMBER}")


@dataclass(frozen=True)
class DeepspeedStep:
    """What is known of a step. None where no line says it."""

    step: int
    loss: float | None = None
    seconds: float | None = None
    learning_rate: float | None = None
    skipped: float | None = None
    """Steps that were left out so far because the gradient was no number."""
    samples_per_second: float | None = None


def read_deepspeed(text: str) -> tuple[DeepspeedStep, ...]:
    """Every step that the log tells of, the last that was told of each; empty when none of its lines is DeepSpeed's."""
    steps: dict[int, DeepspeedStep] = {}
    for line in text.split("\n"):
        results: list[tuple[int, dict[str, Any]]] = []
        if rate := _RATE.search(line):
            results.append((int(rate[1]), {"skipped": float(rate[2]), "learning_rate": float(rate[3])}))
        if speed := _SPEED.search(line):
            results.append((int(speed[1]), {"samples_per_second": float(speed[3])}))
        if pipeline := _PIPELINE.search(line):
            names = ("loss", "seconds", "samples_per_second")
            output = {name: float(value) for name, value in zip(names, pipeline.groups()[1:], strict=True)}
            results.append((int(pipeline[1]), output))
        for number, values in results:
            steps[number] = replace(steps.get(number, DeepspeedStep(number)), **values)
    return tuple(steps[number] for number in sorted(steps))
