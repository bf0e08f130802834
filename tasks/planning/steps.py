"""Seconds of one optimizer step: the slowest pipeline stage's work, its traffic as far as nothing hides it, and the bubble. Pure.

Memory is memory.py; a whole plan predict.py. See docs/planning.md.

The traffic of one GPU of a pipeline stage is counted before any of it is hidden. Bus bandwidth is as nccl-tests define it
(doc/PERFORMANCE.md): bytes / time x (n - 1) / n, twice that for an all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tasks.config.engines.registry import ENGINES
from tasks.config.training import EngineName
from tasks.planning import counts
from tasks.planning.case import Network, Precision
from tasks.planning.prediction import DEFAULT, Constants, Divided, Division, StepTime

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine
from typing import TYPE_CHECKING

from tasks.planning.counts import Parameters

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine


@dataclass(frozen=True)
class Link:
    """What one group of ranks talks over."""

    ranks: int
    bandwidth: float
    """Bus bandwidth in bytes a second of one rank."""
    latency: float
    """Seconds of a ring before its bytes."""
    tree_latency: float
    """Seconds of a tree before its bytes; only an all-reduce may be one."""
    machines: int = 1
    """Over which the ranks lie, as many on each."""
    adapter: float = math.inf
    """Bytes a second of one rank to other machines."""
    inside: float = math.inf
    """Bytes a second of one rank to those of its own machine, where there are others."""


def link(machine: Machine, ranks: int, stride: int = 1, *, constants: Constants = DEFAULT) -> Link:
    """Of a group of `ranks` that lie `stride` apart, machines being filled one after the other.

    Machines whose GPUs share switches of links (NVL72) are one here. A group over several machines leaves each of them through
    the adapters of those of its ranks that lie there. Without a network between machines, the bandwidth of such a group is that
    of the machine's Ethernet.
    """
    if ranks * stride <= machine.joined or ranks == 1:
        return Link(
            ranks,
            machine.link_bandwidth * constants.bus_share,
            constants.link_latency,
            math.inf,
            inside=machine.link_bandwidth * constants.bus_share,
        )
    inside = max(1, min(ranks, machine.joined // stride))
    adapter = machine.network_bandwidth or machine.ethernet_bandwidth / machine.gpus
    bandwidth = min(machine.link_bandwidth or math.inf, adapter * inside) * constants.bus_share
    machines = math.ceil(ranks / inside)
    return Link(
        ranks,
        bandwidth,
        constants.network_latency + ranks * constants.hop_latency,
        constants.network_latency + 2 * math.ceil(math.log2(machines)) * constants.hop_latency,
        machines,
        adapter * constants.bus_share,
        machine.link_bandwidth * constants.bus_share if inside > 1 else math.inf,
    )


def all_gather_seconds(total: float, over: Link) -> float:
    """Of `total` bytes, as every rank has them in the end; a reduce-scatter of as many takes as long."""
    if over.ranks == 1:
        return 0.0
    return over.latency + (over.ranks - 1) / over.ranks * total / over.bandwidth


def all_reduce_seconds(total: float, over: Link) -> float:
    """Of `total` bytes on every rank, by ring or by tree, whichever starts sooner."""
    if over.ranks == 1:
        return 0.0
    return min(2 * over.latency, over.tree_latency) + 2 * (over.ranks - 1) / over.ranks * total / over.bandwidth


def dispatch_seconds(total: float, copies: int, over: Link) -> float:
    """Of `total` bytes that every rank sends in `copies`, each to a rank by chance (tokens to their experts).

    Inside a machine each copy is sent; to another machine one for all its ranks, which hand it on (DeepEP, Megatron-LM's flex
    dispatcher): of m machines, those that c copies by chance meet are m (1 - (1 - 1/m)^c).
    """
    if over.ranks == 1:
        return 0.0
    met = over.machines * (1 - (1 - 1 / over.machines) ** copies)
    outside = met * (over.machines - 1) / over.machines * total / over.adapter
    return over.latency + (over.ranks - 1) / over.ranks * copies * total / over.inside + outside


def send_seconds(total: float, over: Link) -> float:
    """Of `total` bytes from one rank to the next."""
    return over.latency + total / over.bandwidth


TENSORS = 12
"""Of a layer of GPT: weight and bias of four matrices and two norms. DeepSpeed's ZeRO 3 gathers each by itself, FSDP all at once;
so many ranks wait longer for each other (figure 5 of the page "DeepSpeed on Azure 2022" in benchmarks/planning_cases.yaml)."""
OFFLOADED_BYTES = {"cpu": 0, "nvme": 24}
"""Of optimizer state, a parameter, that pass a machine's disks in a step: weight and two moments in float32, read and written."""


