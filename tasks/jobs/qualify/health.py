"""The health of each machine, before anything is measured on it: what its vendor's tools, /sys, its logs and Azure's checks say.

Local rank 0 looks, the others wait. Each look is a function of a file health_*.py that gives probes; what it cannot look at
becomes `missing`, `timed out` or `failed`, for each of its checks. What a value means is judged elsewhere; what a machine says
of itself (an Xid, a throttled GPU) is a finding already, by the rules of tasks/hardware/health.json and AzNHC.

Azure's node health checks (AzNHC), where they are installed: run within a time limit, and their log read.

They are run with `-a`, for they stop at the first failure otherwise. A size that they do not know exits 0, and is unknown here.
What they do not look at (throttling never fails there, Xid 94 and 95 are not in their list) our own looks see. The log stays
with the job. What its lines mean is tasks/qualification/nccl_findings.py. See https://github.com/Azure/azurehpc-health-checks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import torch
from torch import cuda, distributed

from tasks.formats import azure_machine, gpu_health
from tasks.formats.aznhc import read_aznhc
from tasks.formats.azure_machine import DAY, Interface
from tasks.jobs.node.probes import Hangs, ports
from tasks.jobs.qualify import health_amd, health_nvidia
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import LOGS, Machine, Missing, of_file, of_kernel
from tasks.qualification.aznhc_findings import probes_of
from tasks.qualification.measured import Probe, Status

SCRIPT = "opt/azurehpc/test/azurehpc-health-checks/run-health-checks.sh"
"""Where Azure's HPC images have it."""
INSIDE = "azure-nhc/aznhc-entrypoint.sh"
"""Its own entry point, where this machine is the container."""
IMAGES = {"nvidia": "mcr.microsoft.com/aznhc/aznhc-nv", "amd": "mcr.microsoft.com/aznhc/aznhc-rocm"}
CHECK_SECONDS = 500
"""Of one check; its own default."""
OUTPUT = "/azure-nhc/output"
Command = tuple[str, ...]


class NoRights(Exception):
    """It is installed, and this user may not run it."""


def limit(bench: Bench) -> float:
    """Seconds that the checks may take on a machine."""
    return bench.config.aznhc_seconds if bench.config.aznhc == "auto" else 0.0


