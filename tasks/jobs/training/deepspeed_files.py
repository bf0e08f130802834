"""DeepSpeed's own checkpoint files: written by DeepSpeed, read only as they were hashed, and never unpickled freely.

Who hashes and commits them is tasks/jobs/checkpoint/folders.py. torch's format is a pickle inside: `weights_only` admits tensors,
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

from tasks.common.errors import IntegrityError
from tasks.jobs.checkpoint.files import Manifest, place_of
from tasks.jobs.checkpoint.folders import FolderSaver
from tasks.jobs.checkpoint.snapshot import generators, take_generators
from tasks.jobs.checkpoint.writer import OWN
from tasks.jobs.node.elastic import newcomers_seed
from tasks.jobs.training.deepspeed_resharding import reshard

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
        """A failure is kept, for other ranks wait for this one in DeepSpeed's barriers; torch reports a full disk as it likes."""
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
        save_file({name: piece.tensor for name, piece in generators().items()}, _generator(folder, rank))

    engine._copy_recovery_script = lambda path: None  # programs, which have no place in a checkpoint
    return FolderSaver(write, **writing)


def restore(engine: Any, root: Path, found: Manifest, *, rank: int, world_size: int) -> None:
    """Take over a verified checkpoint, and this rank's generator; a rank that was not there gets a seed of its own.

    Raises IntegrityError for bytes that were not verified, and for files that hold more than data.
    """
    folder = place_of(root, found.step, found.attempt)
    own = folder / OWN
    files = engine.checkpoint_engine = HashedFiles({folder / entry["path"]: entry["sha256"] for entry in found.files})
    if found.world_size == world_size and _same_layout(engine, own / TAG):
        engine.load_checkpoint(str(own), tag=TAG, load_lr_scheduler_states=False)
    else:
        reshard(engine, own / TAG, lambda path: files.load(str(path), "cpu"), ranks=found.world_size)
    if rank < found.world_size:
        take_generators(load(files.read(_generator(own, rank))))
    else:
        torch.manual_seed(newcomers_seed(int(found.identity["training"]["seed"]), found.step, rank))


def _same_layout(engine: Any, folder: Path) -> bool:
    """Stages 1 and 2 write one file of weights, stage 3 one a rank."""
    return (engine.zero_optimization_stage() == 3) == any(folder.glob("zero_pp_rank_*_model_states.pt"))


def _generator(folder: Path, rank: int) -> Path:
    return folder / f"generator-{rank}.safetensors"
