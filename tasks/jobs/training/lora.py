"""Low-rank adapters (Hu et al. 2021) by peft: put beside a base model's frozen weights, and merged into them at the end.

peft takes 9 s to import, so it is imported where adapters are asked for. Which layers get one: `training.lora`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tasks.common.errors import Missing
from tasks.config.training import LoraConfig, TrainingConfig

ADAPTER = "default"
"""peft's name of the only adapter that a network gets."""
BASE_LAYER = ".base_layer."


def add_adapters(network: nn.Module, config: TrainingConfig) -> nn.Module:
    """Freeze the network and give its linear layers adapters: A drawn by torch's generator, B zero, so nothing changes yet.

    Raises ValueError when no layer has a name of `lora.targets`, Missing when peft is not installed.
    """
    peft = _peft()
    network.requires_grad_(False)
    try:
        peft.inject_adapter_in_model(peft_settings(config), network, adapter_name=ADAPTER)
    except ValueError as error:
        raise ValueError(
            f"training.lora.targets {', '.join(config.lora.targets)}: {str(error).splitlines()[0]} "
            f"The linear layers are: {', '.join(linear_layers(network))}"
        ) from None
    return network.train()


def linear_layers(network: nn.Module) -> list[str]:
    """Last names of the layers that can have an adapter."""
    layers = (name for name, module in network.named_modules() if isinstance(module, nn.Linear | Conv1D))
    return sorted({name.rpartition(".")[2] for name in layers})


def peft_settings(config: TrainingConfig) -> Any:
    """peft's own form of `training.lora`."""
    lora = config.lora
    return _peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        base_model_name_or_path=config.base,
    )


def merged(network: nn.Module, weights: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The weights of the plain network: W + alpha / rank x B A, under the names that they have without adapters.

    `weights` are whole; `network` says which layers keep their matrices transposed (those of GPT-2).
    """
    assert lora.rank
    plain = {name.replace(BASE_LAYER, "."): tensor for name, tensor in weights.items() if not _of_adapter(name)}
    for name, down in weights.items():
        if name.endswith(f".lora_A.{ADAPTER}.weight"):
            layer = name.removesuffix(f".lora_A.{ADAPTER}.weight")
            product = weights[f"{layer}.lora_B.{ADAPTER}.weight"] @ down * (lora.alpha / lora.rank)
            transposed = bool(getattr(network.get_submodule(layer), "fan_in_fan_out", False))
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + (product.T if transposed else product)
    return plain


def write_adapter(weights: Mapping[str, Tensor], folder: Path, config: TrainingConfig) -> None:
    """Write the adapter by itself, as `PeftModel.from_pretrained(base, folder)` loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in weights.items()
        if _of_adapter(name)
    }
    save_file(own, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = peft_settings(config)
    if isinstance(settings.target_modules, str):
        settings.target_modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in own})
    settings.inference_mode = True
    settings.save_pretrained(folder)


def _of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise Missing(
            "training.lora needs peft on the machines, and it is not there",
            remedy="Install it into their Python: pip install 'headway[cluster]'. Or leave training.lora.rank empty.",
        ) from error
    return peft
