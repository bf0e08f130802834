"""The machine that is looked at: its files under a root, its commands on the PATH, each within a time limit.

State: none beyond where to look, so that tests look at a recorded machine. What is looked for is in the rooms health*.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tasks.formats import gpu_health, smi
from tasks.formats import gpu_health as kernel_log
from tasks.formats.gpu_health import Rules
from tasks.jobs.node.probes import RULES, ask, query_smi

# Logs are read in the form of `dmesg`: the kernel's own, and the file that syslog writes. An empty log proves nothing
# and counts as missing.


LOG_BYTES = 64 * 2**20
"""Read at most, from the end of a log file."""
LOGS = ("var/log/syslog", "var/log/kern.log", "var/log/messages")
"""The first that will do is read, with the one before it, which logrotate calls NAME.1."""
KERNEL = " kernel: "
WANTED = re.compile(r"Xid|carrier|link|uncorrectable|poison", re.IGNORECASE)
"""Lines of a log file that say something here; reading the time of all takes long."""
REMEDY = (
    "Let jobs read the kernel's log: sysctl kernel.dmesg_restrict=0; a container needs --cap-add SYSLOG (Azure ML: "
    "resources.docker_args), or the machine's /var/log."
)


def of_kernel(machine: Machine) -> str:
    """What the kernel said. Raises Missing where neither it nor a log file can be read."""
    try:
        output = machine.says("dmesg")
        if gpu_health.has_lines(output):
            return output
        why = "dmesg says nothing"
    except Missing as error:
        why = str(error)
    written = of_file(machine)
    if written is None:
        raise Missing(f"{why}; nor does the kernel speak in {' or '.join(f'/{log}' for log in LOGS)}", REMEDY)
    return written


def of_file(machine: Machine, *, speaker: str = KERNEL) -> str | None:
    """What matters of the machine's log file; None where there is none in which this one speaks. Empty: anybody."""
    for name in LOGS:
        output = _end(machine, f"{name}.1") + _end(machine, name)
        if output and speaker in output:
            lines = "\n".join(line for line in output.splitlines() if WANTED.search(line))
            return kernel_log.as_dmesg(lines, now=machine.clock(), uptime=machine.uptime)
    return None


def _end(machine: Machine, name: str) -> str:
    try:
        with open(machine.root / name, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# nvidia-smi, asked for everything that a qualification wants to know of each GPU. What it means is health_nvidia.py.


def ask_gpus(machine: Machine, fields: tuple[str, ...] = smi.FIELDS) -> tuple[int, str, list[dict[str, str]]]:
    """How it ended, what it said, and a row a GPU, without fields that this driver does not know."""
    return _asked(machine, "gpu", fields)


def ask_rows(machine: Machine) -> tuple[int, str, list[dict[str, str]]]:
    """The same of remapped rows."""
    return _asked(machine, "remapped-rows", gpu_health.ROW_FIELDS)


def _asked(machine: Machine, table: str, fields: tuple[str, ...]) -> tuple[int, str, list[dict[str, str]]]:
    asked = {field: field for field in fields}
    code, output = query_smi(table, asked, machine.ask, lambda field: None)
    return code, output, gpu_health.rows(output, tuple(asked))


def failure(code: int, text: str, what: str = "nvidia-smi") -> ValueError:
    """Of a call whose answer cannot be read."""
    return ValueError(f"{what} ended with {code}: {' '.join(text.split())[:200]}")


class Missing(Exception):
    """There is no way to look: no such command or file, or no rights."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Machine:
    """Where to look."""

    root: Path = Path("/")
    rules: Rules = field(default_factory=lambda: gpu_health.read_rules(RULES.read_text(encoding="utf-8")))
    imds: str = "http://169.254.169.254"
    """Azure's instance metadata."""
    clock: Callable[[], float] = time.time

    @property
    def is_this(self) -> bool:
        """Whether it is the machine that this process runs on, and no recorded one."""
        return self.root == Path("/")

    def text(self, path: str | Path) -> str:
        """What a file says; empty where it is not there or may not be read, or the driver refuses."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def places(self, pattern: str) -> list[Path]:
        """Files and folders of a pattern under the root."""
        return sorted(self.root.glob(pattern))

    def ask(self, *command: str, seconds: float | None = None) -> tuple[int, str]:
        """Exit code and output of a command. Raises Missing, and Hangs after the time limit."""
        try:
            return ask(*command, seconds=seconds or self.rules.command_seconds)
        except (FileNotFoundError, PermissionError) as error:
            raise Missing(f"there is no {command[0]}" if error.errno == 2 else f"{command[0]}: {error}") from error

    def says(self, *command: str) -> str:
        """The output of a command that ended well. Raises Missing when it did not: it was no way to look."""
        code, output = self.ask(*command)
        if code:
            raise Missing(f"{command[0]} ended with {code}: {' '.join(output.split())[:200]}")
        return output

    @property
    def uptime(self) -> float:
        """Seconds since the machine's start. Raises Missing where /proc/uptime says nothing."""
        messages = self.text("proc/uptime").split()
        if not messages:
            raise Missing("/proc/uptime says nothing")
        return float(messages[0])
