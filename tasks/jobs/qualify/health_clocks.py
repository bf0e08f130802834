"""Application clocks of NVIDIA's GPUs against their maximum; set to it first where benchmark.set_clocks asks for that.

What was set is read again before it is believed. A restart of the machine or of its driver undoes it, so it is said with every
qualification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from tasks.formats import smi
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing
from tasks.jobs.qualify.nvidia_smi import ask_gpus
from tasks.qualification.measured import Probe

KINDS = {"sm_clock": "graphics", "memory_clock": "memory"}
NO_RIGHTS = ("permission", "password is required", "not in the sudoers")


def set_to_maximum(bench: Bench, machine: Machine) -> dict[str, str]:
    """Set what is below its maximum, where it is asked for: what the command said, by GPU."""
    if not bench.config.set_clocks:
        return {}
    _, _, gpus = ask_gpus(machine)
    return {gpu["index"]: _set(machine, gpu) for gpu in gpus if any(_below(gpu, kind) for kind in KINDS.values())}


def clock_probes(bench: Bench, gpu: Mapping[str, str], was_set: str) -> Iterator[Probe]:
    """A GPU's clocks. Below its own maximum is a warning, unless the hardware's file says what they must be."""
    for check, kind in KINDS.items():
        clock = smi.clocks(gpu, kind)
        if clock is None:
            continue
        below = _below(gpu, kind)
        told = [f"its maximum is {clock.maximum:.0f}"]
        told += ["this driver has no application clocks"] if clock.application is None else []
        told += [f"benchmark.set_clocks {'did not hold' if below else 'set it'}: {was_set}"] if was_set else []
        yield Probe(
            check=check,
            measured=clock.in_force,
            unit="MHz",
            where=smi.name(gpu),
            finding="warn" if below and check not in bench.sku.limits else None,
            said="; ".join(told),
            remedy=_remedy(gpu, tried=bool(was_set)) if below else "",
            source="the GPU's own maximum",
        )


def _remedy(gpu: Mapping[str, str], *, tried: bool) -> str:
    command = f"sudo {' '.join(smi.set_clocks_command(gpu))}"
    return f"Run `{command}` in the machine's prolog, or " + (
        "give the job the right to." if tried else "set benchmark.set_clocks."
    )


def _below(gpu: Mapping[str, str], kind: str) -> bool:
    clock = smi.clocks(gpu, kind)
    return clock is not None and clock.in_force < clock.maximum


def _set(machine: Machine, gpu: Mapping[str, str]) -> str:
    """What the command said; as root where sudo asks for no password."""
    command = smi.set_clocks_command(gpu)
    code, said = machine.ask(*command)
    if code and _refused(said):
        with suppress(Missing):
            code, said = machine.ask("sudo", "-n", *command)
    words = " ".join(said.split())[:200]
    return f"{'there are no rights' if _refused(said) else 'it failed'}: {words}" if code else words


def _refused(said: str) -> bool:
    return any(mark in said.lower() for mark in NO_RIGHTS)
