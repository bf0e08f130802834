"""What a plan says of one case: the JSON of `headway plan --case --json`, field by field. Pure.

Units are in the names. predict.py makes it; search.py chooses between several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tasks.config.engines import Planned
from tasks.config.engines.registry import ENGINES
from tasks.config.training import EngineName
from tasks.planning.case import Offload, Precision, Recompute

GIB = 1 << 30
Fit = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Division:
    """A training's division with nothing left open: `parallel`, as used."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    offload: Offload = "none"
    sequence_parallel: bool = False
    micro: int = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    engine: EngineName = "megatron"

    @property
    def counted(self) -> Planned:
        """How the planner counts its engine."""
        return ENGINES[self.engine].planned

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def micro_batches(self, global_batch: int) -> int:
        """Micro batches of a rank in one step."""
        return global_batch // (self.dp * self.micro)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest GPU, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    other: float
    """Logits, communication buffers, the framework, fragmentation."""
    parts: dict[str, float] = field(default_factory=dict)
    """`other` again, part by part."""
    stage: int = 0
    """The pipeline stage that this is of."""
    host: float = 0.0
    """Of one machine's memory, what offloading takes."""
    spared: dict[str, float] = field(default_factory=dict)
    """Of the total, what the engine can do without, by an option or in need: how -> bytes."""
    loose: float = 0.0
    """Of the total, what the allocator gives back by itself before it fails."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.other


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of the slowest pipeline stage, by part. What overlaps is counted where it is not hidden."""

    matmul: float
    attention: float
    memory_bound: float
    """Norms, activations' functions, dropout, softmax, the optimizer."""
    tensor_parallel: float
    pipeline: float
    """Transfers between stages that do not overlap."""
    context_parallel: float
    expert_parallel: float
    data_parallel: float
    """Gradients, and ZeRO's gathering of weights, that do not overlap."""
    bubble: float
    offload: float
    overhead: float
    """Launching kernels, waiting for the slowest, logging."""

    @property
    def total(self) -> float:
        return float(sum(self.__dict__.values()))


@dataclass(frozen=True)
class Flops:
    """Operations of one step over all GPUs, by convention (docs/planning.md, Operations)."""

    hardware: float
    """What is really computed, recomputation included, attention as the full square unless it is causal flash attention."""
    model: float
    """Without recomputation; attention as Megatron-LM counts it today, half the square."""
    published_96: float
    """96 B s L h^2 (1 + s/6h + V/16Lh), of Narayanan et al. 2021, for a network of its form; else equal to `hardware`."""
    six_n: float
    """6 x parameters x tokens."""


@dataclass(frozen=True)
class Prediction:
    """What one case is with one division, on so many GPUs of one machine's kind."""

    division: Division
    memory: Memory
    fit: Fit
    time: StepTime
    step_seconds: float
    tokens_per_second_per_gpu: float
    tflops_hardware: float
    """Of one GPU, operations of recomputation included."""
    tflops_model: float
    mfu: float
    """Model operations against the GPU's peak of the case's precision."""
    days: float | None
    """For the case's tokens, without failures; None when it gives none."""
    binds: tuple[str, ...]
    """What limits, the strongest first: memory, compute, memory bandwidth, links in a machine, network, pipeline bubble, offload,
    waiting."""
    warnings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Options of the engine without which it does not fit."""