def checks(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """A probe a check that failed or warned, and one of the whole; nothing where they are not installed."""
    if bench.config.aznhc == "never":
        return
    with tempfile.TemporaryDirectory(prefix="headway-aznhc-") as folder:
        log = Path(folder) / "aznhc.log"
        try:
            command = command_of(bench.sku.vendor, machine, log)
        except NoRights as error:
            yield Probe(check="aznhc", status="skipped", said=str(error))
            return
        if command:
            # The log, and what was printed where there is none. Raises Hangs; then its container is ended too.
            try:
                _, printed = machine.ask(*command, seconds=limit(bench))
            except Hangs:
                with suppress(Missing, Hangs):
                    machine.ask(*(("sudo", "-n") if command[0] == "sudo" else ()), "docker", "kill", "aznhc")
                raise
            try:
                output = log.read_text(encoding="utf-8", errors="replace")
            except OSError:
                output = printed
            name = re.sub(r"[^\w.-]", "_", bench.node)
            place = bench.rank.output / "health" / f"{name}.aznhc.log"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(output, encoding="utf-8")
            yield from read(output)


def command_of(vendor: str, machine: Machine, log: Path) -> Command | None:
    """What runs the checks here; None where nothing of them is installed. Raises NoRights."""
    ways: tuple[Callable[[str, Machine, Path], Command | None], ...] = (_by_script, _inside, _by_docker, _by_enroot)
    return next((command for way in ways if (command := way(vendor, machine, log))), None)


def _by_script(vendor: str, machine: Machine, log: Path) -> Command | None:
    script = machine.root / SCRIPT
    if not script.exists():
        return None
    command = ("bash", str(script), "-a", "-t", str(CHECK_SECONDS), "-o", str(log))
    if os.geteuid() == 0:
        return command
    with suppress(Missing):
        if machine.ask("sudo", "-n", "true")[0] == 0:
            return ("sudo", "-n", *command)
    raise NoRights(f"{SCRIPT} needs root, and sudo asks for a password")


def _inside(vendor: str, machine: Machine, log: Path) -> Command | None:
    script = machine.root / INSIDE
    return ("env", "NHC_ARGS=-a", f"TIMEOUT={CHECK_SECONDS}", "bash", str(script)) if script.exists() else None


def _by_docker(vendor: str, machine: Machine, log: Path) -> Command | None:
    image = IMAGES[vendor]
    try:
        exists = machine.ask("docker", "image", "inspect", "--format", "{{.Id}}", image)[0] == 0
    except Missing:
        return None
    if not exists:
        return None
    gpus = ("--gpus", "all") if vendor == "nvidia" else ()
    kernel_log = next((f"/{log}" for log in LOGS if (machine.root / log).exists()), "")
    mounts = ("-v", f"{kernel_log}:/azure-nhc/syslog") if kernel_log else ()
    return (
        *("docker", "run", "--rm", "--name=aznhc", "--net=host", "--privileged", "--shm-size=8g", *gpus, *mounts),
        *("-e", "NHC_ARGS=-a", "-e", f"TIMEOUT={CHECK_SECONDS}", "-v", f"{log.parent}:{OUTPUT}"),
        *(image, "bash", "-c", f"/{INSIDE}"),
    )


def _by_enroot(vendor: str, machine: Machine, log: Path) -> Command | None:
    try:
        code, output = machine.ask("enroot", "list")
    except Missing:
        return None
    name = re.search(r"^\S*aznhc\S*$", output, re.MULTILINE)
    if code or not name:
        return None
    inside = ("env", "NHC_ARGS=-a", f"TIMEOUT={CHECK_SECONDS}", "bash", f"/{INSIDE}")
    return ("enroot", "start", "--root", "--rw", "--mount", f"{log.parent}:{OUTPUT}", name[0], *inside)


def read(message: str) -> Iterator[Probe]:
    """What a log says: silence is not health."""
    runs = read_aznhc(message)
    if not runs:
        text = " ".join(message.split())[:200] or "nothing"
        yield Probe(check="aznhc", status="failed", said=f"it ran, and its log says {text}")
    for run in runs:
        yield from probes_of(run)


# Clocks are compared through the launcher's store as NTP does it: the first machine asks each of the others a few
# times, and the shortest round trip counts. Half of that round trip bounds the error; a difference below the bound
# means nothing.


TIMES = 5
ANSWER_SECONDS = 5.0
"""A machine that said that it is there answers at once."""


class Offset(NamedTuple):
    """Of a machine's clock from the first one's, in seconds."""

    seconds: float
    bound: float
    """Half of the round trip in which it was read."""


def note_skew(bench: Bench, clock: Callable[[], float] = time.time) -> None:
    """Note `time_skew` of this machine. With one machine there is nothing to compare."""
    if bench.nodes < 2:
        bench.note(Probe(check="time_skew", status="skipped", said="one machine has no other to be compared with"))
        return
    store, mine = bench.store, bench.node_rank
    try:
        result = (
            ask_all(store, bench.nodes, clock, seconds=bench.config.check_seconds)
            if mine == 0
            else answer(store, mine, clock, seconds=bench.config.check_seconds)
        )
    except RuntimeError as error:  # the store's own, of a key that did not come in time
        bench.note(Probe(check="time_skew", status="timed out", said=str(error).splitlines()[0][:200]))
        return
    bench.note(_probe(result, mine))


def ask_all(store: distributed.Store, nodes: int, clock: Callable[[], float], *, seconds: float) -> dict[int, Offset]:
    """What the first machine does: offsets of all machines that answer, its own included; all can read them."""
    # Machines that are there; waited for together, so that one that is away costs the time once.
    deadline, missing = time.monotonic() + seconds, set(range(1, nodes))
    while missing and time.monotonic() < deadline:
        missing -= {node for node in missing if store.check([f"skew/{node}/here"])}
        time.sleep(0.005 if missing else 0)
    existing = sorted(set(range(1, nodes)) - missing)
    asked = {node: _ask(store, node, clock) for node in existing}
    result = {0: Offset(0.0, 0.0)} | {node: offset for node, offset in asked.items() if offset}
    store.set("skew/offsets", json.dumps(result))
    return result


def answer(store: distributed.Store, node: int, clock: Callable[[], float], *, seconds: float) -> dict[int, Offset]:
    """What the other machines do. Raises RuntimeError when the first machine does not ask, or ends."""
    store.set(f"skew/{node}/here", "")
    for number in range(
        TIMES
    ):  # the first machine waits so long for those that are away, and then asks one after another
        _await(store, f"skew/{node}/{number}/ask", 2 * seconds)
        store.set(f"skew/{node}/{number}/say", repr(clock()))
    _await(store, "skew/offsets", 2 * seconds)
    return {int(at): Offset(*offset) for at, offset in json.loads(store.get("skew/offsets")).items()}


def apart(offsets: dict[int, Offset], node: int) -> Offset:
    """A machine's offset from the others' median, and the widest bound of what it rests on."""
    others = [offset.seconds for at, offset in offsets.items() if at != node]
    bound = max(offset.bound for offset in offsets.values())
    return Offset(offsets[node].seconds - statistics.median(others), bound)


def _ask(store: distributed.Store, node: int, clock: Callable[[], float]) -> Offset | None:
    """A machine's offset; None when it came, and then said nothing."""
    offsets = []
    for number in range(TIMES):
        before, began = clock(), time.monotonic()
        store.set(f"skew/{node}/{number}/ask", "")
        try:
            _await(store, f"skew/{node}/{number}/say", ANSWER_SECONDS)
        except RuntimeError:
            return None
        theirs, trip = float(store.get(f"skew/{node}/{number}/say")), time.monotonic() - began
        offsets.append(Offset(theirs - (before + trip / 2), trip / 2))
    return min(offsets, key=lambda offset: offset.bound)


def _await(store: distributed.Store, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=seconds))


