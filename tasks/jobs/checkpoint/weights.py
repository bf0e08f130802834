"""The weights of a Hugging Face folder without loading it: a network that takes no memory, and where each of its tensors lies.

Who reads a share of them is tasks/jobs/evaluation/sharded.py, who writes them on one by one tasks/jobs/exporting/graph.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tasks.formats.model_folder import open_model_folder


def empty_network(checkpoint: Path, dtype: torch.dtype | None = None) -> Any:
    """The causal language model of a folder in evaluation mode, its parameters on torch's device `meta`; buffers have values.

    Without a type it is that of config.json.
    """
    config: Any = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=False)
    if (checkpoint / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(checkpoint), local_files_only=True)
    return model.requires_grad_(False).eval()


def replace_parameters(model: nn.Module, made: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put another tensor in the place of each parameter; what is tied stays tied."""
    known: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(made(parameter), requires_grad=False)
            setattr(module, name, known[id(parameter)])


class Weights:
    """The tensors of a folder's safetensors by the names that its network has for them. Files stay open as long as this lives."""

    def __init__(self, checkpoint: Path, model: Any) -> None:
        self._checkpoint, self._prefix = checkpoint, f"{model.base_model_prefix}."
        files = [safe_open(str(checkpoint / shard), "pt") for shard in open_model_folder(checkpoint).shards]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def slices(self, name: str, shape: tuple[int, ...]) -> Any:
        """A tensor, of which rows can be read. Raises ValueError where there is none of that name and shape."""
        stored = self._stored(name)
        tensor = self._files[stored].get_slice(stored) if stored else None
        if tensor is None or tuple(tensor.get_shape()) != shape:
            raise ValueError(
                f"{self._checkpoint} has no tensor {name} of shape {list(shape)}, so its weights cannot be read one by one: save "
                "the model with transformers' `save_pretrained`"
            )
        return tensor

    def mapped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as it lies in its file: mapped into memory, not copied. Raises ValueError as `slices` does."""
        self.slices(name, shape)
        stored = self._stored(name)
        result: torch.Tensor = self._files[stored].get_tensor(stored)
        return result

    def _stored(self, name: str) -> str:
        """Its name in the files: of a network without its head, the prefix is left out there."""
        return next((each for each in (name, name.removeprefix(self._prefix)) if each in self._files), "")


def mapped_network(checkpoint: Path) -> Any:
    """The causal language model of a folder, its weights mapped into memory in the type that they are stored in.

    Raises ValueError for weights under other names than the network's.
    """
    model = empty_network(checkpoint)
    weights = Weights(checkpoint, model)
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    replace_parameters(model, lambda parameter: weights.mapped(by_identity[id(parameter)], tuple(parameter.shape)))
    return model
