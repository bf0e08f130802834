"""Arguments of Megatron-LM's `pretrain_gpt.py`, generated from our settings: pure, so that they are shown and golden-tested.

Two flavours: NVIDIA/Megatron-LM @d98e8a64 (megatron/training/arguments.py) and microsoft/Megatron-DeepSpeed @f4157bea
(megatron/arguments.py). Who starts the program is tasks/jobs/train_megatron.py; what does not fit is refused in
tasks/config/flows.py. See docs/megatron.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tasks.config.engines.deepspeed import ds_config
from tasks.config.training import ExecutionConfig, TrainingConfig

LLAMA_EPSILON, GPT2_EPSILON = 1e-6, 1e-5
"""What LlamaConfig and GPT2Config of transformers have for `rms_norm_eps` and `layer_norm_epsilon`: the same network is meant."""


LOCAL = {
    "transformer-impl": "local",
    "no-rope-fusion": True,
    "no-persist-layer-norm": True,
    "no-masked-softmax-fusion": True,
    "no-gradient-accumulation-fusion": True,
}
"""Megatron-LM's own modules, without the kernels of Transformer Engine and Apex: each of these is on by default, and refused or
imported when a layer is built (@d98e8a64: transformer_config.py, torch_norm.py, fused_softmax.py, tensor_parallel/layers.py)."""


@dataclass(frozen=True)
class Places:
    """Where the program reads and writes."""

    tokens: tuple[str, ...]
    """Prefix of `.bin` and `.idx`; of several texts weight, prefix, weight, prefix."""
    tokenizer: str
    """Hugging Face folder of the tokenizer."""
    save: str
    cache: str
    """Where it keeps the order of samples."""
    load: str = ""
    """Folder of a verified checkpoint; empty: from step 0."""
    ds_config: str = ""
    """Of Megatron-DeepSpeed: the file of `megatron_ds_config`."""


def megatron_arguments(
    training: TrainingConfig, execution: ExecutionConfig, places: Places, *, save_every: int, micro_batch: int
) -> list[str]:
    """The arguments, in one order; what the user adds is last, so that it has the last word."""
    deepspeed = execution.megatron.flavour == "megatron-deepspeed"
    of_flavour = _of_megatron_deepspeed if deepspeed else _of_megatron_lm
    optimizer = {
        "lr": training.learning_rate,
        "min-lr": training.learning_rate * training.min_learning_rate_ratio,
        "weight-decay": training.weight_decay,
        "adam-beta1": training.beta1,
        "adam-beta2": training.beta2,
        "clip-grad": training.gradient_clip,
        "seed": training.seed,
    }
    output: dict[str, Any] = {
        **_network(training),
        **optimizer,
        "micro-batch-size": micro_batch,
        "global-batch-size": training.global_batch_size,
        "train-iters": training.steps,
        "eval-iters": 0,
        "tensor-model-parallel-size": execution.tensor_parallel,
        "pipeline-model-parallel-size": execution.pipeline_parallel,
        "sequence-parallel": execution.megatron.sequence_parallel,
        "bf16": training.precision == "bf16",
        **of_flavour(training, execution, places),
        **{
            "data-path": places.tokens,
            "split": "1,0,0",
            "data-cache-path": places.cache,
            "tokenizer-model": places.tokenizer,
        },
        "save": places.save,
        "save-interval": save_every,
        "load": places.load,
        "exit-signal-handler": True,
        "log-interval": 1,
    }
    # `--name value`; true is the name alone, false and empty are nothing, a tuple is several values.
    words: list[str] = []
    for name, value in output.items():
        if value is False or value == "":
            continue
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        words += [f"--{name}", *(f"{one:.12g}" if isinstance(one, float) else str(one) for one in values)]
    return [*words, *execution.megatron.arguments]


def _network(training: TrainingConfig) -> dict[str, Any]:
    """Without dropout, and begun with the same spread as our own (tasks/jobs/training/network.py)."""
    shape = training.network
    return {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.intermediate_size,
        "num-attention-heads": shape.heads,
        "seq-length": training.sequence_length,
        "max-position-embeddings": training.sequence_length,
        "swiglu": shape.architecture == "llama",
        "disable-bias-linear": shape.architecture == "llama",
        "untie-embeddings-and-output-weights": not shape.tie_embeddings,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "init-method-std": math.sqrt(2 / (5 * shape.hidden_size)),
        "make-vocab-size-divisible-by": 1,
    }


def _of_megatron_lm(training: TrainingConfig, execution: ExecutionConfig, places: Places) -> dict[str, Any]:
    shape, llama = training.network, training.network.architecture == "llama"
    grouped = {"group-query-attention": True, "num-query-groups": shape.kv_heads}
    full = {"recompute-method": "uniform", "recompute-num-layers": 1}
    decay = max(1, min(round(training.steps * training.decay_share), training.steps - training.warmup_steps))
    stable = {"lr-wsd-decay-style": "linear", "lr-wsd-decay-iters": decay}
    return {
        **(grouped if shape.kv_heads < shape.heads else {}),
        "position-embedding-type": "rope" if llama else "learned_absolute",
        "normalization": "RMSNorm" if llama else "LayerNorm",
        "norm-epsilon": LLAMA_EPSILON if llama else GPT2_EPSILON,
        "lr-decay-style": "WSD" if training.schedule == "wsd" else "cosine",
        **(stable if training.schedule == "wsd" else {}),
        "context-parallel-size": execution.context_parallel,
        "use-distributed-optimizer": execution.megatron.distributed_optimizer,
        # Our own learning rates (tasks/jobs/training/network.py): Megatron's step s has the rate that its rule gives to
        # s - 1. So its warm-up begins at the rate of our first step, and both of its counts are one lower.
        "lr-warmup-init": training.learning_rate / training.warmup_steps if training.warmup_steps > 1 else 0.0,
        "lr-warmup-iters": max(training.warmup_steps - 1, 0),
        "lr-decay-iters": max(training.steps - 1, 1),
        # A job that was begun with other counts would be refused when it goes on, unless they override those of its
        # checkpoint.
        "override-opt_param-scheduler": True,
        **({"recompute-granularity": execution.recompute} if execution.recompute != "none" else {}),
        **(full if execution.recompute == "full" else {}),
        "tokenizer-type": "HuggingFaceTokenizer",
        "dataloader-type": "single",
        "ckpt-format": "torch_dist",
        "exit-on-missing-checkpoint": bool(places.load),
        "log-throughput": True,
        **(LOCAL if execution.megatron.transformer_impl == "local" else {}),
    }


def _of_megatron_deepspeed(training: TrainingConfig, execution: ExecutionConfig, places: Places) -> dict[str, Any]:
    """ZeRO instead of the distributed optimizer; of one pipeline stage DeepSpeed's plain engine is used, for ZeRO 2 and 3."""
    llama = training.network.architecture == "llama"
    full = {"recompute-granularity": "full", "recompute-method": "uniform", "deepspeed-activation-checkpointing": True}
    return {
        "lr-warmup-iters": training.warmup_steps,
        "lr-decay-iters": training.steps,
        "num-key-value-heads": training.network.kv_heads,
        "use-rotary-position-embeddings": llama,
        "normalization": "rmsnorm" if llama else "layernorm",
        "layernorm-epsilon": LLAMA_EPSILON if llama else GPT2_EPSILON,
        "no-query-key-layer-scaling": True,
        "lr-decay-style": "cosine",
        "ds-sequence-parallel-size": execution.context_parallel,
        **(full if execution.recompute == "full" else {}),
        "tokenizer-type": "HFTokenizer",
        "deepspeed": True,
        "deepspeed_config": places.ds_config,
        "zero-stage": execution.deepspeed.zero_stage,
        "no-pipeline-parallel": execution.pipeline_parallel == 1,
    }


def megatron_ds_config(training: TrainingConfig, execution: ExecutionConfig, *, micro_batch: int) -> dict[str, Any]:
    """What Megatron-DeepSpeed reads besides; the same ZeRO and offload as the engine `deepspeed`."""
    return {**ds_config(training, execution), "train_micro_batch_size_per_gpu": micro_batch, "steps_per_print": 2**31}
