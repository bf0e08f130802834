"""A case with one division on one kind of machine: memory, seconds, operations and what binds. Pure, under a millisecond.

Choosing the division is search.py's. See docs/planning.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.planning import counts, memory, steps
from tasks.planning.case import Case
from tasks.planning.prediction import DEFAULT, Constants, Divided, Division, Fit, Prediction, StepTime

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine


def require_possible(case: Case, division: Division, machine: Machine, *, gpus: int) -> None:
    """ValueError naming the value and the remedy. Mistakes of a case alone are case.py's; whether it fits is memory.py's."""
    _require_counts(case, division, gpus=gpus)
    network, tp = case.network, division.tp
    kv_heads = counts.kv_heads(network)
    if network.heads % tp:
        raise ValueError(f"heads {network.heads} do not divide by tp {tp}: take a tp that divides them")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"kv_heads {kv_heads} and tp {tp}: one must divide the other")
    wide = counts.ffn_size(network)
    if wide % tp:
        raise ValueError(f"ffn {wide} does not divide by tp {tp}: take a tp that divides it")
    if counts.expert_ffn_size(network) % tp:
        raise ValueError(
            f"experts.ffn {counts.expert_ffn_size(network)} does not divide by tp {tp}: take one that does"
        )
    if division.sequence_parallel and (case.sequence // division.cp) % tp:
        raise ValueError(
            f"sequence {case.sequence} over cp {division.cp} does not divide by tp {tp}, as sequence_parallel needs"
        )
    _require_experts(case, division)
    if division.pp > 1 and division.zero > division.counted.most_zero_in_pipeline:
        raise ValueError(
            f"zero {division.zero} with pp {division.pp}: DeepSpeed's pipeline takes zero 0 or 1; lower zero, or pp to 1"
        )
    if division.offload == "nvme" and not division.counted.nvme:
        raise ValueError("offload nvme: only engine deepspeed has it; take cpu, or that engine")
    steps.achievable(machine, division.precision)
    if division.offload == "nvme" and machine.nvme_write_bandwidth <= 0:
        raise ValueError(f"offload nvme: {machine.name} has no local disks that we know of; take cpu, or another size")


def _require_counts(case: Case, division: Division, *, gpus: int) -> None:
    layers, batch, dp = case.network.layers, case.batch.global_, division.dp
    if division.gpus != gpus:
        product = f"tp {division.tp} x pp {division.pp} x cp {division.cp} x dp {dp}"
        raise ValueError(
            f"{product} = {division.gpus} GPUs, and the cluster has {gpus}: make them equal, or leave dp out"
        )
    ends = (
        2 if division.virtual > 1 and layers % division.pp else 0
    )  # embedding and loss count as layers of uneven stages
    if layers + ends < division.pp * division.virtual:
        raise ValueError(
            f"layers {layers} are fewer than pp {division.pp} x virtual {division.virtual}: lower one of the two"
        )
    if division.virtual > 1 and division.pp == 1:
        raise ValueError(f"virtual {division.virtual} without a pipeline: give pp of 2 or more, or leave virtual out")
    if batch % (dp * division.micro):
        raise ValueError(
            f"batch.global {batch} does not divide by dp {dp} x micro {division.micro} = {dp * division.micro}: "
            "change one of the three"
        )
    if case.sequence % division.cp:
        raise ValueError(f"sequence {case.sequence} does not divide by cp {division.cp}: change one of the two")


def _require_experts(case: Case, division: Division) -> None:
    experts = case.network.experts
    if division.ep == 1:
        return
    if experts is None:
        raise ValueError(f"ep {division.ep} for a network without experts: leave ep out")
    if experts.count % division.ep:
        raise ValueError(
            f"experts.count {experts.count} does not divide by ep {division.ep}: take an ep that divides it"
        )
    if (division.dp * division.cp) % division.ep:
        raise ValueError(
            f"dp {division.dp} x cp {division.cp} does not divide by ep {division.ep}: experts are shared within them"
        )


def warnings_of(case: Case, division: Division, machine: Machine) -> tuple[str, ...]:
    """What is possible and seldom wise, and what was assumed for want of a number."""
    messages = []
    if division.tp > machine.gpus:
        messages.append(f"tp {division.tp} goes over machines of {machine.gpus} GPUs: its traffic takes the network")
    if division.gpus > machine.gpus and machine.network_bandwidth <= 0:
        messages.append(f"{machine.name} has no network between machines for GPUs: the plan assumes its Ethernet")
    if case.network.vocab % division.tp:
        messages.append(f"vocab {case.network.vocab} does not divide by tp {division.tp}: the engine pads it")
    if case.network.layers % (division.pp * division.virtual) and (case.network.layers + 2) % (
        division.pp * division.virtual
    ):
        messages.append(
            f"layers {case.network.layers} do not divide by pp {division.pp} x virtual {division.virtual}: "
            "some stages hold one more"
        )
    if division.virtual > 1 and case.batch.global_ // (division.dp * division.micro) % division.pp:
        messages.append(
            f"interleaving wants micro batches in multiples of pp {division.pp}; Megatron-LM refuses others"
        )
    limit = machine.tops_out_at * machine.gpus
    if limit and division.gpus > limit:
        messages.append(f"{division.gpus} GPUs are over {machine.tops_out_at} machines, the most that one job may have")
    if machine.gpu.startswith("AMD"):
        messages.append(
            f"{machine.gpu}: published runs are few, and on PyTorch of 2024 they were 1.6 times slower than planned"
        )
    if machine.assumed:
        messages.append(f"assumed for {machine.name}, for want of a source: {', '.join(machine.assumed)}")
    return tuple(messages)


SECONDS_A_DAY = 86_400
WORTH_NAMING = 0.1
"""Share of the step from which a part is said to bind."""


def predict(
    case: Case, division: Division, machine: Machine, *, gpus: int, constants: Constants = DEFAULT
) -> Prediction:
    """ValueError when the division cannot be run; one that does not fit in memory is predicted and says so."""
    require_possible(case, division, machine, gpus=gpus)
    of = Divided.of_case(case, division)
    room = memory.memory(of, machine)
    fit = memory.judged(room, machine)
    time = steps.step_time(of, machine, constants)
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
    shares = {
        "compute": time.matmul + time.attention,
        "memory bandwidth": time.memory_bound,
        "links in a machine": 0.0,
        "network": time.pipeline + time.context_parallel + time.expert_parallel + time.data_parallel,
        "pipeline bubble": time.bubble,
        "offload": time.offload,
        "waiting": time.overhead,
    }
    shares["network" if over_machines else "links in a machine"] += time.tensor_parallel
    results = [
        name for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] > WORTH_NAMING * time.total
    ]
    return tuple(results if fit == "fits" else ["memory", *results])
