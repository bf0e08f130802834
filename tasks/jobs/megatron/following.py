"""Megatron's log, read while it grows, as records of `metrics.jsonl` under the names that our own loop uses.

The line itself is read by tasks/formats/megatron_log.py. Megatron prints it on the last rank; rank 0 follows that rank's log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tasks.config.training import TrainingConfig
from tasks.formats.megatron_log import Iteration, iterations_of
from tasks.jobs.node.elastic import process_age
from tasks.jobs.node.runtime import Rank


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
