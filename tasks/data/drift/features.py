"""What is measured of the documents that are looked at, one row a document: counts of words, tokens and lines, language, format.

All but the length is of a document's first sampling.HEAD characters. Nothing is compared here: tasks/data/drift/features.py does.

The tokenizer is a `Vocabulary`: counts of tokens, which of them are unknown, which are lone bytes, and how one is written.

The columns of drift: for each, its statistic for all splits, a summary of both sides, and what moved most.

What the statistics are: tasks/data/drift/splits.py. Whether a value is unusual: tasks/data/drift/splits.py. See docs/drift.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.measures import CLASSES, LENGTHS, Texts, classes, repeated_shares
from tasks.data.corpus.tokens import read_words
from tasks.data.drift.splits import Splits, Values, deviations, divergence, greatest_step
from tasks.data.tokenizing.engine import Choice, Tokenizers, choose
from tasks.data.tokenizing.tokenizer import OpenedTokenizer, load, open_tokenizer

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
    yield _shares("language", "language (Jensen-Shannon divergence)", *_one_hot(both.languages), splits)
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


def _one_hot(labels: NDArray[np.str_]) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    names, places = np.unique(labels, return_inverse=True)
    return tuple(names.tolist()), np.eye(len(names), dtype=np.float32)[places]


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


_BYTE = re.compile(r"<0x([89A-F][0-9A-F])>")
"""How SentencePiece and `byte_fallback` write a byte beyond ASCII."""


@dataclass(frozen=True)
class Vocabulary:
    """An opened tokenizer, with the engine that counts."""

    tokenizer: OpenedTokenizer
    choice: Choice

    def count(self, texts: Sequence[str]) -> Any:
        """Tokens of each text, a scipy.sparse matrix [texts, vocab_size] of int32; nothing is put around a document."""
        from scipy.sparse import csr_matrix

        result = self.choice.engine.encode(texts)
        bounds = np.concatenate(([0], np.cumsum(result.lengths)))
        ones = np.ones(len(result.tokens), np.int32)
        shape = (len(texts), self.size)
        counted = csr_matrix((ones, result.tokens.astype(np.int32), bounds.astype(np.int32)), shape=shape)
        counted.sum_duplicates()
        return counted

    def unknown(self, counts: Any) -> NDArray[np.int64]:
        """How many of each document's tokens are the unknown token."""
        return _sum(counts, self._unknown)

    def fallback(self, counts: Any) -> NDArray[np.int64]:
        """How many of each document's tokens are a single byte from 80 to FF, hexadecimal: part of a character for which the
        tokenizer has learnt no token. Byte-level BPE writes such a byte as a letter, others as <0xE2>."""
        return _sum(counts, self._bytes)

    def written(self, token: int) -> str:
        """A token as text; empty for a part of a character."""
        text = Tokenizers(self.tokenizer).decode([token])
        return "" if "\ufffd" in text else text

    @cached_property
    def size(self) -> int:
        return max([self.tokenizer.vocab_size - 1, *self._numbers.values()]) + 1

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return dict(load(self.tokenizer.rules).get_vocab(with_added_tokens=True))

    @cached_property
    def _unknown(self) -> list[int]:
        token = (json.loads(self.tokenizer.rules).get("model") or {}).get("unk_token")
        return [self._numbers[token]] if token in self._numbers else []

    @cached_property
    def _bytes(self) -> list[int]:
        rules = json.loads(self.tokenizer.rules)
        byte_level = "ByteLevel" in json.dumps([rules.get("pre_tokenizer"), rules.get("decoder")])
        letters = _byte_letters() if byte_level else set()
        return [number for token, number in self._numbers.items() if token in letters or _BYTE.fullmatch(token)]


