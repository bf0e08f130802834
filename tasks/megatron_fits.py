"""What of the settings of training the engine `megatron` does not have: refused before anything starts, each with a remedy.

What the other engines have is in tasks/training_config.py; what becomes of the rest, tasks/formats/megatron_arguments.py.
"""

from __future__ import annotations

from typing import Any

from tasks.training_config import ExecutionConfig, TrainingConfig


def require_megatron_fits(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raises ValueError that names the setting and what to do; passes whatever another engine trains."""
    if training.engine != "megatron":
        return
    _require_its_own_loop(training, execution)
    _require_divides(training, execution)
    _require_converter(training, execution)
    if execution.megatron.flavour == "megatron-deepspeed":
        _require_megatron_deepspeed(training, execution)


def _require_its_own_loop(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Megatron-LM has a loop of its own, so what our loop does between steps is not there."""
    safety = training.safety
    ours: dict[str, Any] = {
        "training.safety.not_finite": safety.not_finite if safety.not_finite != "stop" else None,
        "training.safety.spike_factor": safety.spike_factor,
        "training.safety.repeat_every_steps": safety.repeat_every_steps,
        "training.mask_documents": training.mask_documents,
        "execution.parallel": execution.parallel if execution.parallel != "ddp" else None,
        "execution.compile": execution.compile,
        "execution.cache_gib": execution.cache_gib,
        "execution.heldout_every_steps": execution.heldout_every_steps,
        "execution.profile_from": execution.profile_from,
        "execution.local_every_steps": execution.local_every_steps,
        "execution.limits.max_hours": execution.limits.max_hours,
        "execution.limits.max_cost": execution.limits.max_cost,
        "execution.notices.ask": execution.notices.ask,
    }
    for name, value in ours.items():
        if value:
            raise ValueError(
                f"the engine megatron has no {name} ({value}): leave it out, or use the engine torch. "
                "What Megatron-LM has for it can be given in execution.megatron.arguments"
            )


def _require_divides(training: TrainingConfig, execution: ExecutionConfig) -> None:
    shape = training.network
    parts = (
        ("pipeline_parallel", execution.pipeline_parallel, "layers", shape.layers),
        ("tensor_parallel", execution.tensor_parallel, "heads", shape.heads),
        ("tensor_parallel", execution.tensor_parallel, "kv_heads", shape.kv_heads),
    )
    for name, ranks, what, count in parts:
        if count % ranks:
            raise ValueError(f"network.{what} {count} does not divide into execution.{name} {ranks} parts")
    context = execution.context_parallel
    if context > 1 and training.sequence_length % (2 * context):
        raise ValueError(
            f"sequence_length {training.sequence_length} is no multiple of 2 x execution.context_parallel = {2 * context}"
        )
    if execution.megatron.sequence_parallel and execution.tensor_parallel == 1:
        raise ValueError("execution.megatron.sequence_parallel needs execution.tensor_parallel of 2 or more")


def _require_converter(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raises ValueError for a network whose checkpoint nobody could read afterwards: before it is trained, not after."""
    megatron = execution.megatron
    read = megatron.flavour == "megatron-lm" and training.network.architecture == "llama"
    if not read and not megatron.converter:
        raise ValueError(
            f"Megatron-Bridge reads no {training.network.architecture} of {megatron.flavour}: name the command that converts its "
            "checkpoints in execution.megatron.converter"
        )


def _require_megatron_deepspeed(training: TrainingConfig, execution: ExecutionConfig) -> None:
    stage = execution.deepspeed.zero_stage
    if execution.pipeline_parallel > 1 and stage > 1:
        raise ValueError(
            f"Megatron-DeepSpeed pipelines have ZeRO 1 only: execution.deepspeed.zero_stage {stage} needs pipeline_parallel 1"
        )
    if training.schedule != "cosine":
        raise ValueError(f"Megatron-DeepSpeed has no schedule {training.schedule}: use cosine")
    if execution.recompute == "selective":
        raise ValueError("Megatron-DeepSpeed recomputes all or nothing: execution.recompute full or none")
