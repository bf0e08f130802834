"""Seconds of one GPU's own work: matmuls by shape, attention, what only moves bytes. Pure.

Which work a stage has is work.py; how it adds up to a step, steps.py. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.hardware.machine import Machine
from tasks.planning.case import Engine, Precision
from tasks.planning.constants import DEFAULT, Constants

BACKWARD_OF_FLASH = 2.5
"""Five matmuls backward for two forward, for the scores are computed again: Dao 2023, section 3.2."""
BEFORE_HOPPER = 0.73 / 0.35
"""How much nearer attention comes to the matmuls of a GPU before Hopper, by kernels that do not use what Hopper brought: at most
73 % of A100's rate (Dao 2023, FlashAttention-2), 35 % of H100's (Shah et al. 2024, FlashAttention-3, abstract)."""
SCORE_BYTES_FORWARD = 13
"""Of one number of the sequence x sequence matrix in 16 bits: written by the matmul, read and written by softmax, read and
written by dropout with a mask of one byte, read by the matmul (the fused kernels of Megatron-LM)."""
SCORE_BYTES_BACKWARD = 17
"""As forward: the gradients of the product, of dropout (with its mask) and of softmax, which reads its own result too."""


@dataclass(frozen=True)
class Rates:
    """What one GPU reaches in one precision: operations and bytes a second."""

    matmul: float
    attention_matmul: float
    """Attention stays in 16 bits where the layers' matmuls are in 8."""
    flash: float
    memory: float
    """Of kernels that only move bytes."""
    unfused: float
    """Times the bytes that fused kernels move."""
    traffic: float
    """Seconds that a byte of a matmul's traffic costs on top of its operations."""
    element_bytes: int


def rates(
    machine: Machine, precision: Precision, *, engine: Engine = "megatron", constants: Constants = DEFAULT
) -> Rates:
    """ValueError when the machine has no rate for the precision."""
    best = _achievable(machine, precision)
    sixteen = best if precision == "fp32" else _achievable(machine, "bf16" if precision == "fp8" else precision)
    flash = constants.flash_efficiency
    if engine == "torch":
        hopper = machine.achievable_flops.get("fp8", 0.0) > 0  # the first with matmuls in 8 bits
        flash = constants.flash_efficiency_torch * (1.0 if hopper else BEFORE_HOPPER)
    return Rates(
        matmul=best * constants.sustained,
        attention_matmul=sixteen * constants.sustained,
        flash=sixteen * flash,
        memory=machine.memory_bandwidth * constants.memory_efficiency,
        unfused=1.0 if engine == "megatron" else constants.unfused,
        traffic=constants.matmul_ridge / machine.memory_bandwidth,
        element_bytes=4 if precision == "fp32" else 2,
    )


def _achievable(machine: Machine, precision: Precision) -> float:
    result = machine.achievable_flops.get(precision, 0.0)
    if result <= 0:
        able = ", ".join(sorted(name for name, rate in machine.achievable_flops.items() if rate > 0))
        raise ValueError(f"precision {precision}: {machine.gpu} has no rate for it; it computes in {able}")
    return result


def matmul_seconds(m: float, n: float, k: float, at: Rates) -> float:
    """Of an m x k matrix times a k x n: its operations, and that part of moving the three matrices that they do not hide.

    So a matmul that is thin in one dimension (a small micro batch, a layer divided over many GPUs) is slower per operation.
    """
    return 2 * m * n * k / at.matmul + at.element_bytes * (m * k + k * n + m * n) * at.traffic


def attention_seconds(sequence: int, queries: float, *, samples: float, at: Rates, flash: bool) -> tuple[float, float]:
    """Forward and backward between queries, keys and values of width `queries` on this GPU; bytes of the scores not included.

    Flash attention computes half of the square (causal).
    """
    square = 4.0 * sequence * sequence * queries * samples
    if flash:
        return square / 2 / at.flash, BACKWARD_OF_FLASH * square / 2 / at.flash
    return square / at.attention_matmul, 2 * square / at.attention_matmul


def moving_seconds(total: float, at: Rates) -> float:
    """Of kernels that read and write `total` bytes and compute next to nothing."""
    return total / at.memory
