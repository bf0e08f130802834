"""One rank's `pretrain_gpt.py`: a process of its own, started by path, that dies with this one and is asked to stop like it.

What it is told is tasks/formats/megatron_arguments.py; what its last words mean is said here.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.common.errors import Missing
from tasks.common.process import die_with_parent, process_started, read_json
from tasks.config.training import TrainingConfig
from tasks.formats.megatron_log import Iteration, iterations_of
from tasks.jobs.node.elastic import process_age
from tasks.jobs.node.runtime import Rank

# Megatron's log, read while it grows, as records of `metrics.jsonl` under the names that our own loop uses.
#
# The line itself is read by tasks/formats/megatron_log.py. Megatron prints it on the last rank; rank 0 follows that
# rank's log.


class Following:
    """State: how far the log was read."""

    def __init__(self, rank: Rank, config: TrainingConfig, *, offset: int) -> None:
        self._rank, self._config, self._offset = rank, config, offset
        self._log = rank.folder / "logs" / f"rank-{rank.world_size - 1}.log"
        self._peak = rank.settings.get("peak") or {}
        self._first = True

    def look(self) -> None:
        """Tell of every step that is new in the log; raises FloatingPointError for a loss that is no number."""
        for one in self._new():
            if one.loss is None or not one.seconds:
                continue
            if not math.isfinite(one.loss):
                raise FloatingPointError(f"the loss is {one.loss} at step {one.number}: lower training.learning_rate")
            left = one.seconds * (one.total - one.number)
            values = {**_values(one), **self._speed(one, one.seconds), **self._start(one.seconds)}
            self._rank.metrics(step=one.number, **values, step_seconds=one.seconds, seconds_left=left)
            text = f"loss {one.loss:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
            self._rank.progress(one.number, one.total, text, seconds_left=left)

    def _new(self) -> Iterator[Iteration]:
        if not self._log.exists():
            return
        with open(self._log, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            yield from iterations_of(line)

    def _start(self, seconds: float) -> dict[str, float]:
        """On the first step of a process: how long it took to come so far."""
        first, self._first = self._first, False
        return {"start_seconds": max(0.0, process_age() - seconds)} if first else {}

    def _speed(self, one: Iteration, seconds: float) -> dict[str, float]:
        """TFLOP/s as Megatron counts them (training.py, num_floating_point_operations)."""
        speed = self._config.global_batch_size * self._config.sequence_length / seconds
        result = {"tokens_per_second": speed, "tokens_per_second_per_rank": speed / self._rank.world_size}
        tflops = {"tflops_per_rank": one.tflops} if one.tflops else {}
        mfu = {"mfu": one.tflops / self._peak["tflops"]} if one.tflops and self._peak else {}
        return {**result, **tflops, **mfu}


def _values(one: Iteration) -> dict[str, float]:
    assert one.loss is not None
    others = {"learning_rate": one.learning_rate, "grad_norm": one.grad_norm}
    return {"loss": one.loss, **{name: value for name, value in others.items() if value is not None}}


PROGRAM = "pretrain_gpt.py"
LOST_SECONDS = 5.0
"""How long a rank that was asked to stop waits for its process when another rank of the machine is gone: the others' collectives
wait for that one in vain, and the launcher would wait 30 s before it kills."""
TAIL_BYTES = 16_384
_NO_NUMBER = re.compile(r"found NaN in|Unexpected result nan|found Inf in|Unexpected result inf", re.IGNORECASE)
_NO_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate")


def require_checkout(checkout: Path) -> None:
    """Raises Missing when Megatron is not where the settings say."""
    if not (checkout / PROGRAM).is_file():
        raise Missing(
            f"there is no {PROGRAM} in {checkout} (execution.megatron.checkout) on this machine",
            remedy="Use an image that has it (cluster.image), or clone https://github.com/NVIDIA/Megatron-LM there; "
            "for execution.megatron.flavour megatron-deepspeed, https://github.com/microsoft/Megatron-DeepSpeed.",
        )


class Neighbours:
    """The ranks of this job on this machine. State: since when one of them is gone."""

    def __init__(self, ranks: Path) -> None:
        """`ranks` is the job's folder where all of them have said who they are."""
        self._ranks, self._since = ranks, math.inf

    def lost(self) -> bool:
        """Whether one of them has been gone for LOST_SECONDS."""
        messages = [read_json(path) or {} for path in self._ranks.glob("*.json")]
        mine = [one for one in messages if one.get("host") == socket.gethostname()]
        if all(process_started(one["pid"]) == one["started"] for one in mine):
            self._since = math.inf
        else:
            self._since = min(self._since, time.monotonic())
        return time.monotonic() - self._since > LOST_SECONDS


class Child:
    """State: the process, and whether this rank was asked to stop."""

    def __init__(self, checkout: Path, arguments: Sequence[str], *, log: Path) -> None:
        """Start it; what it prints goes where this process prints, into the rank's own log."""
        self.asked = False
        self._log, self._before = log, log.stat().st_size if log.exists() else 0
        path = os.pathsep.join(part for part in (str(checkout), os.environ.get("PYTHONPATH", "")) if part)
        defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # which Megatron demands for tensor and context parallel
        environment = {**defaults, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONSAFEPATH", None)
        self._process = subprocess.Popen(
            [sys.executable, str(checkout / PROGRAM), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # torchrun signals a rank's whole group; one request to stop is enough
            preexec_fn=die_with_parent,
        )
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_: object) -> None:
        """Megatron saves after the step that it is in, and ends (--exit-signal-handler)."""
        self.asked = True
        self._process.terminate()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; returns whether it is over."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, when this rank cannot go on."""
        self._process.kill()
        self._process.wait()

    @property
    def ended_well(self) -> bool:
        """Whether it is over by itself, or because it was asked."""
        code = self._process.returncode
        return code == 0 or (self.asked and code == -signal.SIGTERM)

    def require_success(self) -> None:
        """Raises FloatingPointError, MemoryError or RuntimeError by its last words, unless it ended well or as asked."""
        if self.ended_well:
            return
        code = self._process.returncode
        with open(self._log, "rb") as file:
            file.seek(max(self._before, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        last = " | ".join(line.strip() for line in text.splitlines()[-3:])[:500]
        message = f"{PROGRAM} ended with code {code}: {last or 'it said nothing'}"
        if _NO_NUMBER.search(text):
            raise FloatingPointError(message)
        raise MemoryError(message) if _NO_MEMORY.search(text) else RuntimeError(message)
