"""The trained network as others load it: a Hugging Face folder, adapters merged, with the tokenizer of the tokens.

The card beside it is card.py. Gathering weights that are divided over ranks is an engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from tasks.config.training import TrainingConfig
from tasks.jobs.training.lora import merged, write_adapter
from tasks.jobs.training.network import save_network

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
    save_network(network, folder, tokenizer=tokenizer, weights=weights)
