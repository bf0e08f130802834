"""The model as lm-evaluation-harness asks it, its requests divided among ranks in the very batches that one rank computes.

The harness divides documents by rank itself (`lm.rank`, `lm.world_size`), but then each rank batches what it has: other batches,
other bits, and nothing is left of a rank that is lost. Here all ranks ask for all requests, each computes every n-th batch, and
the harness's own code makes metrics of the whole on rank 0.

Which requests make a batch is decided as `Collator` in lm_eval/models/utils.py orders and groups them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM

from tasks.jobs.evaluation.division import Division, OnRankZero

Tokenized = tuple[Any, list[int], list[int]]
"""A request by its texts, the tokens of its context and those of its continuation."""


def batches_of_contexts(requests: Sequence[Tokenized], size: int, *, shared: bool) -> list[list[int]]:
    """The requests of each batch, as the harness batches them: longest first, and those of one forward pass together.

    Where logits are `shared`, continuations that differ in their last token alone are answered by one pass, that of the longest.
    """
    groups: dict[Any, list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        key = tuple(context + continuation[:-1]) if shared else number
        groups.setdefault(key, []).append(number)

    def place(group: list[int]) -> tuple[int, tuple[int, ...]]:
        read = requests[max(group, key=lambda number: len(requests[number][2]))]
        tokens = tuple(read[1] + read[2])
        return -len(tokens), tokens

    ordered = sorted(groups.values(), key=place)
    return [
        sorted(number for group in ordered[start : start + size] for number in group)
        for start in range(0, len(ordered), size)
    ]


def batches_of_prompts(
    arguments: Sequence[tuple[str, Mapping[str, Any]]], size: int, *, length: Callable[[str], int]
) -> list[list[int]]:
    """The requests of each batch, as the harness batches them: by settings of generation, longest first.

    What is drawn by chance cannot be divided, for each draw depends on those before it: it is one unit.
    """
    drawn = [number for number, (_, settings) in enumerate(arguments) if settings.get("do_sample")]
    groups: dict[str, list[int]] = {}
    for number, (_, settings) in enumerate(arguments):
        if not settings.get("do_sample"):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(number)
    units = [drawn] if drawn else []
    for group in groups.values():
        ordered = sorted(group, key=lambda number: (-length(arguments[number][0]), arguments[number][0]))
        units += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return units


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
