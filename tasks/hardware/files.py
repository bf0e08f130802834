"""The files of hardware, found by name and read: a home's own come before the shipped ones, and a file may be based on another.

A file that says `based_on` lies on top of the other. What it names anew replaces the whole entry, source and all, and null takes
an entry away. So do collectives of the same kind, scope, machines and message; one without numbers takes away. Other lists are
replaced. A file may be based on the one of its own name in a later folder, so that a home changes one number of a shipped size.
Files whose name begins with _ are only there to be based on. The values are in sku.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tasks.common.validation import explain
from tasks.hardware.sku import Sku, plain_name

# A check's unit is fixed: a number in another unit is refused when a file is read. GB is 10^9 bytes and GiB 2^30;
# Gbit/s is a port's rate, as ib_write_bw prints it, and GB/s is everything that is measured.


CHECKS = {
    **dict.fromkeys(("gpu_count", "ib_ports_active", "nvme_count", "cpu_count", "soak_drop"), ""),
    **dict.fromkeys(("gpu_smi", "xid", "ecc", "rows", "throttle", "persistence", "sriov", "aznhc"), ""),
    **dict.fromkeys(("sm_clock", "memory_clock"), "MHz"),
    **dict.fromkeys(("memory_gib", "scratch_free"), "GiB"),
    **dict.fromkeys(("time_skew", "checkpoint_seconds"), "s"),
    **dict.fromkeys((f"matmul_{dtype}" for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8")), "TFLOP/s"),
    **dict.fromkeys(("memory_bandwidth", "host_to_device", "device_to_host", "peer_to_peer"), "GB/s"),
    **dict.fromkeys(("scratch_write", "scratch_read", "store_write", "store_read"), "GB/s"),
    **dict.fromkeys(("scratch_files_written", "scratch_files_read"), "files/s"),
    **dict.fromkeys((f"version_{name}" for name in ("driver", "cuda", "nccl", "mpi", "ofed", "image")), ""),
    "nvlink_down": "links",
    "ib_rate": "Gbit/s",
    "link_flaps": "per 24 h",
    "temperature": "C",
    "training_tflops": "TFLOP/s",
    "scaling_efficiency": "",
}
"""Units of what is measured, by the name of the check; a share and a count have none."""

SPECS = {
    **dict.fromkeys(("gpu", "gpus", "vcpus", "nvlink_generation", "nvme_disks", "infiniband_ports", "rack_nodes"), ""),
    **dict.fromkeys(("ecc_sram_uncorrected", "ecc_sram_corrected", "ecc_dram_corrected"), ""),
    **dict.fromkeys(("gpu_memory_gb", "vm_gpu_memory_gb"), "GB"),
    **dict.fromkeys(("gpu_memory_bandwidth_gb_s", "nvlink_gb_s", "nvme_read_gb_s", "nvme_write_gb_s"), "GB/s"),
    **dict.fromkeys((f"peak_{dtype}_tflops" for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8")), "TFLOP/s"),
    **dict.fromkeys((f"achievable_{dtype}_tflops" for dtype in ("bf16", "fp16", "fp8")), "TFLOP/s"),
    **dict.fromkeys(("memory_gib", "temp_disk_gib"), "GiB"),
    **dict.fromkeys(("infiniband_gbit_s", "ib_write_bw_gbit_s", "ethernet_gbit_s"), "Gbit/s"),
    "nvme_total_tib": "TiB",
    "remote_disk_mb_s": "MB/s",
}
"""Units of what a machine has. Of one GPU: gpu_memory_gb, nvlink_gb_s in one direction, peak_ and achievable_ without sparsity.
Of the machine: vm_gpu_memory_gb and the rest, and peak_fp32_tflops of one without GPUs. ib_write_bw_gbit_s and ecc_ are limits
of AzNHC's own checks."""


