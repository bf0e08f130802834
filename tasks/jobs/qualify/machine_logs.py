"""The logs of a machine since its start, in the form of `dmesg`: the kernel's own, and the file that syslog writes.

An empty log says nothing of the machine, so it counts as none. What the lines mean is tasks/formats/gpu_health.py.
"""

from __future__ import annotations

import re

from tasks.formats import gpu_health, kernel_log
from tasks.jobs.qualify.machine import Machine, Missing

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
        said = machine.says("dmesg")
        if gpu_health.has_lines(said):
            return said
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
        said = _end(machine, f"{name}.1") + _end(machine, name)
        if said and speaker in said:
            lines = "\n".join(line for line in said.splitlines() if WANTED.search(line))
            return kernel_log.as_dmesg(lines, now=machine.clock(), uptime=machine.uptime)
    return None


def _end(machine: Machine, name: str) -> str:
    try:
        with open(machine.root / name, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
