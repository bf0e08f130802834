"""The environment that NCCL, and RCCL on AMD, should have on a kind of machine. Who sets it is the backend.

Pure; the values are in the YAML files of this folder, each with its source.
"""

from __future__ import annotations

from pathlib import Path

from tasks.hardware.sku import load_sku


def nccl_environment(name: str, *folders: Path) -> dict[str, str]:
    """Variables for the ranks on a VM size, the topology file among them; size names as Azure writes them, in any case.

    Raises ValueError for a size of which nothing is known.
    """
    sku = load_sku(name, *folders)
    return {**sku.environment, **({"NCCL_TOPO_FILE": sku.topology} if sku.topology else {})}


def topology_file(name: str, *folders: Path) -> str:
    """Where the machines' image has NCCL's topology file, which a container must see too; empty where there is none.

    Raises ValueError for a size of which nothing is known.
    """
    return load_sku(name, *folders).topology
