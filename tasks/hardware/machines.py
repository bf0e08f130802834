"""Machines as a plan sees them, made of a size's file or of a GPU's name: rates and room in plain SI units.

A number that a file lacks is assumed, cautiously, and named: the plan warns of it. What the qualification measured comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tasks.hardware.files import FOLDER, LOADER, find_sku, read_sku
from tasks.hardware.sku import Number, Sku, plain_name


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


GPUS = "_gpus.yaml"
GB, GIB, TIB, TERA, GBIT = 1e9, 1 << 30, 1 << 40, 1e12, 1e9 / 8
USABLE = 0.98
"""Of a GPU's memory: torch finds 79.2 of an A100's 80 GiB and 139.8 of an H200's 141, and CUDA's context takes half of one."""
ACHIEVABLE = {"nvidia": 0.8, "amd": 0.51}
"""Of the peak, where no best matmul was published: between B200's 0.78 and A100's 0.87; MI300X's 0.51 (ml-engineering, MAMF)."""
FP8_ACHIEVABLE = 0.7
"""H100's 1,402.6 of 1,979 (the same page)."""
OF_LINK = 0.77
"""Bus bandwidth of an all-reduce by a GPU's NVLink in one direction: 231.6 of 300 GB/s on A100 (Azure/AI-benchmarking-guide)."""
OF_PORT = 0.9
"""Bus bandwidth by what the adapters carry: 364 of 400 GB/s over 10 x 8 H100, 189.6 of 200 over 2 x 8 A100, without SHARP."""
ASSUMED_LINK, ASSUMED_HOST = 32e9, 25e9
"""PCIe 4 x16 in one direction, and what of it a copy reaches."""
DTYPES = ("bf16", "fp16", "fp32", "fp8")


@dataclass
class _Reader:
    """A size, read number by number; remembers where each came from, and what was not there."""

    sku: Sku
    specs: Mapping[str, Number]
    sources: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def get(self, name: str, what: str, scale: float = 1.0, *, otherwise: float | None = 0.0) -> float:
        """A number of the file times `scale`; `otherwise` where it has none, named as assumed unless that is 0."""
        result = self.specs.get(name)
        if result is not None and not isinstance(result.value, str):
            self.sources[what] = self.sku.cite(result.source)
            return float(result.value) * scale
        if otherwise:
            self.assumed.append(what)
        return otherwise or 0.0


def machine_of_sku(name: str, *folders: Path) -> Machine:
    """A size of Azure, or a file of your own. Raises ValueError for an unknown one, and one without GPUs."""
    sku = read_sku(find_sku(name, *folders), *folders)
    return _machine(sku, sku.specs, sku.name)


def machine_of_gpu(name: str) -> Machine:
    """The generic machine of a GPU: A100-80GB, h100 or `A100 80GB`. Raises ValueError that names those there are."""
    known = _gpus()
    result = known.get(_bare(name))
    if result is None:
        hint = ", ".join(sorted({one["name"] for one in known.values()}))
        raise ValueError(
            f"gpu {name!r}: nothing is known of it; known are {hint}; or give sku, as `headway hardware` lists them"
        )
    sku = read_sku(find_sku(result["size"]))
    changed = {key: Number.model_validate(value) for key, value in result["specs"].items()}
    return _machine(sku, {**sku.specs, **changed}, result["name"], generic=True)


def of_qualification(machine: Machine, *, allreduce_bus_bandwidth: float, nodes: int) -> Machine:
    """With the bus bandwidth, in bytes a second, that all machines together showed; 0: nothing was measured."""
    if allreduce_bus_bandwidth <= 0:
        return machine
    payload = {
        **machine.sources,
        "link_bandwidth" if nodes == 1 else "network_bandwidth": "measured by the qualification",
    }
    if nodes == 1:
        return replace(machine, link_bandwidth=allreduce_bus_bandwidth, sources=payload)
    return replace(machine, network_bandwidth=allreduce_bus_bandwidth / machine.gpus, sources=payload)


