"""Seconds of collectives and transfers over the links of a cluster: latency, and bytes over bus bandwidth. Pure.

Which of them a step has is traffic.py. Bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md): bytes / time x (n - 1) / n,
twice that for an all-reduce. See docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks.hardware.machine import Machine
from tasks.planning.constants import DEFAULT, Constants


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
