"""Megatron's indexed dataset: `PREFIX.bin` holds tokens, `PREFIX.idx` where each sequence and document begins.

Layout after NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py. Reads by memory map,
writes in a stream, and checks every invariant before tokens are handed on. `open_tokens` holds the whole index;
`stream_index` and `write_index` take any size. Knows nothing of tokenizers or of text.

Files of tokens that are read in parts: digests of their blocks, and what of an artifact was left in the store.

`PREFIX.blocks` beside `PREFIX.bin` has the digests, so that a part of the file is verified by itself; `remote.json` beside the
files that were brought describes those that were not (tasks/storage/blob/ranges.py).

The digests are the first 16 bytes of the SHA-256 of each 16 KiB, one after the other: 0.1 % of the tokens. The file of digests is
a file of the artifact, so its own SHA-256 is in the manifest. See docs/training.md, "Data".
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.common.errors import IntegrityError
from tasks.common.process import read_json

BLOCK = 16 << 10
"""Bytes of a block; the last one of a file may have fewer."""
DIGEST = 16
"""Bytes of a digest."""
READ_BYTES = 8 << 20
REMOTE = "remote.json"


class Remote(NamedTuple):
    """A file that was left in the store."""

    size: int
    blob: str
    version: str
    remedy: str
    """For a file that is damaged there."""


def remote_files(folder: Path) -> dict[str, Remote]:
    """What of the artifact in this folder was left in the store, by path; nothing for a folder that is whole."""
    files = (read_json(folder / REMOTE) or {"files": {}})["files"]
    return {path: Remote(**each) for path, each in files.items()}


def write_blocks(prefix: Path) -> None:
    """Write `PREFIX.blocks` of what lies in `PREFIX.bin`."""
    with open(f"{prefix}.bin", "rb") as file, open(f"{prefix}.blocks", "wb") as out:
        while data := file.read(READ_BYTES):
            out.write(b"".join(digests(data)))


def digests(data: bytes) -> list[bytes]:
    """Of each block of bytes that begin at the beginning of a block."""
    view = memoryview(data)
    return [hashlib.sha256(view[at : at + BLOCK]).digest()[:DIGEST] for at in range(0, len(data), BLOCK)]


class Blocks:
    """The digests of one file of tokens, mapped into memory."""

    def __init__(self, prefix: Path, size: int) -> None:
        """`size` is that of `PREFIX.bin`, in bytes. Raises IntegrityError when there are not as many digests as blocks."""
        self._path, count = Path(f"{prefix}.blocks"), -(-size // BLOCK)
        if self._path.stat().st_size != count * DIGEST:
            raise IntegrityError(
                f"{self._path} has {self._path.stat().st_size} bytes; {size} bytes of tokens have {count} blocks of {BLOCK}, "
                f"whose digests need {count * DIGEST}"
            )
        self._known = np.memmap(self._path, np.uint8, "r", shape=(count, DIGEST)) if count else np.empty((0, DIGEST))

    def damaged(self, first: int, data: bytes) -> list[int]:
        """Of the blocks that `data` holds, the first of which has this number: those that are not what they were when written."""
        known = self._known[first : first + -(-len(data) // BLOCK)]
        return [
            first + at
            for at, (one, given) in enumerate(zip(known, digests(data), strict=True))
            if one.tobytes() != given
        ]


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
CHUNK = 1 << 20
"""Entries of an index that are held at once."""


def token_dtype(vocab_size: int) -> type[np.number]:
    """uint16 for vocabularies under 65,500 entries, else int32, as Megatron chooses."""
    return np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32


class Joined:
    """The tokens of several files as one stream, of which slices are read."""

    def __init__(self, parts: Sequence[NDArray[np.number]]) -> None:
        self._parts = parts
        self._begins = np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, where: slice) -> NDArray[np.number]:
        start, stop, _ = where.indices(len(self))
        pieces = [
            part[max(start - begin, 0) : stop - begin]
            for part, begin in zip(self._parts, self._begins.tolist(), strict=False)
            if start < begin + len(part) and begin < stop
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([self._parts[0][:0], *pieces])


@dataclass(frozen=True)
class IndexedTokens:
    """An opened dataset. `tokens` is the whole `.bin`, memory-mapped."""

    tokens: NDArray[np.number] | Joined
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
    size = binary.stat().st_size
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))) * dtype.itemsize
    if (lengths < 0).any():
        raise IntegrityError(f"{prefix}.idx: a length is negative")
    if size != starts[-1]:
        raise IntegrityError(f"{prefix}.bin has {size} bytes, its index says {starts[-1]}")
    if not np.array_equal(pointers, starts[:-1]):
        raise IntegrityError(f"{prefix}.idx: a pointer is not the sum of the lengths before it")
    if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
        raise IntegrityError(f"{prefix}.idx: the document marks do not run from 0 to {len(lengths)}")
    tokens = np.memmap(binary, dtype, "r") if binary.stat().st_size else np.empty(0, dtype)
    return IndexedTokens(tokens=tokens, lengths=lengths, documents=marks)


def mask_of(prefix: Path) -> Path:
    """The dataset of uint8 beside that of conversations: 1 for a token of an answer, which is learned, 0 for one that is read."""
    return Path(f"{prefix}_mask")


def prefixes(folder: Path, split: str) -> list[Path]:
    """The datasets of a split of a tokens artifact, in order: many where `tokens.json` lists them, else one."""
    about = folder / "tokens.json"
    files = json.loads(about.read_text(encoding="utf-8")).get("files", {}) if about.exists() else {}
    return [folder / name for name in files.get(split, [f"{split}_text_document"])]


def open_split(folder: Path, split: str, *, masks: bool = False) -> IndexedTokens:
    """All datasets of a split as one, or their `masks`; raises IntegrityError as `open_tokens` does."""
    names = prefixes(folder, split)
    first, *others = [open_tokens(mask_of(prefix) if masks else prefix) for prefix in names]
    if not others:
        return first
    opened = [first, *others]
    befores = np.cumsum([0, *(len(each.lengths) for each in opened)], dtype=np.int64)
    marks = [each.documents[:-1] + before for each, before in zip(opened, befores, strict=False)]
    return IndexedTokens(
        tokens=Joined([each.tokens for each in opened if not isinstance(each.tokens, Joined)]),
        lengths=np.concatenate([each.lengths for each in opened]),
        documents=np.concatenate([*marks, befores[-1:]]),
    )


def token_count(prefix: Path) -> int:
    """Tokens of `PREFIX.bin` by the end of its index, of which only that is read; raises IntegrityError as `read_header` does."""
    header, path = read_header(prefix), Path(f"{prefix}.idx")
    if not header.sequences:
        return 0
    lengths, pointers = HEADER.size, HEADER.size + 4 * header.sequences
    last = header.sequences - 1
    length = int(np.fromfile(path, np.int32, 1, offset=lengths + 4 * last)[0])
    return int(np.fromfile(path, np.int64, 1, offset=pointers + 8 * last)[0]) // header.dtype.itemsize + length


def sequence_lengths(prefix: Path) -> NDArray[np.int32]:
    """Tokens of each sequence by the index alone; raises IntegrityError as `read_header` does."""
    return np.fromfile(Path(f"{prefix}.idx"), np.int32, read_header(prefix).sequences, offset=HEADER.size)


def map_tokens(prefix: Path) -> NDArray[np.number]:
    """Map `PREFIX.bin` in the time and memory of the last entry of its index: for who needs no documents.

    Raises IntegrityError when the file has another size than its index says.
    """
    dtype, count = read_header(prefix).dtype, token_count(prefix)
    binary = Path(f"{prefix}.bin")
    if _size(binary) != count * dtype.itemsize:
        raise IntegrityError(f"{binary} has {_size(binary)} bytes, its index says {count * dtype.itemsize}")
    return np.memmap(binary, dtype, "r") if count else np.empty(0, dtype)


@dataclass(frozen=True)
class Header:
    """What the first bytes of an index say."""

    dtype: np.dtype[np.number]
    sequences: int
    documents: int

    @property
    def bytes(self) -> int:
        """Size of the whole index."""
        return HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)


@dataclass(frozen=True)
class Chunk:
    """Neighbouring sequences of an index."""

    first: int
    """Number of the first of them."""
    starts: NDArray[np.int64]
    """First token of each."""
    lengths: NDArray[np.int32]


def read_header(prefix: Path) -> Header:
    """The header of `PREFIX.idx`; raises IntegrityError when it is none, or the file has not the size that it says."""
    path = Path(f"{prefix}.idx")
    with open(path, "rb") as file:
        start = file.read(HEADER.size)
    if len(start) < HEADER.size:
        raise IntegrityError(f"{path} is truncated: {len(start)} bytes, the header alone has {HEADER.size}")
    magic, version, code, sequences, marks = HEADER.unpack(start)
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise IntegrityError(f"{path} is no Megatron index: magic {magic!r}, version {version}, dtype code {code}")
    header = Header(np.dtype(DTYPES[code]), sequences, marks - 1)
    if path.stat().st_size != header.bytes:
        raise IntegrityError(
            f"{path} has {path.stat().st_size} bytes; {sequences} sequences and {marks} marks need {header.bytes}"
        )
    return header


def stream_index(prefix: Path) -> Iterator[Chunk]:
    """All sequences in chunks, each invariant checked on the way; raises IntegrityError at the first that is broken.

    Lengths are not negative, pointers are the sums of the lengths before them, `.bin` has the bytes that they add up to, and
    the documents' marks run from 0 to the count of sequences. Memory does not grow with the index.
    """
    header, path = read_header(prefix), Path(f"{prefix}.idx")
    begin, size = HEADER.size, _size(Path(f"{prefix}.bin"))
    tokens = 0
    for first in range(0, header.sequences, CHUNK):
        count = min(CHUNK, header.sequences - first)
        lengths = np.fromfile(path, np.int32, count, offset=begin + 4 * first)
        pointers = np.fromfile(path, np.int64, count, offset=begin + 4 * header.sequences + 8 * first)
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        if (lengths < 0).any():
            raise IntegrityError(f"{path}: a length is negative")
        if not np.array_equal(pointers, (ends - lengths) * header.dtype.itemsize):
            raise IntegrityError(f"{path}: a pointer is not the sum of the lengths before it")
        tokens = int(ends[-1])
        if size < tokens * header.dtype.itemsize:
            raise IntegrityError(
                f"{prefix}.bin has {size} bytes, its index says {tokens * header.dtype.itemsize} or more"
            )
        yield Chunk(first, ends - lengths, lengths)
    if size != tokens * header.dtype.itemsize:
        raise IntegrityError(f"{prefix}.bin has {size} bytes, its index says {tokens * header.dtype.itemsize}")
    for _ in stream_marks(prefix, header):
        pass


def _size(path: Path) -> int:
    if not path.is_file():
        raise IntegrityError(f"{path} is missing beside its index")
    return path.stat().st_size


def stream_marks(prefix: Path, header: Header) -> Iterator[NDArray[np.int64]]:
    """The first sequence of each document in chunks, then the count of sequences; raises IntegrityError when they fall."""
    path, total = Path(f"{prefix}.idx"), header.documents + 1
    before = 0
    for first in range(0, total, CHUNK):
        offset = HEADER.size + 12 * header.sequences + 8 * first
        marks = np.fromfile(path, np.int64, min(CHUNK, total - first), offset=offset)
        if (first == 0 and marks[0] != 0) or (np.diff(marks, prepend=before) < 0).any():
            raise IntegrityError(f"{path}: the document marks do not run from 0 to {header.sequences}")
        before = int(marks[-1])
        yield marks
    if total < 1 or before != header.sequences:
        raise IntegrityError(f"{path}: the document marks do not run from 0 to {header.sequences}")


def write_index(path: Path, lengths: list[Path], dtype: np.dtype[np.number]) -> Header:
    """Write an index of files that hold the length of each document (int32), in order; an empty document is a 0.

    One sequence a document, none for an empty one, as Megatron writes. Memory does not grow with the files.
    """
    sequences = sum(int(np.count_nonzero(part)) for part in _lengths(lengths))
    header = Header(dtype, sequences, sum(file.stat().st_size // 4 for file in lengths))
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, header.sequences, header.documents + 1))
        for part in _lengths(lengths):
            file.write(part[part > 0].tobytes())
        _write_sums(file, (part[part > 0] * np.int64(dtype.itemsize) for part in _lengths(lengths)), last=False)
        _write_sums(file, ((part > 0).astype(np.int64) for part in _lengths(lengths)), last=True)
    return header


def _write_sums(file: IO[bytes], parts: Iterable[NDArray[np.int64]], *, last: bool) -> None:
    """The sum of what comes before each value; with `last`, the sum of all of them too."""
    before = 0
    for part in parts:
        ends = before + np.cumsum(part, dtype=np.int64)
        file.write((ends - part).tobytes())
        before = int(ends[-1]) if len(ends) else before
    if last:
        file.write(np.int64(before).tobytes())


def _lengths(files: list[Path]) -> Iterator[NDArray[np.int32]]:
    for path in files:
        with open(path, "rb") as file:
            while data := file.read(4 * CHUNK):
                yield np.frombuffer(data, np.int32)


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
