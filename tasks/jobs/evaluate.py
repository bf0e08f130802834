"""The program that measures a checkpoint on held-out text: bits per byte, beside unigram and bigram baselines.

One rank. Any Hugging Face causal language model can be measured: where its tokenizer differs from the tokens' own,
the same text is encoded again, and only per-byte numbers are compared. Intervals are in tasks/scores.py, the baselines
in tasks/jobs/ngram.py; verdicts are the stages'. See docs/evaluation.md.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tasks import scores
from tasks.evaluation_config import EvaluationConfig
from tasks.formats.mmididx import open_tokens
from tasks.jobs import ngram
from tasks.jobs.runtime import Rank, main
from tasks.performance.kinds import kind_of
from tasks.process import read_json, write_json

BATCH_POSITIONS = 8192
"""Most positions, padding included, that one forward pass takes."""
BATCH_LOGITS = 1 << 26
"""Most logits of one forward pass (256 MiB in float32): large vocabularies take fewer positions."""
BITS_DECIMALS = 6
"""Published bits are rounded to what float32 can carry; every published score is computed from the rounded ones."""
NOT_SCORED = -100


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


@dataclass(frozen=True)
class Window:
    """Positions [start, end) of one document; only those from `scored_from` on are scored, the others are context."""

    document: int
    start: int
    end: int
    scored_from: int

    @property
    def length(self) -> int:
        return self.end - self.start


def run(rank: Rank) -> dict[str, Any]:
    """Measure `inputs["checkpoint"]` on the held-out split of `inputs["tokens"]`; returns the metrics."""
    config = EvaluationConfig(**rank.settings["evaluation"])
    torch.set_num_threads(rank.settings["threads"])
    tokens, checkpoint = rank.inputs["tokens"], rank.inputs["checkpoint"]
    heldout = read_heldout(tokens, config)
    encoded = encode_for(checkpoint, tokens, heldout)
    unigram, bigram = _ngram_bits(tokens, heldout.encoded)
    documents = {
        "bytes": heldout.byte_counts.tolist(),
        "model_bits": _rounded(
            model_bits(checkpoint, encoded, sequence_length=rank.settings["sequence_length"], rank=rank)
        ),
        "bigram_bits": _rounded(bigram),
        "unigram_bits": _rounded(unigram),
        "hashes": [hashlib.sha256(text.encode()).hexdigest() for text in heldout.texts],
        "kinds": [kind_of(text) for text in heldout.texts],
    }
    evaluation = _evaluation(documents, config, token_count=int(encoded.lengths.sum()))
    write_json(rank.output / "documents.json", documents)
    write_json(rank.output / "evaluation.json", evaluation)
    return {"metrics": _metrics(evaluation)}


def read_heldout(tokens: Path, config: EvaluationConfig) -> Heldout:
    """Held-out documents in file order until the next one would pass `max_bytes`; ValueError where they are too few."""
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    indexed = open_tokens(tokens / "heldout_text_document")
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


def windows(lengths: Sequence[int], sequence_length: int) -> list[Window]:
    """Cover every position of every document once: whole where it fits, else windows that overlap by half.

    A later window is moved back to full length, so what it scores has at least half a window of context.
    """
    stride = max(1, sequence_length // 2)
    found = []
    for document, length in enumerate(lengths):
        end = min(sequence_length, length)
        found.append(Window(document, start=0, end=end, scored_from=0))
        while end < length:
            scored_from, end = end, min(end + stride, length)
            found.append(Window(document, start=end - sequence_length, end=end, scored_from=scored_from))
    return found


def batches(found: Sequence[Window], positions: int) -> Iterator[list[Window]]:
    """Windows of similar length, longest first; padded to its longest, a batch of several takes at most `positions`."""
    batch: list[Window] = []
    for window in sorted(found, key=lambda window: -window.length):
        if batch and (len(batch) + 1) * batch[0].length > positions:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def model_bits(checkpoint: Path, encoded: Encoded, *, sequence_length: int, rank: Rank) -> NDArray[np.float64]:
    """Bits of each document and its end under the model, with end-of-document as left context; shape [documents]."""
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32, local_files_only=True).eval()
    longest = min(sequence_length, getattr(model.config, "max_position_embeddings", sequence_length))
    found = windows(encoded.lengths.tolist(), longest)
    bits, done = np.zeros(len(encoded.documents)), 0
    for batch in batches(found, min(BATCH_POSITIONS, BATCH_LOGITS // model.config.vocab_size)):
        np.add.at(bits, [window.document for window in batch], _batch_bits(model, batch, encoded))
        done += len(batch)
        rank.progress(done, len(found), f"{done} of {len(found)} windows")
    if not np.isfinite(bits).all():
        raise ValueError(
            f"the model gives no finite probability to {int((~np.isfinite(bits)).sum())} of {len(bits)} held-out "
            "documents: its weights are broken; train again with a lower training.learning_rate"
        )
    return bits


@torch.inference_mode()
def _batch_bits(model: torch.nn.Module, batch: Sequence[Window], encoded: Encoded) -> NDArray[np.float64]:
    """Bits of the scored positions of each window, shape [windows].

    Padding is on the right, where causal attention does not see it from any scored position: no mask is needed.
    """
    shape = (len(batch), batch[0].length)
    inputs = np.full(shape, encoded.eod_id)
    targets = np.full(shape, NOT_SCORED)
    for row, window in enumerate(batch):
        document = encoded.documents[window.document]
        shifted = np.concatenate(([encoded.eod_id], document[:-1]))
        inputs[row, : window.length] = shifted[window.start : window.end]
        targets[row, window.scored_from - window.start : window.length] = document[window.scored_from : window.end]
    logits = model(input_ids=torch.from_numpy(inputs), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="none", ignore_index=NOT_SCORED
    )
    return losses.view(shape).double().sum(dim=1).numpy() / math.log(2)


def _ngram_bits(tokens: Path, heldout: Encoded) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bits of each document under the unigram and the bigram model of the training split, each of shape [documents]."""
    vocab_size = int(read_json(tokens / "tokens.json")["vocab_size"])
    stream: NDArray[Any] = open_tokens(tokens / "train_text_document").tokens
    fitted = ngram.fit_unigram(stream, vocab_size), ngram.fit_bigram(stream, vocab_size, eod_id=heldout.eod_id)
    joined = np.concatenate(heldout.documents)
    unigram, bigram = (ngram.document_bits(one, joined, heldout.lengths, eod_id=heldout.eod_id) for one in fitted)
    return unigram, bigram


