"""Seconds of one optimizer step: the slowest pipeline stage's work, its traffic as far as nothing hides it, and the bubble. Pure.

Memory is memory.py; a whole plan predict.py. See docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tasks.config.engines.registry import ENGINES
from tasks.config.training import EngineName
from tasks.hardware.machine import Machine
from tasks.planning import counts, traffic
from tasks.planning.case import Network, Precision
from tasks.planning.constants import DEFAULT, Constants
from tasks.planning.prediction import Division, StepTime

# One micro batch on one GPU of each pipeline stage, in seconds, and which stage all others wait for. Pure.
#
# See docs/planning.md.


@dataclass(frozen=True)
class Stage:
    """One micro batch on one GPU of a pipeline stage, in seconds."""

    index: int
    layers: int
    work: Work
    tensor: float
    context: float
    expert: float
    idle: float
    """That the host needs longer to launch the kernels than the GPU to run them."""

    @property
    def total(self) -> float:
        return self.work.total + self.tensor + self.context + self.expert + self.idle


@dataclass(frozen=True)
class Layers:
    """One micro batch on one layer, in seconds."""

    dense: Work
    sparse: Work
    """Of a layer with experts."""
    tensor: float
    context: float
    expert: float
    launching: float


def slowest_stage(
    network: Network,
    division: Division,
    *,
    sequence: int,
    machine: Machine,
    at: Rates,
    flash: bool,
    constants: Constants,
) -> Stage:
    """The last stage computes the output too; of the others, the one of most layers is as slow as any."""
    numbers = counts.stage_layers(network.layers, division.pp)
    sparse = counts.expert_layers(network, division)
    each = _layers(network, division, sequence=sequence, machine=machine, at=at, flash=flash, constants=constants)
    work = output_work(network, division, sequence=sequence, at=at)
    last = division.pp - 1
    fullest = max(range(division.pp), key=lambda stage: numbers[stage])
    return max(
        (
            _stage(stage, numbers[stage], sparse[stage], each, extra=work if stage == last else Work())
            for stage in {fullest, last}
        ),
        key=lambda stage: stage.total,
    )


def exposed(seconds: float, computing: float, constants: Constants) -> float:
    """What of a traffic of `seconds` a `computing` beside it does not hide; what it hides costs it a little speed."""
    hidden = min(seconds, constants.overlap * computing)
    return seconds - hidden + constants.contention * hidden


def _layers(
    network: Network,
    division: Division,
    *,
    sequence: int,
    machine: Machine,
    at: Rates,
    flash: bool,
    constants: Constants,
) -> Layers:
    dense = layer_work(network, division, sequence=sequence, at=at, flash=flash, experts=False)
    sparse = dense
    if network.experts is not None:
        sparse = layer_work(network, division, sequence=sequence, at=at, flash=flash, experts=True)
    tensor = traffic.tensor_seconds(network, division, sequence=sequence, machine=machine, constants=constants)
    ring = traffic.context_seconds(network, division, sequence=sequence, machine=machine, constants=constants)
    return Layers(
        dense=dense,
        sparse=sparse,
        tensor=tensor * constants.tensor_exposed,
        context=exposed(ring, dense.attention, constants),
        expert=traffic.expert_seconds(network, division, sequence=sequence, machine=machine, constants=constants),
        launching=constants.launch * passes(division) / 3,
    )


def _stage(index: int, layers: int, with_experts: int, each: Layers, *, extra: Work) -> Stage:
    done = each.dense.times(layers - with_experts).plus(each.sparse.times(with_experts)).plus(extra)
    tensor = each.tensor * layers
    return Stage(
        index=index,
        layers=layers,
        work=done,
        tensor=tensor,
        context=each.context * layers,
        expert=each.expert * with_experts,
        idle=max(0.0, each.launching * layers - done.total - tensor),
    )


# Seconds of one GPU's own work: matmuls by shape, attention, what only moves bytes. Pure.
#
# See docs/planning.md.


BACKWARD_OF_FLASH = 2.5
"""Five matmuls backward for two forward, for the scores are computed again: Dao 2023, section 3.2."""
BEFORE_HOPPER = 0.73 / 0.35
"""How much nearer attention comes to the matmuls of a GPU before Hopper, by kernels that do not use what Hopper brought: at most
73 % of A100's rate (Dao 2023, FlashAttention-2), 35 % of H100's (Shah et al. 2024, FlashAttention-3, abstract)."""
SCORE_BYTES_FORWARD = 13
"""Of one number of the sequence x sequence matrix in 16 bits: written by the matmul, read and written by softmax, read and
written by dropout with a mask of one byte, read by the matmul (the fused kernels of Megatron-LM)."""
SCORE_BYTES_BACKWARD = 17
"""As forward: the gradients of the product, of dropout (with its mask) and of softmax, which reads its own result too."""


@dataclass(frozen=True)
class Rates:
    """What one GPU reaches in one precision: operations and bytes a second."""

    matmul: float
    attention_matmul: float
    """Attention stays in 16 bits where the layers' matmuls are in 8."""
    flash: float
    memory: float
    """Of kernels that only move bytes."""
    unfused: float
    """Times the bytes that fused kernels move."""
    traffic: float
    """Seconds that a byte of a matmul's traffic costs on top of its operations."""
    element_bytes: int


