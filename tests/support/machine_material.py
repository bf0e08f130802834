"""Machines as recorded: files under a root, and vendors' commands that answer as they do there (fake_gpu_tools.py)."""

import json
import sys
from functools import cache
from pathlib import Path

from tasks.config.qualification import BenchmarkConfig
from tasks.config.training import TrainingConfig
from tasks.hardware import sku as hardware
from tasks.jobs.node.runtime import Rank
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine
from tasks.qualification.measured import RankReport

TOOLS = Path(__file__).with_name("fake_gpu_tools.py")
UPTIME = 90000.0
NOW = 1_790_000_000.0
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.173.02",
    "persistence_mode": "Enabled",
    "clocks_event_reasons.active": "0x0000000000000001",
    "clocks.max.graphics": "1980",
    "clocks.applications.graphics": "1980",
    "clocks.max.memory": "2619",
    "clocks.applications.memory": "2619",
    "ecc.errors.corrected.volatile.sram": "0",
    "ecc.errors.uncorrected.volatile.sram": "0",
    "ecc.errors.corrected.volatile.dram": "0",
    "ecc.errors.uncorrected.volatile.dram": "0",
    "ecc.errors.corrected.aggregate.sram": "0",
    "ecc.errors.uncorrected.aggregate.sram": "0",
    "retired_pages.pending": "[N/A]",
    "retired_pages.single_bit_ecc.count": "[N/A]",
    "retired_pages.double_bit.count": "[N/A]",
    "gpu_recovery_action": "None",
}
A100 = H100 | {
    "name": "NVIDIA A100-SXM4-40GB",
    "clocks.max.graphics": "1410",
    "clocks.applications.graphics": "1095",
    "clocks.max.memory": "1215",
    "clocks.applications.memory": "1215",
}
del A100["gpu_recovery_action"]  # a driver of before 565 does not know it
V100 = H100 | {
    "name": "Tesla V100-SXM2-32GB",
    "clocks.max.graphics": "1530",
    "clocks.applications.graphics": "1530",
    "clocks.max.memory": "877",
    "clocks.applications.memory": "877",
    "ecc.errors.corrected.volatile.sram": "[N/A]",
    "ecc.errors.uncorrected.volatile.sram": "[N/A]",
    "retired_pages.pending": "No",
    "retired_pages.single_bit_ecc.count": "2",
    "retired_pages.double_bit.count": "0",
}
NO_REMAPPING = {f"remapped_rows.{what}": "[N/A]" for what in ("uncorrectable", "pending", "failure")}
V100["clocks_throttle_reasons.active"] = V100.pop("clocks_event_reasons.active")
BOOTED = (
    "[    0.000000] Linux version 6.8.0-1021-azure\n[   12.345678] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n"
)


