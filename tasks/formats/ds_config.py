"""DeepSpeed's `ds_config.json`, generated from our settings: pure, so that `headway job render` shows what a job gets.

Who hands it to DeepSpeed is tasks/jobs/training/deepspeed_engine.py. The keys are those of DeepSpeed 0.19
(https://www.deepspeed.ai/docs/config-json). What a run's machines decide is not in it: DeepSpeed itself divides
`train_batch_size` into micro batches of its ranks.
"""

from __future__ import annotations

from typing import Any

from tasks.config.training import DeepspeedConfig, ExecutionConfig, TrainingConfig


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
