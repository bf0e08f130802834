"""What a training takes of the fullest GPU, by part, and whether that fits. Pure.

Parameters' share is states.py, activations' activations.py. Total is what the process's allocator holds at its peak
(torch.cuda.max_memory_reserved); the driver's and CUDA's own is not in it, nor in a machine's usable memory.
Compared with published figures: benchmarks/planning_memory.py and docs/planning.md.
"""

from __future__ import annotations

from dataclasses import replace

from tasks.planning.activations import Stage, element_bytes, micro_tokens, stage_activations
from tasks.planning.case import Network
from tasks.planning.counts import gpu_parameters, stage_layers
from tasks.planning.machine import Machine
from tasks.planning.prediction import GIB, Division, Fit, Memory
from tasks.planning.states import States, states, step_copies

FRAMEWORK = 0.2 * GIB
"""Workspaces of cuBLAS and Transformer Engine, batches, tables of positions. Between steps, Megatron-LM's golden values are by
0.1 to 0.6 GiB above what their states add up to."""
FRAGMENTATION = 0.02
"""Share that the allocator holds in gaps, of all but weights, gradients and optimizer, which are laid out once. Fitted: with it
the mean error of benchmarks/planning_memory.py is -0.2 %, with 1 % -0.6, with 3 % +0.3; the median of 1.7 % hardly depends on it."""
TIGHT = 0.92
"""Share of the usable memory from which on a plan is tight. NCCL's buffers are outside of the allocator, 0.2 to 0.5 GiB a
communicator; a longer batch or experts out of balance take a few per cent more."""
LOSS = "copies of logits"
"""Name of the part of Memory that a fused loss does not take."""
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
    taken = _added(held, activations, step=step_copies(division, of), stage=stage)
    taken = replace(taken, host=held.host * min(machine.gpus, division.gpus))
    offloads = division.engine == "deepspeed" and division.zero == 3 and division.offload != "none"
    if offloads and division.recompute == "full" and taken.total > machine.usable_memory_bytes:
        two = 2 * micro_tokens(division, sequence) * element_bytes(division) * network.hidden
        return _without(taken, max(activations.kept - two, 0.0), gpus=min(machine.gpus, division.gpus))
    return taken


def judged(taken: Memory, machine: Machine) -> Fit:
    """Whether it fits the GPU, and what is offloaded its host.

    Tight is also what fits only with a fused loss: published runs of torch are on both sides of that (llm-foundry's tables).
    """
    room, loss = machine.usable_memory_bytes, taken.parts.get(LOSS, 0.0)
    if taken.total - loss > room or taken.host > HOST_SHARE * machine.host_memory_bytes:
        return "does not fit"
    return "tight" if taken.total > TIGHT * room else "fits"


def warnings(taken: Memory, machine: Machine) -> tuple[str, ...]:
    """What a verdict of `judged` rests on, where that is not plain."""
    room, loss = machine.usable_memory_bytes, taken.parts.get(LOSS, 0.0)
    if taken.total - loss <= room < taken.total:
        return (
            f"fits only with a fused loss: copies of the logits in float32 take {loss / GIB:.3g} of {taken.total / GIB:.3g} GiB"
            f" on a GPU with {room / GIB:.3g}; else lower batch.micro",
        )
    return ()


def _candidates(layers: int, pp: int) -> set[int]:
    """Stages that can be the fullest: the first, the last, and the first of those with the most layers.

    A later stage with no more layers holds fewer micro batches.
    """
    numbers = stage_layers(layers, pp)
    return {0, pp - 1, numbers.index(max(numbers))}


def _added(held: States, activations: Stage, *, step: float, stage: int) -> Memory:
    """The peak: output and loss, or a layer's work, whichever is more; or the optimizer's step, without activations."""
    of_loss = activations.logits > activations.working
    kept = activations.kept + (0 if of_loss else activations.working)
    loss, spare = (activations.logits, activations.spare) if of_loss else (0.0, 0.0)
    copies = max(held.copies, step - kept - loss)
    parts = {
        "logits": loss - spare,
        LOSS: spare,
        "gathered weights": held.gathered,
        "copies of gradients": copies,
        "framework": FRAMEWORK,
        "fragmentation": FRAGMENTATION * (held.gathered + copies + kept + loss),
    }
    return Memory(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=kept,
        other=sum(parts.values()),
        parts=parts,
        stage=stage,
    )


def _without(taken: Memory, moved: float, *, gpus: int) -> Memory:
    """DeepSpeed's `cpu_checkpointing`, taken where nothing else makes it fit: of layers' inputs the GPU keeps two."""
    gaps = FRAGMENTATION * moved
    return replace(
        taken,
        activations=taken.activations - moved,
        other=taken.other - gaps,
        parts={**taken.parts, "fragmentation": taken.parts["fragmentation"] - gaps},
        host=taken.host + moved * gpus,
    )
