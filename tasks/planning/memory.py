"""What a training takes of the fullest GPU, by part, and whether that fits; and of a rank without a GPU. Pure.

Total is what the process's allocator holds at its peak
(torch.cuda.max_memory_reserved); the driver's and CUDA's own is not in it, nor in a machine's usable memory.
Activations are counted operation by operation as Korthikanti et al. 2022 (section 4) do; where their network is meant the sum is
theirs (tests/unit/tasks/planning/test_memory.py). Compared with published figures: benchmarks/planning_memory.py and
docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from tasks.planning.prediction import GIB, Divided, Division, Fit, Memory

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine

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


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a kind of device keep for the backward pass, where kinds differ."""

    norm: int
    """Tensors of width h that an RMSNorm keeps; a LayerNorm keeps two, its input and its output."""
    rotated: bool
    """Whether torch rotates queries and keys into copies that are kept."""
    masks: bool
    """Whether networks with biases have dropout, whose masks are kept: GPT-3 and its kind."""
    statistics: int
    """Bytes that flash attention keeps of a head and token."""


GPU = Kernels(norm=2, rotated=True, masks=True, statistics=4)
CPU = Kernels(norm=3, rotated=False, masks=False, statistics=0)
"""As transformers builds a Llama: what a norm normalised is kept too. Compared with what autograd keeps: test_planning.py."""


def layer(of: Divided, *, experts: bool = False, kernels: Kernels = GPU) -> Layer:
    """What one layer keeps of one micro batch.

    In fp8 Transformer Engine keeps what goes into a matrix in one byte: after the norms and the activation function, of experts
    too, and of what comes out of attention one byte more.
    """
    network, division = of.network, of.division
    tokens, size, tp = of.tokens, division.element_bytes, division.tp
    along = tp if division.sequence_parallel else 1
    narrow = _narrow(division)
    outside = (_outside(network, size, kernels) - 2 * narrow * network.hidden) / along
    wide = network.experts.shared * expert_ffn_size(network) if experts and network.experts else ffn_size(network)
    inside = (_attention(network, division, kernels) + size * wide * _wide_tensors(network, division)) / tp
    inside += narrow * (query_size(network) - (0 if experts else ffn_size(network))) / tp
    routed = _routed(network, division) if experts else 0.0
    heads = network.heads / tp
    scores = 0.0 if of.flash_attention else SCORE_BYTES * size / 2 * heads * of.sequence
    statistics = kernels.statistics * heads if of.flash_attention else 0.0
    whole = tokens * (outside + inside + routed + scores + statistics)
    kept = {"none": whole, "selective": whole - tokens * scores, "full": tokens * size * network.hidden / along}[
        division.recompute
    ]
    if division.recompute == "selective" and division.counted.plain_torch:
        # torchtitan keeps attention's output and every second matrix's, with a layer's input and the down matrix's output, both
        # of width h (distributed/activation_checkpoint.py).
        seconds = size * (2 * query_size(network) + kv_size(network) + ffn_size(network))
        kept = tokens * (seconds / tp + 2 * size * network.hidden / along)
    return Layer(whole, min(kept, whole), tokens * _passing(network, division))


def _narrow(division: Division) -> int:
    """Bytes that an element which goes into a matrix takes less in fp8: Transformer Engine keeps what it has quantized.

    Linear and GroupedLinear alike (transformer_engine/pytorch/module/linear.py, grouped_linear.py: `save_for_backward`).
    """
    return 1 if division.precision == "fp8" and division.counted.narrow_fp8 else 0


def _outside(network: Network, size: int, kernels: Kernels) -> float:
    """Of a token, what tensor parallelism alone does not divide: what both norms keep, masks of dropout."""
    norms = 2 * (kernels.norm if network.gated else 2)
    return network.hidden * (norms * size + (2 if kernels.masks and has_biases(network) else 0))


def _attention(network: Network, division: Division, kernels: Kernels) -> float:
    """Of a token, over all of tp: queries, keys, values and what comes out; torch rotates queries and keys into copies."""
    keys = kv_size(network) * max(1.0, division.tp / kv_heads(network))
    copied = kernels.rotated and division.counted.plain_torch and network.gated
    return division.element_bytes * (2 * query_size(network) + 2 * keys + (query_size(network) + keys if copied else 0))


def _wide_tensors(network: Network, division: Division) -> int:
    """Of the feed-forward part: what goes into the activation function and what comes out; torch keeps the gate's too."""
    if not network.gated:
        return 2
    return 4 if division.counted.plain_torch else 3


def _routed(network: Network, division: Division) -> float:
    """Of a token on one GPU with experts in balance: its copies' inputs and outputs, and the part in the experts over tp."""
    assert network.experts is not None
    size, wide = division.element_bytes, expert_ffn_size(network) / division.tp
    inside = size * wide * _wide_tensors(network, division) - _narrow(division) * wide
    outside = (2 * size - _narrow(division)) * network.hidden
    return network.experts.active * (outside + inside) + 8 * network.experts.count


def _passing(network: Network, division: Division) -> float:
    """Of a token: gradient of the widest pair of tensors, and of the layer's output; with sequence parallelism gathered."""
    wide = ffn_size(network) * (2 if network.gated else 1)
    if network.experts:
        wide = max(wide, network.experts.active * expert_ffn_size(network) * (2 if network.gated else 1))
    across = max(wide, query_size(network) + 2 * kv_size(network)) / division.tp
    return division.element_bytes * (across + network.hidden * (2 if division.sequence_parallel else 1))


