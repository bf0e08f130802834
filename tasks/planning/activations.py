"""What a forward pass leaves in memory for the backward pass: of a layer, of a pipeline stage, at the output.

Pure. Counted operation by operation as Korthikanti et al. 2022 (section 4) do; where their network is meant the sum is theirs
(tests/tasks/planning/test_memory.py). What the parameters take is states.py; both together memory.py. Sizes are bytes of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.planning.case import Network
from tasks.planning.counts import (
    expert_ffn_size,
    expert_layers,
    ffn_size,
    has_biases,
    kv_heads,
    kv_size,
    query_size,
    stage_layers,
)
from tasks.planning.prediction import Division

LOGIT_BYTES_MEGATRON = 6
"""Of one element of [tokens, vocabulary]: logits in bf16, and in float32 what becomes their gradient in place (Megatron-LM,
core/tensor_parallel/cross_entropy.py). Its golden values of 15B and 7B networks agree: benchmarks/planning_memory.py."""
LOGIT_BYTES_TORCH = 14
"""Logits in bf16; in float32 their copy, its log-softmax and the gradient of it: torch's own cross entropy."""
LOGIT_BYTES_LOSS_PARALLEL = 18
"""Where the vocabulary is divided: DTensor's loss is not one operation, and keeps one more copy in float32."""
SCORE_BYTES = 5
"""Of one element of heads x s x s: softmax's output 2, the mask of its dropout 1, what comes out of that 2 (Korthikanti)."""


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer and one micro batch."""

    whole: float
    """Kept when nothing is computed again."""
    kept: float
    """Kept as `recompute` says."""
    passing: float
    """At the worst moment of its backward pass on top of what is kept: gradients on their way, what is gathered over tp."""


@dataclass(frozen=True)
class Stage:
    """Bytes of one pipeline stage at its peak."""

    kept: float
    """Of all micro batches in flight."""
    working: float
    """Of the layer that is computed: what is computed again, and what passes."""
    logits: float
    """On the last stage: the output and its loss. Not at the same time as `working`."""
    spare: float
    """Of `logits`, what a loss in one operation (fused) does not take."""


def element_bytes(division: Division) -> int:
    """Of an activation: under mixed precision what matrices work on."""
    return 4 if division.precision == "fp32" else 2


def micro_tokens(division: Division, sequence: int) -> float:
    """Tokens of one micro batch on one GPU: context parallelism divides the sequence."""
    return division.micro * sequence / division.cp


def layer(
    network: Network, division: Division, *, sequence: int, flash_attention: bool, experts: bool = False
) -> Layer:
    """What one layer keeps of one micro batch.

    In fp8 Transformer Engine keeps what goes into a matrix in one byte: after the norms and the activation function, of experts
    too, and of what comes out of attention one byte more.
    """
    tokens, size, tp = micro_tokens(division, sequence), element_bytes(division), division.tp
    along = tp if division.sequence_parallel else 1
    narrow = _narrow(division)
    outside = (_outside(network, size) - 2 * narrow * network.hidden) / along
    inside = (_attention(network, division, size) + _feed_forward(network, division, size, experts=experts)) / tp
    inside += narrow * (query_size(network) - (0 if experts else ffn_size(network))) / tp
    routed = _routed(network, division, size) if experts else 0.0
    heads = network.heads / tp
    scores = 0.0 if flash_attention else SCORE_BYTES * size / 2 * heads * sequence
    statistics = 4 * heads if flash_attention else 0.0
    whole = tokens * (outside + inside + routed + scores + statistics)
    kept = {
        "none": whole,
        "selective": whole - tokens * scores,
        "full": tokens * size * network.hidden / along,
    }[division.recompute]
    if division.recompute == "selective" and division.engine == "torch":
        kept = tokens * (_every_second_matrix(network, size) / tp + 2 * size * network.hidden / along)
    return Layer(whole, min(kept, whole), tokens * _passing(network, division, size))


def _narrow(division: Division) -> int:
    """Bytes that an element which goes into a matrix takes less in fp8: Transformer Engine keeps what it has quantized.

    Linear and GroupedLinear alike (transformer_engine/pytorch/module/linear.py, grouped_linear.py: `save_for_backward`).
    """
    return 1 if division.precision == "fp8" and division.engine == "megatron" else 0


def _outside(network: Network, size: int) -> float:
    """Of a token, what tensor parallelism alone does not divide: inputs and outputs of both norms, masks of dropout.

    GPT-3 and its kind have dropout; networks without biases were trained without it.
    """
    return network.hidden * (4 * size + (2 if has_biases(network) else 0))


def _attention(network: Network, division: Division, size: int) -> float:
    """Of a token, over all of tp: queries, keys, values and what comes out; torch rotates queries and keys into copies."""
    keys = kv_size(network) * max(1.0, division.tp / kv_heads(network))
    rotated = query_size(network) + keys if division.engine == "torch" and network.gated else 0
    return size * (2 * query_size(network) + 2 * keys + rotated)


def _feed_forward(network: Network, division: Division, size: int, *, experts: bool) -> float:
    """Of a token, over all of tp: what goes into the activation function and what comes out; torch keeps the gate's too."""
    wide = ffn_size(network)
    if experts and network.experts:
        wide = network.experts.shared * expert_ffn_size(network)
    return size * wide * _wide_tensors(network, division)


