"""What training reads: samples of fixed length out of one long stream of tokens, or conversations one by one, in an order that a
seed decides; and the loader.

Which samples a step uses depends on the seed and on the number of samples consumed before it, and on nothing else: not
on the number of ranks, of restarts, or of the step: a place in the order is the number of samples before it, and the order
is a permutation an epoch, with several corpora a draw among them. It keeps no state, so a run goes on anywhere. A run's corpora,
one or a mixture, and tokens that are far away: sources.py.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tasks.common.errors import IntegrityError
from tasks.config.training import TrainingConfig
from tasks.data.tokenizing.rows import fits, pack
from tasks.formats.mmididx import IndexedTokens, map_tokens, open_split, prefixes, remote_files

UNITS = 1 << 22
"""Shares are rounded to so many parts, so that 2^40 places count exactly in 64 bits."""
KEPT = 2
"""Epochs whose order is held, and parts of each: a step may reach into the next one."""
PART = 1 << 14
"""Samples of a part of an epoch's order, about: what is sorted at once."""


class EpochOrder:
    """A permutation of `count` samples: places in the order of raw PCG64 draws, equal ones in the order of samples.

    numpy keeps that stream forever; `Generator.permutation` may change with numpy (NEP 19). Only the part that is asked for is
    sorted, so that the first of 50 million samples is known at once. State: the parts that were asked for last.
    """

    def __init__(self, seed: int, epoch: int, count: int) -> None:
        self._draws = np.random.PCG64([seed, epoch]).random_raw(count)
        bits = min(16, max(0, (count // PART).bit_length()))
        self._part = (self._draws >> np.uint64(48) >> np.uint64(16 - bits)).astype(np.uint16)
        self._begins = np.concatenate(([0], np.cumsum(np.bincount(self._part, minlength=1 << bits))))
        self._sorted: dict[int, NDArray[np.int64]] = {}

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each place, shape [places]."""
        parts = np.searchsorted(self._begins, places, "right") - 1
        result = np.empty(len(places), np.int64)
        for part in np.unique(parts).tolist():
            chosen = parts == part
            result[chosen] = self._samples(part)[places[chosen] - self._begins[part]]
        return result

    def _samples(self, part: int) -> NDArray[np.int64]:
        if part not in self._sorted:
            while len(self._sorted) >= KEPT:
                self._sorted.pop(next(iter(self._sorted)))
            members = np.flatnonzero(self._part == part)
            self._sorted[part] = members[np.argsort(self._draws[members], kind="stable")]
        return self._sorted[part]


class Order:
    """The samples of one corpus over epochs. State: the permutations of the epochs that were asked for last."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self._epochs: dict[int, EpochOrder] = {}

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each place, shape [places]."""
        epochs, inside = np.divmod(places, self.count)
        result = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            exists = epochs == epoch
            if epoch not in self._epochs:
                while len(self._epochs) >= KEPT:
                    self._epochs.pop(next(iter(self._epochs)))
                self._epochs[epoch] = EpochOrder(self.seed, epoch, self.count)
            result[exists] = self._epochs[epoch].at(inside[exists])
        return result


class Draws:
    """From which of several corpora each place draws, by shares: the first `n` places hold each its share, to within one or two.

    The first corpus takes floor(n x share) of the first n places, the next one its part of what is left, and so on: each count
    never falls and grows by at most one, so every place draws from exactly one.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares` are positive; they count relative to their sum."""
        parts = [max(1, round(Fraction(share) / Fraction(sum(shares)) * UNITS)) for share in shares]
        self._of_the_rest = [(part, sum(parts[number:])) for number, part in enumerate(parts)]

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the first n places draw from each corpus, for each n: shape [places, corpora]."""
        left, counts = places, []
        for part, rest in self._of_the_rest:
            counts.append(left * part // rest)
            left = left - counts[-1]
        return np.stack(counts, axis=1)

    def at(self, first: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of `size` places from `first` on: the corpus, and how many samples were drawn from it before; shape [size] each."""
        counts = self.before(np.arange(first, first + size + 1, dtype=np.int64))
        corpus = np.diff(counts, axis=0).argmax(axis=1)
        return corpus, counts[np.arange(size), corpus]


TRAIN = "train"


NOT_LEARNED = -100
"""The target of a token that is only read: cross_entropy leaves it out."""
BEGINS = 1 << 40
"""Set in the first token of a conversation that follows another one in its row; above every token."""


class Batch(NamedTuple):
    """Samples that a rank computes at once."""

    inputs: torch.Tensor
    """Token ids, shape [samples, length]."""
    targets: torch.Tensor
    """The ids one token later, shape [samples, length]; NOT_LEARNED where none is to be predicted."""
    positions: torch.Tensor | None = None
    """Of each token in its document, shape [samples, length]; None: samples are one text each."""

    def to(self, device: torch.device) -> Batch:
        """The same samples there; out of pinned memory they are copied while the CPU goes on."""
        return Batch(*(None if part is None else part.to(device, non_blocking=True) for part in self))

    def pinned(self) -> Batch:
        """The same samples in memory that a GPU reads by itself."""
        return Batch(*(None if part is None else part.contiguous().pin_memory() for part in self))


class Stream(Protocol):
    """Tokens one after the other, wherever they lie."""

    def __len__(self) -> int: ...

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each start on, shape [starts, length]."""

    def close(self, *, done: bool) -> None:
        """Nothing is read any more; with `done`, not by another start of this job either."""


class Mapped:
    """Tokens in memory, or in a file that is mapped into it."""

    def __init__(self, tokens: NDArray[np.number]) -> None:
        self._tokens = tokens.view(np.ndarray)
        self._windows: NDArray[np.number] | None = None
        """Every stretch of the length that was asked for last: views, so what is copied is whole rows."""

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        if self._windows is None or self._windows.shape[1] != length:
            self._windows = sliding_window_view(self._tokens, length)
        return self._windows[starts].astype(np.int64)

    def close(self, *, done: bool) -> None:
        """The map goes with the process."""


class Chain:
    """Streams one after the other, as one: the same rows as if all tokens lay in one file."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._begins = np.cumsum([0, *map(len, streams)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        result = np.empty((len(starts), length), np.int64)
        ends = self._begins[1:]
        first, last = np.searchsorted(ends, starts, "right"), np.searchsorted(ends, starts + length - 1, "right")
        for number in np.unique(first).tolist():
            inside = (first == number) & (last == number)
            if inside.any():
                result[inside] = self._streams[number].rows(starts[inside] - self._begins[number], length)
        for row in np.flatnonzero(first != last).tolist():  # across the border of two files, or more
            result[row] = np.concatenate(list(self._pieces(int(starts[row]), length)))
        return result

    def _pieces(self, start: int, length: int) -> Iterator[NDArray[np.int64]]:
        for stream, begin in zip(self._streams, self._begins.tolist(), strict=False):
            low, high = max(start, begin), min(start + length, begin + len(stream))
            if low < high:
                yield stream.rows(np.array([low - begin]), high - low)[0]

    def close(self, *, done: bool) -> None:
        for stream in self._streams:
            stream.close(done=done)


class Source(Protocol):
    """Samples in their order. `count` of them are new before the first one comes again."""

    @property
    def count(self) -> int: ...

    def batch(self, consumed: int, size: int) -> NDArray[np.int64]:
        """The `size` samples that follow the first `consumed` ones: shape [size, length + 1].

        A token that is read and not learned is its complement, `~token`, which is below 0; `~(token | BEGINS)` where another
        conversation begins.
        """

    def close(self, *, done: bool) -> None:
        """Nothing is read any more; with `done`, not by another start of this job either."""


class Conversations:
    """One corpus of conversations, each a sample by itself, or with `packing` several whole ones a sample.

    A sample is padded at its end, which causal attention sees from no token of it. Where conversations share a sample, the first
    token of each is marked, for positions that begin anew. Those of more than `length` + 1 tokens are left out whole.
    """

    def __init__(
        self, tokens: IndexedTokens, masks: IndexedTokens, *, length: int, seed: int, packing: bool = False
    ) -> None:
        """`masks` is 1 where a token is learned. Raises ValueError when no conversation fits."""
        self.length, self._tokens, self._masks = length, tokens.tokens, masks.tokens
        marks = tokens.boundaries
        sizes = np.diff(marks)
        fit = fits(sizes, length)
        self._starts, self._sizes = marks[:-1][fit], sizes[fit]
        self.left_out = int(len(sizes) - fit.sum())
        """Conversations that are too long."""
        if not len(self._sizes):
            raise ValueError(
                f"the shortest of {len(sizes)} conversations has {sizes.min(initial=0)} tokens, and a sample has room for "
                f"sequence_length + 1 = {length + 1}: raise training.sequence_length"
            )
        alone = np.arange(len(self._sizes) + 1, dtype=np.int64)
        self._packed, self._begins = pack(self._sizes, length + 1, seed) if packing else (alone[:-1], alone)
        self._order = Order(seed, len(self._begins) - 1)

    @property
    def count(self) -> int:
        """Samples an epoch."""
        return self._order.count

    @property
    def conversations(self) -> int:
        """Conversations an epoch."""
        return len(self._sizes)

    @property
    def mean_size(self) -> float:
        """Tokens a sample that are read."""
        return float(self._sizes.sum()) / self.count - 1

    def batch(self, consumed: int, size: int) -> NDArray[np.int64]:
        """The `size` samples that follow the first `consumed` ones, over epochs: as Source.batch has it."""
        return self.at(np.arange(consumed, consumed + size, dtype=np.int64))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each place of the order: shape [places, length + 1]."""
        return self.rows(self._order.at(places))

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples by their number, which without packing is that of a conversation that fits: shape [numbers, length + 1]."""
        rows = np.full((len(numbers), self.length + 1), ~0, np.int64)
        for row, number in zip(rows, numbers.tolist(), strict=True):
            at = 0
            for member in self._packed[self._begins[number] : self._begins[number + 1]].tolist():
                start, size = int(self._starts[member]), int(self._sizes[member])
                tokens, learned = (part[start : start + size] for part in (self._tokens, self._masks))
                row[at : at + size] = np.where(learned, tokens.astype(np.int64), ~tokens.astype(np.int64))
                if at:  # nothing is before it that it could be predicted from
                    row[at] = ~(int(tokens[0]) | BEGINS)
                at += size
        return rows

    def close(self, *, done: bool) -> None:
        """The maps go with the process."""


class Samples:
    """One corpus, cut into samples of `length` + 1 tokens; neighbours share one token.

    The shared token is the last target of one sample and the first input of the next, so every token is predicted once.
    """

    def __init__(self, tokens: Stream, *, length: int, seed: int) -> None:
        """`tokens` is the whole stream: documents end with the end-of-document token."""
        self.tokens, self.length = tokens, length
        self._order = Order(seed, (len(tokens) - 1) // length)

    @property
    def count(self) -> int:
        """Samples an epoch."""
        return self._order.count

    def batch(self, consumed: int, size: int) -> NDArray[np.int64]:
        """The `size` samples that follow the first `consumed` ones, over epochs: shape [size, length + 1]."""
        return self.at(np.arange(consumed, consumed + size, dtype=np.int64))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each place of the order: shape [places, length + 1]."""
        return self.tokens.rows(self._order.at(places) * self.length, self.length + 1)

    def close(self, *, done: bool) -> None:
        self.tokens.close(done=done)


@dataclass(frozen=True)
class Shares:
    """How a global batch is divided: a slice a rank, and micro batches within it."""

    rank: int
    world_size: int
    global_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        at_once = self.micro_batch * self.world_size
        if self.global_batch % at_once:
            raise ValueError(
                f"global_batch_size {self.global_batch} does not divide into micro batches of {self.micro_batch} on "
                f"{self.world_size} ranks: make it a multiple of {self.micro_batch} x {self.world_size} = {at_once}"
            )

    def halved(self, times: int) -> Shares:
        """The same shares with the micro batch halved so often, or smaller, until it divides; 1 is the least."""
        micro = max(1, self.micro_batch // 2**times)
        while self.samples % micro:
            micro -= 1
        return replace(self, micro_batch=micro)

    @property
    def samples(self) -> int:
        """Samples of a global batch that this rank computes."""
        return self.global_batch // self.world_size

    def micro_batches(self, samples: Source, consumed: int, *, eod: int | None = None) -> list[Batch]:
        """This rank's part of the batch after `consumed` samples; with `eod`, positions begin anew at every document."""
        mine = torch.from_numpy(samples.batch(consumed + self.rank * self.samples, self.samples))
        return [batch_of(part, eod) for part in mine.split(self.micro_batch)]


def batch_of(rows: torch.Tensor, eod: int | None) -> Batch:
    """Rows as Source.batch gives them; with `eod`, positions begin anew at every document."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if (rows < 0).any():
        # Of rows with complements: what is behind the last target of all rows is read for nothing, and left out.
        last = int((targets >= 0).any(dim=0).nonzero().max()) + 1
        inputs, targets = inputs[:, :last], targets[:, :last]
        inputs = torch.where(inputs < 0, ~inputs, inputs)
        begins = inputs >= BEGINS
        places = _places(begins) if begins.any() else None
        return Batch(torch.where(begins, inputs - BEGINS, inputs), targets.where(targets >= 0, NOT_LEARNED), places)
    return Batch(inputs, targets, None if eod is None else positions(inputs, eod))


def positions(inputs: torch.Tensor, eod: int) -> torch.Tensor:
    """Of each token in its document, shape [samples, length].

    The end-of-document token is where the next document begins: as an input it stands before that document's first token and
    predicts it, as when the network is evaluated and when it generates. So nothing of one document is seen from another.
    """
    return _places(inputs == eod)


def _places(begins: torch.Tensor) -> torch.Tensor:
    """Of each token behind the last one that begins something, shape [samples, length]."""
    places = torch.arange(begins.shape[1], device=begins.device)
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def open_samples(folder: Path, config: TrainingConfig, tokens: Stream | None = None) -> Samples:
    """The training split of a tokens folder, mapped into memory unless its `tokens` are given.

    Raises ValueError when it is shorter than one sample, IntegrityError when its index does not fit.
    """
    tokens = tokens or chained([Mapped(map_tokens(prefix)) for prefix in prefixes(folder, TRAIN)])
    if len(tokens) <= config.sequence_length:
        raise ValueError(
            f"the training split has {len(tokens)} tokens, one sample needs sequence_length + 1 = "
            f"{config.sequence_length + 1}: give more text, or lower training.sequence_length"
        )
    return Samples(tokens, length=config.sequence_length, seed=config.seed)


def open_conversations(folder: Path, config: TrainingConfig, split: str = TRAIN) -> Conversations:
    """A split of a tokens folder of conversations, mapped into memory; `training.packing` is for those that are learned.

    Raises ValueError when none fits, IntegrityError when an index does not fit, or a mask its tokens.
    """
    tokens, masks = open_split(folder, split), open_split(folder, split, masks=True)
    if not np.array_equal(tokens.lengths, masks.lengths):
        raise IntegrityError(f"{folder}: the masks of the {split} split are of other conversations than its tokens")
    packing = config.packing and split == TRAIN
    return Conversations(tokens, masks, length=config.sequence_length, seed=config.seed, packing=packing)


def chained(streams: Sequence[Stream]) -> Stream:
    """Several streams as one; one as it is."""
    return streams[0] if len(streams) == 1 else Chain(streams)


def tokens_identity(folder: Path) -> dict[str, Any]:
    """What a checkpoint remembers of its tokens: the sha256 of `tokens.json`, and the sizes of the split in bytes."""
    files = [Path(f"{prefix}.{ending}") for prefix in prefixes(folder, TRAIN) for ending in ("bin", "idx")]
    remote = remote_files(folder)
    sizes = {file.name: remote[file.name].size if file.name in remote else file.stat().st_size for file in files}
    return {"tokens.json": hashlib.sha256((folder / "tokens.json").read_bytes()).hexdigest(), "bytes": sizes}


def vocabulary(folder: Path) -> tuple[int, int]:
    """Entries of the vocabulary, and the id of the end-of-document token."""
    output = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    return int(output["vocab_size"]), int(output["eod_id"])


# The loader: a rank's next batches are read and built by a thread while it computes.


TASK_SECONDS = 0.002
"""Of one task of the thread: small steps are read several at once, for waking a thread takes longer than building one."""
MOST_STEPS = 8


class Loader:
    """One rank's batches in their order. State: those that are being read, the next one first.

    Reading ahead changes nothing that is read: whoever asks for another position than the next one gets that one.
    """

    def __init__(
        self, source: Source, shares: Shares, *, device: torch.device, ahead: int, eod: int | None = None
    ) -> None:
        """`ahead` batches are read before they are asked for; `eod`: documents are masked, see Shares.micro_batches."""
        self._source, self._shares, self._ahead, self._eod = source, shares, ahead, eod
        self._pinned = device.type == "cuda"
        # A thread's own GPU is the first one, where pinning would open a context that nobody uses.
        begin = (torch.cuda.set_device, (device,)) if self._pinned else (None, ())
        self._thread = ThreadPoolExecutor(1, "loader", *begin)
        self._seconds = TASK_SECONDS
        """That the last step took to be read."""
        self._reading: deque[tuple[int, Future[list[list[Batch]]], int]] = deque()
        """Position, the task that reads it, and its place among that task's steps."""

    def take(self, consumed: int) -> list[Batch]:
        """This rank's part of the batch after `consumed` samples; raises what reading raised."""
        if not self._reading or self._reading[0][0] != consumed:
            self._forget()
            self._read(consumed)
        while len(self._reading) <= self._ahead:
            self._read(self._reading[-1][0] + self._shares.global_batch)
        _, task, place = self._reading.popleft()
        if task.exception():  # of one of its steps: this one is read by itself, and is good, or raises
            return self._thread.submit(self._batches, consumed).result()
        return task.result()[place]

    def close(self, *, done: bool) -> None:
        """End the thread, then close what it reads; it is waited for no longer than one batch takes."""
        self._forget()
        self._thread.shutdown()
        self._source.close(done=done)

    def _read(self, consumed: int) -> None:
        steps = min(MOST_STEPS, max(1, int(TASK_SECONDS / self._seconds)))
        positions = [consumed + step * self._shares.global_batch for step in range(steps)]
        task = self._thread.submit(self._several, positions)
        self._reading.extend((position, task, place) for place, position in enumerate(positions))

    def _several(self, positions: Sequence[int]) -> list[list[Batch]]:
        began = time.perf_counter()
        results = [self._batches(position) for position in positions]
        self._seconds = (time.perf_counter() - began) / len(positions)
        return results

    def _forget(self) -> None:
        while self._reading:
            self._reading.pop()[1].cancel()

    def _batches(self, consumed: int) -> list[Batch]:
        batches = self._shares.micro_batches(self._source, consumed, eod=self._eod)
        return [batch.pinned() for batch in batches] if self._pinned else batches