def _probe(offsets: dict[int, Offset], node: int) -> Probe:
    if node not in offsets or len(offsets) < 2:
        return Probe(check="time_skew", status="timed out", said="no other machine answered in time")
    off = apart(offsets, node)
    surely = max(0.0, abs(off.seconds) - off.bound)
    text = f"{off.seconds * 1000:+.1f} ms from the median of the others, known to {off.bound * 1000:.1f} ms"
    return Probe(check="time_skew", measured=surely, unit="s", said=text)


# Versions are recorded with every qualification; the stage judges whether they are equal on all machines and as in
# the image. An image's own component_versions.txt comes first, because it has the image's spelling; the driver is
# asked directly.


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
        if release := machine.text(f"sys/module/{vendor}/version"):
            yield "driver", release
    if release := machine.text("sys/module/mlx5_core/version"):
        yield "mlx5", release


def _looked_up(machine: Machine, vendor: str) -> Iterator[tuple[str, str]]:
    """What the image does not say of itself."""
    version = ""
    with suppress(ValueError, KeyError, TypeError):
        version = str(json.loads(machine.text("usr/local/cuda/version.json"))["cuda"]["version"])
    yield "cuda", version
    yield "rocm", machine.text("opt/rocm/.info/version")
    # By the library's own file name: libnccl.so.2.27.3.
    results = (*machine.places("usr/lib/*/libnccl.so.*.*"), *machine.places("usr/lib64/libnccl.so.*.*"))
    yield "nccl", max((path.name.removeprefix("libnccl.so.") for path in results), default="")
    yield "mpi", _quietly(lambda: _mpi(machine.says("mpirun", "--version")))
    yield "ofed", _quietly(lambda: machine.says("ofed_info", "-s").strip().rstrip(":"))
    if vendor == "nvidia":
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield "driver", _quietly(lambda: machine.says(*query).splitlines()[0].strip())


def _mpi(text: str) -> str:
    match = MPI.search(text)
    return next((part for part in match.groups() if part), "") if match else ""