def tensor_seconds(of: Divided, machine: Machine, constants: Constants) -> float:
    """Of one layer and micro batch: an all-reduce after attention and one after the feed-forward part, forward and backward.

    With sequence parallelism a reduce-scatter and an all-gather, which move as much (Korthikanti et al. 2022, section 4.2.2).
    Full recomputation sends the forward's again.
    """
    if of.division.tp == 1:
        return 0.0
    over = link(machine, of.division.tp, constants=constants)
    return (6 if of.division.recompute == "full" else 4) * all_reduce_seconds(_activation_bytes(of), over)


def context_seconds(of: Divided, machine: Machine, constants: Constants) -> float:
    """Of one layer and micro batch: keys and values go round the ring forward, they and their gradients backward."""
    division = of.division
    if division.cp == 1:
        return 0.0
    over = link(machine, division.cp, division.tp, constants=constants)
    keys = counts.kv_size(of.network) / min(division.tp, counts.kv_heads(of.network))
    message = 2 * keys * division.micro * of.sequence / division.cp * division.element_bytes
    passes = 4 if division.recompute == "full" else 3
    return passes * (division.cp - 1) * send_seconds(message, over)


def expert_seconds(of: Divided, machine: Machine, constants: Constants) -> float:
    """Of one layer with experts and micro batch: tokens go to their experts and come back, forward and backward."""
    mixture, division = of.network.experts, of.division
    if mixture is None or division.ep == 1:
        return 0.0
    over = link(machine, division.ep, division.tp, constants=constants)
    own = _activation_bytes(of) / (division.tp if division.sequence_parallel else 1)
    passes = 6 if division.recompute == "full" else 4
    return passes * dispatch_seconds(own, mixture.active, over)


def pipeline_seconds(of: Divided, machine: Machine, constants: Constants) -> float:
    """Of one micro batch on one stage: activations on, their gradients back, for each piece that the stage holds.

    Each of the tensor parallel ranks sends its part of it (Narayanan et al. 2021, section 4.1).
    """
    division = of.division
    if division.pp == 1:
        return 0.0
    over = link(machine, division.pp, division.tp * division.cp * division.dp, constants=constants)
    return 2 * division.virtual * send_seconds(_activation_bytes(of) / division.tp, over)


