"""Whether a written dataset is sound, and what it holds: every index entry, every document's end, a few documents decoded.

In chunks: memory does not grow with the dataset. The format itself is tasks/formats/mmididx.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.common.errors import IntegrityError
from tasks.data.tokenizing.engine import AWKWARD, Tokenizers
from tasks.data.tokenizing.tokenizer import OpenedTokenizer
from tasks.formats.mmididx import mask_of, read_header, stream_index

SAMPLES = 16
SAMPLE_TOKENS = 4000
SLAB = 2048
"""Sequences whose ends are read through one map: what a map touched counts as memory until it is let go."""
BINS = 33
"""Lengths by powers of two: 0, 1, 2 to 3, 4 to 7, ..."""


@dataclass(frozen=True)
class Holds:
    """What a dataset holds. A sequence is what Megatron calls one: here a document's tokens."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    shortest: int
    """Tokens of a sequence; 0 when there is none."""
    median: int
    """Lower bound of the power of two that holds the middle sequence, exact below 4096 tokens."""
    longest: int
    histogram: tuple[int, ...]
    """Sequences by length: BINS powers of two."""
    ends: tuple[tuple[int, int], ...]
    """The commonest last tokens, each with the count of sequences that end with it."""
    samples: tuple[tuple[int, ...], ...]
    """The tokens of a few sequences, spread evenly; of a long one the first SAMPLE_TOKENS + 1."""


def look(prefix: Path, *, largest: int | None = None, samples: int = SAMPLES) -> Holds:
    """Read a whole dataset's index and the ends of its sequences.

    Raises IntegrityError at what does not fit, and where a sampled token is not below `largest`, the size of the vocabulary.
    """
    header = read_header(prefix)
    wanted = np.unique(np.linspace(0, max(header.sequences - 1, 0), samples).astype(np.int64))
    binary = Path(f"{prefix}.bin")
    lengths, ends, result = _Lengths(), _Ends(), []
    for chunk in stream_index(prefix):
        lengths.add(chunk.lengths)
        full = chunk.lengths > 0
        for slab in np.split(chunk.starts[full] + chunk.lengths[full] - 1, range(SLAB, int(full.sum()), SLAB)):
            ends.add(_mapped(binary, header.dtype)[slab])
        for index in wanted[(wanted >= chunk.first) & (wanted < chunk.first + len(chunk.lengths))] - chunk.first:
            start = int(chunk.starts[index])
            stop = start + min(int(chunk.lengths[index]), SAMPLE_TOKENS + 1)
            result.append(tuple(_mapped(binary, header.dtype)[start:stop].tolist()))
    if largest is not None and (high := max((max(s, default=0) for s in result), default=0)) >= largest:
        raise IntegrityError(f"{prefix}.bin holds token {high}; the vocabulary has {largest}")
    return Holds(
        documents=header.documents,
        sequences=header.sequences,
        tokens=lengths.total,
        dtype=header.dtype.name,
        shortest=lengths.shortest,
        median=lengths.median(),
        longest=lengths.longest,
        histogram=tuple(int(n) for n in lengths.histogram),
        ends=ends.commonest(),
        samples=tuple(result),
    )


def require_sound(prefix: Path, tokenizer: OpenedTokenizer, *, eod: int | None) -> Holds:
    """Check a dataset that was just written, by itself: index, sizes, ends, and a few documents through the tokenizer.

    Raises IntegrityError naming what does not fit.
    """
    held = look(prefix, largest=tokenizer.vocab_size)
    if eod is not None and held.sequences and held.ends != ((eod, held.sequences),):
        other = next(token for token, _ in held.ends if token != eod)
        raise IntegrityError(f"{prefix}.bin: a document ends with token {other}, not with end of document {eod}")
    reference = Tokenizers(tokenizer)
    if all(reference.decode(reference.encode([text]).tokens.tolist()) == text for text in AWKWARD):
        # Tokens decode to a text that encodes to the same tokens: with a lossless tokenizer it is the document.
        after = (*tokenizer.suffix, *(() if eod is None else (eod,)))
        for sample in (sample for sample in held.samples if len(sample) <= SAMPLE_TOKENS):
            own = list(sample[len(tokenizer.prefix) : len(sample) - len(after)])
            again = reference.encode([reference.decode(own)]).tokens.tolist()
            if sample != (*tokenizer.prefix, *own, *after) or own != again:
                raise IntegrityError(f"{prefix}.bin: a document does not come back the same through the tokenizer")
    return held


def require_masked(prefix: Path, tokenizer: OpenedTokenizer) -> None:
    """Check conversations that were just written: index and sizes of tokens and masks, and that every one has an answer.

    Raises IntegrityError naming what does not fit.
    """
    look(prefix, largest=tokenizer.vocab_size)
    for tokens, masks in zip(stream_index(prefix), stream_index(mask_of(prefix)), strict=True):
        if not np.array_equal(tokens.lengths, masks.lengths):
            raise IntegrityError(f"{mask_of(prefix)}.idx: a conversation has another length than in {prefix}.idx")
        mask = _mapped(Path(f"{mask_of(prefix)}.bin"), np.dtype(np.uint8))
        for start, length in zip(masks.starts.tolist(), masks.lengths.tolist(), strict=True):
            if not mask[start : start + length].any():
                raise IntegrityError(f"{mask_of(prefix)}.bin: a conversation has no answer, at token {start}")


class _Lengths:
    """Statistics of lengths that come in chunks."""

    def __init__(self) -> None:
        self.total = self.longest = self.shortest = 0
        self.histogram = np.zeros(BINS, np.int64)
        self._small = np.zeros(4096, np.int64)
        self._seen = False

    def add(self, lengths: NDArray[np.int32]) -> None:
        if not len(lengths):
            return
        self.total += int(lengths.sum(dtype=np.int64))
        self.longest = max(self.longest, int(lengths.max()))
        least = int(lengths.min())
        self.shortest = min(self.shortest, least) if self._seen else least
        self._seen = True
        self.histogram += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=BINS)
        small = lengths[lengths < len(self._small)]
        self._small += np.bincount(small, minlength=len(self._small))

    def median(self) -> int:
        middle = (int(self.histogram.sum()) + 1) // 2
        if int(self._small.sum()) >= middle:
            return int(np.searchsorted(np.cumsum(self._small), middle)) if middle else 0
        return 1 << (int(np.searchsorted(np.cumsum(self.histogram), middle)) - 1)


class _Ends:
    """How often each token ends a sequence."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, tokens: NDArray[np.number]) -> None:
        values, counts = np.unique(tokens, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self._counts[int(value)] = self._counts.get(int(value), 0) + count

    def commonest(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self._counts.items(), key=lambda item: -item[1])[:3])


def _mapped(path: Path, dtype: np.dtype[np.number]) -> NDArray[np.number]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
