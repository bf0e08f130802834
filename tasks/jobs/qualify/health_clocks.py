"""Application clocks of NVIDIA's GPUs, set to their maximum where benchmark.set_clocks asks for it; verified and noted.

A restart of the machine or of its driver undoes it, so it is said with every qualification. What clocks are without it is
health_nvidia.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress

from tasks.formats import smi
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.health_nvidia import ask_gpus
from tasks.jobs.qualify.machine import Machine, Missing
from tasks.qualification.measured import Probe

KINDS = ("graphics", "memory")
NO_RIGHTS = ("insufficient permission", "permission denied", "password is required", "not in the sudoers")


def set_to_maximum(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Set what is below its maximum, where it is asked for. What they are afterwards is noted with all other clocks."""
    if not bench.config.set_clocks:
        return
    _, _, before = ask_gpus(machine)
    tried = {gpu["index"]: _set(machine, gpu) for gpu in before if _below(gpu)}
    _, _, after = ask_gpus(machine)
    for gpu in after:
        if gpu["index"] in tried:
            yield _noted(gpu, tried[gpu["index"]])


def _below(gpu: Mapping[str, str]) -> bool:
    clocks = (smi.clocks(gpu, kind) for kind in KINDS)
    return any(clock is not None and clock.in_force < clock.maximum for clock in clocks)


def _set(machine: Machine, gpu: Mapping[str, str]) -> str:
    """What the command said; as root where sudo asks for no password."""
    command = smi.set_clocks_command(gpu)
    code, said = machine.ask(*command)
    if code and _refused(said):
        with suppress(Missing):
            code, said = machine.ask("sudo", "-n", *command)
    return f"{'refused' if _refused(said) else 'failed'}: {said.strip()[:200]}" if code else said.strip()[:200]


def _noted(gpu: Mapping[str, str], said: str) -> Probe:
    """A reading of its own, beside that of the clock: whether what was set holds."""
    command = shlex.join(smi.set_clocks_command(gpu))
    held = not _below(gpu)
    clock = smi.clocks(gpu, "graphics")
    return Probe(
        check="sm_clock",
        measured=clock.in_force if clock else None,
        unit="MHz",
        where=smi.name(gpu),
        finding=None if held else "warn",
        said=f"benchmark.set_clocks {'set it' if held else 'could not set it'}: {said}",
        remedy="" if held else f"Run `sudo {command}` in the machine's prolog, or give the job the right to.",
        source="" if held else "the GPU's own maximum",
    )


def _refused(said: str) -> bool:
    return any(mark in said.lower() for mark in NO_RIGHTS)