def open_vocabulary(folder: Path, texts: Sequence[str]) -> Vocabulary:
    """The tokenizer of a folder: of its own, of a checkpoint, or of tokens, where it lies in `tokenizer/`.

    `texts` are a sample on which the fast engine must agree with the slow one. Raises ValueError when there is none.
    """
    below = folder / "tokenizer"
    tokenizer = open_tokenizer(below if below.is_dir() else folder)
    return Vocabulary(tokenizer, choose(tokenizer, texts))


def _byte_letters() -> set[str]:
    """The letters that byte-level BPE writes bytes 80 to FF as (bytes_to_unicode of OpenAI's GPT-2 encoder.py)."""
    as_they_are = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in as_they_are]
    moved = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {moved.get(byte, chr(byte)) for byte in range(0x80, 0x100)}


def _sum(counts: Any, tokens: list[int]) -> NDArray[np.int64]:
    return np.asarray(counts[:, tokens].sum(axis=1), np.int64).ravel()


WORD_BITS, LINE_BITS = 18, 20
"""Words and lines are counted by the first bits of their hashes."""
LANGUAGE_CHARACTERS = 1000
LINE = 16
"""Characters of the shortest line that counts as one that documents share: shorter ones come by chance."""
FORMAT = (
    "replacement characters",
    "control characters",
    "mojibake",
    "carriage returns",
    "mixed line ends",
    "invisible characters",
    "escaped characters",
    "mark-up",
    "indentation by tabs",
    "indentation not by four",
    "trailing blanks",
    "long lines",
    "camel case",
    "snake case",
)
"""The first eight: whether a document has any. Then shares: of indented lines, of lines, and of words."""
_MOJIBAKE = re.compile("[ÂÃÄÅÐÑâã][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")
"""UTF-8 that was read as Latin-1 or Windows-1252: a lead byte and what a byte of 80 to BF becomes."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060\ufeff]")
_ESCAPED = re.compile(r"&(?:amp|lt|gt|quot|#\d+);|\\u[0-9a-f]{4}|%[0-9A-F]{2}%[0-9A-F]{2}")
_MARKUP = re.compile(r"</[A-Za-z][\w:-]*>")
_INDENTED = re.compile(r"\n([ \t]+)\S")
_TRAILING = re.compile(r"[ \t]\r?\n")
LONG = 100
"""Characters of the longest line that is not a long one."""
_CAMEL = re.compile(r"[a-z][A-Z][a-z]")
_SNAKE = re.compile(r"[a-z]_[a-z]")
_LETTERS = re.compile(r"[^\W\d_]")


@dataclass(frozen=True)
class Measured:
    """Documents, one a row. Counts are scipy.sparse matrices in CSR form, of int32."""

    lengths: NDArray[np.int64]
    """Characters of the whole document."""
    repeated: NDArray[np.float32]
    """Share of characters in lines that the document has had already."""
    classes: NDArray[np.int64]
    """Characters by class, shape [documents, len(CLASSES)]."""
    format: NDArray[np.float32]
    """Shape [documents, len(FORMAT)]."""
    languages: NDArray[np.str_]
    words: Any
    """Documents by words, by hash."""
    lines: Any
    """Documents by lines, by hash: 1 where a document has the line."""
    tokens: Any
    """Documents by tokens; None without a tokenizer."""
    unknown: NDArray[np.int64]
    """Unknown tokens of each document."""
    fallback: NDArray[np.int64]
    """Tokens of each document that are a single byte beyond ASCII (tasks/data/drift/features.py)."""

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, chosen: Any) -> Measured:
        """Some of the documents, in the order of the indices or by a mask."""
        kept: dict[str, Any] = {name: None if value is None else value[chosen] for name, value in vars(self).items()}
        return Measured(**kept)


def together(parts: Sequence[Measured]) -> Measured:
    """The documents of all parts, in order. They must have been measured with one vocabulary."""
    from scipy.sparse import vstack

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else vstack(values, format="csr")

    return Measured(**{name: joined(name) for name in vars(parts[0])})


def measure(heads: Sequence[str], lengths: NDArray[np.int64], vocabulary: Vocabulary | None) -> Measured:
    """Measure documents by their heads; `lengths` are of the whole ones. Without a vocabulary there are no tokens."""
    texts = Texts.of(list(heads))
    words, many = _words(texts)
    tokens = vocabulary.count(heads) if vocabulary else None
    none = np.zeros(len(heads), np.int64)
    return Measured(
        lengths=lengths,
        repeated=repeated_shares(texts),
        classes=np.array(
            [classes(np.bincount(np.frombuffer(data, np.uint8), minlength=256)) for data in texts.encoded], np.int64
        ).reshape(-1, len(CLASSES)),
        format=np.array([_format(t, n) for t, n in zip(heads, many, strict=True)], np.float32).reshape(-1, len(FORMAT)),
        languages=np.array([_language(text) for text in heads], "<U8"),
        words=words,
        lines=_lines(heads),
        tokens=tokens,
        unknown=vocabulary.unknown(tokens) if vocabulary else none,
        fallback=vocabulary.fallback(tokens) if vocabulary else none,
    )


def _words(texts: Texts) -> tuple[Any, list[int]]:
    """Counts of words, and how many words each document has."""
    result = read_words(texts.buffer, texts.starts) if texts.encoded else None
    if result is None:
        return _counts(np.zeros(0, np.int64), np.zeros(1, np.int64), 1 << WORD_BITS), []
    buckets = (result.hashes >> np.uint64(64 - WORD_BITS)).astype(np.int64)
    return _counts(buckets, result.bounds, 1 << WORD_BITS), np.diff(result.bounds).tolist()


def _lines(heads: Sequence[str]) -> Any:
    import xxhash

    result, bounds = [], [0]
    for text in heads:
        lines = {line.strip() for line in text.splitlines()}
        result += [xxhash.xxh3_64_intdigest(line.encode()) >> (64 - LINE_BITS) for line in lines if len(line) >= LINE]
        bounds.append(len(result))
    counted = _counts(np.array(result, np.int64), np.array(bounds), 1 << LINE_BITS)
    counted.data[:] = 1
    return counted


def _counts(labels: NDArray[np.int64], bounds: NDArray[np.int64], width: int) -> Any:
    from scipy.sparse import csr_matrix

    ones = np.ones(len(labels), np.int32)
    counted = csr_matrix((ones, labels.astype(np.int32), bounds.astype(np.int32)), shape=(len(bounds) - 1, width))
    counted.sum_duplicates()
    return counted


def _format(text: str, words: int) -> list[float]:
    lines, returns = max(text.count("\n"), 1), text.count("\r")
    anything = (
        "\ufffd" in text,
        _CONTROL.search(text),
        not text.isascii() and _MOJIBAKE.search(text),
        returns,
        returns and text.count("\n") != text.count("\r\n"),
        not text.isascii() and _INVISIBLE.search(text),
        _ESCAPED.search(text),
        _MARKUP.search(text),
    )
    indented = _INDENTED.findall(text)
    tabs = sum("\t" in each for each in indented)
    odd = sum("\t" not in each and len(each) % 4 != 0 for each in indented)
    shares = (
        tabs / max(len(indented), 1),
        odd / max(len(indented), 1),
        len(_TRAILING.findall(text)) / lines,
        sum(len(line) > LONG for line in text.split("\n")) / lines,
        len(_CAMEL.findall(text)) / max(words, 1),
        len(_SNAKE.findall(text)) / max(words, 1),
    )
    return [*(float(bool(each)) for each in anything), *(min(share, 1.0) for share in shares)]


def _language(text: str) -> str:
    """The language that py3langid takes a document for, of its first characters; `none` for one with hardly a letter."""
    import py3langid

    text = text[:LANGUAGE_CHARACTERS]
    if len(_LETTERS.findall(text[:200])) < LINE and len(_LETTERS.findall(text)) < LINE:
        return "none"
    return str(py3langid.classify(text)[0])
