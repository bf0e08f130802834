"""The corpora of a run: its own tokens, or a mixture of several tokens artifacts in one order.

One corpus in its order, and shares of several, are samples.py. Which artifacts a run is given: flows/support/inputs.py.
See docs/training.md, "Data".
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.common.process import own_folder
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.mmididx import BLOCK, map_tokens, prefixes, read_header, remote_files, token_count, token_dtype
from tasks.jobs.data.samples import (
    TRAIN,
    Chain,
    Conversations,
    Draws,
    Mapped,
    Samples,
    Source,
    Stream,
    chained,
    open_conversations,
    open_samples,
    tokens_identity,
    vocabulary,
)

# Tokens that lie far away, in a store or on a shared file system, kept on the machine's own disk while training reads
# them.
#
# Training starts at once: what the disk does not hold yet is read where it lies, only as much as a sample needs, while
# a thread brings the corpus piece by piece. What stays beyond the room given is always read where it lies. Ranks of one
# machine share the cache and divide the work; a restart finds it again; every piece is compared with its checksum
# before it is first used.


PIECE = 8 << 20
"""Bytes that are brought at once."""
READS = 8
"""Ranges that are read at a time."""
HELD = np.uint64(1 << 32)
"""Set in the mark of a piece that lies on the disk; the low 32 bits are the CRC-32 of its bytes."""


class Ranges(Protocol):
    """A file that lies somewhere and is read in parts."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, length: int) -> bytes:
        """These bytes; fewer only at the end of the file. Called by several threads at a time."""


class FileRanges:
    """A file on a file system that is mounted."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._file, length, start)


@dataclass(frozen=True)
class Place:
    """Where a cache lies, and this rank's part in filling it."""

    folder: Path
    room: int
    """Bytes."""
    first: int = 0
    """First piece that this rank brings, and then every `ranks`th."""
    ranks: int = 1


def open_cached(prefix: Path, *, room: int, environment: Mapping[str, str]) -> Cached:
    """The tokens of `PREFIX.bin` by way of a cache of `room` bytes on this machine.

    The folder is the machine's scratch disk where the job has one, else the one for temporary files. Its name says which file it
    is a copy of, so another start finds it. Raises IntegrityError when the file has another size than its index says.
    """
    count, dtype, path = token_count(prefix), read_header(prefix).dtype, Path(f"{prefix}.bin")
    ranges, output = FileRanges(path), path.stat()
    if ranges.size != count * dtype.itemsize:
        raise IntegrityError(f"{path} has {ranges.size} bytes, its index says {count * dtype.itemsize}")
    which = f"{path.resolve()} {output.st_ino} {output.st_size} {output.st_mtime_ns}"
    return Cached(ranges, dtype, _place(which, room, environment))


def _open_remote(
    folder: Path, config: TrainingConfig, *, share: float, room: int, environment: Mapping[str, str]
) -> Cached:
    """The training split of an artifact whose `.bin` were left in the store, by way of a cache of `room` bytes on this machine.

    `share` is the part of the run's samples that are of this artifact. The cache is filled, as far as there is room, where this
    machine's samples, each read in the store by itself, would come to more bytes than the corpus has: it reads most of the
    corpus, or reads it often. Of a corpus that many machines share, each reads its own samples.
    """
    # azure-storage-blob takes half a second to import, which only those who read there should wait for.
    from tasks.storage.blob.ranges import open_remote

    names, known = [file.name for file in prefixes(folder, TRAIN)], remote_files(folder)
    ranges, dtype = open_remote(folder, names), np.dtype(token_dtype(vocabulary(folder)[0]))
    machines = int(environment.get("WORLD_SIZE", "1")) / int(environment.get("LOCAL_WORLD_SIZE", "1"))
    samples = config.steps * config.global_batch_size * share / machines
    one_by_one = samples * (config.sequence_length * dtype.itemsize + BLOCK)
    fills = ranges.size < one_by_one
    which = " ".join(f"{known[f'{name}.bin'].blob} {known[f'{name}.bin'].version}" for name in names)
    return Cached(ranges, dtype, _place(which, room if fills else 0, environment))


def _place(which: str, room: int, environment: Mapping[str, str]) -> Place:
    base = Path(environment.get("HEADWAY_SCRATCH") or tempfile.gettempdir())
    first, ranks = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    name = f"headway-tokens-{os.getuid()}-{hashlib.sha256(which.encode()).hexdigest()[:16]}"
    return Place(base / name, room, first, ranks)


