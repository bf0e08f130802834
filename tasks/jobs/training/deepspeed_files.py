"""DeepSpeed's own checkpoint files: written by DeepSpeed, read only as they were hashed, and never unpickled freely.

Who hashes and commits them is tasks/jobs/checkpoint_folders.py. torch's format is a pickle inside: `weights_only` admits tensors,
plain values and the few classes of NAMED, so a file that was made to run code is refused, whatever its manifest says.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load, save_file

from tasks.errors import IntegrityError
from tasks.jobs.checkpoint import RNG
from tasks.jobs.checkpoint_files import Manifest, place_of
from tasks.jobs.checkpoint_folders import FolderSaver
from tasks.jobs.checkpoint_writer import OWN

TAG = "deepspeed"
"""Folder of DeepSpeed's files within a checkpoint's."""
NAMED = [LossScaler, ZeroStageEnum, fragment_address]
"""Classes of DeepSpeed that stand in its files beside tensors and plain values."""


class HashedFiles(TorchCheckpointEngine):
    """How DeepSpeed reads and writes files; the bytes that are hashed are the bytes that are loaded."""

    def __init__(self, sha256: Mapping[Path, str]) -> None:
        """`sha256` of every file of the verified manifest, by path; empty: nothing is read yet."""
        super().__init__()
        self.sha256, self.failed = sha256, ""

    def read(self, path: Path) -> bytes:
        """Raises IntegrityError for a file that changed since it was verified, or that its manifest does not name."""
        data = path.read_bytes()
        if self.sha256.get(path) != hashlib.sha256(data).hexdigest():
            raise IntegrityError(f"{path} changed between verification and loading, or its manifest does not name it")
        return data

    def load(self, path: str, map_location: Any = None) -> Any:
        """Raises IntegrityError for what `read` does, and for a file that holds more than data."""
        data = io.BytesIO(self.read(Path(path)))
        with torch.serialization.safe_globals(NAMED):
            try:
                return torch.load(data, map_location=map_location, weights_only=True)
            except pickle.UnpicklingError as error:
                raise IntegrityError(
                    f"{path} holds more than tensors and plain values: {str(error).splitlines()[0]}",
                    remedy="It was written by another release of DeepSpeed, or by somebody else: go on from another one.",
                ) from error

    def save(self, state_dict: Any, path: str) -> None:
        """A failure is kept: the other ranks wait for this one in DeepSpeed's barriers. torch reports a full disk in its own way."""
        try:
            super().save(state_dict, path)
        except (OSError, RuntimeError) as error:
            self.failed = f"{path}: {error}"


def saver(engine: Any, rank: int, writing: Mapping[str, Any]) -> FolderSaver:
    """What writes a rank's checkpoints of DeepSpeed's engine, and its generator's state beside them."""

    def write(folder: Path) -> None:
        files = engine.checkpoint_engine = HashedFiles({})
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        if files.failed:
            raise OSError(files.failed)
        save_file({RNG: torch.get_rng_state()}, _generator(folder, rank))

    engine._copy_recovery_script = lambda path: None  # programs, which have no place in a checkpoint
    return FolderSaver(write, **writing)


def restore(engine: Any, root: Path, found: Manifest, *, rank: int, world_size: int) -> None:
    """Take over a verified checkpoint. Raises ValueError for one of another number of ranks, IntegrityError for other bytes."""
    folder = place_of(root, found.step, found.attempt)
    if found.world_size != world_size:
        raise ValueError(
            f"{folder} was written by {found.world_size} ranks, and DeepSpeed divides its state by their number: "
            f"go on with {found.world_size} ranks, not {world_size}, or train anew in another job folder"
        )
    files = engine.checkpoint_engine = HashedFiles({folder / entry["path"]: entry["sha256"] for entry in found.files})
    path, _ = engine.load_checkpoint(str(folder / OWN), tag=TAG, load_lr_scheduler_states=False)
    if path is None:
        raise IntegrityError(f"{folder} does not hold DeepSpeed's state")
    torch.set_rng_state(load(files.read(_generator(folder / OWN, rank)))[RNG])


def _generator(folder: Path, rank: int) -> Path:
    return folder / f"generator-{rank}.safetensors"
