"""What a training takes of the fullest GPU, by part, and whether that fits. Pure.

Total is what the process's allocator holds at its peak
(torch.cuda.max_memory_reserved); the driver's and CUDA's own is not in it, nor in a machine's usable memory.
Compared with published figures: benchmarks/planning_memory.py and docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.hardware.machine import Machine
from tasks.planning.case import Network
from tasks.planning.counts import (
    Parameters,
    expert_ffn_size,
    expert_layers,
    ffn_size,
    gpu_parameters,
    has_biases,
    kv_heads,
    kv_size,
    query_size,
    stage_layers,
)
from tasks.planning.prediction import GIB, Division, Fit, Memory

# What a forward pass leaves in memory for the backward pass: of a layer, of a pipeline stage, at the output.
#
# Pure. Counted operation by operation as Korthikanti et al. 2022 (section 4) do; where their network is meant the sum
# is theirs (tests/unit/tasks/planning/test_memory.py). Sizes are bytes of one GPU.


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
    if division.recompute == "selective" and division.counted.plain_torch:
        kept = tokens * (_every_second_matrix(network, size) / tp + 2 * size * network.hidden / along)
    return Layer(whole, min(kept, whole), tokens * _passing(network, division, size))


def _narrow(division: Division) -> int:
    """Bytes that an element which goes into a matrix takes less in fp8: Transformer Engine keeps what it has quantized.

    Linear and GroupedLinear alike (transformer_engine/pytorch/module/linear.py, grouped_linear.py: `save_for_backward`).
    """
    return 1 if division.precision == "fp8" and division.counted.narrow_fp8 else 0


def _outside(network: Network, size: int) -> float:
    """Of a token, what tensor parallelism alone does not divide: inputs and outputs of both norms, masks of dropout.

    GPT-3 and its kind have dropout; networks without biases were trained without it.
    """
    return network.hidden * (4 * size + (2 if has_biases(network) else 0))


def _attention(network: Network, division: Division, size: int) -> float:
    """Of a token, over all of tp: queries, keys, values and what comes out; torch rotates queries and keys into copies."""
    keys = kv_size(network) * max(1.0, division.tp / kv_heads(network))
    rotated = query_size(network) + keys if division.counted.plain_torch and network.gated else 0
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
    return 4 if division.counted.plain_torch else 3


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
    if division.pp > 1 and division.counted.keeps_stage_input:
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
    fused = division.counted.fused_loss
    if fused == "always" or (fused == "divided" and division.tp * division.pp > 1):
        return LOGIT_BYTES_MEGATRON + more
    return (LOGIT_BYTES_LOSS_PARALLEL if division.tp > 1 else LOGIT_BYTES_TORCH) + more


# What parameters take of one GPU: weights, gradients, optimizer state, by precision, engine, ZeRO stage and offload.
#
# Pure.


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
    weights, gradients, optimizer = division.counted.state_bytes.get(division.precision, (4, 4, 8))
    apart = division.counted.bf16_accumulated_apart and division.precision == "bf16" and division.zero <= 1
    return Each(weights, gradients + (4 if apart else 0), optimizer)


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
        if division.counted.offloads:
            host, gradients = host + gradients / each.gradients * 4, 0.0
        if division.zero == 3:
            host, weights = host + weights, 0.0
    if division.zero == 3 and division.counted.plain_torch and division.pp > 1:
        gradients = each.gradients * of.total  # kept whole until the last micro batch of a step
    return States(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=_gathered(network, division, of),
        copies=_copies(division, of, shared),
        host=host,
        spare=gradients / 2
        if division.counted.half_gradients_option and division.precision in ("bf16", "fp8")
        else 0.0,
    )


def _gathered(network: Network, division: Division, of: Parameters) -> float:
    """FSDP2: two layers and the two ends of the network; with pipeline stages all of the stage, for weights stay gathered.

    DeepSpeed's ZeRO-3: four bytes of its largest matrix (DeepSpeed's own estimate, docs/code-docs/source/memory.rst), or as much
    as it may hold alive. Under autocast: the weights in bf16, for the backward pass.
    """
    half = 4 if division.precision == "fp32" else 2
    if division.zero < 3:
        return half * of.total if division.counted.plain_torch and division.precision != "fp32" else 0.0
    if division.counted.gathers_by_tensor:
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
    counted = division.counted
    if counted.flattens_fp16:
        return 2 * of.total if division.precision == "fp16" and division.zero == 0 else 0.0
    if not counted.gradient_buckets or division.offload != "none" or division.precision == "fp32" or division.zero == 0:
        return 0.0
    in_float32 = bytes_each(division).gradients > 2
    buckets = 2 * (4 if in_float32 else 2) * min(BUCKET_PARAMETERS, of.total / 2)
    return buckets + (0 if in_float32 else 4 * shared)


def step_copies(division: Division, of: Parameters) -> float:
    """Bytes that only the optimizer's step needs, when activations are gone: DeepSpeed without ZeRO, gradients in float32."""
    plain = division.counted.gradient_buckets and division.zero == 0 and bytes_each(division).gradients == 2
    return 4 * of.total if plain else 0.0


