"""Megatron's indexed dataset: `PREFIX.bin` holds tokens, `PREFIX.idx` where each sequence and document begins.

Layout after NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py. Reads by memory map,
writes in a stream, and checks every invariant before tokens are handed on. Knows nothing of tokenizers or of text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.errors import IntegrityError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
UINT16_VOCABULARY = 65_500


def token_dtype(vocab_size: int) -> type[np.number]:
    """uint16 for vocabularies under 65,500 entries, else int32, as Megatron chooses."""
    return np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32


@dataclass(frozen=True)
class IndexedTokens:
    """An opened dataset. `tokens` is the whole `.bin`, memory-mapped."""

    tokens: NDArray[np.number]
    lengths: NDArray[np.int32]
    """Tokens of each sequence, shape [sequences]."""
    documents: NDArray[np.int64]
    """First sequence of each document, then the count of sequences: shape [documents + 1]."""

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    @property
    def boundaries(self) -> NDArray[np.int64]:
        """First token of each document, then the count of tokens: shape [documents + 1]."""
        starts = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        return starts[self.documents]


def open_tokens(prefix: Path) -> IndexedTokens:
    """Map `PREFIX.bin` and read `PREFIX.idx`; raises IntegrityError naming what does not fit."""
    index = Path(f"{prefix}.idx").read_bytes()
    if len(index) < HEADER.size:
        raise IntegrityError(f"{prefix}.idx is truncated: {len(index)} bytes, the header alone has {HEADER.size}")
    magic, version, code, sequences, documents = HEADER.unpack_from(index)
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise IntegrityError(
            f"{prefix}.idx is no Megatron index: magic {magic!r}, version {version}, dtype code {code}"
        )
    if len(index) != HEADER.size + 12 * sequences + 8 * documents:
        raise IntegrityError(
            f"{prefix}.idx has {len(index)} bytes; {sequences} sequences and {documents} marks need others"
        )
    lengths = np.frombuffer(index, np.int32, sequences, HEADER.size)
    pointers = np.frombuffer(index, np.int64, sequences, HEADER.size + 4 * sequences)
    marks = np.frombuffer(index, np.int64, documents, HEADER.size + 12 * sequences)
    binary = Path(f"{prefix}.bin")
    dtype = np.dtype(DTYPES[code])
    _check(prefix, lengths, pointers, marks, dtype, binary.stat().st_size)
    tokens = np.memmap(binary, dtype, "r") if binary.stat().st_size else np.empty(0, dtype)
    return IndexedTokens(tokens=tokens, lengths=lengths, documents=marks)


def _check(
    prefix: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    marks: NDArray[np.int64],
    dtype: np.dtype[np.number],
    size: int,
) -> None:
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))) * dtype.itemsize
    if (lengths < 0).any():
        raise IntegrityError(f"{prefix}.idx: a length is negative")
    if size != starts[-1]:
        raise IntegrityError(f"{prefix}.bin has {size} bytes, its index says {starts[-1]}")
    if not np.array_equal(pointers, starts[:-1]):
        raise IntegrityError(f"{prefix}.idx: a pointer is not the sum of the lengths before it")
    if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
        raise IntegrityError(f"{prefix}.idx: the document marks do not run from 0 to {len(lengths)}")


class TokenWriter:
    """Writes one dataset in a stream; `close` writes the index. A killed writer leaves no index, so nothing to open."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(token_dtype(vocab_size))
        self._file = open(f"{prefix}.bin", "wb")  # noqa: SIM115
        self._lengths: list[int] = []
        self._documents: list[int] = [0]

    def add_document(self, tokens: list[int]) -> None:
        """Append one document as one sequence; an empty one is a document without a sequence, as Megatron writes it."""
        if tokens:
            self._file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
            self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def close(self) -> tuple[int, int]:
        """Write the index; returns the counts of documents and tokens."""
        self._file.close()
        lengths = np.asarray(self._lengths, dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))) * self.dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if np.dtype(dtype) == self.dtype)
        with open(f"{self.prefix}.idx", "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(self._documents)))
            file.write(lengths.tobytes())
            file.write(starts[:-1].astype(np.int64).tobytes())
            file.write(np.asarray(self._documents, dtype=np.int64).tobytes())
        return len(self._documents) - 1, int(lengths.sum(dtype=np.int64))
