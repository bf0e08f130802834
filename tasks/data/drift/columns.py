"""The columns of drift: for each, its statistic for all splits, a summary of both sides, and what moved most.

What the statistics are: tasks/data/drift/splits.py. Whether a value is unusual: tasks/data/drift/splits.py. See docs/drift.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.measures import CLASSES, LENGTHS
from tasks.data.drift.features import FORMAT, Measured
from tasks.data.drift.splits import Splits, Values, deviations, divergence, greatest_step

KEPT = 8192
"""Words, tokens and lines that are told apart: those in most documents of both sides together. The rest counts as one."""


SHOWN = 3


BARS = 12


BITS, STEP, ERRORS = "bits", "share", "standard errors"


COPIES = ("copies of earlier documents", "lines of other documents", "repeated within the document")


@dataclass(frozen=True)
class Histogram:
    """Shares by label, on both sides."""

    labels: tuple[str, ...]
    reference: tuple[float, ...]
    new: tuple[float, ...]


@dataclass(frozen=True)
class Column:
    """One column: row 0 of `values` is the reference against the new data, the others are splits."""

    name: str
    title: str
    unit: str
    values: Values | None
    """None where nothing can be measured."""
    reference: float | None = None
    new: float | None = None
    moved: tuple[str, ...] = ()
    histogram: Histogram | None = None


@dataclass(frozen=True)
class Kept:
    """The columns of a count matrix that are told apart."""

    counts: Any
    """Documents by kept labels, and last what is left."""
    labels: NDArray[np.int64]
    """The label of each column but the last."""

    @classmethod
    def of(cls, counts: Any, most: int = KEPT) -> Kept:
        """Those in most documents; which side they are on is not looked at."""
        from scipy.sparse import csr_matrix, hstack

        documents = np.bincount(counts.indices, minlength=counts.shape[1])
        labels = np.sort(np.argsort(-documents, kind="stable")[:most])
        labels = labels[documents[labels] > 0]
        kept = counts[:, labels]
        rest = np.asarray(counts.sum(axis=1), np.int64).ravel() - np.asarray(kept.sum(axis=1), np.int64).ravel()
        return cls(hstack([kept, csr_matrix(rest.reshape(-1, 1))], format="csr").astype(np.float32), labels)

    @property
    def presence(self) -> Any:
        """Whether a document has each kept label, without the rest."""
        present = self.counts[:, :-1]
        present.data = np.ones_like(present.data)
        return present


def frequencies(kept: Kept, splits: Splits, *, title: str) -> Column:
    """Column `tokens`; what moved is told by whoever can read the labels (tasks/data/drift/comparison.py)."""
    new = splits.new_sums(kept.counts)
    every = np.asarray(kept.counts.sum(axis=0), np.float32).reshape(-1, 1)
    return Column("tokens", title, BITS, divergence(every - new, new))


def measured_columns(both: Measured, splits: Splits, *, copies: NDArray[np.float32]) -> Iterator[Column]:
    """All columns but `tokens` and `domain`, of the reference's documents and then the new ones."""
    yield from _by_tokens(both, splits)
    yield _steps("length", "length in characters (Kolmogorov-Smirnov)", both.lengths.astype(float), splits, LENGTHS)
    names, places = np.unique(both.languages, return_inverse=True)
    one_hot = tuple(names.tolist()), np.eye(len(names), dtype=np.float32)[places]
    yield _shares("language", "language (Jensen-Shannon divergence)", *one_hot, splits)
    totals = np.maximum(both.classes.sum(axis=1, keepdims=True), 1)
    title = "classes of characters (Jensen-Shannon divergence)"
    yield _shares("characters", title, CLASSES, (both.classes / totals).astype(np.float32), splits)
    yield _duplicates(both, splits, copies)
    yield _deviating("format", "format and style of code", FORMAT, both.format, splits)


def _by_tokens(both: Measured, splits: Splits) -> Iterator[Column]:
    titles = {
        "unknown_tokens": "unknown tokens",
        "byte_fallback_tokens": "tokens of a single byte beyond ASCII",
        "tokens_per_word": "tokens a word (Kolmogorov-Smirnov)",
    }
    if both.tokens is None:
        for name, title in titles.items():
            yield Column(name, f"{title}: not measured without a tokenizer", STEP, None)
        return
    tokens = np.asarray(both.tokens.sum(axis=1), np.float64).ravel()
    for name, counts in (("unknown_tokens", both.unknown), ("byte_fallback_tokens", both.fallback)):
        features = np.stack((counts / np.maximum(tokens, 1), counts > 0), axis=1).astype(np.float32)
        yield _deviating(name, titles[name], ("share of tokens", "documents with any"), features, splits)
    words = np.maximum(np.asarray(both.words.sum(axis=1), np.float64).ravel(), 1)
    edges = tuple(round(0.25 * step, 2) for step in range(41))
    yield _steps("tokens_per_word", titles["tokens_per_word"], tokens / words, splits, edges)


