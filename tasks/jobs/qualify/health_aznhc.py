"""Azure's node health checks (AzNHC), where they are installed: run within a time limit, and their log read.

They are run with `-a`, for they stop at the first failure otherwise. A size that they do not know exits 0, and is unknown here.
What they do not look at (throttling never fails there, Xid 94 and 95 are not in their list) our own looks see. The log stays
with the job. What its lines mean is tasks/qualification/aznhc_findings.py. See https://github.com/Azure/azurehpc-health-checks.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tasks.formats.aznhc import read_aznhc
from tasks.jobs.node.probes import Hangs
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import LOGS, Machine, Missing
from tasks.qualification.aznhc_findings import probes_of
from tasks.qualification.measured import Probe

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
