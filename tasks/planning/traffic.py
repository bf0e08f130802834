"""What one GPU of a pipeline stage sends in a step: seconds of each kind of traffic, before any of it is hidden. Pure.

Bus bandwidth is as nccl-tests define it (doc/PERFORMANCE.md): bytes / time x (n - 1) / n, twice that for an all-reduce. What
hides behind computing is steps.py. See docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.planning import counts
from tasks.planning.counts import Parameters
from tasks.planning.prediction import DEFAULT, Constants, Divided, Division

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
