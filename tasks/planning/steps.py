"""Seconds of one optimizer step: the slowest pipeline stage's work, its traffic as far as nothing hides it, and the bubble. Pure.

Memory is memory.py; a whole plan predict.py. See docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tasks.hardware.machine import Machine
from tasks.planning import counts, efficiency, traffic
from tasks.planning.case import Network
from tasks.planning.constants import DEFAULT, Constants
from tasks.planning.prediction import Division, StepTime
from tasks.planning.stages import Stage, exposed, slowest_stage

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
    """Of the division as it is: whether it is possible is possible.py's.

    With offload, gathering weights is not hidden: a GPU's adapter and its way to the host share one PCIe switch (ND A100 v4), and
    DeepSpeed's runs on Azure are slower by about that traffic.
    """
    at = efficiency.rates(machine, division.precision, engine=division.engine, constants=constants)
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
        memory_bound=micro_batches * slowest.work.memory_bound
        + efficiency.moving_seconds(_optimizer_bytes(held, division), at),
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
