"""What a prediction is made of and what it says: a division, the model's numbers, and memory, time and operations by part.

Pure values. memory.py and steps.py fill them, predict.py puts them together, search.py chooses between several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tasks.config.engines import Planned
from tasks.config.engines.registry import ENGINES
from tasks.config.training import EngineName
from tasks.planning.case import Case, Network, Offload, Precision, Recompute

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

    @property
    def element_bytes(self) -> int:
        """Of an activation: under mixed precision what matrices work on."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class Divided:
    """A training divided: all that its memory and its step's time depend on, the machines apart."""

    network: Network
    division: Division
    sequence: int
    """Tokens of a sample."""
    global_batch: int = 1
    """Samples of an optimizer step over all ranks."""
    flash_attention: bool = True

    @classmethod
    def of_case(cls, case: Case, division: Division) -> Divided:
        """A case with nothing left open."""
        return cls(case.network, division, case.sequence, case.batch.global_, case.flash_attention)

    @property
    def tokens(self) -> float:
        """Of one micro batch on one GPU: context parallelism divides the sequence."""
        return self.division.micro * self.sequence / self.division.cp

    @property
    def micro_batches(self) -> int:
        """Of a rank in one step."""
        return self.global_batch // (self.division.dp * self.division.micro)


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


@dataclass(frozen=True)
class Constants:
    """The numbers of the step's model that no data sheet has. Shares are of 1; what is a time is in seconds.

    Those marked *fitted* come from `python -m benchmarks.planning --fit` over all runs of benchmarks/planning_cases.yaml at once,
    never from one run. With them the median error of throughput is 6 %, and nine in ten runs are within 15 %; `--cross-validate`
    says how well they predict a paper that they did not see: 8 %, and 19 %.
    """

    sustained: float = 0.91
    """Share of the best matmul's rate that a large matmul keeps through hours of training (power, heat). Fitted."""
    matmul_ridge: float = 0.92
    """How much of a matmul's traffic to memory is not hidden behind its operations: 1 is none of it. Fitted."""
    memory_efficiency: float = 0.68
    """Share of the memory's bandwidth that norms, activations, dropout and softmax reach. Fitted."""
    flash_efficiency: float = 0.53
    """Rate of flash attention against the best matmul's, forward and backward together, as Megatron-LM has it from Transformer
    Engine. Fitted."""
    flash_efficiency_torch: float = 0.23
    """As `flash_efficiency`, of PyTorch's and Triton's kernels on Hopper and later, whose new instructions they do not use; on
    older GPUs, BEFORE_HOPPER (steps.py) times that. Fitted."""
    unfused: float = 1.56
    """How much more memory traffic than Megatron-LM's fused kernels PyTorch and DeepSpeed have outside of matmuls: casts of
    autocast, norms and activations in several kernels, copies between buckets. Fitted."""
    tensor_exposed: float = 0.59
    """Share of tensor parallel traffic that stands in the way of computing. Fitted."""
    overlap: float = 0.93
    """Share of a step's computing behind which traffic of gradients and weights can hide, where the engine overlaps. Fitted."""
    contention: float = 0.18
    """What hidden traffic still costs: collectives take processors and memory bandwidth from the computing. Fitted."""
    straggling: float = 0.011
    """Time that each doubling of the machines adds: the slowest of more is slower, and they wait more often. Fitted."""
    launch: float = 3.5e-4
    """Seconds in which a host launches the kernels of one layer, forward and backward: some 60 of 6 microseconds. Assumed; a
    layer is never faster, which only small ones with small micro batches notice."""
    step: float = 0.02
    """Seconds of a step outside of it all: reductions of the gradients' norm and of the loss, reading back, logging. Assumed."""
    link_latency: float = 3.0e-5
    """Seconds of a collective in one machine before its bytes: Azure/AI-benchmarking-guide @8fd0c6e, all_reduce on eight H100: 42
    microseconds at 1 MiB, of which 4 are its bytes."""
    network_latency: float = 4.0e-5
    """As `link_latency` between machines. Assumed a little over it; what a step sends is too large to notice."""
    hop_latency: float = 3.0e-6
    """What each further rank of a ring adds, and each further level of a tree twice. Assumed: a write over InfiniBand."""
    bus_share: float = 0.8
    """Share of the bus bandwidth of a large all-reduce that a training's collectives reach: they are smaller, and not all are
    all-reduces, which alone use NVLink's switches (8 x H100: about 480 GB/s against 370, nccl-tests issue 212)."""
    host_share: float = 0.6
    """Share of the PCIe link's bandwidth that offloading reaches, both directions being in use. Assumed."""
    cpu_adam: float = 5e9
    """Parameters a second that the processors of one machine update: 28 bytes moved for each, at 140 GB/s, which two
    processors have. Assumed, in view of DeepSpeed's runs on 128 A100, for which half of it was too slow."""


DEFAULT = Constants()