def _steps(name: str, title: str, values: NDArray[np.float64], splits: Splits, edges: Sequence[float]) -> Column:
    """A number a document: the greatest distance of the distributions, and the medians."""
    new = splits.new[0] > 0
    medians = (float(np.median(values[~new])), float(np.median(values[new])))
    moved = (f"median {medians[0]:.6g} -> {medians[1]:.6g}",) if medians[0] != medians[1] else ()
    # Shares by bins that begin at the edges, from the first to the last that hold anything.
    bins = np.maximum(np.searchsorted(np.asarray(edges), values, side="right") - 1, 0)
    first, last = int(bins.min()), int(bins.max()) + 1
    old_, new_ = (np.bincount(bins[side], minlength=last)[first:last] / side.sum() for side in (~new, new))
    histogram = Histogram(tuple(f"{edge:g}" for edge in edges[first:last]), tuple(old_.tolist()), tuple(new_.tolist()))
    return Column(name, title, STEP, greatest_step(values, splits), *medians, moved, histogram)


def _shares(name: str, title: str, labels: Sequence[str], values: NDArray[np.float32], splits: Splits) -> Column:
    """Shares of each document by label: the divergence of their means, as counts of documents."""
    old, new = splits.means(values)
    of_old, of_new = splits.sizes
    common = int(old[:, 0].argmax())
    histogram = _histogram(labels, old[:, 0], new[:, 0])
    summary = float(old[common, 0]), float(new[common, 0])
    return Column(name, title, BITS, divergence(old * of_old, new * of_new), *summary, moved(histogram), histogram)


def _deviating(name: str, title: str, labels: Sequence[str], values: NDArray[np.float32], splits: Splits) -> Column:
    """Several numbers a document: the means that lie the most standard errors apart; the summary is of those."""
    apart = deviations(values, splits)
    old, new = (side[:, 0] for side in splits.means(values))
    greatest = int(np.abs(apart[:, 0]).argmax())
    order = np.argsort(-np.abs(apart[:, 0]), kind="stable")[:SHOWN]
    messages = [_said(labels[i], old[i], new[i]) for i in order.tolist() if abs(apart[i, 0]) > 1]
    histogram = _histogram(labels, old, new)
    summary = (float(old[greatest]), float(new[greatest]))
    return Column(name, title, ERRORS, np.abs(apart).max(axis=0), *summary, tuple(messages), histogram)


def _duplicates(both: Measured, splits: Splits, copies: NDArray[np.float32]) -> Column:
    """Copies in the whole corpora; lines that documents of one side share; lines that a document has had already."""
    values = np.stack((copies, both.repeated), axis=1)
    apart = deviations(values, splits)
    shared_old, shared_new = _shared_lines(both.lines, splits)
    difference = shared_new - shared_old
    spread = difference.std()
    lines = difference / spread if spread > 0 else difference * 0
    greatest = np.abs(np.stack((apart[0], lines, apart[1])))
    sides = ((means, shared) for means, shared in zip(splits.means(values), (shared_old, shared_new), strict=True))
    old, new = (np.array([means[0, 0], shared[0], means[1, 0]]) for means, shared in sides)
    order = np.argsort(-greatest[:, 0], kind="stable").tolist()
    messages = tuple(_said(COPIES[i], old[i], new[i]) for i in order if greatest[i, 0] > 1)
    summary = (float(old[order[0]]), float(new[order[0]]))
    title = "duplicates: documents and lines"
    return Column("duplicates", title, ERRORS, greatest.max(axis=0), *summary, messages, _histogram(COPIES, old, new))


def _shared_lines(lines: Any, splits: Splits) -> tuple[Values, Values]:
    """Of the lines of each side, the share that an earlier document of that side has as well, each [splits + 1].

    Of lines that are in many documents; what comes once can be no repetition on either side.
    """
    documents = np.bincount(lines.indices, minlength=lines.shape[1])
    labels = np.argsort(-documents, kind="stable")[:KEPT]
    common = lines[:, labels[documents[labels] > 1]].astype(np.float32)
    new = splits.new_sums(common)
    old = np.asarray(common.sum(axis=0), np.float32).reshape(-1, 1) - new
    each = np.asarray(lines.sum(axis=1), np.float32).reshape(-1, 1)
    of_new = splits.new_sums(each)[0].astype(np.float64)
    of_old = float(each.sum()) - of_new
    again_old, again_new = (np.maximum(side - 1, 0).sum(axis=0, dtype=np.float64) for side in (old, new))
    return again_old / np.maximum(of_old, 1), again_new / np.maximum(of_new, 1)


def _histogram(labels: Sequence[str], old: Values, new: Values) -> Histogram:
    """The labels with the largest shares on either side."""
    order = np.argsort(-np.maximum(old, new), kind="stable")[:BARS]
    order = order[np.maximum(old, new)[order] > 0]
    return Histogram(tuple(labels[i] for i in order), tuple(old[order].tolist()), tuple(new[order].tolist()))


def moved(histogram: Histogram) -> tuple[str, ...]:
    """The labels whose shares differ most."""
    rows = list(zip(histogram.labels, histogram.reference, histogram.new, strict=True))
    rows.sort(key=lambda row: -abs(row[1] - row[2]))
    return tuple(_said(*row) for row in rows[:SHOWN] if _percent(row[1]) != _percent(row[2]))


def _said(label: str, old: float, new: float) -> str:
    return f"{label} {_percent(old)} -> {_percent(new)}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
