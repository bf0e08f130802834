"""How many floating-point operations a token costs the network that is trained, and by which convention they are counted.

The formulas are tasks/planning/size.py; "MFU" means little without the convention, so it is told beside it. See docs/training.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.planning.size import flops_per_token_6n, flops_per_token_megatron

FROZEN = 2 / 3
"""Under LoRA the base's weights get no gradient: forward and the gradient of activations are four of six operations."""


class Flops(NamedTuple):
    """Operations a token, forward and backward, of the whole network; recomputation is not counted."""

    per_token: float
    convention: str
    """`megatron`: Megatron-LM's num_floating_point_operations, causal attention counted as half of the square. `6n`: six a
    parameter, no attention, for networks of another shape. With `, frozen base`: two thirds of it."""


def flops_of(network: nn.Module, config: TrainingConfig, parameters: int) -> Flops:
    """What a token of `config.sequence_length` costs; `parameters` are all of the network's."""
    shape = _shape(getattr(network, "config", None))
    if shape is None:
        counted = Flops(flops_per_token_6n(parameters), "6n")
    else:
        vocab_size = int(network.config.vocab_size)  # type: ignore[union-attr, arg-type]
        length = config.sequence_length
        counted = Flops(flops_per_token_megatron(shape, vocab_size, sequence_length=length), "megatron")
    return Flops(counted.per_token * FROZEN, f"{counted.convention}, frozen base") if config.lora.rank else counted


def _shape(payload: Any) -> NetworkConfig | None:
    """The shape that transformers' configuration tells; None for a family whose layers are not counted."""
    family = getattr(payload, "model_type", "")
    if family not in ("llama", "gpt2"):
        return None
    heads, hidden = payload.num_attention_heads, payload.hidden_size
    return NetworkConfig(
        architecture=family,
        layers=payload.num_hidden_layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=getattr(payload, "num_key_value_heads", None) or heads,
        intermediate_size=getattr(payload, "intermediate_size", None)
        or getattr(payload, "n_inner", None)
        or 4 * hidden,
        tie_embeddings=payload.tie_word_embeddings,
    )
