"""What is measured of the documents that are looked at, one row a document: counts of words, tokens and lines, language, format.

All but the length is of a document's first sampling.HEAD characters. Nothing is compared here: tasks/data/drift/columns.py does.

The tokenizer is a `Vocabulary`: counts of tokens, which of them are unknown, which are lone bytes, and how one is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.measures import CLASSES, Texts, classes, repeated_shares
from tasks.data.corpus.tokens import read_words
from tasks.data.tokenizing.engine import Choice, Tokenizers, choose
from tasks.data.tokenizing.tokenizer import OpenedTokenizer, load, open_tokenizer

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