def _wide_tensors(network: Network, division: Division) -> int:
    if not network.gated:
        return 2
    return 4 if division.engine == "torch" else 3


def _routed(network: Network, division: Division, size: int) -> float:
    """Of a token on one GPU with experts in balance: its copies' inputs and outputs, and the part in the experts over tp."""
    assert network.experts is not None
    wide = expert_ffn_size(network) / division.tp
    inside = size * wide * _wide_tensors(network, division) - _narrow(division) * wide
    outside = (2 * size - _narrow(division)) * network.hidden
    return network.experts.active * (outside + inside) + 8 * network.experts.count


def _every_second_matrix(network: Network, size: int) -> float:
    """What torchtitan's selective recomputation keeps of a token: attention's output, and of the matrices every second one.

    With a layer's input and the down matrix's output, both of width h. torchtitan, distributed/activation_checkpoint.py.
    """
    return size * (2 * query_size(network) + kv_size(network) + ffn_size(network))


def _passing(network: Network, division: Division, size: int) -> float:
    """Of a token: gradient of the widest pair of tensors, and of the layer's output; with sequence parallelism gathered."""
    wide = ffn_size(network) * (2 if network.gated else 1)
    if network.experts:
        wide = max(wide, network.experts.active * expert_ffn_size(network) * (2 if network.gated else 1))
    across = max(wide, query_size(network) + 2 * kv_size(network)) / division.tp
    return size * (across + network.hidden * (2 if division.sequence_parallel else 1))


def in_flight(division: Division, *, stage: int, micro_batches: int) -> float:
    """Micro batches whose activations a stage holds at most, in whole passes through its layers; one forward, one backward.

    Narayanan et al. 2021, section 2.2: p - i of stage i; interleaved, 2 (p - i - 1) + (v - 1) p + 1 pieces of 1/v each.
    """
    before = division.pp - stage
    if division.virtual == 1:
        return min(micro_batches, before)
    pieces = 2 * (before - 1) + (division.virtual - 1) * division.pp + 1
    return min(micro_batches * division.virtual, pieces) / division.virtual


def stage_activations(
    network: Network,
    division: Division,
    *,
    sequence: int,
    micro_batches: int,
    flash_attention: bool,
    stage: int,
) -> Stage:
    """Peak of one pipeline stage. DeepSpeed and torch keep the stage's output of each micro batch in flight as well."""
    dense = layer(network, division, sequence=sequence, flash_attention=flash_attention)
    layers = stage_layers(network.layers, division.pp)[stage]
    with_experts = expert_layers(network, division)[stage]
    sparse = dense
    if with_experts:
        sparse = layer(network, division, sequence=sequence, flash_attention=flash_attention, experts=True)
    kept = (layers - with_experts) * dense.kept + with_experts * sparse.kept
    if division.pp > 1 and division.engine != "megatron":
        kept += micro_tokens(division, sequence) * element_bytes(division) * network.hidden
    again = max(dense.whole - dense.kept, sparse.whole - sparse.kept)
    last = stage == division.pp - 1
    return Stage(
        kept=kept * in_flight(division, stage=stage, micro_batches=micro_batches),
        working=again + max(dense.passing, sparse.passing),
        logits=logits(network, division, sequence=sequence) if last else 0.0,
        spare=_copies_of_logits(network, division, sequence=sequence) if last else 0.0,
    )


def logits(network: Network, division: Division, *, sequence: int) -> float:
    """The output over the vocabulary and its loss, with what goes into the last matrix, and its gradient where gathered."""
    tokens, size = micro_tokens(division, sequence), element_bytes(division)
    around = size * network.hidden * (3 if division.sequence_parallel else 2)
    return tokens * (around + network.vocab / division.tp * _logit_bytes(division))


def _copies_of_logits(network: Network, division: Division, *, sequence: int) -> float:
    """None where the vocabulary is divided: DTensor has no fused loss."""
    if division.tp > 1:
        return 0.0
    more = _logit_bytes(division) - LOGIT_BYTES_MEGATRON - (element_bytes(division) - 2)
    return micro_tokens(division, sequence) * network.vocab / division.tp * more


def _logit_bytes(division: Division) -> int:
    """Megatron-DeepSpeed takes Megatron's loss; what DeepSpeed trains otherwise, such as Hugging Face's networks, torch's."""
    more = element_bytes(division) - 2
    if division.engine == "megatron" or (division.engine == "deepspeed" and division.tp * division.pp > 1):
        return LOGIT_BYTES_MEGATRON + more
    return (LOGIT_BYTES_LOSS_PARALLEL if division.tp > 1 else LOGIT_BYTES_TORCH) + more