FOLDER = Path(__file__).parent
ENDINGS = (".yaml", ".yml")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The fast one where libyaml is there."""
SAME = ("collective", "scope", "nodes", "bytes")
"""What two collectives of one file cannot share."""
OWN = ("name", "aliases", "based_on")
"""What is not taken over from the file that another is based on."""


def known_skus(*folders: Path) -> dict[str, Path]:
    """Files by plain name; those of earlier folders come first, ours last."""
    result: dict[str, Path] = {}
    for path in _files(*folders):
        if not path.name.startswith("_"):
            result.setdefault(plain_name(path.stem), path)
    return result


def find_sku(name: str, *folders: Path) -> Path:
    """The file of a name, of one of its other names, or a path that was given. Raises ValueError when there is none."""
    if name.endswith(ENDINGS):
        return Path(name)
    known = known_skus(*folders)
    if plain_name(name) in known:
        return known[plain_name(name)]
    for path in known.values():
        if plain_name(name) in map(plain_name, _names(path)):
            return path
    raise ValueError(
        f"hardware {name!r}: nothing is known of it; known are {', '.join(display_names(known))}, or the path of a .yaml file of "
        "the same form (`headway hardware local-cpu` shows one; `headway qualify --record` measures one)"
    )


def is_known(name: str, *folders: Path) -> bool:
    """Whether there is a file of a name."""
    try:
        find_sku(name, *folders)
    except ValueError:
        return False
    return True


def display_names(known: dict[str, Path]) -> list[str]:
    """Names as the files write them: Standard_ND96isr_H100_v5."""
    return sorted((_names(path)[0] for path in known.values()), key=str.lower)


def read_sku(path: Path, *folders: Path) -> Sku:
    """A file, on top of what it is based on. Raises ValueError that names the file, the key and the value."""
    output = _resolved(path, folders, above=())
    try:
        sku = Sku.model_validate(output)
    except ValidationError as error:
        raise ValueError(f"{path} is no description of hardware: {explain(error, Sku)}") from error
    # Names of checks and specs are ours, and so are their units.
    limits = {f"limits.{name}": (name, limit.unit, CHECKS) for name, limit in sku.limits.items()}
    specs = {f"specs.{name}": (name, number.unit, SPECS) for name, number in sku.specs.items()}
    for where, (name, unit, known) in {**limits, **specs}.items():
        if name not in known:
            raise ValueError(f"{path}: {where}: there is no such name; known are {', '.join(sorted(known))}")
        if unit != known[name]:
            raise ValueError(f"{path}: {where}: its unit is {known[name] or 'none'}, and the file says {unit!r}")
    if path.parent in (*folders, FOLDER) and plain_name(sku.name) != plain_name(path.stem):
        raise ValueError(f"{path}: its name is {sku.name!r}; a file of this folder is called as its hardware")
    return sku


def _names(path: Path) -> list[str]:
    """The name of a file and its others; of one that cannot be read, what it is called."""
    try:
        output = _said(path)
    except ValueError:
        return [path.stem]
    aliases = output.get("aliases")
    return [str(output.get("name") or path.stem), *map(str, aliases if isinstance(aliases, list) else ())]


def _files(*folders: Path) -> list[Path]:
    existing = [folder for folder in (*folders, FOLDER) if folder.is_dir()]
    return [path for folder in existing for path in sorted(folder.iterdir()) if path.suffix in ENDINGS]


def _resolved(path: Path, folders: tuple[Path, ...], above: tuple[Path, ...]) -> dict[str, Any]:
    output = _said(path)
    if not output.get("based_on"):
        return output
    above = (*above, path)
    base = _base(str(output["based_on"]), path, folders, above)
    return _on_top(_resolved(base, folders, above), output)


def _base(name: str, path: Path, folders: tuple[Path, ...], above: tuple[Path, ...]) -> Path:
    for candidate in _files(*folders):
        if plain_name(candidate.stem) == plain_name(name) and candidate not in above:
            return candidate
    circle = any(plain_name(one.stem) == plain_name(name) for one in above)
    raise ValueError(
        f"{path}: based_on {name!r}: " + ("it is based on itself" if circle else "there is no file of this name")
    )


def _on_top(base: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in base.items() if key not in OWN} | output
    for key, value in output.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = {name: entry for name, entry in {**base[key], **value}.items() if entry is not None}
    if isinstance(output.get("collectives"), list) and isinstance(base.get("collectives"), list):
        # The last of each kind, scope, machines and message; without those that say no number.
        entries = [*base["collectives"], *output["collectives"]]
        last = {
            tuple(entry.get(key) for key in SAME) if isinstance(entry, dict) else at: entry
            for at, entry in enumerate(entries)
        }
        merged["collectives"] = [
            entry for entry in last.values() if not isinstance(entry, dict) or set(entry) & {"norm", "warn", "fail"}
        ]
    return merged


def _said(path: Path) -> dict[str, Any]:
    try:
        output = yaml.load(path.read_text(encoding="utf-8"), LOADER)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(output, dict):
        raise ValueError(f"{path} is no description of hardware: it has no keys")
    return output