def rates(
    machine: Machine, precision: Precision, *, engine: EngineName = "megatron", constants: Constants = DEFAULT
) -> Rates:
    """ValueError when the machine has no rate for the precision."""
    best = _achievable(machine, precision)
    sixteen = best if precision == "fp32" else _achievable(machine, "bf16" if precision == "fp8" else precision)
    counted, flash = ENGINES[engine].planned, constants.flash_efficiency
    if counted.plain_torch:
        hopper = machine.achievable_flops.get("fp8", 0.0) > 0  # the first with matmuls in 8 bits
        flash = constants.flash_efficiency_torch * (1.0 if hopper else BEFORE_HOPPER)
    return Rates(
        matmul=best * constants.sustained,
        attention_matmul=sixteen * constants.sustained,
        flash=sixteen * flash,
        memory=machine.memory_bandwidth * constants.memory_efficiency,
        unfused=1.0 if counted.fused_kernels else constants.unfused,
        traffic=constants.matmul_ridge / machine.memory_bandwidth,
        element_bytes=4 if precision == "fp32" else 2,
    )


def _achievable(machine: Machine, precision: Precision) -> float:
    result = machine.achievable_flops.get(precision, 0.0)
    if result <= 0:
        able = ", ".join(sorted(name for name, rate in machine.achievable_flops.items() if rate > 0))
        raise ValueError(f"precision {precision}: {machine.gpu} has no rate for it; it computes in {able}")
    return result


def matmul_seconds(m: float, n: float, k: float, at: Rates) -> float:
    """Of an m x k matrix times a k x n: its operations, and that part of moving the three matrices that they do not hide.

    So a matmul that is thin in one dimension (a small micro batch, a layer divided over many GPUs) is slower per operation.
    """
    return 2 * m * n * k / at.matmul + at.element_bytes * (m * k + k * n + m * n) * at.traffic


def attention_seconds(sequence: int, queries: float, *, samples: float, at: Rates, flash: bool) -> tuple[float, float]:
    """Forward and backward between queries, keys and values of width `queries` on this GPU; bytes of the scores not included.

    Flash attention computes half of the square (causal).
    """
    square = 4.0 * sequence * sequence * queries * samples
    if flash:
        return square / 2 / at.flash, BACKWARD_OF_FLASH * square / 2 / at.flash
    return square / at.attention_matmul, 2 * square / at.attention_matmul


def moving_seconds(total: float, at: Rates) -> float:
    """Of kernels that read and write `total` bytes and compute next to nothing."""
    return total / at.memory


# What one GPU of a pipeline stage computes for one micro batch: seconds of matmuls, attention and moved bytes. Pure.
#
# What is sent between GPUs is traffic.py. See docs/planning.md.


NORMS_AND_RESIDUALS = 10
"""Numbers of width h that a layer's forward moves: two norms read and write one, two additions read two and write one."""
COPIES_OF_A_TOKEN = 8
"""Numbers of width h moved for each expert that a token goes to, forward: sorted by rank, sorted by expert, and both back, each
read and written."""
BYTES_OF_A_LOGIT = 30
"""Moved for one, forward and backward: written in 16 bits, read, kept as 32, its largest and its sum found, its gradient."""


