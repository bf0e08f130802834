"""What training reads: samples of fixed length out of one long stream of tokens, in an order that a seed decides.

Which samples a step uses depends on the seed and on the number of samples consumed before it, and on nothing else: not
on the number of ranks, of restarts, or of the step. Nothing here computes with a network.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.formats.mmididx import open_tokens
from tasks.training_config import TrainingConfig

TRAIN = "train_text_document"


class Batch(NamedTuple):
    """Samples that a rank computes at once."""

    inputs: torch.Tensor
    """Token ids, shape [samples, length]."""
    targets: torch.Tensor
    """The ids one token later, shape [samples, length]."""
    positions: torch.Tensor | None = None
    """Of each token in its document, shape [samples, length]; None: samples are one text each."""

    def to(self, device: torch.device) -> Batch:
        """The same samples there."""
        return Batch(*(None if part is None else part.to(device) for part in self))


@dataclass(frozen=True)
class Samples:
    """The training split, cut into samples of `length` + 1 tokens; neighbours share one token.

    The shared token is the last target of one sample and the first input of the next, so every token is predicted once.
    """

    tokens: NDArray[np.number]
    """The whole stream, shape [tokens]; documents end with the end-of-document token."""
    length: int
    """Predictions a sample."""
    seed: int

    @property
    def count(self) -> int:
        """Samples an epoch."""
        return (len(self.tokens) - 1) // self.length

    def batch(self, consumed: int, size: int) -> NDArray[np.int64]:
        """The `size` samples that follow the first `consumed` ones, over epochs: shape [size, length + 1]."""
        return np.stack([self._sample(position) for position in range(consumed, consumed + size)])

    def _sample(self, position: int) -> NDArray[np.int64]:
        epoch, index = divmod(position, self.count)
        start = int(epoch_order(self.seed, epoch, self.count)[index]) * self.length
        return np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """A permutation of `count` samples, shape [count].

    It sorts raw PCG64 draws, whose stream numpy keeps forever; `Generator.permutation` may change with numpy (NEP 19).
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(count), kind="stable")


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

    def micro_batches(self, samples: Samples, consumed: int) -> list[Batch]:
        """This rank's part of the batch after `consumed` samples."""
        mine = samples.batch(consumed + self.rank * self.samples, self.samples)
        parts = torch.from_numpy(mine).split(self.micro_batch)
        return [Batch(part[:, :-1], part[:, 1:]) for part in parts]


def open_samples(folder: Path, config: TrainingConfig) -> Samples:
    """Map the training split of a tokens folder.

    Raises ValueError when it is shorter than one sample, IntegrityError when its index does not fit.
    """
    tokens = open_tokens(folder / TRAIN).tokens
    if len(tokens) <= config.sequence_length:
        raise ValueError(
            f"the training split has {len(tokens)} tokens, one sample needs sequence_length + 1 = "
            f"{config.sequence_length + 1}: give more text, or lower training.sequence_length"
        )
    return Samples(tokens=tokens, length=config.sequence_length, seed=config.seed)


def tokens_identity(folder: Path) -> dict[str, Any]:
    """What a checkpoint remembers of its tokens: the sha256 of `tokens.json`, and the sizes of the split in bytes."""
    sizes = {f"{TRAIN}.{ending}": (folder / f"{TRAIN}.{ending}").stat().st_size for ending in ("bin", "idx")}
    return {"tokens.json": hashlib.sha256((folder / "tokens.json").read_bytes()).hexdigest(), "bytes": sizes}


def vocabulary(folder: Path) -> tuple[int, int]:
    """Entries of the vocabulary, and the id of the end-of-document token."""
    said = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    return int(said["vocab_size"]), int(said["eod_id"])
