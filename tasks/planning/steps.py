"""Seconds of one optimizer step: the slowest pipeline stage's work, its traffic as far as nothing hides it, and the bubble. Pure.

Memory is memory.py; a whole plan predict.py. See docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks.planning import counts, efficiency, traffic, work
from tasks.planning.case import Network
from tasks.planning.constants import DEFAULT, Constants
from tasks.planning.machine import Machine
from tasks.planning.prediction import Division, StepTime
from tasks.planning.work import Work

OPTIMIZER_BYTES = 34
"""Moved for one parameter by Adam in mixed precision: gradient read twice (its norm, the update), weight and two moments of four
bytes read and written, the short weight written."""
FP32_OPTIMIZER_BYTES = 32
ACCUMULATED_BYTES = 8
"""Moved for one parameter by adding a micro batch's gradient in float32."""


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
    """Of the division as it is: whether it is possible is possible.py's.

    With offload, gathering weights is not hidden: a GPU's adapter and its way to the host share one PCIe switch (ND A100 v4), and
    DeepSpeed's runs on Azure are slower by about that traffic.
    """
    at = efficiency.rates(machine, division.precision, engine=division.engine, constants=constants)
    slowest = _slowest(
        network, division, sequence=sequence, machine=machine, at=at, flash=flash_attention, constants=constants
    )
    micro_batches = division.micro_batches(global_batch)
    held = counts.gpu_parameters(network, division, sequence=sequence, stage=slowest.index)
    sending = traffic.pipeline_seconds(network, division, sequence=sequence, machine=machine, constants=constants)
    once, every = traffic.data_seconds(held, division, layers=slowest.layers, machine=machine, constants=constants)
    computing = slowest.work.total
    data = _exposed(once, computing * _overlapped_micro_batches(division, micro_batches), constants)
    hiding = 0.0 if division.offload != "none" else computing
    data += micro_batches * _exposed(every, hiding, constants)
    optimizer = efficiency.moving_seconds(_optimizer_bytes(held.total, division), at)
    adding = micro_batches * _added_bytes(held.total, division) * at.traffic
    if division.virtual > 1:
        sending = _exposed(sending, computing, constants)
    bubble = (division.pp - 1) / division.virtual * (slowest.total + sending)
    offload = traffic.offload_seconds(
        held.total, division, machine=machine, micro_batches=micro_batches, constants=constants
    )
    parts = StepTime(
        matmul=micro_batches * slowest.work.matmul + adding,
        attention=micro_batches * slowest.work.attention,
        memory_bound=micro_batches * slowest.work.memory_bound + optimizer,
        tensor_parallel=micro_batches * slowest.tensor,
        pipeline=micro_batches * sending,
        context_parallel=micro_batches * slowest.context,
        expert_parallel=micro_batches * slowest.expert,
        data_parallel=data,
        bubble=bubble,
        offload=offload,
        overhead=micro_batches * slowest.idle,
    )
    machines = max(1.0, division.gpus / machine.gpus)
    waiting = constants.straggling * math.log2(machines) * parts.total + constants.step
    return StepTime(**{**parts.__dict__, "overhead": parts.overhead + waiting})


def _slowest(
    network: Network,
    division: Division,
    *,
    sequence: int,
    machine: Machine,
    at: efficiency.Rates,
    flash: bool,
    constants: Constants,
) -> Stage:
    """The last stage computes the output too; of the others, the one of most layers is as slow as any."""
    numbers = counts.stage_layers(network.layers, division.pp)
    sparse = counts.expert_layers(network, division)
    common = {"sequence": sequence, "at": at}
    dense_work = work.layer_work(network, division, flash=flash, experts=False, **common)
    sparse_work = work.layer_work(network, division, flash=flash, experts=True, **common) if any(sparse) else Work()
    output = work.output_work(network, division, **common)
    sizes = {"sequence": sequence, "machine": machine, "constants": constants}
    tensor = traffic.tensor_seconds(network, division, **sizes) * constants.tensor_exposed
    context = _exposed(traffic.context_seconds(network, division, **sizes), dense_work.attention, constants)
    expert = traffic.expert_seconds(network, division, **sizes)
    stages = []
    for index in {max(range(division.pp), key=lambda stage: numbers[stage]), division.pp - 1}:
        layers, with_experts = numbers[index], sparse[index]
        done = dense_work.times(layers - with_experts).plus(sparse_work.times(with_experts))
        if index == division.pp - 1:
            done = done.plus(output)
        launching = constants.launch * (4 / 3 if division.recompute == "full" else 1) * layers
        stages.append(
            Stage(
                index=index,
                layers=layers,
                work=done,
                tensor=tensor * layers,
                context=context * layers,
                expert=expert * with_experts,
                idle=max(0.0, launching - done.total - tensor * layers),
            )
        )
    return max(stages, key=lambda stage: stage.total)


def _exposed(seconds: float, computing: float, constants: Constants) -> float:
    """What of a traffic of `seconds` a `computing` beside it does not hide; what it hides costs it a little speed."""
    hidden = min(seconds, constants.overlap * computing)
    return seconds - hidden + constants.contention * hidden


def _overlapped_micro_batches(division: Division, micro_batches: int) -> float:
    """Micro batches whose computing runs beside the traffic of once a step.

    Gradients are reduced while the last backward goes on, weights gathered while the first forward does; with interleaving,
    pieces are ready one after the other through as many micro batches as there are stages. Megatron-LM without its
    distributed optimizer waits until all is computed (Narayanan et al. 2021).
    """
    if division.engine == "megatron" and not division.zero:
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
