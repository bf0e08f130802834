"""Whether a machine holds its rate when it is hot: products of matrices for a minute or longer, on all ranks at the same time.

The drop is what the rate lost from the first to the last tenth; the rate itself is compute.py's.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tasks.formats import gpu_health, smi
from tasks.jobs.node.probes import Hangs, ask
from tasks.jobs.qualify import compute as gpus
from tasks.jobs.qualify.bench import Bench, Outcome, Rate, Together, tried
from tasks.jobs.qualify.compute import GPU_SIZES, formats_of, matmul_windows, product_on
from tasks.jobs.qualify.machine import Machine, Missing, ask_gpus, failure
from tasks.qualification.measured import Probe

ZONES = Path("/sys/class/thermal")
NVIDIA = ("nvidia-smi", "--query-gpu=index,temperature.gpu", "--format=csv,noheader,nounits")
AMD = ("rocm-smi", "--showtemp", "--json")
SECONDS = 30.0
"""Longest time of one call; a GPU that has fallen off the bus makes nvidia-smi hang."""


def of_gpus() -> dict[str, float]:
    """Degrees Celsius by GPU; empty where no tool says any."""
    for command, read in ((NVIDIA, read_nvidia), (AMD, read_amd)):
        if shutil.which(command[0]):
            try:
                output = ask(*command, seconds=SECONDS)[1]
            except (OSError, Hangs):
                output = ""
            return read(output)
    return {}


def of_zones(root: Path = ZONES) -> dict[str, float]:
    """Degrees Celsius by thermal zone, under the zone's type (x86_pkg_temp); virtual machines have none."""
    result = {}
    for zone in sorted(root.glob("thermal_zone*")):
        try:
            result[(zone / "type").read_text().strip()] = int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):
            continue
    return result


def read_nvidia(text: str) -> dict[str, float]:
    """Lines as `0, 41`; a GPU that says [N/A] is left out."""
    lines = re.findall(r"^\s*(\d+)\s*,\s*(\d+)\s*$", text, re.MULTILINE)
    return {f"GPU {index}": float(degrees) for index, degrees in lines}


def read_amd(text: str) -> dict[str, float]:
    """`{"card0": {"Temperature (Sensor junction) (C)": "45.0", ...}}`; the hottest sensor of a card counts."""
    try:
        cards = json.loads(text)
    except ValueError:
        return {}
    result = {}
    for card, output in cards.items():
        degrees = [
            float(value)
            for key, value in output.items()
            if "Temperature" in key and re.fullmatch(r"\d+(\.\d+)?", value)
        ]
        if degrees and card.startswith("card"):
            result[f"GPU {card.removeprefix('card')}"] = max(degrees)
    return result


# An idle GPU is never thermally throttled, so the groups that load GPUs are watched every second. Heat, a power brake
# and a slowdown by the hardware count; idle, application clocks and the software's power cap do not
# (tasks/hardware/health.json).


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
                result = self._look(self._machine)
            except (Missing, Hangs, ValueError) as error:
                status = "timed out" if isinstance(error, Hangs) else "missing"
                self.unseen = Probe.model_validate({"check": "throttle", "status": status, "said": str(error)})
                return
            self.looks += 1
            self.times.update(result.keys())
            self.why.update(result)


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
    code, output, gpus = ask_gpus(machine, FIELDS)
    if code:
        raise failure(code, output)
    results = [finding for gpu in gpus for finding in gpu_health.gpu_findings(gpu, machine.rules)]
    parts = [finding.message.partition(" is throttled: ") for finding in results]
    return {name: reasons for name, _, reasons in parts}


def amd(machine: Machine) -> dict[str, str]:
    """The same of AMD's."""
    result = smi.throttled(machine.says("amd-smi", "metric", "--power", "--json"))
    return {f"GPU {gpu}": state for gpu, state in result.items()}


PARTS = 10
HOTTEST_FIRST = ("matmul_bf16", "matmul_fp16", "matmul_fp32")


def measure(bench: Bench) -> None:
    """Note `soak_drop` of this rank's core or its GPUs; local rank 0 notes `temperature` too, the highest that it saw."""
    torch.set_num_threads(bench.threads)
    together = Together(bench, "soak")
    together.meet("ready")
    seconds = min(bench.config.soak_seconds, together.left) / PARTS
    tenths: list[Outcome] = []
    hottest: dict[str, float] = {}
    once, where = _work(bench, seconds)
    while len(tenths) < PARTS and together.left > 0:
        tenths.append(tried(once))
        if bench.local_rank == 0:
            now = of_gpus() if bench.cuda else of_zones()
            hottest = {part: max(degrees, hottest.get(part, degrees)) for part, degrees in now.items()}
    bench.note(*_drops(tenths, where, together.late), *_temperatures(bench, hottest))


def _work(bench: Bench, seconds: float) -> tuple[Callable[[], Sequence[Rate]], tuple[str, ...]]:
    """What is done in a tenth of the time, and the names of the parts whose rates it gives."""
    if not bench.cuda:
        size = bench.config.matmul_size
        return lambda: [_middle(matmul_windows(size, seconds))], (f"rank {bench.rank.rank}",)
    devices = gpus.own(bench)
    check = next(check for check in HOTTEST_FIRST if check in formats_of(devices[0]))
    work, amount = partial(product_on, check, GPU_SIZES[0]), 2.0 * GPU_SIZES[0] ** 3
    return lambda: gpus.measure_all(devices, work, amount, seconds), gpus.names(devices)


def _middle(windows: Sequence[Rate]) -> Rate:
    """The median window by its rate on the core: a tenth's best window would hide throttling that comes and goes."""
    return sorted(windows, key=lambda window: window.on_core)[len(windows) // 2]


def _drops(tenths: Sequence[Outcome], where: Sequence[str], late: str) -> list[Probe]:
    failed = next((tenth for tenth in tenths if not tenth.rates), None)
    if failed or len(tenths) < PARTS:
        status, text = (failed.status, failed.said) if failed else ("timed out", late)
        return [Probe(check="soak_drop", status=status, said=text)]
    results = []
    for number, part in enumerate(where):
        rates = [tenth.rates[number].on_core for tenth in tenths]
        unknown = [tenth for tenth, rate in enumerate(rates, start=1) if not rate]
        if unknown:  # the rank had its core for less than the clock can tell
            text = f"the rate of tenth {unknown[0]} of {PARTS} is unknown: other work had the core all the time"
            results.append(Probe(check="soak_drop", status="failed", where=part, said=text))
        else:
            shares = "rate of each tenth against the first: " + ", ".join(f"{rate / rates[0]:.3f}" for rate in rates)
            results.append(Probe(check="soak_drop", measured=1 - rates[-1] / rates[0], where=part, said=shares))
    return results


def _temperatures(bench: Bench, hottest: dict[str, float]) -> list[Probe]:
    if bench.cuda and bench.local_rank == 0 and not hottest:
        text = "neither nvidia-smi nor rocm-smi says one"
        return [Probe(check="temperature", status="missing", unit="C", said=text)]
    return [
        Probe(check="temperature", measured=degrees, unit="C", where=part) for part, degrees in sorted(hottest.items())
    ]
