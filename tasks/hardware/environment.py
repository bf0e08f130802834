"""The environment that NCCL, and RCCL on AMD, should have on an Azure VM size: nccl.json, as values.

Pure; who sets it is the backend that knows the size of its machines. Each entry of the file names its source.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


def nccl_environment(sku: str) -> dict[str, str]:
    """Variables for the ranks on a VM size, the topology file among them; size names as Azure writes them, in any case.

    Raises ValueError for a size that is not in the file.
    """
    family = _family(sku)
    topology = {"NCCL_TOPO_FILE": family["topology"]} if family["topology"] else {}
    return {**family["environment"], **topology}


def topology_file(sku: str) -> str:
    """Where the machines' image has NCCL's topology file, which a container must see too; empty where there is none.

    Raises ValueError for a size that is not in the file.
    """
    return str(_family(sku)["topology"])


def _family(sku: str) -> dict[str, Any]:
    families = _families()
    if _plain(sku) not in families:
        known = sorted({name for family in families.values() for name in family["skus"]})
        raise ValueError(f"no NCCL environment is known for VM size {sku!r}; known are {', '.join(known)}")
    return families[_plain(sku)]


def _plain(sku: str) -> str:
    return sku.lower().removeprefix("standard_")


@cache
def _families() -> dict[str, dict[str, Any]]:
    said = json.loads((Path(__file__).parent / "nccl.json").read_text(encoding="utf-8"))
    return {_plain(sku): family for family in said["families"] for sku in family["skus"]}
