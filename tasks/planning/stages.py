"""One micro batch on one GPU of each pipeline stage, in seconds, and which stage all others wait for. Pure.

What it computes is steps.py, what it sends traffic.py; a step out of many micro batches is steps.py. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.hardware.machine import Machine
from tasks.planning import counts, traffic
from tasks.planning import steps as work
from tasks.planning.case import Network
from tasks.planning.constants import Constants
from tasks.planning.prediction import Division
from tasks.planning.steps import Rates, Work


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
    output = work.output_work(network, division, sequence=sequence, at=at)
    last = division.pp - 1
    fullest = max(range(division.pp), key=lambda stage: numbers[stage])
    return max(
        (
            _stage(stage, numbers[stage], sparse[stage], each, extra=output if stage == last else Work())
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
    dense = work.layer_work(network, division, sequence=sequence, at=at, flash=flash, experts=False)
    sparse = dense
    if network.experts is not None:
        sparse = work.layer_work(network, division, sequence=sequence, at=at, flash=flash, experts=True)
    tensor = traffic.tensor_seconds(network, division, sequence=sequence, machine=machine, constants=constants)
    ring = traffic.context_seconds(network, division, sequence=sequence, machine=machine, constants=constants)
    return Layers(
        dense=dense,
        sparse=sparse,
        tensor=tensor * constants.tensor_exposed,
        context=exposed(ring, dense.attention, constants),
        expert=traffic.expert_seconds(network, division, sequence=sequence, machine=machine, constants=constants),
        launching=constants.launch * work.passes(division) / 3,
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