def in_flight(division: Division, *, stage: int, micro_batches: int) -> float:
    """Micro batches whose activations a stage holds at most, in whole passes through its layers; one forward, one backward.

    Narayanan et al. 2021, section 2.2: p - i of stage i; interleaved, 2 (p - i - 1) + (v - 1) p + 1 pieces of 1/v each.
    """
    before = division.pp - stage
    if division.virtual == 1:
        return min(micro_batches, before)
    pieces = 2 * (before - 1) + (division.virtual - 1) * division.pp + 1
    return min(micro_batches * division.virtual, pieces) / division.virtual


def stage_activations(of: Divided, *, stage: int) -> Stage:
    """Peak of one pipeline stage. DeepSpeed and torch keep the stage's output of each micro batch in flight as well."""
    network, division = of.network, of.division
    dense = layer(of)
    layers = stage_layers(network.layers, division.pp)[stage]
    with_experts = expert_layers(network, division)[stage]
    sparse = layer(of, experts=True) if with_experts else dense
    kept = (layers - with_experts) * dense.kept + with_experts * sparse.kept
    if division.pp > 1 and division.counted.keeps_stage_input:
        kept += of.tokens * division.element_bytes * network.hidden
    again = max(dense.whole - dense.kept, sparse.whole - sparse.kept)
    last = stage == division.pp - 1
    copies = 0.0
    if last and division.tp == 1:  # DTensor, where the vocabulary is divided, has no fused loss
        more = _logit_bytes(division) - LOGIT_BYTES_MEGATRON - (division.element_bytes - 2)
        copies = of.tokens * network.vocab / division.tp * more
    return Stage(
        kept=kept * in_flight(division, stage=stage, micro_batches=max(1, of.micro_batches)),
        working=again + max(dense.passing, sparse.passing),
        logits=logits(of) if last else 0.0,
        spare=copies,
    )


def logits(of: Divided, *, kernels: Kernels = GPU) -> float:
    """The output over the vocabulary and its loss, with what the last norm keeps, and its gradient where gathered."""
    network, division = of.network, of.division
    norm = kernels.norm if network.gated else 2
    around = division.element_bytes * network.hidden * (3 if division.sequence_parallel else norm)
    return of.tokens * (around + network.vocab / division.tp * _logit_bytes(division))


def _logit_bytes(division: Division) -> int:
    """Megatron-DeepSpeed takes Megatron's loss; what DeepSpeed trains otherwise, such as Hugging Face's networks, torch's."""
    more = division.element_bytes - 2
    fused = division.counted.fused_loss
    if fused == "always" or (fused == "divided" and division.tp * division.pp > 1):
        return LOGIT_BYTES_MEGATRON + more
    return (LOGIT_BYTES_LOSS_PARALLEL if division.tp > 1 else LOGIT_BYTES_TORCH) + more


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


def states(network: Network, division: Division, of: Parameters) -> States:
    """Of one GPU with these parameters (counts.gpu_parameters)."""
    each, ranks = bytes_each(division), division.dp * division.cp  # over which ZeRO divides what is dense
    shared = of.dense / ranks + of.experts / max(1.0, ranks / division.ep)
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


def memory(of: Divided, machine: Machine) -> Memory:
    """Of the fullest GPU over all pipeline stages."""
    layers = stage_layers(of.network.layers, of.division.pp)
    # The first, the last, and the first of those with the most layers: a later one with no more holds fewer micro batches.
    candidates = {0, of.division.pp - 1, layers.index(max(layers))}
    return max((memory_of_stage(of, machine, stage=stage) for stage in candidates), key=lambda one: one.total)


def memory_of_stage(of: Divided, machine: Machine, *, stage: int) -> Memory:
    """Of one GPU of one pipeline stage, counted from 0."""
    network, division = of.network, of.division
    activations = stage_activations(of, stage=stage)
    local = gpu_parameters(network, division, sequence=of.sequence, stage=stage)
    held = states(network, division, local)
    with_zero = division.counted.gradient_buckets and division.zero >= 1
    # DeepSpeed without ZeRO needs the gradients in float32 for the optimizer's step only, when activations are gone.
    plain = division.counted.gradient_buckets and division.zero == 0 and bytes_each(division).gradients == 2
    step = 4 * local.total if plain else 0.0
    taken = _added(held, activations, step=step, stage=stage, with_zero=with_zero)
    if not with_zero or division.pp == 1:
        taken = replace(taken, loose=taken.parts["fragmentation"])
    gpus = min(machine.gpus, division.gpus)
    taken = replace(taken, host=held.host * gpus)
    offloads = division.counted.offloads_weights_again and division.zero == 3 and division.offload != "none"
    if offloads and division.recompute == "full" and taken.total > machine.usable_memory_bytes:
        # DeepSpeed's `cpu_checkpointing`, taken where nothing else makes it fit: of layers' inputs the GPU keeps two.
        moved = max(activations.kept - 2 * of.tokens * division.element_bytes * network.hidden, 0.0)
        return replace(taken, activations=taken.activations - moved, host=taken.host + moved * gpus)
    return taken


def memory_of_cpu_rank(of: Divided, *, trained: int, frozen: int, share: float) -> float:
    """Bytes of a rank without a GPU, in float32: its `share` of the state, and all layers' activations and the logits.

    `trained` parameters have gradients and optimizer state, `frozen` ones beside them neither. Nothing is computed again, and no
    allocator keeps gaps. Assumes DDP with `gradient_as_bucket_view=True`; else its buckets are a second copy of the gradients.
    """
    each = bytes_each(of.division)
    state = (each.weights + each.gradients + each.optimizer) * trained + each.weights * frozen
    activations = of.network.layers * layer(of, kernels=CPU).whole + logits(of, kernels=CPU)
    return state * share + activations


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
            for option, saved in ((FUSED_LOSS, activations.spare if of_loss else 0.0), (HALF_GRADIENTS, held.spare))
            if saved
        },
    )
