"""What a training takes of the fullest GPU, by part, and whether that fits. Pure.

Parameters' share is states.py, activations' activations.py. Total is what the process's allocator holds at its peak
(torch.cuda.max_memory_reserved); the driver's and CUDA's own is not in it, nor in a machine's usable memory.
Compared with published figures: benchmarks/planning_memory.py and docs/planning.md.
"""

from __future__ import annotations

from dataclasses import replace

from tasks.hardware.machine import Machine
from tasks.planning.activations import Stage, element_bytes, micro_tokens, stage_activations
from tasks.planning.case import Network
from tasks.planning.counts import gpu_parameters, stage_layers
from tasks.planning.prediction import GIB, Division, Fit, Memory
from tasks.planning.states import States, states, step_copies

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


def memory(
    network: Network,
    division: Division,
    *,
    sequence: int,
    global_batch: int,
    machine: Machine,
    flash_attention: bool = True,
) -> Memory:
    """Of the fullest GPU over all pipeline stages."""
    return max(
        (
            memory_of_stage(
                network,
                division,
                stage=stage,
                sequence=sequence,
                global_batch=global_batch,
                machine=machine,
                flash_attention=flash_attention,
            )
            for stage in _candidates(network.layers, division.pp)
        ),
        key=lambda one: one.total,
    )


def memory_of_stage(
    network: Network,
    division: Division,
    *,
    stage: int,
    sequence: int,
    global_batch: int,
    machine: Machine,
    flash_attention: bool = True,
) -> Memory:
    """Of one GPU of one pipeline stage, counted from 0."""
    activations = stage_activations(
        network,
        division,
        sequence=sequence,
        micro_batches=max(1, division.micro_batches(global_batch)),
        flash_attention=flash_attention,
        stage=stage,
    )
    of = gpu_parameters(network, division, sequence=sequence, stage=stage)
    held = states(network, division, of)
    with_zero = division.engine == "deepspeed" and division.zero >= 1
    taken = _added(held, activations, step=step_copies(division, of), stage=stage, with_zero=with_zero)
    if not with_zero or division.pp == 1:
        taken = replace(taken, loose=taken.parts["fragmentation"])
    taken = replace(taken, host=held.host * min(machine.gpus, division.gpus))
    offloads = division.engine == "deepspeed" and division.zero == 3 and division.offload != "none"
    if offloads and division.recompute == "full" and taken.total > machine.usable_memory_bytes:
        two = 2 * micro_tokens(division, sequence) * element_bytes(division) * network.hidden
        return _without(taken, max(activations.kept - two, 0.0), gpus=min(machine.gpus, division.gpus))
    return taken


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


def _candidates(layers: int, pp: int) -> set[int]:
    """Stages that can be the fullest: the first, the last, and the first of those with the most layers.

    A later stage with no more layers holds fewer micro batches.
    """
    numbers = stage_layers(layers, pp)
    return {0, pp - 1, numbers.index(max(numbers))}


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
            for option, saved in (
                (FUSED_LOSS, activations.spare if of_loss else 0.0),
                (HALF_GRADIENTS, held.spare),
            )
            if saved
        },
    )


def _without(taken: Memory, moved: float, *, gpus: int) -> Memory:
    """DeepSpeed's `cpu_checkpointing`, taken where nothing else makes it fit: of layers' inputs the GPU keeps two."""
    return replace(
        taken,
        activations=taken.activations - moved,
        host=taken.host + moved * gpus,
    )
