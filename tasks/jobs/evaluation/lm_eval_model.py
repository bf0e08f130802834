"""The model as lm-evaluation-harness asks it, its requests divided among ranks in the very batches that one rank computes.

The harness divides documents by rank itself (`lm.rank`, `lm.world_size`), but then each rank batches what it has: other batches,
other bits, and nothing is left of a rank that is lost. Here all ranks ask for all requests, each computes every n-th batch, and
the harness's own code makes metrics of the whole on rank 0.

Which requests make a batch is division.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM

from tasks.jobs.evaluation.division import Division, OnRankZero, Tokenized, batches_of_contexts, batches_of_prompts


class DividedModel(HFLM):  # type: ignore[misc]
    """A causal language model of Hugging Face, of which this process computes the share of one rank."""

    def __init__(self, division: Division, **settings: Any) -> None:
        super().__init__(**settings)
        assert self.backend == "causal" and isinstance(self.batch_size, int), "the batches are known beforehand"
        self.division, self._calls = division, 0
        if division.rank:
            _end_before_metrics()

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokenized], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Of each request its log probability, and whether it is the greedy answer."""

        def compute(unit: Sequence[int]) -> Mapping[str, Any]:
            batch = [requests[number] for number in unit]
            answers = HFLM._loglikelihood_tokens(self, batch, disable_tqdm=True, override_bs=override_bs)
            return {"value": np.array([one[0] for one in answers]), "greedy": np.array([one[1] for one in answers])}

        units = batches_of_contexts(requests, self.batch_size, shared=self.logits_cache)
        result: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for unit, part in self._answers(units, compute):
            pairs = zip(part["value"].tolist(), part["greedy"].tolist(), strict=True)
            for number, answer in zip(unit, pairs, strict=True):
                result[number] = answer
        return result

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What is written behind each request."""

        def compute(unit: Sequence[int]) -> Mapping[str, Any]:
            texts = HFLM.generate_until(self, [requests[number] for number in unit], disable_tqdm=True)
            return {"json": np.frombuffer(json.dumps(texts).encode(), np.uint8)}

        arguments = [request.args for request in requests]
        units = batches_of_prompts(arguments, self.batch_size, length=lambda text: len(self.tok_encode(text)))
        result = [""] * len(requests)
        for unit, part in self._answers(units, compute):
            for number, text in zip(unit, json.loads(part["json"].tobytes()), strict=True):
                result[number] = text
        return result

    def _answers(
        self, units: list[list[int]], compute: Callable[[Sequence[int]], Mapping[str, Any]]
    ) -> Iterator[tuple[list[int], Mapping[str, Any]]]:
        """Of every unit what `compute` says of it; nothing on other ranks than the first, whose answers nobody reads."""
        self._calls += 1  # texts that are measured whole come batch by batch: each is of another rank
        first = self._calls % self.division.world_size if len(units) == 1 else 0
        parts = self.division.share(f"lm-eval-{self._calls}", units, compute, first=first)
        return iter(()) if self.division.rank else zip(units, parts.all(), strict=True)


def _end_before_metrics() -> None:
    """Have the harness end once all requests are answered: its next step is that of rank 0, which has all the answers."""

    def ended(*_: Any, **__: Any) -> None:
        raise OnRankZero

    Task.apply_filters = ConfigurableTask.apply_filters = ended
