"""A tokenizer as drift sees it: counts of tokens, which of them are unknown, which are lone bytes, and how one is written."""

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
