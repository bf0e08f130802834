"""The engine deepspeed, as a configuration sees it: our own loop, whose state DeepSpeed's ZeRO divides and offloads.

What DeepSpeed is told, its `ds_config.json`, is generated from our settings: pure, so that `headway job render` shows what a job
gets. Who hands it over is tasks/jobs/training/deepspeed_engine.py. The keys are those of DeepSpeed 0.19
(https://www.deepspeed.ai/docs/config-json). What a run's machines decide is not in it: DeepSpeed itself divides
`train_batch_size` into micro batches of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.config.engines import Engine, Planned, require_no_megatron, require_whole_replicas
from tasks.config.training import DeepspeedConfig, ExecutionConfig, TrainingConfig


class DeepspeedEngine(Engine):
    """ZeRO 1, 2 or 3, with state on the host or on NVMe."""

    loop = "tasks.jobs.training.deepspeed_engine:DeepspeedEngine"
    laid_out_by_precision = "DeepSpeed's optimizer state"
    planned = Planned(
        plain_torch=False,
        state_bytes={"bf16": (2, 2, 12), "fp16": (2, 2, 12), "fp8": (2, 2, 12)},
        bf16_accumulated_apart=True,
        gathers_by_tensor=True,
        gradient_buckets=True,
        reduces_in_float32=False,
        fused_loss="divided",
        ties_positions=True,
        zero_stages=(1, 2, 3),
        most_zero_in_pipeline=1,
        offloads_weights_again=True,
        nvme=True,
        searches_matrices=False,
        splits_norms=False,
    )

    def require_fits(self, training: TrainingConfig, execution: ExecutionConfig) -> None:
        """What ZeRO does not do here: it divides weights in its own way."""
        require_no_megatron("deepspeed", execution)
        require_whole_replicas(training, execution, whole=False)
        asked = {
            "execution.tensor_parallel": (execution.tensor_parallel, execution.tensor_parallel > 1),
            "execution.parallel": (execution.parallel, execution.parallel != "ddp"),
            "execution.compile": (execution.compile, execution.compile),
            "execution.local_every_steps": (execution.local_every_steps, execution.local_every_steps is not None),
        }
        for name, (value, refused) in asked.items():
            if refused:
                raise ValueError(f"the engine deepspeed has no {name} {value}: use the engine torch, or leave it out")
        zero = execution.deepspeed
        if training.lora.rank and zero.zero_stage == 3:
            raise ValueError(
                f"training.lora.rank {training.lora.rank} under execution.deepspeed.zero_stage 3, which divides frozen weights "
                "too, is not proven: set zero_stage to 2, or use the engine torch with execution.parallel fsdp"
            )
        if zero.zero_stage == 1 and training.precision == "bf16" and zero.offload == "none":
            raise ValueError(
                "execution.deepspeed.zero_stage 1 with training.precision bf16 is an optimizer of DeepSpeed's that has no "
                "norm to judge steps by: set zero_stage to 2"
            )

    def job_settings(self, training: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
        return {"deepspeed": ds_config(training, execution)}

    def zero_stage(self, execution: ExecutionConfig) -> int:
        return execution.deepspeed.zero_stage

    def division(self, training: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
        return {**super().division(training, execution), "offload": execution.deepspeed.offload}

    def execution(
        self, *, zero: int, offload: str, virtual: int, sequence_parallel: bool, options: Sequence[str]
    ) -> dict[str, Any]:
        return {"deepspeed": {"zero_stage": max(zero, 1), "offload": offload}}

    def divided(self, execution: Mapping[str, Any]) -> str:
        return f"zero {execution.get('deepspeed', {}).get('zero_stage', 1)}"


def ds_config(training: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
    """The whole configuration. The optimizer is not in it: torch's AdamW is handed over, as the engine `torch` uses it."""
    return {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_clipping": training.gradient_clip,
        "bf16": {"enabled": training.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": _zero(execution.deepspeed),
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on CPUs, and nothing has to be compiled for it
    }


def _zero(asked: DeepspeedConfig) -> dict[str, Any]:
    """What is divided, and where it lies. Weights can only lie elsewhere when they are divided: stage 3."""
    zero: dict[str, Any] = {"stage": asked.zero_stage, "contiguous_gradients": True, "overlap_comm": True}
    if asked.offload == "none":
        return zero
    place: dict[str, Any] = {"device": asked.offload, "pin_memory": True}
    if asked.offload == "nvme":
        place["nvme_path"] = asked.nvme_path
    zero["offload_optimizer"] = place
    if asked.zero_stage == 3:
        zero["offload_param"] = dict(place)
    return zero
