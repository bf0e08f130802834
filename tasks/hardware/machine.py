"""A kind of machine as a plan sees it: rates and room, in plain SI units. Pure.

tasks/hardware/machines.py makes them of a size's file or of a GPU's name; measured values of a qualification replace those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """All rates are of one direction, bytes or operations a second."""

    name: str
    gpu: str
    gpus: int
    """Of one machine."""
    memory_bytes: int
    """Of one GPU, as the vendor counts it: 80 GB of an A100 are 80 GiB less what the firmware keeps."""
    usable_memory_bytes: int
    """Of one GPU, what a training process can take: without the driver's and CUDA's own."""
    peak_flops: Mapping[str, float]
    """Dense operations a second by precision: bf16, fp16, fp32, fp8."""
    achievable_flops: Mapping[str, float]
    """What the best matmul reaches (MAMF); no plan is above it."""
    memory_bandwidth: float
    link_bandwidth: float
    """Bus bandwidth, as nccl-tests count, of a large all-reduce between the GPUs of one machine."""
    network_bandwidth: float
    """Bus bandwidth of a large all-reduce over machines, per GPU of the machine: all its adapters over all its GPUs; 0: none."""
    ethernet_bandwidth: float
    """Of one machine, to storage."""
    host_bandwidth: float
    """Of one GPU to its host's memory (PCIe, or NVLink-C2C)."""
    host_memory_bytes: int
    nvme_write_bandwidth: float
    """Of one machine's local disks; 0: none."""
    vcpus: int
    family: str = ""
    """Azure's quota family; empty for a generic machine."""
    tops_out_at: int = 0
    """Most machines that one job may have (Azure ML: 100 with RDMA); 0: no limit known."""
    link_gpus: int = 0
    """GPUs that its links join, over several machines where these share switches (72 in an NVL72); 0: those of one machine."""
    nvme_bytes: float = 0.0
    """Room on one machine's local disks."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> where its number is from."""
    assumed: tuple[str, ...] = ()
    """Fields for which no number was found, and a cautious one was taken: they are warnings of the plan."""

    @property
    def joined(self) -> int:
        """GPUs that talk over links, not over the network."""
        return max(self.gpus, self.link_gpus)