def data_seconds(
    held: Parameters, division: Division, machine: Machine, constants: Constants, *, layers: int
) -> tuple[float, float]:
    """Of gradients and, where ZeRO divides them, weights: once a step, and with every micro batch.

    Stages 0 and 1 reduce once a step; 2 with every micro batch; 3 also gathers the weights twice with every micro batch, layer by
    layer. In a pipeline FSDP2 keeps the weights of a step and reduces once (torchtitan), which makes 3 as 1.
    """
    ranks, stride = division.dp * division.cp, division.tp
    dense = link(machine, ranks, stride, constants=constants)
    sparse = link(machine, ranks // division.ep, stride * division.ep, constants=constants)
    once = micro = 0.0
    for count, over in ((held.dense, dense), (held.experts, sparse)):
        if count == 0 or over.ranks == 1:
            continue
        gradients, weights = gradient_bytes(division) * count, division.element_bytes * count
        if division.zero == 0:
            once += all_reduce_seconds(gradients, over)
            continue
        reducing = all_gather_seconds(gradients, over)
        gathering = all_gather_seconds(weights, over)
        if division.zero == 3 and division.pp == 1:
            pieces, tensors = max(1, layers), max(1, layers) * (TENSORS if division.counted.gathers_by_tensor else 1)
            micro += pieces * all_gather_seconds(gradients / pieces, over)
            micro += 2 * tensors * all_gather_seconds(weights / tensors, over)
        elif division.zero == 2 and division.pp == 1:
            micro += reducing
            once += gathering
        else:
            once += reducing + gathering
    return once, micro


def gradient_bytes(division: Division) -> int:
    """Of one parameter's gradient as it is reduced: Megatron-LM and FSDP2 reduce bf16's in float32, DeepSpeed as they are."""
    whole = division.precision != "fp16" and division.counted.reduces_in_float32
    return 4 if division.precision == "fp32" or whole else 2


def offload_seconds(parameters: float, of: Divided, machine: Machine, constants: Constants) -> float:
    """Of a step: gradients to the host, its processors' optimizer, weights back; for ZeRO-3 also the weights with every pass.

    `parameters` are those of this GPU before ZeRO divides them.
    """
    division = of.division
    if division.offload == "none":
        return 0.0
    own = parameters / (division.dp * division.cp if division.zero else 1)
    bandwidth = machine.host_bandwidth * constants.host_share
    seconds = 2 * division.element_bytes * own / bandwidth
    seconds += own * machine.gpus / constants.cpu_adam
    if division.zero == 3:
        seconds += 2 * of.micro_batches * division.element_bytes * own / bandwidth
    moved = OFFLOADED_BYTES[division.offload] * own * machine.gpus
    if moved and machine.nvme_write_bandwidth <= 0:
        raise ValueError(f"offload nvme: {machine.name} has no local disks that we know of; take cpu, or another size")
    return seconds + (moved / machine.nvme_write_bandwidth if moved else 0.0)


def _activation_bytes(of: Divided) -> float:
    """Of a micro batch between two layers, whole over tensor parallelism."""
    return of.tokens * of.network.hidden * of.division.element_bytes


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


def slowest_stage(of: Divided, machine: Machine, at: Rates, constants: Constants) -> Stage:
    """The last stage computes the output too; of the others, the one of most layers is as slow as any."""
    division = of.division
    numbers = counts.stage_layers(of.network.layers, division.pp)
    with_experts = counts.expert_layers(of.network, division)
    dense = layer_work(of, at, experts=False)
    sparse = dense if of.network.experts is None else layer_work(of, at, experts=True)
    tensor = tensor_seconds(of, machine, constants) * constants.tensor_exposed
    context = exposed(context_seconds(of, machine, constants), dense.attention, constants)
    expert = expert_seconds(of, machine, constants)
    launching = constants.launch * passes(division) / 3
    last = division.pp - 1

    def stage(index: int) -> Stage:
        layers, extra = numbers[index], output_work(of, at) if index == last else Work()
        done = dense.times(layers - with_experts[index]).plus(sparse.times(with_experts[index])).plus(extra)
        return Stage(
            index=index,
            layers=layers,
            work=done,
            tensor=tensor * layers,
            context=context * layers,
            expert=expert * with_experts[index],
            idle=max(0.0, launching * layers - done.total - tensor * layers),
        )

    fullest = max(range(division.pp), key=lambda index: numbers[index])
    return max(map(stage, {fullest, last}), key=lambda one: one.total)


def exposed(seconds: float, computing: float, constants: Constants) -> float:
    """What of a traffic of `seconds` a `computing` beside it does not hide; what it hides costs it a little speed."""
    hidden = min(seconds, constants.overlap * computing)
    return seconds - hidden + constants.contention * hidden


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
    best = achievable(machine, precision)
    sixteen = best if precision == "fp32" else achievable(machine, "bf16" if precision == "fp8" else precision)
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


def achievable(machine: Machine, precision: Precision) -> float:
    """What the best matmul reaches; ValueError when the machine has no rate for the precision."""
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


def moving_seconds(total: float, at: Rates) -> float:
    """Of kernels that read and write `total` bytes and compute next to nothing."""
    return total / at.memory


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


def layer_work(of: Divided, at: Rates, *, experts: bool) -> Work:
    """Of one layer, forward and backward, with what is computed again."""
    network, division, sequence, flash = of.network, of.division, of.sequence, of.flash_attention
    queries, samples = counts.query_size(network) / division.tp, division.micro / division.cp
    square = 4.0 * sequence * sequence * queries * samples
    forward_attention, backward_attention = square / at.attention_matmul, 2 * square / at.attention_matmul
    if flash:  # computes half of the square (causal)
        forward_attention, backward_attention = square / 2 / at.flash, BACKWARD_OF_FLASH * square / 2 / at.flash
    scores = 0.0 if flash else network.heads / division.tp * division.micro * sequence * (sequence / division.cp)
    forward_scores = moving_seconds(scores * SCORE_BYTES_FORWARD, at)
    backward_scores = moving_seconds(scores * SCORE_BYTES_BACKWARD, at)
    matrices = _matrices(of, at, experts=experts)
    moved = moving_seconds(_moved_bytes(of, at, experts=experts) * at.unfused, at)
    core = division.recompute == "full" or (division.recompute == "selective" and not flash)
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


def output_work(of: Divided, at: Rates) -> Work:
    """Of the output over the vocabulary and the loss, on the last stage."""
    wide = of.network.vocab / of.division.tp
    return Work(
        matmul=3 * matmul_seconds(of.tokens, wide, of.network.hidden, at),
        memory_bound=moving_seconds(BYTES_OF_A_LOGIT * of.tokens * wide, at),
    )


def _matrices(of: Divided, at: Rates, *, experts: bool) -> float:
    """Seconds of a layer's matmuls forward."""
    network, division, tokens = of.network, of.division, of.tokens
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


def _moved_bytes(of: Divided, at: Rates, *, experts: bool) -> float:
    """Bytes that a layer's forward moves outside of its matmuls and scores.

    Rotated or transposed queries, keys and values are read and written; an activation is read, with its gate, and written. With
    experts each token is sorted to its experts and added up again.
    """
    network, division = of.network, of.division
    share = division.tp if division.sequence_parallel else 1
    mixture = network.experts if experts else None
    width: float = counts.ffn_size(network)
    if mixture:
        width = (mixture.active + mixture.shared) * counts.expert_ffn_size(network)
    numbers = NORMS_AND_RESIDUALS * network.hidden / share
    numbers += 2 * (counts.query_size(network) + 2 * counts.kv_size(network)) / division.tp
    numbers += counts.ffn_matrices(network) * width / division.tp
    numbers += COPIES_OF_A_TOKEN * mixture.active * network.hidden / share if mixture else 0
    return numbers * of.tokens * at.element_bytes


OPTIMIZER_BYTES = 34
"""Moved for one parameter by Adam in mixed precision: gradient read twice (its norm, the update), weight and two moments of four
bytes read and written, the short weight written."""
FP32_OPTIMIZER_BYTES = 32
ACCUMULATED_BYTES = 8
"""Moved for one parameter by adding a micro batch's gradient in float32."""


def step_time(of: Divided, machine: Machine, constants: Constants = DEFAULT) -> StepTime:
    """Of the division as it is: whether it is possible is predict.py's.

    With offload, gathering weights is not hidden: a GPU's adapter and its way to the host share one PCIe switch (ND A100 v4), and
    DeepSpeed's runs on Azure are slower by about that traffic.
    """
    division, micro_batches = of.division, of.micro_batches
    at = rates(machine, division.precision, engine=division.engine, constants=constants)
    slowest = slowest_stage(of, machine, at, constants)
    parameters = counts.gpu_parameters(of.network, division, sequence=of.sequence, stage=slowest.index)
    held = parameters.total
    sending = pipeline_seconds(of, machine, constants)
    if division.virtual > 1:
        sending = exposed(sending, slowest.work.total, constants)
    once, every = data_seconds(parameters, division, machine, constants, layers=slowest.layers)
    computing = slowest.work.total
    data = exposed(once, computing * _overlapped_micro_batches(division, micro_batches), constants)
    data += micro_batches * exposed(every, computing if division.offload == "none" else 0.0, constants)
    # The matmul itself adds a micro batch's gradients to those before it; ZeRO 3 keeps only its own part.
    added = 0.0 if division.zero == 3 and division.pp == 1 else ACCUMULATED_BYTES * held
    updated = 0.0  # where the host updates
    if division.offload == "none":
        own = held / (division.dp * division.cp if division.zero else 1)
        updated = own * (FP32_OPTIMIZER_BYTES if division.precision == "fp32" else OPTIMIZER_BYTES)
    parts = StepTime(
        matmul=micro_batches * (slowest.work.matmul + added * at.traffic),
        attention=micro_batches * slowest.work.attention,
        memory_bound=micro_batches * slowest.work.memory_bound + moving_seconds(updated, at),
        tensor_parallel=micro_batches * slowest.tensor,
        pipeline=micro_batches * sending,
        context_parallel=micro_batches * slowest.context,
        expert_parallel=micro_batches * slowest.expert,
        data_parallel=data,
        bubble=(division.pp - 1) / division.virtual * (slowest.total + sending),
        offload=offload_seconds(held, of, machine, constants),
        overhead=micro_batches * slowest.idle,
    )
    machines = max(1.0, division.gpus / machine.gpus)
    waiting = constants.straggling * math.log2(machines) * parts.total + constants.step
    return replace(parts, overhead=parts.overhead + waiting)


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


MEASURED_EFFICIENCY = 0.5
"""Share of the measured square-matmul rate that a whole step reaches on a CPU, by Megatron's count of operations.

Norms, softmax, the optimizer and small matrices cost time and count little. Measured with a plain loop (Llama, fp32,
AdamW, one thread a rank, both cores busy) against 512 x 512 matmuls in the same process: median 0.56 at 0.9 M and 0.52
at 1.1 M parameters, 0.6 to 0.7 at 5 M and 16 M. Published H100 runs of Megatron-Core reach 0.41 to 0.49 of the peak."""


def step_time_measured(
    flops: float,
    gradient_bytes: float,
    *,
    ranks: int,
    gflops_per_rank: float,
    bus_gigabytes_per_second: float,
    efficiency: float = MEASURED_EFFICIENCY,
) -> StepTime:
    """Of machines of which only rates are known, those that a qualification measured: operations, then one all-reduce.

    `flops` are those of the whole global batch; `gflops_per_rank` is the matmul rate of the slowest rank, for which all others
    wait. Nothing is overlapped, so an engine that overlaps is faster than this says. Raises ValueError for rates that cannot be.
    """
    if gflops_per_rank <= 0 or not 0 < efficiency <= 1:
        raise ValueError(
            f"a rate of {gflops_per_rank} GFLOP/s at efficiency {efficiency}: need a rate above 0 and 0 < efficiency <= 1"
        )
    if ranks > 1 and bus_gigabytes_per_second <= 0:
        raise ValueError(f"a bus bandwidth of {bus_gigabytes_per_second} GB/s over {ranks} ranks: need one above 0")
    over = Link(ranks, bus_gigabytes_per_second * 1e9, latency=0.0, tree_latency=0.0)
    none = StepTime(**dict.fromkeys(StepTime.__dataclass_fields__, 0.0))
    computing = flops / ranks / (gflops_per_rank * 1e9 * efficiency)
    return replace(none, matmul=computing, data_parallel=all_reduce_seconds(gradient_bytes, over))
