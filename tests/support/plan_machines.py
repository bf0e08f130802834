"""Machines for tests of the plan's arithmetic, by hand: their numbers are round and stay, whatever tasks/hardware says today."""

from __future__ import annotations

from tasks.hardware.machines import Machine

GIB = 1 << 30


def machine(
    gpu: str,
    *,
    memory_gib: float,
    tflops: tuple[float, float],
    fp8: tuple[float, float] = (0, 0),
    memory_gb_s: float,
    link_gb_s: float,
    network_gb_s: float,
    gpus: int = 8,
) -> Machine:
    """`tflops` and `fp8` are peak and achievable."""
    rates = {"bf16": tflops, "fp16": tflops, "fp8": fp8}
    return Machine(
        name=f"8 x {gpu}",
        gpu=gpu,
        gpus=gpus,
        memory_bytes=round(memory_gib * GIB),
        usable_memory_bytes=round(memory_gib * GIB * 0.98),
        peak_flops={name: peak * 1e12 for name, (peak, _) in rates.items()},
        achievable_flops={name: best * 1e12 for name, (_, best) in rates.items()},
        memory_bandwidth=memory_gb_s * 1e9,
        link_bandwidth=link_gb_s * 1e9,
        network_bandwidth=network_gb_s * 1e9,
        ethernet_bandwidth=10e9,
        host_bandwidth=25e9,
        host_memory_bytes=1900 * GIB,
        nvme_write_bandwidth=8e9,
        vcpus=96,
    )


A100 = machine("A100-80GB", memory_gib=80, tflops=(312, 271.2), memory_gb_s=2039, link_gb_s=230, network_gb_s=23)
H100 = machine(
    "H100", memory_gib=80, tflops=(989, 794.5), fp8=(1979, 1402.6), memory_gb_s=3350, link_gb_s=475, network_gb_s=47
)
V100 = machine("V100-32GB", memory_gib=32, tflops=(125, 105), memory_gb_s=900, link_gb_s=125, network_gb_s=10)