class Cached:
    """A stream of tokens behind a cache. State: the copy, which pieces of it hold what they should, and who brings more."""

    def __init__(self, ranges: Ranges, dtype: np.dtype[np.number], place: Place) -> None:
        self._ranges, self._dtype, self._place = ranges, dtype, place
        self.pieces = -(-ranges.size // PIECE)
        own_folder(place.folder, remedy="leave execution.cache_gib empty")
        self._copy, self._file = _mapped(place.folder / "tokens.bin", ranges.size)
        marks, _ = _mapped(place.folder / "pieces", 8 * self.pieces)
        self._marks = marks.view(np.uint64)
        self._good = np.zeros(self.pieces, bool)
        self._windows: NDArray[np.number] = self._copy.view(dtype)
        self._reads = ThreadPoolExecutor(READS, "tokens")
        self._stop = threading.Event()
        self._bringing = threading.Thread(target=self._bring, daemon=True)
        self._bringing.start()

    def __len__(self) -> int:
        return self._ranges.size // self._dtype.itemsize

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each start on, shape [starts, length]. Raises IntegrityError when the file ends before."""
        # Which of the samples lie on the disk whole, and are what they should be.
        size = self._dtype.itemsize
        first, last = starts * size // PIECE, ((starts + length) * size - 1) // PIECE
        local = np.ones(len(starts), bool)
        for ahead in range(int((last - first).max(initial=0)) + 1):
            piece = np.minimum(first + ahead, last)
            for number in np.unique(piece[~self._good[piece]]).tolist():
                self._good[number] = self._check(number)
            local &= self._good[piece]
        result = np.empty((len(starts), length), np.int64)
        result[local] = sliding_window_view(self._windows, length)[starts[local]]
        far = np.flatnonzero(~local)
        parts = self._reads.map(lambda row: self._read(int(starts[row]) * size, length * size), far)
        for row, data in zip(far, parts, strict=True):
            result[row] = np.frombuffer(data, self._dtype)
        return result

    @property
    def held(self) -> int:
        """Pieces that lie on the disk."""
        return int(np.count_nonzero(self._marks))

    def close(self, *, done: bool) -> None:
        """Bring no more; when training is done, the cache goes."""
        self._stop.set()
        self._bringing.join()
        self._reads.shutdown()
        if done:
            shutil.rmtree(self._place.folder, ignore_errors=True)

    def wait(self) -> None:
        """Until all that this rank brings has come."""
        self._bringing.join()

    def _check(self, piece: int) -> bool:
        """Whether a piece is there; what is not what its checksum says is brought again when the cache is opened again."""
        mark = self._marks[piece]
        if not mark & HELD:
            return False
        if zlib.crc32(self._copy[piece * PIECE : (piece + 1) * PIECE].data) == int(mark ^ HELD):
            return True
        self._marks[piece] = 0
        return False

    def _read(self, start: int, length: int) -> bytes:
        data = self._ranges.read(start, length)
        if len(data) != length:
            raise IntegrityError(
                f"the tokens end at byte {start + len(data)}, {length} bytes were there from {start} on"
            )
        return data

    def _bring(self) -> None:
        """This rank's pieces, as far as the room goes. Training goes on without the cache when the disk does not take them."""
        try:
            for piece in range(self._place.first, min(self.pieces, self._place.room // PIECE), self._place.ranks):
                if self._stop.is_set():
                    return
                if not self._marks[piece] & HELD:
                    # Bytes first, then the mark: a kill between leaves a piece that nobody uses.
                    start = piece * PIECE
                    data = self._read(start, min(PIECE, self._ranges.size - start))
                    os.pwrite(self._file, data, start)
                    os.fdatasync(self._file)
                    self._marks[piece] = HELD | np.uint64(zlib.crc32(data))
        except (OSError, IntegrityError) as error:
            print(f"the cache of tokens is filled no further: {error}", flush=True)


def _mapped(path: Path, size: int) -> tuple[NDArray[np.uint8], int]:
    """A file of this size, mapped, and open for writing: zeros that take no room until something is written there."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, size)
    if not size:
        return np.empty(0, np.uint8), file
    return np.memmap(path, np.uint8, "r+", shape=(size,)).view(np.ndarray), file


OWN = "tokens"
"""Input with the run's own tokens; another corpus of a mixture is `tokens-NAME` (tasks/train.py)."""
TOKENIZER = "tokenizer/tokenizer.json"


class Mixture:
    """Samples of several corpora, each in its own order, drawn by shares."""

    def __init__(self, corpora: Sequence[Samples | Conversations], shares: Sequence[float]) -> None:
        self.corpora, self._draws = corpora, Draws(shares)
        self._length = corpora[0].length

    @property
    def count(self) -> int:
        """Samples of all corpora; a corpus whose share is above its part of them comes again before all were seen."""
        return sum(corpus.count for corpus in self.corpora)

    def batch(self, consumed: int, size: int) -> NDArray[np.int64]:
        """The `size` samples that follow the first `consumed` ones: shape [size, length + 1]."""
        corpus, places = self._draws.at(consumed, size)
        rows = np.empty((size, self._length + 1), np.int64)
        for number in np.unique(corpus).tolist():
            mine = corpus == number
            rows[mine] = self.corpora[number].at(places[mine])
        return rows

    def close(self, *, done: bool) -> None:
        for corpus in self.corpora:
            corpus.close(done=done)


def open_source(inputs: Mapping[str, Path], config: TrainingConfig, execution: ExecutionConfig) -> Source:
    """What the run trains on: its own tokens, or the mixture of them and others.

    Raises ValueError for a corpus that is missing, shorter than one sample, or of another tokenizer; IntegrityError for
    an index that does not fit its tokens.
    """
    folders = corpora(inputs, config)
    for folder in folders:
        require_objective(folder, config)
    for folder in folders[1:]:
        require_same_tokenizer(folders[0], folder)
    shares = list(shares_by_name(config).values()) if config.mixture else [1.0]
    opened: list[Samples | Conversations] = [
        open_conversations(folder, config)
        if config.objective == "sft"
        else open_samples(
            folder, config, _stream(folder, config, execution, of=len(folders), share=share / sum(shares))
        )
        for folder, share in zip(folders, shares, strict=True)
    ]
    return Mixture(opened, shares) if config.mixture else opened[0]


def require_objective(folder: Path, config: TrainingConfig) -> None:
    """Raise ValueError unless tokens are of what the run learns from: conversations with masks, or text."""
    masked = "answers" in json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    if masked == (config.objective == "sft"):
        return
    what, other = ("conversations", "sft") if masked else ("text", "pretrain")
    raise ValueError(
        f"the tokens are of {what}, and training.objective is {config.objective}: set it to {other}, or preprocess other data "
        "(preprocessing.text_field messages makes tokens of conversations)"
    )


def conversations(source: Source) -> tuple[int, int]:
    """Those that are learned, and those that are longer than a sample, over all corpora; none of text."""
    parts = [each for each in _parts(source) if isinstance(each, Conversations)]
    return sum(part.conversations for part in parts), sum(part.left_out for part in parts)


def tokens_a_sample(source: Source, config: TrainingConfig) -> float:
    """Tokens that are read of a sample, padding left out; of a mixture the mean of its corpora."""
    parts = _parts(source)
    sizes = [part.mean_size if isinstance(part, Conversations) else config.sequence_length for part in parts]
    return sum(sizes) / len(sizes)


def _parts(source: Source) -> Sequence[Source]:
    return source.corpora if isinstance(source, Mixture) else [source]


def _stream(folder: Path, config: TrainingConfig, execution: ExecutionConfig, *, of: int, share: float) -> Stream:
    files = prefixes(folder, TRAIN)
    if execution.cache_gib is None:
        return chained([Mapped(map_tokens(file)) for file in files])
    room = int(execution.cache_gib * 2**30 / of)
    if remote_files(folder):
        return _open_remote(folder, config, share=share, room=room, environment=os.environ)
    if len(files) == 1:
        return open_cached(files[0], room=room, environment=os.environ)
    # Every file has its part of the room.
    sizes = [token_count(file) for file in files]
    rooms = [room * size // max(sum(sizes), 1) for size in sizes]
    return Chain([open_cached(f, room=its, environment=os.environ) for f, its in zip(files, rooms, strict=True)])


def corpora(inputs: Mapping[str, Path], config: TrainingConfig) -> list[Path]:
    """The folders of tokens, in the order of the shares. Raises ValueError for one that the job was not given."""
    if not config.mixture:
        return [inputs[OWN]]
    others = {name: inputs.get(f"{OWN}-{name}") for name in shares_by_name(config)}
    own = [name for name, folder in others.items() if folder is None]
    if len(own) != 1:
        raise ValueError(
            f"training.mixture has shares for {', '.join(others)}; of these the job was not given {', '.join(own) or 'its own'} "
            "as another corpus: exactly one of them must be the run's own tokens"
        )
    return [folder or inputs[OWN] for folder in others.values()]


def shares_by_name(config: TrainingConfig) -> dict[str, float]:
    """Shares by the names of their corpora, sorted: the order in which they are written down changes nothing."""
    return dict(sorted((parse_ref(ref, kind="tokens")[1], share) for ref, share in config.mixture.items()))


def require_same_tokenizer(folder: Path, other: Path) -> None:
    """Raise ValueError unless the tokens of both folders are ids of the same vocabulary."""
    known = [(*vocabulary(each), _digest(each / TOKENIZER)) for each in (folder, other)]
    if known[0] == known[1]:
        return
    messages = [
        f"{each} ({size} entries, end of document {eod})"
        for each, (size, eod, _) in zip((folder, other), known, strict=True)
    ]
    raise ValueError(
        f"training.mixture mixes tokens of two tokenizers, {messages[0]} and {messages[1]}: preprocess one of them again with "
        "preprocessing.tokenizer.ref of the other"
    )


def _digest(path: Path) -> str:
    if not path.is_file():
        raise IntegrityError(f"{path} is missing: it says which tokenizer these tokens are of")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_identity(inputs: Mapping[str, Path], config: TrainingConfig) -> dict[str, Any]:
    """What a checkpoint remembers of its data: that of its tokens, and of a mixture that of every corpus by its name."""
    if not config.mixture:
        return tokens_identity(inputs[OWN])
    folders = corpora(inputs, config)
    return {name: tokens_identity(folder) for name, folder in zip(shares_by_name(config), folders, strict=True)}
