"""Training logs of Megatron-LM, Megatron-DeepSpeed, Primus and DeepSpeed: steps, times, throughput, how the run ended. Pure.

Megatron's line is that of NVIDIA/Megatron-LM @d98e8a6 (megatron/training/training.py, training_log), with what forks add, drop
and put in front; fields are found by their names, wherever they stand, so two ranks on one line are read too. Nothing is raised.

DeepSpeed's own engine, without Megatron, writes two lines (0.19, deepspeed/runtime/engine.py, deepspeed/utils/timer.py), of rank
0 and every `steps_per_print` steps: `step=10, skipped=0, lr=[0.001], mom=[[0.9, 0.95]]` and `epoch=0/micro_step=20/
global_step=10, RunningAvgSamplesPerSec=41.2, CurrSamplesPerSec=40.7, MemAllocated=0.5GB, MaxMemAllocated=0.6GB`; of a pipeline
`steps: 10 loss: 2.3456 iter time (s): 0.5 samples/sec: 16.0`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

WARM_UP = 3
"""Iterations that build caches and connections first; they are in no median when there are more."""
ITERATION = re.compile(r"iteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|")
_FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)", re.IGNORECASE)
_TIMES = {"elapsed time per iteration (ms)": 0.001, "elapsed time per iteration (s)": 1.0}
"""What makes seconds of it."""
_TFLOPS = ("throughput per GPU (TFLOP/s/GPU)", "compute per GPU (TFLOP/s/GPU)", "TFLOPs")
_FIELDS = {
    "lm loss": "loss",
    "learning rate": "learning_rate",
    "grad norm": "grad_norm",
    "loss scale": "loss_scale",
    "consumed samples": "samples",
    "global batch size": "batch",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
    "samples per second": "samples_per_second",
    "tokens/s/GPU inst/harmonic mean": "tokens_per_second",
    "tokens/s/GPU": "tokens_per_second",
}
"""Names on the line and here. Others, such as seq_load_balancing_loss and num zeros, are left out."""
_HOST = re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)?([A-Za-z][\w.-]*):\s.*?iteration\s+\d+\s*/")
_WORLD = re.compile(r"\bworld[ _-]size:?[ .]+\s*(\d{1,9})\b")
_SAVING = re.compile(r"saving checkpoint at iteration\s+(\d+)")
_SAVED = re.compile(r"successfully saved checkpoint (?:at|from) iteration\s+(\d+)|save-checkpoint\s*\.*:\s*\(")
_DONE = re.compile(r"\[after training is done\]|\[exiting program|exiting program at iteration")
_KILLED = re.compile(
    r"sigkill_handler|SIGKILL|SIGTERM|Killing subprocess|Signal \d+ \(SIG\w+\)|exitcode\s*:\s*-\d+|DUE TO TIME LIMIT"
    r"|DUE TO PREEMPTION|Out Of Memory|CUDA out of memory|oom-kill|Segmentation fault|exits with return code = -?[1-9]"
    r"|ChildFailedError|Watchdog caught collective operation timeout|NCCL error|srun: error:"
)
_MOST_SAID = 20


@dataclass(frozen=True)
class Iteration:
    """One line of a run's progress. None where the line has no such field."""

    number: int
    total: int
    seconds: float | None = None
    tflops: float | None = None
    """Of one GPU, now."""
    tflops_average: float | None = None
    """The run's own average, where it prints one."""
    loss: float | None = None
    """Absent when every iteration of the window was skipped, as while the loss scale is searched."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    samples: float | None = None
    batch: float | None = None
    skipped: float | None = None
    nan: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    line: int = 0


@dataclass(frozen=True)
class MegatronRun:
    """A training, as far as its log goes."""

    tool: str
    """megatron or megatron-deepspeed."""
    iterations: tuple[Iteration, ...] = ()
    hosts: tuple[str, ...] = ()
    """Machines that lines begin with."""
    world: int | None = None
    done: bool = False
    """Whether it says that the training is over."""
    saving: bool = False
    """Whether a checkpoint was begun that nothing says is written."""
    saved: bool = False
    """Whether some checkpoint was written."""
    killed: tuple[str, ...] = ()
    """Lines that tell how it was ended."""
    unread: tuple[str, ...] = ()
    """Lines of an iteration without a time."""

    @property
    def timed(self) -> tuple[Iteration, ...]:
        """Iterations that count: without the first ones where there are others, without those that have no time."""
        timed = tuple(one for one in self.iterations if one.seconds)
        first = timed[0].number if timed else 0
        later = tuple(one for one in timed if one.number >= first + WARM_UP)
        return later or timed[1:] or timed

    @property
    def seconds(self) -> float | None:
        """Median of an iteration."""
        return _median([one.seconds for one in self.timed])

    @property
    def tflops(self) -> float | None:
        """Median throughput of a GPU, in TFLOP/s; by the run's own count of FLOPs."""
        return _median([one.tflops for one in self.timed])

    @property
    def complete(self) -> bool:
        """Whether the last iteration that was to come came."""
        return bool(self.iterations) and self.iterations[-1].number >= self.iterations[-1].total

    @property
    def lost(self) -> int:
        """Lines whose loss is no number, and iterations that the run itself counts as such."""
        broken = sum(one.loss is not None and not math.isfinite(one.loss) for one in self.iterations)
        return max(broken, int(max((one.nan or 0 for one in self.iterations), default=0)))