@dataclass(frozen=True)
class Work:
    """Seconds of one micro batch."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound

    def times(self, number: float) -> Work:
        return Work(self.matmul * number, self.attention * number, self.memory_bound * number)

    def plus(self, other: Work) -> Work:
        return Work(
            self.matmul + other.matmul, self.attention + other.attention, self.memory_bound + other.memory_bound
        )


def layer_work(network: Network, division: Division, *, sequence: int, at: Rates, flash: bool, experts: bool) -> Work:
    """Of one layer, forward and backward, with what is computed again."""
    tokens = division.micro * sequence / division.cp
    forward_attention, backward_attention = attention_seconds(
        sequence,
        counts.query_size(network) / division.tp,
        samples=division.micro / division.cp,
        at=at,
        flash=flash,
    )
    scores = 0.0 if flash else network.heads / division.tp * division.micro * sequence * (sequence / division.cp)
    forward_scores = moving_seconds(scores * SCORE_BYTES_FORWARD, at)
    backward_scores = moving_seconds(scores * SCORE_BYTES_BACKWARD, at)
    matrices = _matrices(network, division, tokens=tokens, at=at, experts=experts)
    numbers = _moved_bytes(network, division, tokens=tokens, at=at, experts=experts)
    moved = moving_seconds(numbers * at.unfused, at)
    full = division.recompute == "full"
    core = full or (division.recompute == "selective" and not flash)
    again = passes(division)
    return Work(
        matmul=matrices * again,
        attention=forward_attention * (2 if core else 1) + backward_attention,
        memory_bound=moved * again + forward_scores * (2 if core else 1) + backward_scores,
    )


def passes(division: Division) -> float:
    """Forward passes that a layer's matrices and small kernels cost: one, two backward, and what is computed again.

    PyTorch's selective checkpointing computes every other matmul again (torchtitan); Megatron-LM's only attention's core.
    """
    if division.recompute == "full":
        return 4.0
    return 3.5 if division.recompute == "selective" and division.counted.plain_torch else 3.0


def output_work(network: Network, division: Division, *, sequence: int, at: Rates) -> Work:
    """Of the output over the vocabulary and the loss, on the last stage."""
    tokens = division.micro * sequence / division.cp
    wide = network.vocab / division.tp
    return Work(
        matmul=3 * matmul_seconds(tokens, wide, network.hidden, at),
        memory_bound=moving_seconds(BYTES_OF_A_LOGIT * tokens * wide, at),
    )


def _matrices(network: Network, division: Division, *, tokens: float, at: Rates, experts: bool) -> float:
    """Seconds of a layer's matmuls forward."""
    hidden, query = network.hidden, counts.query_size(network) / division.tp
    keys = counts.kv_size(network) / min(division.tp, counts.kv_heads(network))
    seconds = matmul_seconds(tokens, query + 2 * keys, hidden, at)
    seconds += matmul_seconds(tokens, hidden, query, at)
    mixture = network.experts if experts else None
    if mixture is None:
        return seconds + _feed_forward(network, counts.ffn_size(network) / division.tp, tokens=tokens, at=at)
    width = counts.expert_ffn_size(network) / division.tp
    local = mixture.count / division.ep
    each = tokens * mixture.active / local
    seconds += local * _feed_forward(network, width, tokens=each, at=at)
    if mixture.shared:
        seconds += _feed_forward(network, mixture.shared * width, tokens=tokens, at=at)
    return seconds


def _feed_forward(network: Network, width: float, *, tokens: float, at: Rates) -> float:
    up = counts.ffn_matrices(network) - 1
    return matmul_seconds(tokens, up * width, network.hidden, at) + matmul_seconds(tokens, network.hidden, width, at)


def _moved_bytes(network: Network, division: Division, *, tokens: float, at: Rates, experts: bool) -> float:
    """Bytes that a layer's forward moves outside of its matmuls and scores.

    Rotated or transposed queries, keys and values are read and written; an activation is read, with its gate, and written. With
    experts each token is sorted to its experts and added up again.
    """
    share = division.tp if division.sequence_parallel else 1
    mixture = network.experts if experts else None
    width: float = counts.ffn_size(network)
    if mixture:
        width = (mixture.active + mixture.shared) * counts.expert_ffn_size(network)
    numbers = NORMS_AND_RESIDUALS * network.hidden / share
    numbers += 2 * (counts.query_size(network) + 2 * counts.kv_size(network)) / division.tp
    numbers += counts.ffn_matrices(network) * width / division.tp
    numbers += COPIES_OF_A_TOKEN * mixture.active * network.hidden / share if mixture else 0
    return numbers * tokens * at.element_bytes


