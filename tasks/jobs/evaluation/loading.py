"""The network that is measured: on which device, in which precision, and whether it has room there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tasks.config.evaluation import EvaluationConfig
from tasks.formats.model_folder import open_model_folder
from tasks.jobs.training.parallel import own_device, own_gpu

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BESIDE_WEIGHTS = 1 << 30
"""Bytes of a GPU that a batch takes beside the weights: logits (256 MiB), activations, keys and values, the libraries' own."""


def device_of(config: EvaluationConfig) -> torch.device:
    """Where is measured: the machine's first GPU where it has one, as a rank of training has it, else the CPU."""
    if config.device == "cpu":
        return torch.device("cpu")
    own_gpu(0)
    return own_device()


def load_model(checkpoint: Path, *, precision: str = "fp32", device: torch.device | str = "cpu") -> Any:
    """The causal language model of a folder, in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(
        str(checkpoint), dtype=PRECISIONS[precision], local_files_only=True, trust_remote_code=False
    )
    return model.to(device).eval()


def load_measured(checkpoint: Path, config: EvaluationConfig) -> Any:
    """The same, as the settings say. Raises ValueError, before anything is loaded, where a GPU has no room for it."""
    device = device_of(config)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copies = 2 if config.lm_eval.tasks else 1  # the harness's process has its own
        require_room(weight_bytes(checkpoint, config.precision), free, precision=config.precision, copies=copies)
    return load_model(checkpoint, precision=config.precision, device=device)


def require_room(weights: int, free: int, *, precision: str, copies: int = 1) -> None:
    """Raises ValueError, with what to do, where weights and a batch need more bytes than a GPU has free."""
    needed = copies * (weights + BESIDE_WEIGHTS)
    if needed <= free:
        return
    remedies = ["set evaluation.precision: bf16, which halves the weights"] if precision == "fp32" else []
    remedies += ["leave evaluation.lm_eval.tasks empty, whose process loads them once more"] if copies > 1 else []
    remedies += ["measure on a machine with a larger GPU, or set evaluation.device: cpu"]
    raise ValueError(
        f"the weights take {weights / 2**30:.1f} GiB in {precision}, and measuring {needed / 2**30:.1f} GiB of one GPU, "
        f"which has {free / 2**30:.1f} GiB free: {'; or '.join(remedies)}"
    )


def weight_bytes(checkpoint: Path, precision: str) -> int:
    """What the weights of a folder take once they are loaded, by the heads of its files."""
    return open_model_folder(checkpoint).parameters * PRECISIONS[precision].itemsize