def read_megatron(text: str) -> MegatronRun | None:
    """The training in a log; None when no line of it is one's. A part is joined with what came before by its last lines."""
    if not ITERATION.search(text):
        return None
    lines = text.split("\n")
    iterations = tuple(one for number, line in enumerate(lines, 1) for one in iterations_of(line, number))
    if not iterations:
        return None
    others = [(number, line) for number, line in enumerate(lines, 1) if "consumed samples" not in line]
    saving = saved = False
    for _, line in others:
        if _SAVED.search(line):
            saving, saved = False, True
        elif _SAVING.search(line):
            saving = True
    world = _WORLD.search(text)
    # Each iteration once, the last that was told of it: a run that was resumed does some again
    once = tuple(value for _, value in sorted({one.number: one for one in iterations}.items()))
    is_deepspeed = "samples per second:" in text or "DeepSpeed" in text or "[deepspeed]" in text
    return MegatronRun(
        tool="megatron-deepspeed" if is_deepspeed else "megatron",
        iterations=once,
        hosts=tuple(dict.fromkeys(host[1] for line in lines if "iteration" in line and (host := _HOST.match(line)))),
        world=int(world[1]) if world else None,
        done=bool(_DONE.search(text)),
        saving=saving,
        saved=saved,
        killed=tuple(f"line {n}: {line.strip()[:300]}" for n, line in others if _KILLED.search(line))[:_MOST_SAID],
        unread=tuple(
            f"line {one.line}: iteration {one.number} has no time" for one in iterations if one.seconds is None
        ),
    )


def iterations_of(line: str, number: int = 0) -> Iterator[Iteration]:
    """Every iteration that a line tells of; lines of several ranks may be glued together."""
    starts = list(ITERATION.finditer(line)) if "iteration" in line else []
    for place, start in enumerate(starts):
        end = starts[place + 1].start() if place + 1 < len(starts) else len(line)
        yield _iteration(start, line[start.end() : end], number)


def _iteration(start: re.Match[str], text: str, line: int) -> Iteration:
    """One of `name: value | name: value |`; of two values the first is now, the second the run's average."""
    split = (part.partition(":") for part in text.split("|"))
    fields = {name.strip(): [float(value) for value in _FLOAT.findall(rest)[:2]] for name, _, rest in split if rest}
    time = next((fields[name][0] * factor for name, factor in _TIMES.items() if fields.get(name)), None)
    tflops = next((fields[name] for name in _TFLOPS if fields.get(name)), [])
    others = {_FIELDS[name]: values[0] for name, values in fields.items() if name in _FIELDS and values}
    return Iteration(
        number=int(start[1]),
        total=int(start[2]),
        seconds=_positive(time),
        tflops=_positive(tflops[0] if tflops else None),
        tflops_average=_positive(tflops[1] if len(tflops) > 1 else None),
        line=line,
        **{name: value for name, value in others.items() if name == "loss" or math.isfinite(value)},
    )


def _positive(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _median(values: list[float | None]) -> float | None:
    messages = [value for value in values if value is not None]
    return statistics.median(messages) if messages else None


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