FRAMEWORK = 0.2 * GIB
"""Workspaces of cuBLAS and Transformer Engine, batches, tables of positions. Between steps, Megatron-LM's golden values are by
0.1 to 0.6 GiB above what their states add up to."""
FRAGMENTATION = 0.02
"""Share that the allocator holds in gaps, of all but weights, gradients and optimizer, which are laid out once. Fitted: with it
the mean error in benchmarks/planning_memory.py is -0.2 %, with 1 % -0.6, with 3 % +0.3; the median hardly depends on it."""
DEEPSPEED_GAPS = 8.4 * GIB
DEEPSPEED_GAPS_SHARE = 0.2
"""With ZeRO, instead: what nvidia-smi shows of Megatron-DeepSpeed above what is counted, the smaller of the two. Fitted on the
44 A100 runs that BigScience wrote down before BLOOM: median error 4 %. Of those that ran out of memory three of six would have
fitted without it. Without pipeline stages the allocator gives most of it back in need: DeepSpeed's tutorials, of smaller GPUs."""
TIGHT = 0.92
"""Share of the usable memory from which on a plan is tight. NCCL's buffers are outside of the allocator, 0.2 to 0.5 GiB a
communicator; a longer batch or experts out of balance take a few per cent more."""
FUSED_LOSS = "a fused loss"
HALF_GRADIENTS = "gradients reduced in bf16"
HOST_SHARE = 0.9
"""Of a machine's memory, what offloading may take; the rest is the operating system's, the loader's and pinned buffers'."""


def memory(
    network: Network,
    division: Division,
    *,
    sequence: int,
    global_batch: int,
    machine: Machine,
    flash_attention: bool = True,
) -> Memory:
    """Of the fullest GPU over all pipeline stages."""
    return max(
        (
            memory_of_stage(
                network,
                division,
                stage=stage,
                sequence=sequence,
                global_batch=global_batch,
                machine=machine,
                flash_attention=flash_attention,
            )
            for stage in _candidates(network.layers, division.pp)
        ),
        key=lambda one: one.total,
    )


def memory_of_stage(
    network: Network,
    division: Division,
    *,
    stage: int,
    sequence: int,
    global_batch: int,
    machine: Machine,
    flash_attention: bool = True,
) -> Memory:
    """Of one GPU of one pipeline stage, counted from 0."""
    activations = stage_activations(
        network,
        division,
        sequence=sequence,
        micro_batches=max(1, division.micro_batches(global_batch)),
        flash_attention=flash_attention,
        stage=stage,
    )
    of = gpu_parameters(network, division, sequence=sequence, stage=stage)
    held = states(network, division, of)
    with_zero = division.counted.gradient_buckets and division.zero >= 1
    taken = _added(held, activations, step=step_copies(division, of), stage=stage, with_zero=with_zero)
    if not with_zero or division.pp == 1:
        taken = replace(taken, loose=taken.parts["fragmentation"])
    taken = replace(taken, host=held.host * min(machine.gpus, division.gpus))
    offloads = division.counted.offloads_weights_again and division.zero == 3 and division.offload != "none"
    if offloads and division.recompute == "full" and taken.total > machine.usable_memory_bytes:
        two = 2 * micro_tokens(division, sequence) * element_bytes(division) * network.hidden
        return _without(taken, max(activations.kept - two, 0.0), gpus=min(machine.gpus, division.gpus))
    return taken


