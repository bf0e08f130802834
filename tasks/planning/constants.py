"""The numbers of the step's model that no data sheet has, each with its meaning, source and error. No arithmetic here.

Those marked *fitted* come from `python -m benchmarks.planning --fit` over all runs of benchmarks/planning_cases.yaml together,
never from one run; `--cross-validate` says how well they predict a paper that they did not see. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares are of 1; what is a time is in seconds."""

    sustained: float = 0.92
    """Share of the best matmul's rate that a large matmul keeps through hours of training (power, heat). Fitted."""
    matmul_ridge: float = 1.0
    """How much of a matmul's traffic to memory is not hidden behind its operations: 1 is none of it. Fitted."""
    memory_efficiency: float = 0.75
    """Share of the memory's bandwidth that norms, activations, dropout and softmax reach. Fitted."""
    flash_efficiency: float = 0.6
    """Rate of flash attention against the best matmul's, forward and backward together, as Megatron-LM takes it from Transformer
    Engine. Fitted; FlashAttention-2 (arXiv 2307.08691, figure 4) reaches 0.62 to 0.73 on A100 with 16k tokens and heads of 128."""
    flash_efficiency_torch: float = 0.3
    """As `flash_efficiency`, of PyTorch's and Triton's kernels, which do not use what Hopper brought. Fitted."""
    unfused: float = 1.8
    """How much more memory traffic than Megatron-LM's fused kernels PyTorch and DeepSpeed have outside of matmuls: casts of
    autocast, norms and activations in several kernels, copies between buckets. Fitted."""
    tensor_exposed: float = 0.7
    """Share of tensor parallel traffic that stands in the way of computing. Fitted."""
    overlap: float = 0.9
    """Share of a step's computing behind which traffic of gradients and weights can hide, where the engine overlaps. Fitted."""
    contention: float = 0.15
    """What hidden traffic still costs: collectives take processors and memory bandwidth from the computing. Fitted."""
    straggling: float = 0.01
    """Time that each doubling of the machines adds: the slowest of more is slower, and they wait more often. Fitted."""
    launch: float = 3.5e-4
    """Seconds in which a host launches the kernels of one layer, forward and backward: about 60 of 6 microseconds (Megatron-Core's
    layer as profiled in NVIDIA/TransformerEngine's issues). A small layer is never faster."""
    step: float = 0.02
    """Seconds of a step outside of it all: the clip's and the loss's reductions, reading back, logging."""
    link_latency: float = 3.0e-5
    """Seconds of a collective in one machine before its bytes: Azure/AI-benchmarking-guide @8fd0c6e, all_reduce on eight
    H100: 42 us at 1 MiB, of which 4 are bytes; 125 at 16 MiB, of which 61 are."""
    network_latency: float = 4.0e-5
    """As `link_latency` between machines: nccl-tests over InfiniBand at small sizes, 30 to 60 us on two machines."""
    hop_latency: float = 3.0e-6
    """What each further rank of a ring adds, and each further level of a tree twice."""
    bus_share: float = 0.8
    """Share of the bus bandwidth of nccl-tests that a collective reaches while kernels compute beside it."""
    host_share: float = 0.6
    """Share of the PCIe link's bandwidth that offloading reaches: ZeRO-Offload (arXiv 2101.06840), section 5."""
    cpu_adam: float = 2.5e9
    """Parameters a second that the processors of one machine update (DeepSpeedCPUAdam, ZeRO-Offload table 4: 1 B in 0.22 s to
    10 B in 2.2 s with AVX on two sockets: 4.5e9; half of it where eight ranks share the memory's bandwidth)."""


DEFAULT = Constants()
