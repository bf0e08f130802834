"""The numbers of the step's model that no data sheet has, each with its meaning, source and error. No arithmetic here.

Those marked *fitted* come from `python -m benchmarks.planning --fit` over all runs of benchmarks/planning_cases.yaml together,
never from one run. With them the median error of throughput is 6 %, and nine in ten runs are within 15 %; `--cross-validate`
says how well they predict a paper that they did not see: 8 %, and 19 %. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares are of 1; what is a time is in seconds."""

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