def _quietly(asked: Callable[[], str]) -> str:
    """Empty where the command is not there, fails or hangs: a version that nobody knows is not reported."""
    try:
        return asked()
    except (Missing, Hangs, IndexError):
        return ""


REMOTE_DISK = "MSFT NVMe Accelerator"
"""Model of Azure's remote disks where they are NVMe; a local one is a `Microsoft NVMe Direct Disk`."""


def memory(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """All of it, as the kernel counts it: without what the firmware took."""
    meminfo = dict(line.split(":", 1) for line in machine.text("proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" in meminfo:
        bytes_ = int(meminfo["MemTotal"].split()[0]) * 2**10
    elif machine.is_this:  # no Linux
        bytes_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        raise Missing("/proc/meminfo does not say MemTotal")
    yield Probe(check="memory_gib", measured=bytes_ / 2**30, unit="GiB")


def cpus(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Processors that are online."""
    ranges = machine.text("sys/devices/system/cpu/online")
    if not ranges and not machine.is_this:
        raise Missing("/sys/devices/system/cpu/online says nothing")
    ranges = ranges or f"1-{os.cpu_count()}"  # no Linux
    pairs = (part.partition("-") for part in ranges.split(","))
    count = sum(int(last or first) - int(first) + 1 for first, _, last in pairs)
    yield Probe(check="cpu_count", measured=float(count))


def scratch(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Room where jobs keep what is theirs for a while: cluster.scratch, or else the job's folder."""
    folder = os.environ.get("HEADWAY_SCRATCH") or str(bench.rank.folder)
    free = shutil.disk_usage(folder).free / 2**30
    yield Probe(check="scratch_free", measured=free, unit="GiB", where=folder)


def nvme(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Local NVMe disks; not said where there is none and none is asked for."""
    models = [machine.text(place / "model") for place in machine.places("sys/class/nvme/nvme*")]
    local = [model for model in models if REMOTE_DISK not in model]
    if local or "nvme_count" in bench.sku.limits:
        yield Probe(check="nvme_count", measured=float(len(local)), said=", ".join(sorted(set(local))))


def infiniband(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Active ports, and the rate of each; not said where there is none and none is asked for."""
    result = ports(machine.root / "sys/class/infiniband")
    if not result and "ib_ports_active" not in bench.sku.limits:
        return
    active = sum(port.active for port in result.values())
    down = ", ".join(f"{name} is {port.state}" for name, port in result.items() if not port.active)
    yield Probe(
        check="ib_ports_active",
        measured=float(active),
        said=down or ("" if result else "/sys/class/infiniband has no port"),
        remedy="Check cable and switch port." if down else "",
    )
    for name, port in result.items():
        # A port that is not active carries nothing.
        rate = azure_machine.rate(port.rate) if port.active else 0.0
        yield Probe(
            check="ib_rate",
            status="measured" if rate is not None else "failed",
            measured=rate,
            unit="Gbit/s",
            where=name,
            said=f"it is {port.state}, its rate reads {port.rate!r}",
        )
    if not result:
        yield Probe(check="ib_rate", measured=0.0, unit="Gbit/s", said="there is no port")


def link_flaps(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """How often links went down in 24 hours: the most of what the kernel, the machine's log and the ports' counters say.

    A counter has no times: what all ports of the machine had together is its start, or that of a switch.
    """
    result = ports(machine.root / "sys/class/infiniband")
    if not result and "link_flaps" not in bench.sku.limits:
        return
    uptime = machine.uptime
    times: Counter[str] = Counter()
    # That of the kernel and that of the machine, where networkd writes too; and why, where none can be read.
    try:
        logs, unread = [of_kernel(machine), of_file(machine, speaker="") or ""], ""
    except Missing as error:
        logs, unread = [], str(error)
    if not (logs or result):
        raise Missing(unread)
    for log in logs:
        times |= gpu_health.flaps(log, since=max(0.0, uptime - DAY))
    at_once = min((port.downed for port in result.values()), default=0)
    for name, port in result.items():
        times[name] = max(times[name], round(azure_machine.per_day(port.downed - at_once, uptime)))
    text = f"of the last {min(uptime, DAY) / 3600:.1f} h" + (
        f", by the ports' counters alone: {unread}" if unread else ""
    )
    flapped = {name: count for name, count in sorted(times.items()) if count}
    for name, count in (flapped or {"": 0}).items():
        yield Probe(check="link_flaps", measured=float(count), unit="per 24 h", where=name, said=text)


def virtual_functions(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Accelerated networking: behind each interface of Hyper-V a virtual function of the network card, and it is up."""
    interfaces = [
        Interface(
            place.name,
            (place / "device/driver").resolve().name if (place / "device/driver").exists() else "",
            machine.text(place / "address"),
            machine.text(place / "operstate"),
        )
        for place in machine.places("sys/class/net/*")
    ]
    for interface, function in azure_machine.behind(interfaces):
        up = function is not None and function.state == "up"
        yield Probe(
            check="sriov",
            measured=float(up),
            where=interface.name,
            finding=None if up else "warn",
            said=f"{function.driver} {function.name} is {function.state}" if function else "no virtual function",
            remedy=""
            if up
            else "Switch accelerated networking on; after a host's maintenance it comes back by itself.",
            source="" if up else "Azure, accelerated networking",
        )


class Look(NamedTuple):
    """One look at a machine."""

    checks: tuple[str, ...]
    """What it says something of, as far as this hardware has it."""
    look: Callable[[Bench, Machine], Iterable[Probe]]
    vendors: tuple[str, ...] = ("nvidia", "amd", "cpu")


LOOKS = (
    Look(("memory_gib",), memory),
    Look(("cpu_count",), cpus),
    Look(("scratch_free",), scratch),
    Look(("nvme_count",), nvme),
    Look(("ib_ports_active", "ib_rate"), infiniband),
    Look(("link_flaps",), link_flaps),
    Look(("sriov",), virtual_functions),
    Look(("gpu_count",), health_nvidia.count, ("nvidia",)),
    Look(("xid",), health_nvidia.errors, ("nvidia",)),
    Look(("gpu_smi",), health_nvidia.gpus, ("nvidia",)),
    Look(("rows",), health_nvidia.remapped_rows, ("nvidia",)),
    Look(("nvlink_down",), health_nvidia.nvlinks, ("nvidia",)),
    Look(("gpu_count", "gpu_smi"), health_amd.count, ("amd",)),
    Look(("ecc",), health_amd.errors, ("amd",)),
    Look(("throttle",), health_amd.throttled, ("amd",)),
    Look(("sm_clock", "memory_clock"), health_amd.clocks, ("amd",)),
    Look(("aznhc",), checks, ("nvidia", "amd")),
)
"""In this order; Azure's checks last, for they take minutes."""


def measure(bench: Bench, machine: Machine | None = None) -> None:
    """Note the machine's versions and everything that its looks say."""
    if bench.local_rank == 0:
        look(bench, machine or Machine())
    if bench.sku.vendor != "cpu":  # Azure's checks use the GPUs: nobody measures meanwhile
        bench.share("health/end", True, seconds=bench.config.check_seconds + limit(bench))


def look(bench: Bench, machine: Machine) -> None:
    """Everything that one machine says."""
    note(bench, machine)
    note_skew(bench)
    for one in LOOKS:
        if bench.sku.vendor in one.vendors:
            bench.note(*guarded(one, bench, machine))


def guarded(one: Look, bench: Bench, machine: Machine) -> Iterator[Probe]:
    """The probes of a look, and what it could not look at."""
    try:
        yield from one.look(bench, machine)
    except Missing as error:
        yield from _unseen(one, "missing", error, remedy=error.remedy)
    except Hangs as error:
        yield from _unseen(one, "timed out", error)
    except (OSError, ValueError) as error:
        yield from _unseen(one, "failed", error)


def _unseen(one: Look, status: Status, error: Exception, *, remedy: str = "") -> Iterator[Probe]:
    return (Probe(check=check, status=status, said=str(error), remedy=remedy) for check in one.checks)
