"""Held-out text: whole documents in file order, and the same text in the ids of the checkpoint's own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tasks.evaluation_config import EvaluationConfig
from tasks.formats.mmididx import open_tokens
from tasks.process import read_json


@dataclass(frozen=True)
class Encoded:
    """Documents as one tokenizer's ids, each with the end-of-document id last."""

    documents: list[NDArray[np.int64]]
    eod_id: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document) for document in self.documents], dtype=np.int64)


@dataclass(frozen=True)
class Heldout:
    """The text that is measured on: whole documents in file order."""

    texts: list[str]
    byte_counts: NDArray[np.int64]
    """UTF-8 bytes of each document, shape [documents]."""
    encoded: Encoded
    """By the tokens' own tokenizer."""


HELDOUT = "heldout_text_document"


def read_heldout(tokens: Path, config: EvaluationConfig, *, verdict: bool = True) -> Heldout:
    """Held-out documents in file order until the next one would pass `max_bytes`.

    Where a `verdict` rests on them, ValueError when they are too few; else there may be none.
    """
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    indexed = open_tokens(tokens / HELDOUT)
    texts: list[str] = []
    sizes: list[int] = []
    documents: list[NDArray[np.int64]] = []
    total = 0
    for start, end in pairwise(indexed.boundaries.tolist()):
        document = indexed.tokens[start:end].astype(np.int64)
        text = tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False)
        size = len(text.encode())
        total += size
        if total > config.max_bytes:
            break
        texts.append(text)
        sizes.append(size)
        documents.append(document)
    if verdict:
        _require_documents(len(documents), config, available=indexed.document_count)
    eod_id = int(read_json(tokens / "tokens.json")["eod_id"])
    return Heldout(texts=texts, byte_counts=np.array(sizes, dtype=np.int64), encoded=Encoded(documents, eod_id))


def encode_for(checkpoint: Path, tokens: Path, heldout: Heldout) -> Encoded:
    """The held-out documents in the checkpoint's own ids; ValueError where its tokenizer cannot write the same text."""
    path = checkpoint / "tokenizer.json"
    if path.read_bytes() == (tokens / "tokenizer" / "tokenizer.json").read_bytes():
        return heldout.encoded
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eod_id = PreTrainedTokenizerFast.from_pretrained(str(checkpoint)).eos_token_id
    if eod_id is None:
        raise ValueError(
            f"{checkpoint} names no eos_token in tokenizer_config.json: add the token that ends a document"
        )
    encodings = tokenizer.encode_batch(heldout.texts, add_special_tokens=False)
    for number, (encoding, text) in enumerate(zip(encodings, heldout.texts, strict=True)):
        if tokenizer.decode(encoding.ids, skip_special_tokens=False) != text:
            raise ValueError(
                f"the tokenizer of {checkpoint} does not give back held-out document {number}, so bits per byte would "
                "be of another text: use a checkpoint with a byte-level tokenizer"
            )
    return Encoded([np.array([*encoding.ids, eod_id], dtype=np.int64) for encoding in encodings], eod_id)


def _require_documents(found: int, config: EvaluationConfig, *, available: int) -> None:
    if found >= config.min_documents:
        return
    if available < config.min_documents:
        remedy = "raise preprocessing.heldout_fraction or give more documents"
    else:
        remedy = f"raise evaluation.max_bytes, which is {config.max_bytes}"
    raise ValueError(
        f"{found} held-out documents, but a verdict needs evaluation.min_documents = {config.min_documents}: {remedy}"
    )