class RecordedMachine:
    """State: what its files and its commands say; a test changes it, then looks."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.root = folder / "root"
        self.bin = folder / "bin"
        self.state = folder / "state.json"
        self.bin.mkdir(parents=True)
        self.says({})
        monkeypatch.setenv("PATH", str(self.bin))
        self.file("proc/uptime", f"{UPTIME} 1.0")
        self.file("proc/meminfo", "MemTotal:       1961032704 kB\nMemFree: 1 kB")
        self.file("sys/devices/system/cpu/online", "0-95")
        self.file("etc/os-release", 'NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="22.04"\n')
        self.file("log", BOOTED)
        self.command("dmesg", f'while IFS= read -r line; do echo "$line"; done < {folder}/root/log')

    def says(self, state):
        self.state.write_text(json.dumps(state))

    def change(self, **state):
        self.says(json.loads(self.state.read_text()) | state)

    @property
    def gpus(self):
        return json.loads(self.state.read_text())["gpus"]

    def gpu(self, index, **fields):
        gpus = self.gpus
        gpus[index] |= {name.replace("__", "."): value for name, value in fields.items()}
        self.change(gpus=gpus)

    def file(self, path, text):
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")
        return place

    def command(self, name, text):
        place = self.bin / name
        place.write_text(f"#!/bin/sh\n{text}\n")
        place.chmod(0o755)

    def tool(self, name):
        self.command(name, f'exec {sys.executable} -S -I {TOOLS} {self.state} {name} "$@"')

    def log(self, *lines):
        self.file("log", BOOTED + "\n".join(lines))

    def port(
        self, name, *, state="4: ACTIVE", physical="5: LinkUp", rate="400 Gb/sec (4X NDR)", downed=0, layer="InfiniBand"
    ):
        place = f"sys/class/infiniband/{name}/ports/1"
        said = {"state": state, "phys_state": physical, "rate": rate, "link_layer": layer}
        for file, text in {**said, "counters/link_downed": str(downed)}.items():
            self.file(f"{place}/{file}", text)

    def interface(self, name, driver, *, address="00:0d:3a:01:02:03", state="up"):
        self.file(f"sys/class/net/{name}/address", address)
        self.file(f"sys/class/net/{name}/operstate", state)
        (self.root / "sys/bus/drivers" / driver).mkdir(parents=True, exist_ok=True)
        device = self.root / "sys/class/net" / name / "device"
        device.mkdir(exist_ok=True)
        (device / "driver").symlink_to(self.root / "sys/bus/drivers" / driver)

    def nvidia(self, gpu, *, gpus=8, links=18, rate="26.562 GB/s"):
        """GPUs that are well, each with NVLinks."""
        self.tool("nvidia-smi")
        rows = [gpu | {"index": str(n), "pci.bus_id": f"0000000{n + 1}:00:00.0"} for n in range(gpus)]
        remapped = [
            {"gpu_bus_id": row["pci.bus_id"]}
            | {f"remapped_rows.{what}": "0" for what in ("uncorrectable", "pending", "failure")}
            for row in rows
        ]
        self.says({"gpus": rows, "remapped-rows": remapped, "nvlink": nvlink(gpu["name"], [links] * gpus, rate=rate)})
        return self

    def nd_h100(self):
        """A Standard_ND96isr_H100_v5."""
        self.nvidia(H100)
        for number in range(8):
            self.port(f"mlx5_ib{number}")
            self.file(f"sys/class/nvme/nvme{number}/model", "Microsoft NVMe Direct Disk v2")
        self.port("mlx5_an0", rate="100 Gb/sec (4X EDR)", layer="Ethernet")
        self.file("sys/class/nvme/nvme8/model", "MSFT NVMe Accelerator v1.0")
        self.interface("eth0", "hv_netvsc")
        self.interface("enP27939s1", "mlx5_core")
        self.interface("lo", "", address="00:00:00:00:00:00")
        return self

    def machine(self, **settings):
        return Machine(root=self.root, clock=lambda: NOW, **settings)


def nvlink(name, active, *, links=18, rate="26.562 GB/s"):
    """What `nvidia-smi nvlink --status` says: so many active links of each GPU, the others inactive."""
    return "\n".join(
        f"GPU {gpu}: {name} (UUID: GPU-{gpu})\n"
        + "\n".join(
            f"\t Link {n}: {rate if n < up else '<inactive>'}" for n in range(max(up, links if up < links else up))
        )
        for gpu, up in enumerate(active)
    )


@cache
def load_sku(name):
    """A shipped file, read once."""
    return hardware.load_sku(name)


def bench_of(folder, sku="nd96isr_h100_v5", **config):
    """A rank alone at its bench."""
    (folder / "out").mkdir(parents=True, exist_ok=True)
    settings = {
        "benchmark": BenchmarkConfig(**config).model_dump(mode="json"),
        "sku": load_sku(sku).model_dump(mode="json"),
        "training": TrainingConfig().model_dump(mode="json"),
        "threads": 1,
    }
    rank = Rank(folder=folder, rank=0, world_size=1, attempt=1, settings=settings, inputs={}, output=folder / "out")
    return Bench(rank)


def report_of(folder):
    return RankReport.model_validate_json((folder / "out/ranks/0.json").read_text())
