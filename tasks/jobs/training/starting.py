"""What training starts from: random weights, or a base model's; with adapters beside them where LoRA is asked for.

A base model is a Hugging Face folder with whole safetensors weights (tasks/formats/model_folder.py). No code of it is run. How
adapters are merged and written is lora.py. See docs/fine-tuning.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.data.tokenizing.tokenizer import OpenedTokenizer, load, open_tokenizer
from tasks.formats.model_folder import ModelFolder, open_model_folder
from tasks.jobs.training.engine import Setting
from tasks.jobs.training.lora import add_adapters
from tasks.jobs.training.network import build_network


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
