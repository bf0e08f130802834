"""The engine megatron, as a configuration sees it: a loop of its own, by the arguments of tasks/formats/megatron_arguments.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tasks.config.engines import Engine, Planned, require_no_offload
from tasks.config.training import ExecutionConfig, TrainingConfig

VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
VIRTUAL_LAYERS = "--num-layers-per-virtual-pipeline-stage"


class MegatronEngine(Engine):
    """Megatron-LM or Megatron-DeepSpeed: tensor, pipeline, context and sequence parallel."""

    program = "tasks.jobs.train_megatron"
    cannot_continue = "training cannot continue from another run's Megatron-LM checkpoints"
    cannot_mirror = "Megatron-LM's index of the data and its checkpoints are read by ranks of all machines"
    planned = Planned(
        plain_torch=False,
        state_bytes={"bf16": (2, 4, 12), "fp16": (2, 2, 16), "fp8": (2, 4, 12)},
        flattens_fp16=True,
        half_gradients_option="--grad-reduce-in-bf16",
        narrow_fp8=True,
        keeps_stage_input=False,
        fused_loss="always",
        fused_kernels=True,
        reduces_after_backward=True,
        zero_stages=(1,),
        zero_only_divided=True,
        offloads=False,
        nvme=True,
        searches_layers=True,
    )

    def require_fits(self, training: TrainingConfig, execution: ExecutionConfig) -> None:
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
        _require_layers(execution)
        if execution.megatron.flavour == "megatron-deepspeed":
            stage = execution.deepspeed.zero_stage
            if execution.pipeline_parallel > 1 and stage > 1:
                raise ValueError(
                    f"Megatron-DeepSpeed pipelines have ZeRO 1 only: execution.deepspeed.zero_stage {stage} needs "
                    "pipeline_parallel 1"
                )
            if training.schedule != "cosine":
                raise ValueError(f"Megatron-DeepSpeed has no schedule {training.schedule}: use cosine")
            if execution.recompute == "selective":
                raise ValueError("Megatron-DeepSpeed recomputes all or nothing: execution.recompute full or none")

    def zero_stage(self, execution: ExecutionConfig) -> int:
        own = execution.megatron
        return int(own.distributed_optimizer) if own.flavour == "megatron-lm" else execution.deepspeed.zero_stage

    def division(self, training: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
        return {
            "virtual": _virtual(training, execution),
            "offload": "none",
            "sequence_parallel": execution.megatron.sequence_parallel,
        }

    def execution(
        self, *, zero: int, offload: str, virtual: int, sequence_parallel: bool, options: Sequence[str]
    ) -> dict[str, Any]:
        require_no_offload("megatron", offload)
        return {
            "megatron": {
                "sequence_parallel": sequence_parallel,
                "distributed_optimizer": zero > 0,
                "arguments": [*([VIRTUAL_STAGES, str(virtual)] if virtual > 1 else []), *options],
            }
        }


def _require_layers(execution: ExecutionConfig) -> None:
    """What Megatron-LM divides with Transformer Engine alone (@d98e8a64: torch_norm.py, dot_product_attention.py)."""
    if execution.megatron.transformer_impl == "transformer_engine":
        return
    if execution.megatron.flavour != "megatron-lm":
        raise ValueError("execution.megatron.transformer_impl is of the flavour megatron-lm: leave it out")
    for name, asked in (
        ("execution.context_parallel", execution.context_parallel > 1),
        ("execution.megatron.sequence_parallel", execution.megatron.sequence_parallel),
    ):
        if asked:
            raise ValueError(
                f"{name} needs Transformer Engine, and execution.megatron.transformer_impl is local: use transformer_engine, "
                f"in an image that has it, or leave {name} out"
            )


def _require_its_own_loop(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Megatron-LM has a loop of its own, so what our loop does between steps is not there."""
    safety = training.safety
    ours: dict[str, Any] = {
        "training.safety.not_finite": safety.not_finite if safety.not_finite != "stop" else None,
        "training.safety.spike_factor": safety.spike_factor,
        "training.safety.repeat_every_steps": safety.repeat_every_steps,
        "training.packing": training.packing,
        "training.objective": training.objective if training.objective != "pretrain" else None,
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


def _virtual(training: TrainingConfig, how: ExecutionConfig) -> int:
    """Pieces a stage, as Megatron's own arguments say it: their number, or the layers of one."""
    given = how.megatron.arguments
    pairs = {name: value for name, value in pairwise(given) if value.isdigit() and int(value)}
    if VIRTUAL_STAGES in pairs:
        return int(pairs[VIRTUAL_STAGES])
    layers = training.network.layers // how.pipeline_parallel
    return max(1, layers // int(pairs.get(VIRTUAL_LAYERS, layers)))
