"""What an engine is to the loop of training: it computes gradients and updates, and knows what of its state must be saved.

The loop (tasks/jobs/train.py), the data, the checkpoints' protocol, metrics and safety are the same for all engines.
What an engine declares, and which class it names for this, is tasks/config/engines. To add one: CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from tasks.config.engines.registry import ENGINES
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.jobs.checkpoint.files import Manifest
from tasks.jobs.checkpoint.pieces import Piece
from tasks.jobs.data.samples import Batch
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.metrics_logger import Meter


@dataclass(frozen=True)
class Setting:
    """What an engine is built from, on one rank."""

    rank: Rank
    training: TrainingConfig
    execution: ExecutionConfig
    vocab_size: int
    eod: int
    base: Path | None
    """Folder of the base model; None: random weights."""
    group: Any
    """Process group of a step's collectives; None: the default one."""


class Saving(Protocol):
    """One rank's checkpoints, written beside training: by a process of its own
    (tasks/jobs/checkpoint/snapshot.py)."""

    failure: str
    """Why the last save failed; empty when it did not."""
    seconds: float
    """How long the last one took to be written; on rank 0: to be committed."""

    def save(self, *, step: int, consumed_samples: int, local: bool = False) -> None:
        """Take a snapshot, the only stall, and have it written, `local` to the machine's own disk."""

    def busy(self) -> bool:
        """Whether the last one is still being written; on rank 0: not yet committed."""

    def abandon(self) -> None:
        """Another rank failed: give up the one in flight."""

    def close(self) -> None:
        """Wait for the last one, then end the writer."""


class Engine(Protocol):
    """One rank's weights, gradients and optimizer. Ranks call the same methods in the same order: most of them are collective."""

    network: nn.Module
    """Called with `input_ids`; gives logits, also while it is trained: for held-out text."""
    device: torch.device

    def gradients(self, batches: Sequence[Batch], meter: Meter) -> Tensor:
        """Forward and backward over this rank's micro batches; afterwards gradients are averaged over the global batch.

        Returns the mean loss of this rank's samples in nats a token, float64 on the CPU; of `sft` what gives the loss as a
        mean over ranks. It waits for no other rank, but to count the answers of `sft`.
        """

    def clip(self) -> float:
        """Clip the gradients to `gradient_clip`; returns their L2 norm over all parameters before that, equal on all ranks."""

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer; the gradients are gone afterwards."""

    def discard(self) -> None:
        """Let the gradients go without a step."""

    def restore(self, root: Path, result: Manifest) -> None:
        """Take over a verified checkpoint; raises IntegrityError when it does not hold this engine's state."""

    def own_files(self, result: Manifest) -> list[dict[str, Any]]:
        """Of a checkpoint that as many ranks wrote, the files that this rank reads; empty: all, for it is divided otherwise."""

    def pieces(self) -> Mapping[str, Piece]:
        """This rank's part of all that training changes; of engines whose checkpoints lie on the machines' own disks, too."""

    def saving(self, writing: Mapping[str, Any]) -> Saving:
        """What writes this engine's checkpoints; `writing` are fields of checkpoint_writer.Writing."""

    def write(self, folder: Path, tokenizer: Path) -> None:
        """Write the network as a Hugging Face folder; rank 0 writes, all ranks take part."""

    def parameters(self) -> int:
        """Trained numbers of the whole network; tied embeddings count once."""


def open_engine(setting: Setting) -> Engine:
    """The engine that `training.engine` names."""
    module, name = ENGINES[setting.training.engine].loop.split(":")
    return cast(Engine, getattr(import_module(module), name)(setting))