def _evaluation(documents: dict[str, list[float]], config: EvaluationConfig, *, token_count: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "samples": config.bootstrap_samples,
        "confidence": config.confidence,
        "seed": config.seed,
    }
    sizes, model, bigram = documents["bytes"], documents["model_bits"], documents["bigram_bits"]
    score = scores.bits_per_byte_interval(model, sizes, **sampling)
    gain = scores.relative_gain(model, bigram, **sampling)
    return {
        "documents": len(sizes),
        "bytes": sum(sizes),
        "tokens": token_count,
        "bits_per_byte": score.estimate,
        "interval": [score.low, score.high],
        "perplexity": 2.0 ** (math.fsum(model) / token_count),
        "unigram": {"bits_per_byte": scores.bits_per_byte(documents["unigram_bits"], sizes)},
        "bigram": {"bits_per_byte": scores.bits_per_byte(bigram, sizes)},
        "gain_over_bigram": {"estimate": gain.estimate, "interval": [gain.low, gain.high]},
        "confidence": config.confidence,
    }


def _metrics(evaluation: dict[str, Any]) -> dict[str, float]:
    gain = evaluation["gain_over_bigram"]
    return {
        "bits_per_byte": evaluation["bits_per_byte"],
        "bigram_bits_per_byte": evaluation["bigram"]["bits_per_byte"],
        "unigram_bits_per_byte": evaluation["unigram"]["bits_per_byte"],
        "gain_over_bigram": gain["estimate"],
        "gain_low": gain["interval"][0],
        "gain_high": gain["interval"][1],
        "documents": evaluation["documents"],
    }


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


def _rounded(bits: NDArray[np.float64]) -> list[float]:
    return [round(value, BITS_DECIMALS) for value in bits.tolist()]


if __name__ == "__main__":
    sys.exit(main(run))
