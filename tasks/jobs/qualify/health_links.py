"""The network of a machine, by /sys and its logs: InfiniBand ports and their rate, links that flap, accelerated networking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tasks.formats import gpu_health, links
from tasks.formats.gpu_health import Port
from tasks.formats.links import DAY, Interface
from tasks.jobs.node.probes import ports
from tasks.jobs.qualify import machine_logs
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing
from tasks.qualification.measured import Probe


def infiniband(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Active ports, and the rate of each; not said where there is none and none is asked for."""
    found = ports(machine.root / "sys/class/infiniband")
    if not found and "ib_ports_active" not in bench.sku.limits:
        return
    active = sum(port.active for port in found.values())
    down = ", ".join(f"{name} is {port.state}" for name, port in found.items() if not port.active)
    yield Probe(
        check="ib_ports_active",
        measured=float(active),
        said=down or ("" if found else "/sys/class/infiniband has no port"),
        remedy="Check cable and switch port." if down else "",
    )
    for name, port in found.items():
        yield _rate(name, port)
    if not found:
        yield Probe(check="ib_rate", measured=0.0, unit="Gbit/s", said="there is no port")


def _rate(name: str, port: Port) -> Probe:
    """A port that is not active carries nothing."""
    rate = links.rate(port.rate) if port.active else 0.0
    return Probe(
        check="ib_rate",
        status="measured" if rate is not None else "failed",
        measured=rate,
        unit="Gbit/s",
        where=name,
        said=f"it is {port.state}, its rate reads {port.rate!r}",
    )


def link_flaps(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """How often links went down in 24 hours: the most of what the kernel, the machine's log and the ports' counters say.

    A counter has no times: what all ports of the machine had together is its start, or that of a switch.
    """
    found = ports(machine.root / "sys/class/infiniband")
    if not found and "link_flaps" not in bench.sku.limits:
        return
    uptime = machine.uptime
    times: Counter[str] = Counter()
    logs, unread = _logs(machine)
    if not (logs or found):
        raise Missing(unread)
    for log in logs:
        times |= gpu_health.flaps(log, since=max(0.0, uptime - DAY))
    at_once = min((port.downed for port in found.values()), default=0)
    for name, port in found.items():
        times[name] = max(times[name], round(links.per_day(port.downed - at_once, uptime)))
    said = f"of the last {min(uptime, DAY) / 3600:.1f} h" + (
        f", by the ports' counters alone: {unread}" if unread else ""
    )
    flapped = {name: count for name, count in sorted(times.items()) if count}
    for name, count in (flapped or {"": 0}).items():
        yield Probe(check="link_flaps", measured=float(count), unit="per 24 h", where=name, said=said)


def virtual_functions(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Accelerated networking: behind each interface of Hyper-V a virtual function of the network card, and it is up."""
    for interface, function in links.behind(_interfaces(machine)):
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


def _logs(machine: Machine) -> tuple[list[str], str]:
    """That of the kernel and that of the machine, where networkd writes too; and why, where none can be read."""
    try:
        return [machine_logs.of_kernel(machine), machine_logs.of_file(machine, speaker="") or ""], ""
    except Missing as error:
        return [], str(error)


def _interfaces(machine: Machine) -> list[Interface]:
    return [
        Interface(
            place.name,
            (place / "device/driver").resolve().name if (place / "device/driver").exists() else "",
            machine.text(place / "address"),
            machine.text(place / "operstate"),
        )
        for place in machine.places("sys/class/net/*")
    ]
