"""The network: a Llama or GPT-2 of transformers with random weights, its loss, and how it is written for others to load.

How it is trained does not live here (tasks/jobs/train.py), nor how it is exported (tasks/jobs/export.py).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tasks.config.training import TrainingConfig
from tasks.jobs.data.samples import NOT_LEARNED, Batch


def build_network(config: TrainingConfig, *, vocab_size: int, eod: int) -> nn.Module:
    """A causal language model in float32 whose weights depend on `config.seed` only; seeds torch's generator.

    There is no padding token: it would be `eod`, and torch.nn.Embedding never trains the row of its padding token.
    Matrices begin with a standard deviation of sqrt(2 / (5 hidden_size)): SmallInit of Nguyen and Salazar, Transformers
    without Tears (2019), as in GPT-NeoX. The library's own 0.02 is that of a width of 1000: networks as narrow as ours
    learn far more slowly from it.
    """
    shape = config.network
    torch.manual_seed(config.seed)
    common = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
        "dtype": "float32",
        "initializer_range": math.sqrt(2 / (5 * shape.hidden_size)),
    }
    network = _gpt2(config, common) if shape.architecture == "gpt2" else _llama(config, common)
    return network.train()


def _llama(config: TrainingConfig, common: Mapping[str, Any]) -> nn.Module:
    shape = config.network
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=config.sequence_length,
            **common,
        )
    )


def _gpt2(config: TrainingConfig, common: Mapping[str, Any]) -> nn.Module:
    """Without dropout, as networks that see their text about once are trained; its positions are those that are trained."""
    shape = config.network
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=shape.hidden_size,
            n_inner=shape.intermediate_size,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=config.sequence_length,
            activation_function="gelu_pytorch_tanh",  # the same function as gelu_new, in one operation
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    )


def next_token_loss(
    network: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    by: float | None = None,
) -> torch.Tensor:
    """Mean cross-entropy in nats a token, or its sum divided `by` a number, a scalar; tensors are of shape [batch, length].

    Where positions begin anew, transformers begins a text of its own, whose tokens attend to themselves only. The loss is
    computed here and not by transformers, which shifts its labels and so would drop a prediction of every sample.
    """
    logits = network(input_ids=inputs, position_ids=positions, use_cache=False).logits
    reduction = "mean" if by is None else "sum"
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_LEARNED, reduction=reduction
    )
    return loss if by is None else loss / by


def answers_a_rank(batches: Sequence[Batch], config: TrainingConfig, group: Any) -> float | None:
    """Tokens of the global batch that are learned, by the number of ranks; None where every token is. All ranks take part.

    A rank's summed loss divided by it, and averaged over ranks as engines do, is the mean over the learned tokens of the global
    batch, whatever part of them each rank and micro batch has: as `num_items_in_batch` makes it in transformers' trainer.
    """
    if config.objective != "sft":
        return None
    count = torch.tensor(
        float(sum(int((batch.targets != NOT_LEARNED).sum()) for batch in batches)), dtype=torch.float64
    )
    dist.all_reduce(count, group=group)
    return float(count) / dist.get_world_size(group)


def parameter_count(network: nn.Module) -> int:
    """Trained numbers; tied embeddings count once."""
    return sum(parameter.numel() for parameter in network.parameters())


def save_network(
    network: nn.Module, folder: Path, *, tokenizer: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write a Hugging Face folder: configuration, safetensors weights, and the files of the tokenizer's folder.

    `weights` are those to write where the network holds only its part of them.
    """
    ends = network.config.eos_token_id
    network.generation_config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    with _not_of_deepspeed():
        network.save_pretrained(folder, state_dict=weights)
    for path in sorted(tokenizer.iterdir()):
        shutil.copyfile(path, folder / path.name)


@contextmanager
def _not_of_deepspeed() -> Iterator[None]:
    """transformers has accelerate look if the network is one of DeepSpeed's, which imports DeepSpeed where it is: 4 s of CPU."""
    try:
        from accelerate.utils import other
    except ModuleNotFoundError:
        yield
        return
    plain, other.is_deepspeed_available = other.is_deepspeed_available, lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = plain


# AdamW as all engines of our own loop use it.


def build_optimizer(network: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """`adamw` whose state is there from the start, to be restored into."""
    optimizer = adamw(network, config)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            # the fused kernel wants the count of steps where the parameter is
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return optimizer


def adamw(network: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [
        group for group in groups if group["params"]
    ]  # adapters are matrices, and DeepSpeed takes no group of nothing
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
