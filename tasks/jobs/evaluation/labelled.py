"""The suite `labelled`: texts with labels, told apart by which label the model holds for the likeliest continuation.

The label's probability is that of all its tokens behind the prompt, without regard to its length. Accuracy has Wilson's interval;
macro-F1 is the mean over labels of 2 tp / (2 tp + fp + fn); `majority_share` is what always saying the commonest label would
give. Greedy scoring, so the same files give the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.config.evaluation import LabelledFile
from tasks.evaluation.scores import wilson
from tasks.jobs.evaluation.division import Arrays
from tasks.jobs.evaluation.generating import logits_in_parts
from tasks.jobs.evaluation.scoring import batch_positions
from tasks.jobs.evaluation.suites import Bench, Suite, digest_of, files_of, lines_of, place_of

LABELS = 64
"""Most labels of a file: each is scored behind each text."""


class Labelled(NamedTuple):
    """A file as it was read."""

    texts: list[str]
    labels: list[str]
    sha256: str
    """Of the file, or of all files of the dataset."""


class _Row(NamedTuple):
    """One text with one label behind it, as tokens."""

    place: int
    """In the flat table of texts and labels."""
    tokens: list[int]
    start: int
    """Where the label begins."""


def labelled(bench: Bench) -> Suite | None:
    """Accuracy and macro-F1 of each file; `samples` is the number of texts of the shortest one."""
    files = bench.config.labelled
    if not files:
        return None
    metrics: dict[str, float] = {}
    samples, details, digests, problems = [], {}, {}, {}
    begun = []
    for file in files:
        read = read_labelled(bench, file)
        names = sorted(set(read.labels))
        begun.append((file, read, names, begin_scores(bench, file, read.texts, names)))
    for file, read, names, scores in begun:
        messages = [names[best] for best in scores().argmax(axis=1)]
        result = figures_of(read.labels, messages, confidence=bench.config.confidence)
        metrics |= {f"{file.name}_{name}": value for name, value in result.items()}
        right = (label == answer for label, answer in zip(read.labels, messages, strict=True))
        problems[f"{file.name}_accuracy"] = "".join("01"[one] for one in right)
        samples.append(len(messages))
        digests[file.name] = read.sha256
        details[file.name] = {"samples": len(messages), "labels": {name: read.labels.count(name) for name in names}}
    return Suite(metrics, min(samples), problems=problems, details={"files": details, "sha256": digests})


def read_labelled(bench: Bench, file: LabelledFile) -> Labelled:
    """Texts and labels. Raises ValueError for a bad line, for one label only, and for too many."""
    setting = f"evaluation.labelled.{file.name}"
    place = place_of(bench, file.file, setting=setting)
    records = [line.record for line in lines_of(place, setting=setting, fields=("text", "label"))]
    texts, labels = [each["text"] for each in records], [each["label"].strip() for each in records]
    read = Labelled(texts, labels, digest_of(files_of(place)))
    count = len(set(read.labels))
    if not 2 <= count <= LABELS:
        raise ValueError(f"{setting}: {file.file} has {count} different labels; give 2 to {LABELS}")
    return read


def figures_of(labels: Sequence[str], messages: Sequence[str], *, confidence: float) -> dict[str, float]:
    """Accuracy with its interval, macro-F1 over the labels that there are, and the share of the commonest label."""
    right = [label for label, answer in zip(labels, messages, strict=True) if label == answer]
    names = sorted(set(labels))
    scores = [2 * right.count(name) / (labels.count(name) + messages.count(name)) for name in names]
    share = wilson(len(right), len(labels), confidence=confidence)
    return {
        "count": float(len(right)),
        "accuracy": share.estimate,
        "low": share.low,
        "high": share.high,
        "macro_f1": sum(scores) / len(scores),
        "majority_share": max(map(labels.count, names)) / len(labels),
    }


def label_scores(bench: Bench, file: LabelledFile, texts: Sequence[str], names: Sequence[str]) -> NDArray[np.float64]:
    """The natural logarithm of each label's probability behind each text, shape [texts, labels].

    A prompt that does not fit the model's context loses its beginning. Raises SuiteTimeout; ValueError for a label that does not
    fit, and for a model without finite probabilities.
    """
    return begin_scores(bench, file, texts, names)()


def begin_scores(
    bench: Bench, file: LabelledFile, texts: Sequence[str], names: Sequence[str]
) -> Callable[[], NDArray[np.float64]]:
    """Do this rank's share of the same; what is returned waits for the other ranks' and says it, or raises OnRankZero."""
    rows = sorted(_rows(bench, file, texts, names), key=lambda row: (len(row.tokens), row.place))
    most, batches = batch_positions(bench.model), []
    while rows:
        count = max(1, most // len(rows[-1].tokens))
        batches.append(rows[-count:])
        rows = rows[:-count]

    def compute(batch: Sequence[_Row]) -> Arrays:
        bench.check_time()
        return {"scores": np.array(_scored(bench, batch))}

    parts = bench.division.share(f"labelled-{file.name}", batches, compute)

    def ended() -> NDArray[np.float64]:
        scores = np.zeros(len(texts) * len(names))
        for batch, part in zip(batches, parts.all(bench.check_time), strict=True):
            scores[[row.place for row in batch]] = part["scores"]
        if not np.isfinite(scores).all():
            raise ValueError("the model gives no finite probability to a label: its weights are broken")
        return scores.reshape(len(texts), len(names))

    return ended


def _rows(bench: Bench, file: LabelledFile, texts: Sequence[str], names: Sequence[str]) -> Iterator[_Row]:
    ends = [bench.tokenizer.encode(f" {name}", add_special_tokens=False).ids for name in names]
    room = bench.context - max(map(len, ends))
    if room < 1:
        raise ValueError(
            f"evaluation.labelled.{file.name}: a label has more tokens than the model takes: {bench.context}"
        )
    for number, text in enumerate(texts):
        prompt = bench.tokenizer.encode(file.prompt.replace("{text}", text), add_special_tokens=False).ids
        kept = [*bench.opening, *prompt][-room:]
        for column, end in enumerate(ends):
            yield _Row(number * len(names) + column, [*kept, *end], len(kept))


@torch.inference_mode()
def _scored(bench: Bench, batch: Sequence[_Row]) -> list[float]:
    """Padding is on the right, where causal attention does not see it from any scored position: no mask is needed."""
    longest = max(len(row.tokens) for row in batch)
    read = torch.tensor([row.tokens + [bench.eod_id] * (longest - len(row.tokens)) for row in batch])
    results: list[list[torch.Tensor]] = [[] for _ in batch]
    for part, logits in logits_in_parts(bench.model, read.to(bench.model.device)):
        for row, seen, value in zip(batch, logits, results, strict=True):
            first, last = max(row.start - 1, part.start), min(len(row.tokens) - 1, part.stop)
            if first < last:
                spread = torch.log_softmax(seen[first - part.start : last - part.start].double(), dim=-1)
                wanted = torch.tensor(row.tokens[first + 1 : last + 1], device=spread.device).unsqueeze(-1)
                value.append(spread.gather(-1, wanted))
    return [float(torch.cat(value).sum()) for value in results]
