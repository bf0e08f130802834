"""The GPUs of a machine before a run: clocks, links, ECC and faults, by nvidia-smi and the kernel log.

Who looks while a run goes on is tasks/jobs/node/probes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Literal

from tasks.formats import gpu_health, smi
from tasks.formats.azure_machine import DAY
from tasks.formats.gpu_health import Finding
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing, ask_gpus, ask_rows, failure, of_kernel
from tasks.qualification.measured import Probe

# With benchmark.set_clocks application clocks are first set to their maximum, and read back before that is believed.
# A restart of the machine or of its driver undoes it, so every qualification says what was set.


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
            if check in bench.sku.limits:  # one GPU of eight that says nothing would hide behind the others
                yield Probe(
                    check=check, status="missing", unit="MHz", where=smi.name(gpu), said="the driver names no clock"
                )
            continue
        below = _below(gpu, kind)
        entries = [f"its maximum is {clock.maximum:.0f}"]
        entries += ["this driver has no application clocks"] if clock.application is None else []
        entries += [f"benchmark.set_clocks {'did not hold' if below else 'set it'}: {was_set}"] if was_set else []
        remedy = ""
        if below:
            command = f"sudo {' '.join(smi.set_clocks_command(gpu))}"
            way = "give the job the right to." if was_set else "set benchmark.set_clocks."
            remedy = f"Run `{command}` in the machine's prolog, or {way}"
        yield Probe(
            check=check,
            measured=clock.in_force,
            unit="MHz",
            where=smi.name(gpu),
            finding="warn" if below and check not in bench.sku.limits else None,
            said="; ".join(entries),
            remedy=remedy,
            source="the GPU's own maximum",
        )


def _below(gpu: Mapping[str, str], kind: str) -> bool:
    clock = smi.clocks(gpu, kind)
    return clock is not None and clock.in_force < clock.maximum


def _set(machine: Machine, gpu: Mapping[str, str]) -> str:
    """What the command said; as root where sudo asks for no password."""
    command = smi.set_clocks_command(gpu)
    code, output = machine.ask(*command)
    if code and _refused(output):
        with suppress(Missing):
            code, output = machine.ask("sudo", "-n", *command)
    words = " ".join(output.split())[:200]
    return f"{'there are no rights' if _refused(output) else 'it failed'}: {words}" if code else words


def _refused(text: str) -> bool:
    return any(mark in text.lower() for mark in NO_RIGHTS)


SOURCE = "tasks/hardware/health.json"
READ = {
    "ecc": tuple(field for field in smi.FIELDS if field.startswith("ecc.")),
    "throttle": ("clocks_event_reasons.active",),
}
"""Of them a GPU must say at least one, or nothing was looked at."""


def count(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """GPUs that answer."""
    code, output = machine.ask("nvidia-smi", "--list-gpus")
    gpus = smi.listed(output)
    if code and not gpus:
        raise failure(code, output, "nvidia-smi --list-gpus")
    lost = "; ".join(line.strip() for line in output.splitlines() if line.strip() and not smi.GPU.match(line))
    yield Probe(check="gpu_count", measured=float(gpus), said=lost[:400])


def gpus(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """How nvidia-smi ends, and of each GPU errors of its memory, throttling, clocks and persistence."""
    were_set = set_to_maximum(bench, machine)
    code, output, rows = ask_gpus(machine)
    bad = gpu_health.smi_finding(code, output, machine.rules)
    wants = "; ".join(f"{smi.name(gpu)}: the driver asks for {asked}" for gpu in rows if (asked := smi.recovery(gpu)))
    text = "; ".join(part for part in (bad.message if bad else "", wants) if part)
    yield Probe(
        check="gpu_smi",
        measured=f"ended with {code}",
        finding="fail" if wants else bad.level if bad else None,
        said=text,
        remedy="Do what the driver asks for, or replace the GPU." if text else "",
        source=SOURCE if text else "",
    )
    looks = (gpu_health.gpu_findings, smi.ecc_findings, smi.page_findings)
    results = [finding for gpu in rows for look in looks for finding in look(gpu, machine.rules)]
    yield from map(probe_of, results)
    for check, what in READ.items():
        unread = [smi.name(gpu) for gpu in rows if not any(smi.is_read(gpu.get(field)) for field in what)]
        if unread:
            yield Probe(check=check, status="missing", where=", ".join(unread), said="nvidia-smi says nothing of it")
        elif rows and not any(finding.check == check for finding in results):
            yield Probe(check=check, measured=0.0)
    for gpu in rows:
        yield from clock_probes(bench, gpu, were_set.get(gpu["index"], ""))
        mode = gpu.get("persistence_mode", "unknown")
        off = mode == "Disabled"
        yield Probe(
            check="persistence",
            measured=mode,
            where=smi.name(gpu),
            finding="warn" if off else None,
            remedy=f"nvidia-smi -i {gpu['index']} -pm 1 (as root)" if off else "",
            source="AzNHC check_gpu_persistence" if off else "",
        )


def remapped_rows(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Rows of memory that wait to be remapped or could not be; the retired pages of older GPUs are with gpus()."""
    code, output, rows = ask_rows(machine)
    if code and not rows:
        raise failure(code, output)
    results = [f for row in rows for f in (*gpu_health.row_findings(row), *smi.row_findings(row, machine.rules))]
    yield from map(probe_of, results)
    if not any(smi.is_read(value) for row in rows for field, value in row.items() if field != "gpu_bus_id"):
        yield Probe(check="rows", status="skipped", said="these GPUs remap no rows; retired pages are looked at")
    elif not results:
        yield Probe(check="rows", measured=0.0)


