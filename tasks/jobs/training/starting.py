"""What training starts from: random weights, or a base model's; with adapters beside them where LoRA is asked for.

A base model is a Hugging Face folder with whole safetensors weights (tasks/formats/model_folder.py). No code of it is run. See
docs/fine-tuning.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tasks.common.errors import Missing
from tasks.config.training import LoraConfig, TrainingConfig
from tasks.data.tokenizing.tokenizer import OpenedTokenizer, load, open_tokenizer
from tasks.formats.model_folder import ModelFolder, open_model_folder
from tasks.jobs.training.engine import Setting
from tasks.jobs.training.network import build_network, save_network

# Low-rank adapters (Hu et al. 2021) by peft: put beside a base model's frozen weights, and merged into them at the end.
#
# peft takes 9 s to import, so it is imported where adapters are asked for. Which layers get one: `training.lora`.


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
            remedy="Install it into their Python: pip install 'headway[train]'. Or leave training.lora.rank empty.",
        ) from error
    return peft


# The trained network as others load it: a Hugging Face folder, adapters merged, with the tokenizer of the tokens.
#
# The card beside it is card.py. Gathering weights that are divided over ranks is an engine's.


ADAPTER_FOLDER = "adapter"


def write_network(
    network: nn.Module,
    config: TrainingConfig,
    folder: Path,
    *,
    tokenizer: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a network on rank 0. `weights` are those to write where the network holds only its part of them."""
    if config.lora.rank:
        whole = weights or network.state_dict()
        write_adapter(whole, folder / ADAPTER_FOLDER, config)
        weights = merged(network, whole, config.lora)
    if config.objective == "sft":
        _stop_at_turns(network, tokenizer.parent)
    save_network(network, folder, tokenizer=tokenizer, weights=weights)


def _stop_at_turns(network: Any, tokens: Path) -> None:
    """Have answers end where those of the conversations end, beside where a document does."""
    ends = network.config.eos_token_id
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    turns = json.loads((tokens / "tokens.json").read_text(encoding="utf-8"))["turn_ends"]
    network.generation_config.eos_token_id = [*known, *(end for end in turns if end not in known)]


def starting_network(setting: Setting) -> nn.Module:
    """The network in float32, equal on all ranks, in training mode; seeds torch's generator.

    Raises ValueError when the tokens are not of the base model's tokenizer, or a sample is longer than it can be given.
    """
    config = setting.training
    if setting.base is None:
        return build_network(config, vocab_size=setting.vocab_size, eod=setting.eod)
    result = open_model_folder(setting.base)
    require_base_fits(result, config.sequence_length, setting.vocab_size)
    require_same_tokenizer(setting.base, setting.rank.inputs["tokens"] / "tokenizer")
    torch.manual_seed(config.seed)
    network = load_base(setting.base)
    if config.packing:
        require_packable(network)
    return add_adapters(network, config) if config.lora.rank else network


def load_base(folder: Path) -> nn.Module:
    """A base model in float32, whatever type it is stored in.

    It has no padding token while it is trained: torch.nn.Embedding never trains the row of its padding token.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.pad_token_id = None
    network: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    return network.train()


def require_base_fits(result: ModelFolder, sequence_length: int, vocab_size: int) -> None:
    """Raise ValueError where the base model has no room for the tokens or for a sample."""
    if vocab_size > result.vocab_size:
        raise ValueError(
            f"the tokens have {vocab_size} words, the base model {result.vocab_size}: preprocess with the base's own tokenizer "
            "(leave preprocessing.tokenizer.ref empty)"
        )
    if result.positions and sequence_length > result.positions:
        raise ValueError(
            f"training.sequence_length {sequence_length} is more than the base model's {result.positions} positions: lower it"
        )


def require_packable(network: Any) -> None:
    """Raise ValueError where positions that begin anew do not keep a text of a row from what is before it.

    A network that has no positions to begin anew (ALiBi), or that carries a state along (Mamba), reads on.
    """
    ids, size = torch.arange(1, 9) % network.config.vocab_size, 4
    places = torch.arange(len(ids)) % size
    network.eval()
    with torch.no_grad():
        together = network(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0, size:]
        alone = network(input_ids=ids[None, size:], position_ids=places[None, size:], use_cache=False).logits[0]
    network.train()
    if (together - alone).abs().max() > 1e-4 * alone.abs().max():
        raise ValueError(
            f"training.packing: in a row of {type(network).__name__} a conversation sees the one before it. Set it to false"
        )


def require_same_tokenizer(base: Path, used: Path) -> None:
    """Raise ValueError unless the tokens' numbers mean what they mean to the base model."""
    theirs, ours = open_tokenizer(base), open_tokenizer(used)
    if theirs.eod != ours.eod:
        raise ValueError(
            f"documents of the tokens end with token {ours.eod}, those of the base model with {theirs.eod}: "
            "preprocess with the base's own tokenizer (leave preprocessing.tokenizer.ref empty)"
        )
    if different := _different(theirs, ours):
        raise ValueError(
            f"the tokens are not of the base model's tokenizer: {different}. Preprocess with the base's own "
            "(leave preprocessing.tokenizer.ref empty)"
        )


def _different(theirs: OpenedTokenizer, ours: OpenedTokenizer) -> str:
    """The first word that has another number, in words; empty: there is none."""
    if theirs.rules == ours.rules:
        return ""
    known, used = _words(theirs), _words(ours)
    for word in sorted(known.keys() | used.keys()):
        if known.get(word) != used.get(word):
            return f"{word!r} is {used.get(word, 'no word')} there, and {known.get(word, 'no word')} in the base"
    return ""


def _words(tokenizer: OpenedTokenizer) -> dict[str, int]:
    words: dict[str, int] = load(tokenizer.rules).get_vocab(with_added_tokens=True)
    return words
