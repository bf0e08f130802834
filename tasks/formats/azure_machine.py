"""What an Azure machine says of itself: its instance metadata (IMDS), Hyper-V's key-value pairs, the image's component versions.

Pure: who reads is tasks/jobs/qualify/health.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""/sys/class/dmi/id/chassis_asset_tag of every Azure VM."""


KEY_BYTES, VALUE_BYTES = 512, 2048
"""Of a record in /var/lib/hyperv/.kvp_pool_N (linux/include/uapi/linux/hyperv.h)."""


COMPONENTS = {"NVIDIA": "driver", "CUDA": "cuda", "NCCL": "nccl", "RCCL": "rccl", "ROCM": "rocm", "HPCX": "mpi"}


def key_values(pool: bytes) -> dict[str, str]:
    """A pool of key-value pairs; PhysicalHostName is in pool 3."""
    size = KEY_BYTES + VALUE_BYTES
    records = (pool[at : at + size] for at in range(0, len(pool) - size + 1, size))
    return {_text(record[:KEY_BYTES]): _text(record[KEY_BYTES:]) for record in records}


def instance(compute: Mapping[str, Any]) -> dict[str, str]:
    """The parts of IMDS's `instance/compute` that name a machine, by our names; without what is empty."""
    names = {"vmSize": "vm_size", "vmId": "vm_id", "resourceId": "resource_id", "name": "vm_name"}
    return {ours: str(compute[theirs]) for theirs, ours in names.items() if compute.get(theirs)}


def urn(compute: Mapping[str, Any]) -> str:
    """The image: PUBLISHER:OFFER:SKU:VERSION, or the id of one of the subscription's own. Empty where it is not said."""
    image = (compute.get("storageProfile") or {}).get("imageReference") or {}
    parts = [str(image.get(part) or "") for part in ("publisher", "offer", "sku", "version")]
    return ":".join(parts) if all(parts) else str(image.get("id") or "")


def components(text: str) -> dict[str, str]:
    """/opt/azurehpc/component_versions.txt, by our names. Raises ValueError when it is no JSON object of names and versions."""
    output = json.loads(text)
    if not isinstance(output, dict):
        raise ValueError("component_versions.txt is no JSON object")
    return {ours: str(output[theirs]) for theirs, ours in COMPONENTS.items() if output.get(theirs)}


def os_release(text: str) -> str:
    """/etc/os-release: ID and VERSION_ID, as `ubuntu 22.04`."""
    pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return " ".join(pairs[key].strip().strip("\"'") for key in ("ID", "VERSION_ID") if pairs.get(key))


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


RATE = re.compile(r"^\s*(\d+(?:\.\d+)?) Gb/sec")


DAY = 86400.0


SYNTHETIC = "hv_netvsc"
"""Driver of an interface that Hyper-V gives; all traffic goes through it where no virtual function is behind it."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    driver: str
    address: str
    state: str
    """operstate: up, down, unknown."""


def rate(text: str) -> float | None:
    """Gbit/s of a port, as its file `rate` has it: 400 Gb/sec (4X NDR)."""
    match = RATE.match(text)
    return float(match[1]) if match else None


def per_day(downed: int, uptime: float) -> float:
    """Times in 24 hours that a link went down, of a counter that began at the machine's start."""
    return downed * DAY / max(uptime, DAY)


def behind(interfaces: list[Interface]) -> list[tuple[Interface, Interface | None]]:
    """Each interface of Hyper-V with its virtual function: the other interface of its address (accelerated networking)."""
    synthetic = [one for one in interfaces if one.driver == SYNTHETIC]
    others = {one.address: one for one in interfaces if one.driver and one.driver != SYNTHETIC}
    return [(one, others.get(one.address)) for one in synthetic]
