"""The AMD GPUs of a machine: rocm-smi or amd-smi, the amdgpu driver's files under /sys, the kernel log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tasks.formats import smi
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing, of_kernel
from tasks.qualification.measured import Probe

SOURCE = "the amdgpu driver"
LISTS = (("rocm-smi", "--showid", "--json"), ("amd-smi", "list", "--json"))
AMD = "0x1002"


def count(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """GPUs that answer, to the first tool that is there."""
    for command in LISTS:
        try:
            code, output = machine.ask(*command)
        except Missing:
            continue
        ended = f"{command[0]} ended with {code}"
        text = " ".join(output.split())[:200] if code else ""
        yield Probe(check="gpu_smi", measured=ended, finding="fail" if code else None, said=text, source=command[0])
        yield Probe(check="gpu_count", measured=float(smi.cards(output)))
        return
    raise Missing("there is neither rocm-smi nor amd-smi")


def errors(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Errors of each GPU's memories since the driver was loaded, by its own counters, and what the kernel's log says."""
    for name, device in _devices(machine):
        files = {path.name: machine.text(path) for path in device.glob("ras/*_err_count")}
        uncorrected, corrected = smi.errors(files)
        yield Probe(
            check="ecc",
            status="measured" if files else "missing",
            measured=float(uncorrected) if files else None,
            unit="errors",
            where=name,
            finding="fail" if uncorrected else None,
            said=f"{corrected} corrected" if files else "the driver has no error counters (ras/*_err_count)",
            remedy="Drain the machine and have the GPU replaced." if uncorrected else "",
            source=SOURCE,
        )
    try:
        log = of_kernel(machine)
    except Missing:
        return  # the counters above have said it
    for bus, line in smi.faults(log):
        yield Probe(check="ecc", measured=1.0, where=f"GPU {bus}", finding="fail", said=line[:300], source=SOURCE)


def throttled(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """GPUs that say that they are throttled. Raises Missing without amd-smi."""
    result = smi.throttled(machine.says("amd-smi", "metric", "--power", "--json"))
    for gpu, state in result.items():
        yield Probe(check="throttle", measured=1.0, where=f"GPU {gpu}", finding="warn", said=state, source="amd-smi")
    if not result:
        yield Probe(check="throttle", measured=0.0)


def clocks(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """The highest clocks that the driver offers, and whether it is free to choose them."""
    for name, device in _devices(machine):
        level = machine.text(device / "power_dpm_force_performance_level")
        fixed = level not in smi.FREE_LEVELS
        for check, file in (("sm_clock", "pp_dpm_sclk"), ("memory_clock", "pp_dpm_mclk")):
            highest = smi.highest(machine.text(device / file))
            yield Probe(
                check=check,
                status="measured" if highest is not None else "missing",
                measured=highest,
                unit="MHz",
                where=name,
                finding="warn" if fixed and highest is not None else None,
                said=f"performance level {level or 'not said'}",
                remedy="rocm-smi --setperflevel auto (as root)" if fixed else "",
                source=SOURCE,
            )


def _devices(machine: Machine) -> list[tuple[str, Path]]:
    """AMD's cards under /sys, numbered in their order. Raises Missing where there is none."""
    cards = sorted(machine.places("sys/class/drm/card[0-9]*/device"), key=lambda path: int(path.parts[-2][4:] or 0))
    results = [card for card in cards if machine.text(card / "vendor") == AMD]
    if not results:
        raise Missing("/sys/class/drm has no card of AMD's")
    return [(f"GPU {number}", card) for number, card in enumerate(results)]