def _machine(sku: Sku, specs: Mapping[str, Number], name: str, *, generic: bool = False) -> Machine:
    read = _Reader(sku, specs)
    gpus = round(read.get("gpus", "gpus"))
    memory = read.get("gpu_memory_gb", "memory_bytes", GIB)
    if not gpus or not memory:
        raise ValueError(
            f"the hardware file of {name} describes no GPUs, which a plan of a case needs; `headway hardware` lists sizes"
        )
    # Peak and achievable by precision; a precision that the GPU has no rate for is left out of both.
    peak = {dtype: read.get(f"peak_{dtype}_tflops", "peak_flops", TERA) for dtype in DTYPES}
    peak = {dtype: rate for dtype, rate in peak.items() if rate}
    bf16 = read.get("achievable_bf16_tflops", "achievable_flops", TERA)
    share = bf16 / peak["bf16"] if bf16 and "bf16" in peak else 0.0
    if not share:
        share = ACHIEVABLE.get(read.sku.vendor, min(ACHIEVABLE.values()))
        read.assumed.append("achievable_flops")
    shares = {"fp8": min(share, FP8_ACHIEVABLE)}
    achievable = {
        dtype: read.get(f"achievable_{dtype}_tflops", "achievable_flops", TERA) or rate * shares.get(dtype, share)
        for dtype, rate in peak.items()
    }
    ports, gbit = read.get("infiniband_ports", "network_bandwidth"), read.get("infiniband_gbit_s", "network_bandwidth")
    return Machine(
        name=name,
        gpu=str(specs["gpu"].value) if "gpu" in specs else name,
        gpus=gpus,
        memory_bytes=round(memory),
        usable_memory_bytes=round(memory * USABLE),
        peak_flops=peak,
        achievable_flops=achievable,
        memory_bandwidth=read.get("gpu_memory_bandwidth_gb_s", "memory_bandwidth", GB, otherwise=1e12),
        link_bandwidth=_link(read),
        network_bandwidth=ports * gbit * GBIT * OF_PORT / gpus,
        ethernet_bandwidth=read.get("ethernet_gbit_s", "ethernet_bandwidth", GBIT, otherwise=20 * GBIT),
        host_bandwidth=_host(read),
        host_memory_bytes=round(read.get("memory_gib", "host_memory_bytes", GIB, otherwise=gpus * 100 * GIB)),
        nvme_write_bandwidth=read.get("nvme_write_gb_s", "nvme_write_bandwidth", GB),
        link_gpus=round(read.get("nvlink_gpus", "link_gpus")),
        nvme_bytes=read.get("nvme_total_tib", "nvme_bytes", TIB) or read.get("temp_disk_gib", "nvme_bytes", GIB),
        vcpus=round(read.get("vcpus", "vcpus")),
        family="" if generic else sku.family,
        tops_out_at=0
        if generic or not ports
        else round(float(sku.azureml["mpi_nodes"].value))
        if "mpi_nodes" in sku.azureml
        else 0,
        sources=read.sources,
        assumed=tuple(dict.fromkeys(read.assumed)),
    )


def _link(read: _Reader) -> float:
    """Of the largest message in one machine that a norm is known of; else, and where a GPU's links are its own, by the links."""
    own = read.specs.get("nvlink_gb_s") != read.sku.specs.get("nvlink_gb_s")
    known = [] if own else read.sku.collectives
    rows = [row for row in known if (row.collective, row.scope) == ("all_reduce", "node")]
    best = max((row for row in rows if row.norm or row.fail), key=lambda row: (row.bytes, row.norm or 0), default=None)
    if best:
        read.sources["link_bandwidth"] = read.sku.cite(best.norm_source or best.source)
        return float(best.norm or best.fail or 0.0) * GB
    return read.get("nvlink_gb_s", "link_bandwidth", GB * OF_LINK, otherwise=ASSUMED_LINK)


def _host(read: _Reader) -> float:
    limit = read.sku.limits.get("host_to_device")
    result = (
        next((level for level in (limit.norm, limit.warn, limit.fail) if isinstance(level, float)), 0.0)
        if limit
        else 0.0
    )
    if not result:
        read.assumed.append("host_bandwidth")
        return ASSUMED_HOST
    read.sources["host_bandwidth"] = read.sku.cite(limit.source) if limit else ""
    return result * GB


@cache
def _gpus() -> dict[str, dict[str, Any]]:
    """By every spelling of every name."""
    output = yaml.load((FOLDER / GPUS).read_text(encoding="utf-8"), LOADER)["gpus"]
    result: dict[str, dict[str, Any]] = {}
    for name, one in output.items():
        entry = {"name": name, "size": one["size"], "specs": one.get("specs", {})}
        result |= {_bare(known): entry for known in (name, *one.get("aliases", ()))}
    return result


def _bare(gpu: str) -> str:
    return plain_name(gpu).replace("nvidia", "").replace("amd", "").replace("_", "").replace("-", "")
