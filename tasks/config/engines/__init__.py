"""What an engine declares of itself: one file an engine in this folder, with all that is particular to it.

The program that trains, what of the settings it does not have, what its job is handed, and how the planner counts it. Everybody
reads these, and nobody asks for an engine's name: `ENGINES` of registry.py has them by `training.engine`. They are plain values,
so that a plan is made without importing torch. What an engine does is in tasks/jobs/training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.config.training import ExecutionConfig, TrainingConfig


@dataclass(frozen=True)
class Planned:
    """How the planner counts an engine: memory, traffic, operations, and which divisions it tries.

    The defaults are those of a loop over PyTorch with its optimizer on float32 weights. Where each comes from is said where it is
    used (tasks/planning/memory.py, steps.py, search.py).
    """

    plain_torch: bool = True
    """Layers and their division are PyTorch's own: autocast, FSDP2, its attention and selective checkpointing, unfused copies."""
    state_bytes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Bytes a parameter of weight, gradient and optimizer, by precision; of one that is not named 4, 4 and 8, all in float32."""
    bf16_accumulated_apart: bool = False
    """Up to ZeRO 1 gradients are accumulated in float32 beside those in bf16: 4 bytes more."""
    gathers_by_tensor: bool = False
    """ZeRO 3 gathers each tensor by itself; else each layer at once."""
    gradient_buckets: bool = False
    """ZeRO has buckets, and a float32 copy of its share of the gradients; its allocator leaves larger gaps."""
    flattens_fp16: bool = False
    """Without ZeRO fp16 gradients are copied to be reduced."""
    reduces_in_float32: bool = True
    """Gradients in bf16 are reduced in float32; else as they are."""
    half_gradients_option: str = ""
    """Argument with which gradients are accumulated and reduced in bf16."""
    narrow_fp8: bool = False
    """In fp8, what goes into a matrix is kept in one byte."""
    keeps_stage_input: bool = True
    """A pipeline stage keeps what comes into it, also where all else is computed again."""
    fused_loss: Literal["never", "divided", "always"] = "never"
    """Whether the loss over the vocabulary is Megatron's: where the network is divided, or always."""
    ties_positions: bool = False
    """A tied embedding brings the learned positions to the last pipeline stage."""
    fused_kernels: bool = False
    """Kernels outside of matmuls are fused."""
    reduces_after_backward: bool = False
    """Without ZeRO gradients are reduced when all is computed."""
    zero_stages: tuple[Literal[0, 1, 2, 3], ...] = (3, 0)
    """Stages that a search tries."""
    zero_only_divided: bool = False
    """Over one rank stage 0 is tried instead."""
    most_zero_in_pipeline: int = 3
    """Highest stage with pipeline stages."""
    offloads: bool = True
    """A search tries offloading, where little else helps; gradients go to the host with the optimizer."""
    offloads_weights_again: bool = False
    """With ZeRO 3, activations of full recomputation go to the host as well, where memory asks for it."""
    nvme: bool = False
    """What is offloaded may lie on NVMe disks."""
    searches_layers: bool = False
    """A search tries pipeline and context parallel; else only what the case names."""
    searches_matrices: bool = True
    """A search tries tensor parallel."""
    splits_norms: bool = True
    """Norms and dropout are divided over the ranks of tensor parallel."""


class Engine(ABC):
    """An engine with our own loop. A subclass says what settings it lacks, how a plan becomes settings, and what else differs."""

    loop: str = ""
    """Its class in the loop (tasks/jobs/training/engine.py), as MODULE:CLASS; empty: `program` has a loop of its own."""
    program: str = "tasks.jobs.train"
    """What a job of it runs."""
    cannot_continue: str = ""
    """Why no other run can continue from its checkpoints; empty: it can."""
    cannot_mirror: str = ""
    """Why it needs a folder that its machines share; empty: it can do without."""
    laid_out_by_precision: str = ""
    """What of its checkpoints is laid out by `training.precision`, so that another one cannot continue; empty: nothing."""
    planned = Planned()

    @abstractmethod
    def require_fits(self, training: TrainingConfig, execution: ExecutionConfig) -> None:
        """Raise ValueError for a setting that it does not have, with its value and a remedy."""

    def job_settings(self, training: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
        """What its job is handed beside the settings of every engine."""
        return {}

    def zero_stage(self, execution: ExecutionConfig) -> int:
        """What is divided over the copies of the network: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
        return 0

    def division(self, training: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
        """What of a planned division its own section says: `virtual`, `offload`, `sequence_parallel`."""
        return {"virtual": 1, "offload": "none", "sequence_parallel": False}

    @abstractmethod
    def execution(
        self, *, zero: int, offload: str, virtual: int, sequence_parallel: bool, options: Sequence[str]
    ) -> dict[str, Any]:
        """A planned division as settings of `execution`, with arguments that it needs. Raises ValueError for what it has not."""

    def divided(self, execution: Mapping[str, Any]) -> str:
        """How a recorded run divided its state, in a word or two; empty when there is nothing to report."""
        return ""


def require_no_megatron(engine: str, execution: ExecutionConfig) -> None:
    """Raise ValueError for parallelism that only Megatron-LM has."""
    only_megatron = {"pipeline_parallel": execution.pipeline_parallel, "context_parallel": execution.context_parallel}
    for name, value in only_megatron.items():
        if value > 1:
            raise ValueError(f"execution.{name} {value} needs the engine megatron, not {engine}")


def require_whole_replicas(training: TrainingConfig, execution: ExecutionConfig, *, whole: bool) -> None:
    """Raise ValueError for probes that compare whole replicas, where there are none."""
    every = training.safety.repeat_every_steps
    if every and not whole:
        raise ValueError(
            f"training.safety.repeat_every_steps {every} compares whole replicas: it needs the engine torch with "
            f"execution.parallel ddp, not {training.engine} with {execution.parallel}"
        )


def require_no_offload(engine: str, offload: str) -> None:
    """Raise ValueError for a plan that offloads."""
    if offload != "none":
        raise ValueError(f"offload {offload}: engine {engine} does not offload; take deepspeed, or more GPUs")