OPTIMIZER_BYTES = 34
"""Moved for one parameter by Adam in mixed precision: gradient read twice (its norm, the update), weight and two moments of four
bytes read and written, the short weight written."""
FP32_OPTIMIZER_BYTES = 32
ACCUMULATED_BYTES = 8
"""Moved for one parameter by adding a micro batch's gradient in float32."""


def step_time(
    network: Network,
    division: Division,
    *,
    sequence: int,
    global_batch: int,
    machine: Machine,
    flash_attention: bool = True,
    constants: Constants = DEFAULT,
) -> StepTime:
    """Of the division as it is: whether it is possible is predict.py's.

    With offload, gathering weights is not hidden: a GPU's adapter and its way to the host share one PCIe switch (ND A100 v4), and
    DeepSpeed's runs on Azure are slower by about that traffic.
    """
    at = rates(machine, division.precision, engine=division.engine, constants=constants)
    slowest = slowest_stage(
        network, division, sequence=sequence, machine=machine, at=at, flash=flash_attention, constants=constants
    )
    micro_batches = division.micro_batches(global_batch)
    held = counts.gpu_parameters(network, division, sequence=sequence, stage=slowest.index).total
    sending = traffic.pipeline_seconds(network, division, sequence=sequence, machine=machine, constants=constants)
    if division.virtual > 1:
        sending = exposed(sending, slowest.work.total, constants)
    offload = traffic.offload_seconds(held, division, machine=machine, micro_batches=micro_batches, constants=constants)
    data = _data_parallel(
        network, division, slowest, sequence=sequence, micro_batches=micro_batches, machine=machine, constants=constants
    )
    adding = _added_bytes(held, division) * at.traffic
    parts = StepTime(
        matmul=micro_batches * (slowest.work.matmul + adding),
        attention=micro_batches * slowest.work.attention,
        memory_bound=micro_batches * slowest.work.memory_bound + moving_seconds(_optimizer_bytes(held, division), at),
        tensor_parallel=micro_batches * slowest.tensor,
        pipeline=micro_batches * sending,
        context_parallel=micro_batches * slowest.context,
        expert_parallel=micro_batches * slowest.expert,
        data_parallel=data,
        bubble=(division.pp - 1) / division.virtual * (slowest.total + sending),
        offload=offload,
        overhead=micro_batches * slowest.idle,
    )
    machines = max(1.0, division.gpus / machine.gpus)
    waiting = constants.straggling * math.log2(machines) * parts.total + constants.step
    return replace(parts, overhead=parts.overhead + waiting)


def _data_parallel(
    network: Network,
    division: Division,
    slowest: Stage,
    *,
    sequence: int,
    micro_batches: int,
    machine: Machine,
    constants: Constants,
) -> float:
    """Seconds of gradients and weights of a step that computing does not hide."""
    held = counts.gpu_parameters(network, division, sequence=sequence, stage=slowest.index)
    once, every = traffic.data_seconds(held, division, layers=slowest.layers, machine=machine, constants=constants)
    computing = slowest.work.total
    seconds = exposed(once, computing * _overlapped_micro_batches(division, micro_batches), constants)
    return seconds + micro_batches * exposed(every, computing if division.offload == "none" else 0.0, constants)


def _overlapped_micro_batches(division: Division, micro_batches: int) -> float:
    """Micro batches whose computing runs beside the traffic of once a step.

    Gradients are reduced while the last backward goes on, weights gathered while the first forward does; with interleaving,
    pieces are ready one after the other through as many micro batches as there are stages. Megatron-LM without its
    distributed optimizer waits until all is computed (Narayanan et al. 2021).
    """
    if division.counted.reduces_after_backward and not division.zero:
        return 0.0
    share = 1.0 if division.zero else 2 / 3
    return share * (min(division.pp, micro_batches) if division.virtual > 1 else 1)


def _optimizer_bytes(parameters: float, division: Division) -> float:
    """Of one step on one GPU; none where the host updates."""
    if division.offload != "none":
        return 0.0
    own = parameters / (division.dp * division.cp if division.zero else 1)
    return own * (FP32_OPTIMIZER_BYTES if division.precision == "fp32" else OPTIMIZER_BYTES)


def _added_bytes(parameters: float, division: Division) -> float:
    """Of adding one micro batch's gradients to those before it, which the matmul itself does; ZeRO 3 keeps only its own part."""
    return 0.0 if division.zero == 3 and division.pp == 1 else ACCUMULATED_BYTES * parameters
