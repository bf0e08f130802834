"""DeepSpeed's own checkpoint files, as DeepSpeed names and lays them out; read only as they were hashed, and never unpickled freely.

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

from tasks.errors import IntegrityError

NAMED = [LossScaler, ZeroStageEnum]
"""Classes of DeepSpeed that stand in its files beside tensors and plain values."""


class HashedFiles(TorchCheckpointEngine):
    """What DeepSpeed reads its checkpoint by: the bytes that are hashed are the bytes that are loaded."""

    def __init__(self, sha256: Mapping[Path, str]) -> None:
        """`sha256` of every file of the verified manifest, by path."""
        super().__init__()
        self.sha256 = sha256

    def load(self, path: str, map_location: Any = None) -> Any:
        """Raises IntegrityError for a file that the manifest does not name, that changed, or that holds more than data."""
        data = Path(path).read_bytes()
        if self.sha256.get(Path(path)) != hashlib.sha256(data).hexdigest():
            raise IntegrityError(f"{path} changed between verification and loading, or its manifest does not name it")
        with torch.serialization.safe_globals(NAMED):
            try:
                return torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
            except pickle.UnpicklingError as error:
                raise IntegrityError(
                    f"{path} holds more than tensors and plain values: {error}",
                    remedy="It was written by another release of DeepSpeed, or by somebody else: go on from another one.",
                ) from error