def errors(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """What the driver wrote into the kernel's log in the last day, once a GPU and code; only what is new fails."""
    log, uptime = of_kernel(machine), machine.uptime
    seen = gpu_health.xids(log, since=max(0.0, uptime - DAY))
    times = Counter((error.bus, error.code) for error in seen)
    newest = list({(error.bus, error.code): error for error in seen}.values())
    for error, finding in zip(newest, gpu_health.xid_findings(newest, machine.rules), strict=True):
        ago = uptime - error.seconds
        level: Literal["warn", "fail"] | None = finding.level if ago <= machine.rules.xid_hours * 3600 else "warn"
        if error.code in machine.rules.xid_programs:  # what somebody's program caused says nothing of the machine
            level = None
        yield Probe(
            check="xid",
            measured=float(error.code),
            where=f"GPU {error.bus}",
            finding=level,
            said=f"{times[error.bus, error.code]} times, last {ago / 3600:.1f} h ago: {finding.message}",
            remedy=finding.remedy or ("Reset the GPU, or restart the machine." if finding.level == "fail" else ""),
            source=SOURCE,
        )
    if not seen:
        yield Probe(check="xid", measured=0.0, said=f"none in the kernel's log of {min(uptime, DAY) / 3600:.1f} h")


def nvlinks(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Inactive NVLinks of all GPUs; not said where there is none and none is asked for."""
    code, output = machine.ask("nvidia-smi", "nvlink", "--status")
    result = smi.links(output)
    if code:
        raise failure(code, output, "nvidia-smi nvlink")
    asked_for, any_active = "nvlink_down" in bench.sku.limits, any(links.active for links in result.values())
    if not result and asked_for:
        raise ValueError(f"nvidia-smi nvlink --status names no link: {' '.join(output.split())[:200]}")
    if not asked_for and not any_active:
        return
    down = {gpu: links for gpu, links in smi.down(result).items() if links}
    yield Probe(
        check="nvlink_down",
        measured=float(sum(down.values())),
        unit="links",
        where=", ".join(f"GPU {gpu}" for gpu in down),
        finding="fail" if down and not asked_for else None,
        said=", ".join(f"GPU {gpu}: {links} inactive" for gpu, links in down.items()),
        remedy="Check the NVSwitch fabric and its manager; then reset the GPU." if down else "",
        source="AzNHC check_nvlink_status (NHC2016)" if down else "",
    )


def probe_of(finding: Finding) -> Probe:
    """A finding of gpu_health, as a qualification notes it: with the count that it begins with, or 1."""
    where, _, what = (
        finding.message.partition(": ") if finding.message.startswith("GPU ") else ("", "", finding.message)
    )
    return Probe(
        check=finding.check,
        measured=smi.number(what.split(" ")[0]) or 1.0,
        where=where.removesuffix(" is throttled"),
        finding=finding.level,
        said=finding.message,
        remedy=finding.remedy,
        source=SOURCE,
    )
