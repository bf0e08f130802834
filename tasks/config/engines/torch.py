"""The engine torch, as a configuration sees it: our own loop with PyTorch's own parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.config.engines import Engine, require_no_megatron, require_no_offload, require_whole_replicas
from tasks.config.training import ExecutionConfig, TrainingConfig


class TorchEngine(Engine):
    """DDP or FSDP2, with tensor parallel of networks that have a plan."""

    loop = "tasks.jobs.training.torch_engine:TorchEngine"

    def require_fits(self, training: TrainingConfig, execution: ExecutionConfig) -> None:
        """What cannot share matrices; a base model's family is looked at by the job."""
        require_no_megatron("torch", execution)
        require_whole_replicas(
            training, execution, whole=execution.parallel == "ddp" and execution.tensor_parallel == 1
        )
        asked = f"execution.tensor_parallel {execution.tensor_parallel}"
        if execution.tensor_parallel == 1:
            return
        if execution.parallel != "fsdp":
            raise ValueError(f"{asked} needs execution.parallel fsdp, which also divides what the matrices' ranks hold")
        if training.lora.rank:
            raise ValueError(f"{asked} has no plan for adapters: set it to 1, or leave training.lora.rank out")
        if training.network.architecture != "llama" and not training.base:
            raise ValueError(f"{asked} has a plan for llama only, not for {training.network.architecture}: set it to 1")

    def zero_stage(self, execution: ExecutionConfig) -> int:
        return 3 if execution.parallel == "fsdp" else 0

    def execution(
        self, *, zero: int, offload: str, virtual: int, sequence_parallel: bool, options: Sequence[str]
    ) -> dict[str, Any]:
        if zero in (1, 2):
            raise ValueError(f"zero {zero}: engine torch divides nothing (0) or weights too (3)")
        require_no_offload("torch", offload)
        return {"parallel": "fsdp" if zero == 3 else "ddp"}

    def divided(self, execution: Mapping[str, Any]) -> str:
        return str(execution["parallel"])
