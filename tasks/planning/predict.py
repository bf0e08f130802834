"""A case with one division on one kind of machine: memory, seconds, operations and what binds. Pure, under a millisecond.

Choosing the division is search.py's; whether it can be run at all, possible.py's. See docs/planning.md.
"""

from __future__ import annotations

from tasks.hardware.machine import Machine
from tasks.planning import counts, memory, steps
from tasks.planning.case import Case
from tasks.planning.constants import DEFAULT, Constants
from tasks.planning.possible import require_possible, warnings_of
from tasks.planning.prediction import Division, Fit, Prediction, StepTime

SECONDS_A_DAY = 86_400
WORTH_NAMING = 0.1
"""Share of the step from which a part is said to bind."""


def predict(
    case: Case, division: Division, machine: Machine, *, gpus: int, constants: Constants = DEFAULT
) -> Prediction:
    """ValueError when the division cannot be run; one that does not fit in memory is predicted and says so."""
    require_possible(case, division, machine, gpus=gpus)
    room = memory.memory(
        case.network,
        division,
        sequence=case.sequence,
        global_batch=case.batch.global_,
        machine=machine,
        flash_attention=case.flash_attention,
    )
    fit = memory.judged(room, machine)
    time = steps.step_time(
        case.network,
        division,
        sequence=case.sequence,
        global_batch=case.batch.global_,
        machine=machine,
        flash_attention=case.flash_attention,
        constants=constants,
    )
    flops = counts.flops(
        case.network,
        case.sequence,
        case.batch.global_,
        recompute=division.recompute,
        flash_attention=case.flash_attention,
    )
    seconds = time.total
    model = flops.model / seconds / gpus
    steps_to_go = case.tokens / case.tokens_a_step if case.tokens else None
    return Prediction(
        division=division,
        memory=room,
        fit=fit,
        time=time,
        step_seconds=seconds,
        tokens_per_second_per_gpu=case.tokens_a_step / seconds / gpus,
        tflops_hardware=flops.hardware / seconds / gpus / 1e12,
        tflops_model=model / 1e12,
        mfu=model / machine.peak_flops[division.precision],
        days=steps_to_go * seconds / SECONDS_A_DAY if steps_to_go else None,
        binds=_binds(time, fit, over_machines=division.tp > machine.gpus),
        warnings=(*memory.warnings(room, machine), *warnings_of(case, division, machine)),
        needs=memory.needs(room, machine),
    )


def _binds(time: StepTime, fit: Fit, *, over_machines: bool) -> tuple[str, ...]:
    """Parts of the step by their share, from WORTH_NAMING; memory first when it is the one that is short."""
    tensor = {"network" if over_machines else "links in a machine": time.tensor_parallel}
    shares = {
        "compute": time.matmul + time.attention,
        "memory bandwidth": time.memory_bound,
        "links in a machine": 0.0,
        "network": time.pipeline + time.context_parallel + time.expert_parallel + time.data_parallel,
        "pipeline bubble": time.bubble,
        "offload": time.offload,
        "waiting": time.overhead,
    }
    for name, seconds in tensor.items():
        shares[name] += seconds
    results = [
        name for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] > WORTH_NAMING * time.total
    ]
    return tuple(results if fit == "fits" else ["memory", *results])
