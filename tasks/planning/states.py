"""What parameters take of one GPU: weights, gradients, optimizer state, by precision, engine, ZeRO stage and offload.

Pure. Activations are activations.py; the sum is memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.planning.case import Network
from tasks.planning.counts import Parameters, ffn_size, query_size, stage_layers
from tasks.planning.prediction import Division

LIVE_PARAMETERS = 1_000_000_000
"""Most that DeepSpeed's ZeRO-3 holds gathered: `stage3_max_live_parameters`, default (deepspeed.ai, docs/config-json)."""
BUCKET_PARAMETERS = 500_000_000
"""Gradients that DeepSpeed reduces at once: `reduce_bucket_size`, default; two of them, for it overlaps."""


@dataclass(frozen=True)
class Each:
    """Bytes of one parameter before anything is divided."""

    weights: float
    gradients: float
    optimizer: float


@dataclass(frozen=True)
class States:
    """Bytes of one GPU."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights in half precision beside the float32 ones, and those of other GPUs while they are needed."""
    copies: float
    """Gradients a second time: buckets, float32 copies for the optimizer."""
    host: float
    """What this GPU has in its host's memory."""
    spare: float
    """Of the gradients, what Megatron-LM does not take when it accumulates and reduces them in bf16, as NeMo's recipes do."""


def bytes_each(division: Division) -> Each:
    """By precision and engine.

    Megatron-LM (megatron/training/theoretical_memory_usage.py and its README): bf16 2 + 4 + 12, fp16 2 + 2 + 16 (with the float32
    copy of the gradients), fp32 4 + 4 + 8. In fp8 Transformer Engine holds the matrices and their transposes for the bf16 ones.
    DeepSpeed (Rajbhandari et al. 2020, K = 12): 2 + 2 + 12; its bf16 optimizer, up to stage 1, accumulates gradients in float32
    beside those in bf16, 4 more, and divides neither (BigScience, tr11-176B-ml/chronicles-prequel.md, 02-28).
    torch trains float32 weights, under autocast or FSDP2: 4 + 4 + 8.
    """
    if division.engine == "torch" or division.precision == "fp32":
        return Each(4, 4, 8)
    if division.engine == "deepspeed":
        return Each(2, 6 if division.precision == "bf16" and division.zero <= 1 else 2, 12)
    return {"bf16": Each(2, 4, 12), "fp16": Each(2, 2, 16), "fp8": Each(2, 4, 12)}[division.precision]


def sharing(division: Division) -> tuple[int, float]:
    """Over how many GPUs ZeRO divides what is dense, and what belongs to experts."""
    ranks = division.dp * division.cp
    return ranks, max(1.0, ranks / division.ep)


def states(network: Network, division: Division, of: Parameters) -> States:
    """Of one GPU with these parameters (counts.gpu_parameters)."""
    each, (dense, sparse) = bytes_each(division), sharing(division)
    shared = of.dense / dense + of.experts / sparse
    weights = each.weights * (shared if division.zero >= 3 else of.total)
    gradients = each.gradients * (shared if division.zero >= 2 else of.total)
    optimizer = each.optimizer * (shared if division.zero >= 1 else of.total)
    host = 0.0
    if division.offload != "none":
        host, optimizer = optimizer, 0.0
        if division.engine != "megatron":
            host, gradients = host + gradients / each.gradients * 4, 0.0
        if division.zero == 3:
            host, weights = host + weights, 0.0
    if division.zero == 3 and division.engine == "torch" and division.pp > 1:
        gradients = each.gradients * of.total  # kept whole until the last micro batch of a step
    return States(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=_gathered(network, division, of),
        copies=_copies(division, of, shared),
        host=host,
        spare=gradients / 2 if division.engine == "megatron" and division.precision in ("bf16", "fp8") else 0.0,
    )


def _gathered(network: Network, division: Division, of: Parameters) -> float:
    """FSDP2: two layers and the two ends of the network; with pipeline stages all of the stage, for weights stay gathered.

    DeepSpeed's ZeRO-3: four bytes of its largest matrix (DeepSpeed's own estimate, docs/code-docs/source/memory.rst), or as much
    as it may hold alive. Under autocast: the weights in bf16, for the backward pass.
    """
    half = 4 if division.precision == "fp32" else 2
    if division.zero < 3:
        return half * of.total if division.engine == "torch" and division.precision != "fp32" else 0.0
    if division.engine == "deepspeed":
        largest = network.hidden * max(ffn_size(network), query_size(network), network.vocab) / division.tp
        whole = of.total * division.pp
        return max(2 * half * largest, half * min(LIVE_PARAMETERS, whole))
    if division.pp > 1:
        return half * of.total
    return half * (of.total - of.layers + 2 * of.layers / stage_layers(network.layers, division.pp)[0])


def _copies(division: Division, of: Parameters, shared: float) -> float:
    """Gradients a second time, while activations are there.

    Megatron-LM's local data parallelism flattens fp16 gradients to reduce them: 2 bytes (seen in the V100 logs that
    benchmarks/planning_memory.py compares). DeepSpeed's ZeRO: a float32 copy of its share, and buckets.
    """
    if division.engine == "megatron":
        return 2 * of.total if division.precision == "fp16" and division.zero == 0 else 0.0
    if division.engine == "torch" or division.offload != "none" or division.precision == "fp32":
        return 0.0
    if division.zero == 0:
        return 0.0
    in_float32 = bytes_each(division).gradients > 2
    buckets = 2 * (4 if in_float32 else 2) * min(BUCKET_PARAMETERS, of.total / 2)
    return buckets + (0 if in_float32 else 4 * shared)


def step_copies(division: Division, of: Parameters) -> float:
    """Bytes that only the optimizer's step needs, when activations are gone: DeepSpeed without ZeRO, gradients in float32."""
    plain = division.engine == "deepspeed" and division.zero == 0 and bytes_each(division).gradients == 2
    return 4 * of.total if plain else 0.0
