"""How long a training step takes, from what the qualification measured.

Pure: counts of operations and bytes come from size.py, rates from the benchmark. Judging the time is the stage's
(tasks/plan.py). Nothing is overlapped here, so an engine that overlaps is faster than this says. See docs/planning.md.
"""

from __future__ import annotations

DEFAULT_EFFICIENCY = 0.5
"""Share of the square-matmul rate that a whole step reaches, by Megatron's count of operations.

Norms, softmax, the optimizer and small matrices cost time and count little. Measured with a plain loop (Llama, fp32,
AdamW, one thread a rank, both cores busy) against 512 x 512 matmuls in the same process: median 0.56 at 0.9 M and 0.52
at 1.1 M parameters, 0.6 to 0.7 at 5 M and 16 M. Published H100 runs of Megatron-Core reach 0.41 to 0.49 of the peak."""


def compute_seconds(flops: float, gflops: float, *, efficiency: float = DEFAULT_EFFICIENCY) -> float:
    """Time of `flops` operations on one rank whose matmul rate is `gflops` (10^9 operations a second)."""
    if gflops <= 0 or not 0 < efficiency <= 1:
        raise ValueError(
            f"a rate of {gflops} GFLOP/s at efficiency {efficiency}: need a rate above 0 and 0 < efficiency <= 1"
        )
    return flops / (gflops * 1e9 * efficiency)


def allreduce_seconds(message_bytes: float, ranks: int, *, bus_gigabytes_per_second: float) -> float:
    """Time of one ring all-reduce: 2 (n - 1) / n x bytes / bus bandwidth; 0 for one rank.

    Inverts the definition of bus bandwidth in nccl-tests (doc/PERFORMANCE.md): busbw = bytes / time x 2 (n - 1) / n.
    """
    if ranks == 1:
        return 0.0
    if bus_gigabytes_per_second <= 0:
        raise ValueError(f"a bus bandwidth of {bus_gigabytes_per_second} GB/s over {ranks} ranks: need one above 0")
    return 2 * (ranks - 1) / ranks * message_bytes / (bus_gigabytes_per_second * 1e9)


def step_seconds(
    flops: float,
    gradient_bytes: float,
    *,
    ranks: int,
    gflops_per_rank: float,
    bus_gigabytes_per_second: float,
    efficiency: float = DEFAULT_EFFICIENCY,
) -> float:
    """One optimizer step: the slowest rank's share of the step's `flops`, then one all-reduce of the gradients.

    `flops` are those of the whole global batch; `gflops_per_rank` is the matmul rate of the slowest rank, for which
    all others wait.
    """
    computing = compute_seconds(flops / ranks, gflops_per_rank, efficiency=efficiency)
    return computing + allreduce_seconds(gradient_bytes, ranks, bus_gigabytes_per_second=bus_gigabytes_per_second)
