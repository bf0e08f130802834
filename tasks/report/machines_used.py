"""What the runs of a home ran on and used of it, read from job folders, for `headway cost` and `headway rightsize`.

A folder that is gone leaves its values out. What is made of them is tasks/planning/spent.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.config.cluster import ClusterConfig, machine_size, on_this_machine
from tasks.hardware.sku import load_sku
from tasks.planning.spent import Machines, Use

GPU_BUSY, CPU_BUSY = "_utilization_percentage", "system/cpu_utilization_percentage"
MEMORY_USED = "system/system_memory_usage_percentage"


def machines_of(folder: Path) -> Machines | None:
    """What a job ran on: a size of Azure, or `local-cpu` and `local-gpu`; None when its folder is gone."""
    job, cluster = _json(folder / "job.json"), _json(folder / "cluster.json")
    return Machines(size_of(cluster), float(job.get("nodes") or 1)) if job else None


def size_of(cluster: Mapping[str, Any]) -> str:
    """The name under which a machine of a cluster is priced: its size, else the cluster's own name."""
    named = machine_size(cluster)
    if named or not on_this_machine(cluster.get("backend", "local")):
        return named or str(cluster.get("name") or "")
    return "local-gpu" if cluster.get("gpus_per_node") else "local-cpu"


def used(folder: Path, hardware: Path, *, metrics: Mapping[str, float], out_of_memory: int = 0) -> Use | None:
    """What a training used of its machines; None when its folder is gone. `hardware` are the home's own files of sizes."""
    job, payload, result = _json(folder / "job.json"), _json(folder / "cluster.json"), _json(folder / "result.json")
    if not job:
        return None
    cluster, time = ClusterConfig.model_validate(payload), result.get("time") or {}
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        lines = []
    # What a writer left half is left out.
    records = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    gpu = bool(job.get("gpus_per_node"))
    known = [
        float(value)
        for record in records
        for name, value in record.items()
        if (name.startswith("system/gpu_") and name.endswith(GPU_BUSY) if gpu else name == CPU_BUSY)
    ]
    busy = sum(known) / len(known) if known else None
    return Use(
        device="gpu" if gpu else "cpu",
        memory=_gpu_memory(time, payload, hardware) if gpu else _memory(time, cluster, records),
        busy=None if busy is None else busy / 100,
        data=metrics.get("data_share"),
        communication=metrics.get("communication_share"),
        checkpoint=metrics.get("checkpoint_share"),
        mfu=metrics.get("mfu"),
        out_of_memory=out_of_memory,
        machines=float(job.get("nodes") or 1),
    )


def _gpu_memory(time: Mapping[str, Any], cluster: Mapping[str, Any], hardware: Path) -> float | None:
    """The most that torch had on one GPU, of what the size has; a vendor's GB of a GPU are GiB."""
    peak, size = time.get("gpu_memory_gib"), size_of(cluster)
    if peak is None or not size or size == "local-gpu":
        return None
    try:
        existing = load_sku(size, hardware).specs.get("gpu_memory_gb")
    except ValueError:
        return None
    return float(peak) / float(existing.value) if existing else None


def _memory(time: Mapping[str, Any], cluster: ClusterConfig, records: Iterable[Mapping[str, Any]]) -> float | None:
    """Of the limit that the job had; without one, of the machine, with all else that ran there."""
    if cluster.memory_gib and time.get("memory_gib") is not None:
        return float(time["memory_gib"]) * cluster.ranks_per_node / cluster.memory_gib
    shares = [float(record[MEMORY_USED]) / 100 for record in records if MEMORY_USED in record]
    return max(shares, default=None)


def _json(path: Path) -> dict[str, Any]:
    try:
        output = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return output if isinstance(output, dict) else {}
