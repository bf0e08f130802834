"""Every metric of Headway as a value: its name in OpenTelemetry and in Prometheus, its unit, its labels. No figures here.

Names of the host's metrics are those of OpenTelemetry's semantic conventions. What is measured is in measure.py; the dashboard
and the alert rules name metrics through these values only, so they cannot name one that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUFFIXES = {
    "s": "_seconds",
    "By": "_bytes",
    "1": "_ratio",
    "Cel": "_celsius",
    "W": "_watts",
    "{token}/s": "_per_second",
}
SECONDS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


@dataclass(frozen=True)
class Instrument:
    """A metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """UCUM; what stands in braces is a remark."""
    help: str
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, by OpenTelemetry's rule: underscores, the unit spelt out, `_total` for what only grows."""
        name = self.name.replace(".", "_") + SUFFIXES.get(self.unit, "")
        return f"{name}_total" if self.kind == "counter" else name


@dataclass(frozen=True)
class Point:
    """One figure, in the order of the instrument's labels. A histogram's is the count of each bucket, then the sum."""

    instrument: Instrument
    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()

    @property
    def attributes(self) -> dict[str, str]:
        return dict(zip(self.instrument.labels, self.labels, strict=True))


RUNS = Instrument("headway.runs", "counter", "{run}", "Flow runs that ended", ("flow", "subject", "status"))
GATES = Instrument(
    "headway.gates.closed", "counter", "{gate}", "Gates that stayed closed", ("flow", "subject", "stage")
)
STAGES = Instrument("headway.stage.duration", "histogram", "s", "Time that a stage took", ("flow", "stage", "status"))
RESTARTS = Instrument("headway.job.restarts", "counter", "{restart}", "Starts of a job after its first", ("stage",))

RUNNING = Instrument("headway.runs.running", "gauge", "{run}", "Running flow runs", ("flow", "subject"))
FAILING = Instrument(
    "headway.run.failing.time",
    "gauge",
    "s",
    "When the newest run that went wrong ended, while no later one of the kind succeeded, since the epoch",
    ("flow", "subject", "status"),
)
SHARE = Instrument(
    "headway.stage.done", "gauge", "1", "Share of the running stage that is done", ("flow", "subject", "stage")
)
MOVED = Instrument(
    "headway.stage.progress.time",
    "gauge",
    "s",
    "When the running stage last made progress, since the epoch",
    ("flow", "subject", "stage"),
)
LOSS = Instrument("headway.training.loss", "gauge", "{nat}", "Training loss of the last step", ("model",))
SPEED = Instrument("headway.training.tokens", "gauge", "{token}/s", "Training tokens per second", ("model",))
STEP = Instrument("headway.training.step", "gauge", "{step}", "Last step of training", ("model",))
EVALUATED = Instrument(
    "headway.evaluation.value", "gauge", "{value}", "What the newest evaluation measured", ("model", "metric")
)
DRIFTED = Instrument(
    "headway.drift.value", "gauge", "{value}", "What the newest comparison of new data found", ("dataset", "metric")
)
ALERT = Instrument(
    "headway.alert.firing", "gauge", "{alert}", "1 for every alert that fires", ("alert", "severity", "instance")
)
TICK = Instrument("headway.telemetry.tick", "gauge", "s", "Duration of the last check of everything")
TIME = Instrument("headway.telemetry.time", "gauge", "s", "When everything was last checked, since the epoch")
BEHIND = Instrument(
    "headway.telemetry.behind", "gauge", "By", "Events of run logs that an exporter has not sent yet", ("exporter",)
)

CPU = Instrument("system.cpu.utilization", "gauge", "1", "Share of all CPU time in use")
LOAD = Instrument("system.cpu.load_average.1m", "gauge", "{thread}", "Threads that run or wait, over a minute")
CORES = Instrument("system.cpu.logical.count", "gauge", "{cpu}", "Logical CPUs")
MEMORY = Instrument("system.memory.usage", "gauge", "By", "Memory by state", ("state",))
DISK = Instrument("system.filesystem.usage", "gauge", "By", "Space on the disk that holds the state", ("state",))
DISK_IO = Instrument("system.disk.io", "counter", "By", "Bytes read from and written to disks", ("direction",))
NETWORK = Instrument("system.network.io", "counter", "By", "Bytes over the network, without loopback", ("direction",))
GPU = Instrument("hw.gpu.utilization", "gauge", "1", "Share of time in which the GPU worked", ("gpu", "name"))
GPU_MEMORY = Instrument("hw.gpu.memory.usage", "gauge", "By", "Memory of the GPU in use", ("gpu", "name"))
GPU_LIMIT = Instrument("hw.gpu.memory.limit", "gauge", "By", "Memory of the GPU", ("gpu", "name"))
GPU_HEAT = Instrument("hw.temperature", "gauge", "Cel", "Temperature of the GPU", ("gpu", "name"))
GPU_POWER = Instrument("hw.power", "gauge", "W", "Power that the GPU draws", ("gpu", "name"))

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Instrument))
