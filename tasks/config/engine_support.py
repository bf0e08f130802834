"""What of the settings of training an engine does not have: refused before anything starts, each with a remedy.

The settings are tasks/config/training.py; what becomes of them, tasks/jobs/training and tasks/formats/megatron_arguments.py.
"""

from __future__ import annotations

from typing import Any

from tasks.config.training import ExecutionConfig, TrainingConfig


def require_engine_fits(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raises ValueError that names the setting and what to do."""
    {"torch": _require_torch, "deepspeed": _require_deepspeed, "megatron": _require_megatron}[training.engine](
        training, execution
    )


def _require_no_megatron(engine: str, execution: ExecutionConfig) -> None:
    only_megatron = {"pipeline_parallel": execution.pipeline_parallel, "context_parallel": execution.context_parallel}
    for name, value in only_megatron.items():
        if value > 1:
            raise ValueError(f"execution.{name} {value} needs the engine megatron, not {engine}")


def _require_whole_replicas(training: TrainingConfig, execution: ExecutionConfig, *, whole: bool) -> None:
    every = training.safety.repeat_every_steps
    if every and not whole:
        raise ValueError(
            f"training.safety.repeat_every_steps {every} compares whole replicas: it needs the engine torch with "
            f"execution.parallel ddp, not {training.engine} with {execution.parallel}"
        )


def _require_torch(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """What cannot share matrices; a base model's family is looked at by the job."""
    _require_no_megatron("torch", execution)
    _require_whole_replicas(training, execution, whole=execution.parallel == "ddp" and execution.tensor_parallel == 1)
    asked = f"execution.tensor_parallel {execution.tensor_parallel}"
    if execution.tensor_parallel == 1:
        return
    if execution.parallel != "fsdp":
        raise ValueError(f"{asked} needs execution.parallel fsdp, which also divides what the matrices' ranks hold")
    if training.lora.rank:
        raise ValueError(f"{asked} has no plan for adapters: set it to 1, or leave training.lora.rank out")
    if training.network.architecture != "llama" and not training.base:
        raise ValueError(f"{asked} has a plan for llama only, not for {training.network.architecture}: set it to 1")


def _require_deepspeed(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """What ZeRO does not do here: it divides weights in its own way."""
    _require_no_megatron("deepspeed", execution)
    _require_whole_replicas(training, execution, whole=False)
    asked = {
        "execution.tensor_parallel": (execution.tensor_parallel, execution.tensor_parallel > 1),
        "execution.parallel": (execution.parallel, execution.parallel != "ddp"),
        "execution.compile": (execution.compile, execution.compile),
        "execution.local_every_steps": (execution.local_every_steps, execution.local_every_steps is not None),
        "training.lora.rank": (training.lora.rank, training.lora.rank is not None),
    }
    for name, (value, refused) in asked.items():
        if refused:
            raise ValueError(f"the engine deepspeed has no {name} {value}: use the engine torch, or leave it out")
    zero = execution.deepspeed
    if zero.zero_stage == 1 and training.precision == "bf16" and zero.offload == "none":
        raise ValueError(
            "execution.deepspeed.zero_stage 1 with training.precision bf16 is an optimizer of DeepSpeed's that has no "
            "norm to judge steps by: set zero_stage to 2"
        )


def _require_megatron(training: TrainingConfig, execution: ExecutionConfig) -> None:
    if not execution.megatron.checkout:
        raise ValueError(
            "the engine megatron needs execution.megatron.checkout: the folder of Megatron-LM on the machines"
        )
    _require_its_own_loop(training, execution)
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
    _require_converter(training, execution)
    if execution.megatron.flavour == "megatron-deepspeed":
        stage = execution.deepspeed.zero_stage
        if execution.pipeline_parallel > 1 and stage > 1:
            raise ValueError(
                f"Megatron-DeepSpeed pipelines have ZeRO 1 only: execution.deepspeed.zero_stage {stage} needs pipeline_parallel 1"
            )
        if training.schedule != "cosine":
            raise ValueError(f"Megatron-DeepSpeed has no schedule {training.schedule}: use cosine")
        if execution.recompute == "selective":
            raise ValueError("Megatron-DeepSpeed recomputes all or nothing: execution.recompute full or none")


def _require_its_own_loop(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Megatron-LM has a loop of its own, so what our loop does between steps is not there."""
    safety = training.safety
    ours: dict[str, Any] = {
        "training.safety.not_finite": safety.not_finite if safety.not_finite != "stop" else None,
        "training.safety.spike_factor": safety.spike_factor,
        "training.safety.repeat_every_steps": safety.repeat_every_steps,
        "training.base": training.base,
        "training.lora.rank": training.lora.rank,
        "training.mask_documents": training.mask_documents,
        "execution.parallel": execution.parallel if execution.parallel != "ddp" else None,
        "execution.compile": execution.compile,
        "execution.cache_gib": execution.cache_gib,
        "execution.heldout_every_steps": execution.heldout_every_steps,
        "execution.profile_from": execution.profile_from,
        "execution.local_every_steps": execution.local_every_steps,
        "execution.notices.ask": execution.notices.ask,
    }
    for name, value in ours.items():
        if value:
            raise ValueError(
                f"the engine megatron has no {name} ({value}): leave it out, or use the engine torch. "
                "What Megatron-LM has for it can be given in execution.megatron.arguments"
            )


def _require_converter(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raises ValueError for a network whose checkpoint nobody could read afterwards: before it is trained, not after."""
    megatron = execution.megatron
    read = megatron.flavour == "megatron-lm" and training.network.architecture == "llama"
    if not read and not megatron.converter:
        raise ValueError(
            f"Megatron-Bridge reads no {training.network.architecture} of {megatron.flavour}: name the command that converts its "
            "checkpoints in execution.megatron.converter"
        )
