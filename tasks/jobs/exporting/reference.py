"""The answers of an exported model, measured as an endpoint measures its own: what later answers are compared with.

The prompts are the golden ones and the beginnings of held-out documents. The file's form is tasks/formats/model_folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.formats.model_folder import summary
from tasks.jobs.exporting.loss import Sample
from tasks.jobs.serving.generation import Generation
from tasks.jobs.serving.outputs import measures

BEGINNING = 32
"""Tokens of a held-out document that are given as a prompt."""


def reference_of(
    generation: Generation, golden: Sequence[str], sample: Sample | None, *, prompts: int, max_tokens: int
) -> dict[str, Any]:
    """Statistics of the greedy answers to the golden prompts and to `prompts` beginnings of held-out documents."""
    asked = [generation.encode(prompt) for prompt in golden]
    if sample is not None:
        beginnings = map(_beginning, sample.encoded.documents[:prompts])
        asked += [[*generation.opening, *text] for text in beginnings if text]
    results = []
    for tokens in asked:
        limit = min(max_tokens, generation.context_length - len(tokens))
        results.append(measures(len(tokens), generation.complete(tokens, limit, measure=True)))
    columns = {
        "length": [one["completion_tokens"] for one in results],
        **{name: [one[name] for one in results if one[name] is not None] for name in ("entropy", "repetition", "odd")},
    }
    return summary(columns, prompts=len(results), max_tokens=max_tokens)


def _beginning(document: Any) -> list[int]:
    """At most half of a document, without its end."""
    return [int(token) for token in document[: min(BEGINNING, len(document) // 2)]]
