"""Whether GPUs are throttled while they compute: looked at every second during the groups of checks that load them.

An idle GPU is never thermally throttled, so health.py alone would see nothing. Heat, a power brake and a slowdown by the hardware
count; idle, application clocks and the software's power cap do not (tasks/hardware/health.json).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.formats import gpu_health, rocm
from tasks.jobs.node.vendor_commands import Hangs
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing
from tasks.jobs.qualify.nvidia_smi import ask_gpus, failure
from tasks.qualification.measured import Probe

LOADS = ("compute", "soak")
EVERY_SECONDS = 1.0
SHARE = 0.1
"""Of the looks in which a GPU is throttled that is a fault; less is a warning."""
FIELDS = ("index", "pci.bus_id", "clocks_event_reasons.active")
Looked = Callable[[Machine], dict[str, str]]


class Watch:
    """State: how often each GPU was throttled, in how many looks, and why no look was possible."""

    def __init__(self, machine: Machine, look: Looked) -> None:
        self.looks = 0
        self.times: Counter[str] = Counter()
        self.why: dict[str, str] = {}
        self.unseen: Probe | None = None
        self._machine = machine
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttling", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End; a look that hangs is not waited for longer than its own limit."""
        self._over.set()
        self._thread.join(self._machine.rules.command_seconds + 1)

    def probes(self, during: str) -> Iterator[Probe]:
        """What was seen."""
        if self.unseen:
            yield self.unseen
        for gpu, times in self.times.items():
            yield Probe(
                check="throttle",
                measured=times / self.looks,
                unit="of looks",
                where=gpu,
                finding="fail" if times / self.looks > SHARE else "warn",
                said=f"{self.why[gpu]}, in {times} of {self.looks} looks during {during}",
                remedy="Have the machine's cooling and power looked at; leave it out meanwhile.",
                source="tasks/hardware/health.json",
            )
        if self.looks and not self.times:
            yield Probe(check="throttle", measured=0.0, said=f"in {self.looks} looks during {during}")

    def _run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            try:
                found = self._look(self._machine)
            except (Missing, Hangs, ValueError) as error:
                status = "timed out" if isinstance(error, Hangs) else "missing"
                self.unseen = Probe.model_validate({"check": "throttle", "status": status, "said": str(error)})
                return
            self.looks += 1
            self.times.update(found.keys())
            self.why.update(found)


@contextmanager
def watched(bench: Bench, group: str, machine: Machine | None = None) -> Iterator[Watch | None]:
    """Watch this machine's GPUs during a group of checks that loads them, and note what was seen."""
    look = {"nvidia": nvidia, "amd": amd}.get(bench.sku.vendor)
    if look is None or group not in LOADS or bench.local_rank:
        yield None
        return
    watch = Watch(machine or Machine(), look)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        bench.note(*watch.probes(group))


def nvidia(machine: Machine) -> dict[str, str]:
    """Why each GPU is throttled now, where it is. Raises ValueError when nvidia-smi does not end well."""
    code, said, gpus = ask_gpus(machine, FIELDS)
    if code:
        raise failure(code, said)
    found = [finding for gpu in gpus for finding in gpu_health.gpu_findings(gpu, machine.rules)]
    parts = [finding.message.partition(" is throttled: ") for finding in found]
    return {name: reasons for name, _, reasons in parts}


def amd(machine: Machine) -> dict[str, str]:
    """The same of AMD's."""
    found = rocm.throttled(machine.says("amd-smi", "metric", "--power", "--json"))
    return {f"GPU {gpu}": state for gpu, state in found.items()}
