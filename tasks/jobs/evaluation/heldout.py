"""Held-out text: whole documents, drawn by hash where not all are read; the same text in the ids of a checkpoint's tokenizer.

What a tokenizer puts before a document, as `<|begin_of_text|>`, is no text: each model gets its own as the first context.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tasks.common.process import read_json
from tasks.config.evaluation import EvaluationConfig
from tasks.data.tokenizing.tokenizer import around
from tasks.formats.mmididx import mask_of, open_tokens
from tasks.formats.model_folder import store_opening


@dataclass(frozen=True)
class Encoded:
    """Documents as one tokenizer's ids, each with the end-of-document id last; or conversations, as a template writes them."""

    documents: list[NDArray[np.int64]]
    """Without what the tokenizer puts before a document."""
    eod_id: int
    opening: tuple[int, ...] = ()
    """What the tokenizer puts before a document; empty for most."""
    answers: list[NDArray[np.bool_]] | None = None
    """Of conversations, which tokens are of answers: they alone are scored. None: all are."""

    @property
    def context(self) -> tuple[int, ...]:
        """What the first token of a document is predicted from; it is not scored. Of a conversation nothing stands before it."""
        return self.opening_tokens if self.answers is None else ()

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """What a text opens with, that a model is to go on with."""
        return self.opening or (self.eod_id,)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document) for document in self.documents], dtype=np.int64)

    @property
    def scored(self) -> NDArray[np.int64]:
        """Tokens of each document that are scored."""
        if self.answers is None:
            return self.lengths
        return np.array([np.count_nonzero(answers[1:]) for answers in self.answers], dtype=np.int64)


@dataclass(frozen=True)
class Heldout:
    """The text that is measured on: whole documents, those that were drawn in file order."""

    texts: list[str]
    byte_counts: NDArray[np.int64]
    """UTF-8 bytes of each document, of a conversation those of its answers, shape [documents]."""
    encoded: Encoded
    """By the tokens' own tokenizer."""
    available: int = 0
    """Documents of the split."""
    share: float = 1.0
    """Of the split's tokens, those that are read."""


HELDOUT = "heldout_text_document"
FULL = 0.01
"""Share of `max_bytes` that may be left over: hardly a document fits into less, and each is decoded to see that."""


def read_heldout(tokens: Path, config: EvaluationConfig, *, verdict: bool = True) -> Heldout:
    """Up to `max_bytes` of held-out documents: all, or those whose hash comes first, without any that does not fit.

    A document's hash does not depend on its place, so every part of the split has its share. Where a `verdict` rests on them,
    ValueError when they are too few; else there may be none.
    """
    about = read_json(tokens / "tokens.json")
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    chats = "answers" in about
    before, after = ((), ()) if chats else around(tokenizer)
    eod = 0 if chats else 1  # the token at a document's end that is no text
    indexed = open_tokens(tokens / HELDOUT)
    places = list(pairwise(indexed.boundaries.tolist()))
    hashes = [hashlib.sha256(indexed.tokens[start:end].tobytes()).digest() for start, end in places]
    drawn: dict[int, tuple[str, int]] = {}
    left = config.max_bytes
    for number in sorted(range(len(places)), key=hashes.__getitem__):
        start, end = places[number]
        if left < config.max_bytes * FULL:
            break
        if end - start > left + len(before) + len(after) + eod and not chats:  # a token is a byte at least
            continue
        ids = indexed.tokens[start + len(before) : end - eod - len(after)]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        size = len(text.encode())
        if size <= left:
            drawn[number], left = (text, size), left - size
    numbers = sorted(drawn)
    if verdict:
        result = len(numbers)
        if not (result >= config.min_documents):
            if indexed.document_count < config.min_documents:
                remedy = "raise preprocessing.heldout_fraction or give more documents"
            else:
                remedy = f"raise evaluation.max_bytes, which is {config.max_bytes}"
            raise ValueError(
                f"{result} held-out documents, but a verdict needs evaluation.min_documents = {config.min_documents}: {remedy}"
            )
    documents = [indexed.tokens[places[n][0] + len(before) : places[n][1]].astype(np.int64) for n in numbers]
    read = sum(places[n][1] - places[n][0] for n in numbers)
    sizes, answers = [drawn[number][1] for number in numbers], None
    if chats:
        masks = open_tokens(mask_of(tokens / HELDOUT)).tokens
        answers = [masks[slice(*places[n])].astype(np.bool_) for n in numbers]
        own = (ids[learnt].tolist() for ids, learnt in zip(documents, answers, strict=True))
        sizes = [len(tokenizer.decode(ids, skip_special_tokens=True).encode()) for ids in own]
    return Heldout(
        texts=[drawn[number][0] for number in numbers],
        byte_counts=np.array(sizes, dtype=np.int64),
        encoded=Encoded(documents, int(about["eod_id"]), before, answers),
        available=len(places),
        share=read / max(len(indexed.tokens), 1),
    )


def encode_for(checkpoint: Path, tokens: Path, heldout: Heldout) -> Encoded:
    """The held-out documents in the checkpoint's own ids; ValueError where its tokenizer cannot write the same text."""
    path, theirs = checkpoint / "tokenizer.json", tokens / "tokenizer" / "tokenizer.json"
    if path.read_bytes() == theirs.read_bytes():
        return heldout.encoded
    if heldout.encoded.answers is not None:
        # A base keeps the file that it came with; that of the tokens was written again, with other white space.
        if Tokenizer.from_file(str(path)).to_str() == Tokenizer.from_file(str(theirs)).to_str():
            return heldout.encoded
        raise ValueError(
            f"{checkpoint} has another tokenizer than the held-out conversations, whose answers are measured in their tokens: "
            "preprocess the conversations with this model's tokenizer, or compare models of one tokenizer"
        )
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eod_id = _end_of(checkpoint)
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
    documents = [np.array([*encoding.ids, eod_id], dtype=np.int64) for encoding in encodings]
    return Encoded(documents, eod_id, around(tokenizer)[0])


def opening_of(checkpoint: Path) -> tuple[int, ...]:
    """The tokens that a checkpoint's documents open with, as `Encoded.context`; empty where its tokenizer names none."""
    end = _end_of(checkpoint)
    return around(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))[0] or (() if end is None else (end,))


def open_documents(checkpoint: Path, folder: Path) -> tuple[int, ...]:
    """Have the tokenizer in a folder, a copy of the checkpoint's, put before a text what documents open with; returns that."""
    opening, tokenizer = opening_of(checkpoint), Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    if opening and not around(tokenizer)[0]:
        token = tokenizer.id_to_token(opening[0])
        assert token is not None, "it was found by its name"
        store_opening(folder, token, opening[0])
    return opening


def _end_of(checkpoint: Path) -> int | None:
    """The token that ends a document."""
    result: int | None = PreTrainedTokenizerFast.from_pretrained(str(checkpoint)).eos_token_id
    return result