def judged(taken: Memory, machine: Machine) -> Fit:
    """Whether it fits the GPU, and what is offloaded its host.

    Tight is also what fits only with the options of Memory.spared: published runs are on both sides of that (llm-foundry's and
    NeMo's tables), and say nothing of them.
    """
    room = machine.usable_memory_bytes
    if least(taken) > room or taken.host > HOST_SHARE * machine.host_memory_bytes:
        return "does not fit"
    return "tight" if taken.total > TIGHT * room else "fits"


def least(taken: Memory) -> float:
    """What must be there: without what options save, and the allocator's gaps, which it gives back before it fails.

    (CUDACachingAllocator frees its cached blocks and tries again.) DeepSpeed's over pipeline stages stay: see DEEPSPEED_GAPS.
    """
    return taken.total - sum(taken.spared.values()) - taken.loose


def needs(taken: Memory, machine: Machine) -> tuple[str, ...]:
    """The options without which it does not fit; none where it fits as it is, and where it does not fit with them either."""
    room = machine.usable_memory_bytes
    return tuple(taken.spared) if least(taken) <= room < taken.total - taken.loose else ()


def warnings(taken: Memory, machine: Machine) -> tuple[str, ...]:
    """What a verdict of `judged` rests on, where that is not plain."""
    room, saved = machine.usable_memory_bytes, sum(taken.spared.values())
    if not needs(taken, machine):
        return ()
    return (
        f"needs {taken.total / GIB:.3g} GiB of a GPU that has {room / GIB:.3g}, and fits only with {' and '.join(taken.spared)},"
        f" which save {saved / GIB:.3g} GiB: set them in the engine, or lower batch.micro",
    )


def _candidates(layers: int, pp: int) -> set[int]:
    """Stages that can be the fullest: the first, the last, and the first of those with the most layers.

    A later stage with no more layers holds fewer micro batches.
    """
    numbers = stage_layers(layers, pp)
    return {0, pp - 1, numbers.index(max(numbers))}


def _added(held: States, activations: Stage, *, step: float, stage: int, with_zero: bool) -> Memory:
    """The peak: output and loss, or a layer's work, whichever is more; or the optimizer's step, without activations."""
    of_loss = activations.logits > activations.working
    kept = activations.kept + (0 if of_loss else activations.working)
    loss = activations.logits if of_loss else 0.0
    copies = max(held.copies, step - kept - loss)
    passing = held.gathered + copies + kept + loss
    gaps = FRAGMENTATION * passing
    if with_zero:
        everything = held.weights + held.gradients + held.optimizer + passing
        gaps = min(DEEPSPEED_GAPS, DEEPSPEED_GAPS_SHARE * everything)
    parts = {
        "logits": loss,
        "gathered weights": held.gathered,
        "copies of gradients": copies,
        "framework": FRAMEWORK,
        "fragmentation": gaps,
    }
    return Memory(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=kept,
        other=sum(parts.values()),
        parts=parts,
        stage=stage,
        spared={
            option: saved
            for option, saved in (
                (FUSED_LOSS, activations.spare if of_loss else 0.0),
                (HALF_GRADIENTS, held.spare),
            )
            if saved
        },
    )


def _without(taken: Memory, moved: float, *, gpus: int) -> Memory:
    """DeepSpeed's `cpu_checkpointing`, taken where nothing else makes it fit: of layers' inputs the GPU keeps two."""
    return replace(
        taken,
        activations=taken.activations - moved,
        host=taken.host + moved * gpus,
    )
