"""What runs on a machine: image, kernel, driver, CUDA or ROCm, NCCL, MPI, OFED, torch; and which Azure machine it is.

Recorded with every qualification; whether they are equal on all machines and as in the image is judged elsewhere. What the image
itself says (component_versions.txt) comes first, for it has the image's own spelling; the driver is asked what it is.
"""

from __future__ import annotations

import json
import platform
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException

import torch
from torch import cuda

from tasks.formats import azure_machine
from tasks.jobs.node.vendor_commands import Hangs
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing

IMDS_PATH = "/metadata/instance/compute?api-version=2021-02-01"
IMDS_SECONDS = 2.0
COMPONENTS = "opt/azurehpc/component_versions.txt"
MPI = re.compile(r"\(Open MPI\) (\S+)|Version (\d\S*)")


def note(bench: Bench, machine: Machine) -> None:
    """Note versions, and the machine's names at Azure."""
    compute = metadata(machine)
    own, of_image = dict(_own(machine)), _components(machine)
    result = {**dict(_looked_up(machine, bench.sku.vendor)), **of_image, **own}
    image = image_of(azure_machine.urn(compute), result["os"], known=bool(of_image))
    bench.note(
        versions={name: value for name, value in {**result, "image": image}.items() if value},
        machine={**azure_machine.instance(compute), **_physical_host(machine)},
    )


def image_of(urn: str, system: str, *, known: bool) -> str:
    """The image that versions are compared by; empty: by themselves. In a container they are not those of the machine's image."""
    if known:
        return urn
    return f"{urn} without its component_versions.txt" if urn else system


def metadata(machine: Machine) -> dict[str, object]:
    """IMDS's `instance/compute`; empty on machines that are not Azure's, and where nothing answers."""
    if machine.text("sys/class/dmi/id/chassis_asset_tag") != azure_machine.AZURE_ASSET_TAG:
        return {}
    request = urllib.request.Request(machine.imds + IMDS_PATH, headers={"Metadata": "true"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it may not be asked through a proxy
    try:
        with opener.open(request, timeout=IMDS_SECONDS) as answer:
            output = json.load(answer)
    except (OSError, ValueError, HTTPException):
        return {}
    return output if isinstance(output, dict) else {}


def _physical_host(machine: Machine) -> dict[str, str]:
    """The host that a Guest Health Report names (Hyper-V's key-value pool 3)."""
    try:
        pool = (machine.root / "var/lib/hyperv/.kvp_pool_3").read_bytes()
    except OSError:
        return {}
    host = azure_machine.key_values(pool).get("PhysicalHostName", "")
    return {"physical_host": host} if host else {}


def _components(machine: Machine) -> dict[str, str]:
    with suppress(ValueError):
        return azure_machine.components(machine.text(COMPONENTS) or "{}")
    return {}


def _own(machine: Machine) -> Iterator[tuple[str, str]]:
    """What this very process runs on and with."""
    yield "kernel", machine.text("proc/sys/kernel/osrelease") or platform.release()
    yield "os", azure_machine.os_release(machine.text("etc/os-release"))
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "torch_cuda", torch.version.cuda or ""
    yield "torch_rocm", str(getattr(torch.version, "hip", "") or "")
    if torch.version.cuda and cuda.is_available():
        yield "torch_nccl", ".".join(map(str, cuda.nccl.version()))
    for vendor in ("nvidia", "amdgpu"):
        if output := machine.text(f"sys/module/{vendor}/version"):
            yield "driver", output
    if output := machine.text("sys/module/mlx5_core/version"):
        yield "mlx5", output


def _looked_up(machine: Machine, vendor: str) -> Iterator[tuple[str, str]]:
    """What the image does not say of itself."""
    yield "cuda", _cuda(machine)
    yield "rocm", machine.text("opt/rocm/.info/version")
    yield "nccl", _nccl(machine)
    yield "mpi", _quietly(lambda: _mpi(machine.says("mpirun", "--version")))
    yield "ofed", _quietly(lambda: machine.says("ofed_info", "-s").strip().rstrip(":"))
    if vendor == "nvidia":
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield "driver", _quietly(lambda: machine.says(*query).splitlines()[0].strip())


def _cuda(machine: Machine) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(machine.text("usr/local/cuda/version.json"))["cuda"]["version"])
    return ""


def _nccl(machine: Machine) -> str:
    """By the library's own file name: libnccl.so.2.27.3."""
    results = (*machine.places("usr/lib/*/libnccl.so.*.*"), *machine.places("usr/lib64/libnccl.so.*.*"))
    return max((path.name.removeprefix("libnccl.so.") for path in results), default="")


def _mpi(text: str) -> str:
    match = MPI.search(text)
    return next((part for part in match.groups() if part), "") if match else ""


def _quietly(asked: Callable[[], str]) -> str:
    """Empty where the command is not there, fails or hangs: a version that nobody knows is not reported."""
    try:
        return asked()
    except (Missing, Hangs, IndexError):
        return ""
