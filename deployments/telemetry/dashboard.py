"""The Grafana dashboard as values: rows of panels over the metrics of instruments.py. Pure.

`python docs/make_monitoring.py` writes it to docs/monitoring/headway-dashboard.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deployments.telemetry import instruments as of

WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """A picture of some figures. `queries` are pairs of PromQL and what the lines are called."""

    title: str
    help: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    limit: float | None = None
    """The top of the scale."""


STATE = (
    Panel("Alerts", of.ALERT.help, ((of.ALERT.prometheus, "{{alert}} {{instance}}"),), kind="table"),
    Panel(
        "Runs at work",
        of.RUNNING.help,
        ((f"sum by (flow, subject) ({of.RUNNING.prometheus})", "{{flow}} {{subject}}"),),
    ),
    Panel(
        "Runs that ended, a day",
        of.RUNS.help,
        ((f"sum by (status) (increase({of.RUNS.prometheus}[1d]))", "{{status}}"),),
        kind="bargauge",
    ),
    Panel(
        "Gates that stayed closed, a day",
        of.GATES.help,
        ((f"sum by (subject, stage) (increase({of.GATES.prometheus}[1d]))", "{{subject}} {{stage}}"),),
        kind="bargauge",
    ),
)
STAGES = (
    Panel(
        "Done of the running stage",
        of.SHARE.help,
        ((of.SHARE.prometheus, "{{subject}} {{stage}}"),),
        "percentunit",
        limit=1.0,
    ),
    Panel(
        "Since the last progress",
        of.MOVED.help,
        ((f"time() - {of.MOVED.prometheus}", "{{subject}} {{stage}}"),),
        "s",
    ),
    Panel(
        "Time of a stage, 90 of 100",
        of.STAGES.help,
        (
            (
                f'histogram_quantile(0.9, sum by (le, stage) (rate({of.STAGES.prometheus}_bucket{{status="ran"}}[1d])))',
                "{{stage}}",
            ),
        ),
        "s",
    ),
    Panel("Restarts of jobs, an hour", of.RESTARTS.help, ((f"increase({of.RESTARTS.prometheus}[1h])", "{{stage}}"),)),
)
TRAINING = (
    Panel("Loss", of.LOSS.help, ((of.LOSS.prometheus, "{{model}}"),)),
    Panel("Tokens a second", of.SPEED.help, ((of.SPEED.prometheus, "{{model}}"),)),
    Panel("Step", of.STEP.help, ((of.STEP.prometheus, "{{model}}"),)),
)
HOST = (
    Panel("CPU", of.CPU.help, ((of.CPU.prometheus, "in use"),), "percentunit", limit=1.0),
    Panel("Load", of.LOAD.help, ((of.LOAD.prometheus, "load"), (of.CORES.prometheus, "CPUs"))),
    Panel("Memory", of.MEMORY.help, ((of.MEMORY.prometheus, "{{state}}"),), "bytes"),
    Panel("Disk of the state", of.DISK.help, ((of.DISK.prometheus, "{{state}}"),), "bytes"),
    Panel("Disk traffic", of.DISK_IO.help, ((f"rate({of.DISK_IO.prometheus}[5m])", "{{direction}}"),), "Bps"),
    Panel("Network", of.NETWORK.help, ((f"rate({of.NETWORK.prometheus}[5m])", "{{direction}}"),), "Bps"),
)
GPUS = (
    Panel("GPU", of.GPU.help, ((of.GPU.prometheus, "{{gpu}} {{name}}"),), "percentunit", limit=1.0),
    Panel(
        "GPU memory",
        of.GPU_MEMORY.help,
        ((of.GPU_MEMORY.prometheus, "{{gpu}} in use"), (of.GPU_LIMIT.prometheus, "{{gpu}} all")),
        "bytes",
    ),
    Panel("GPU temperature", of.GPU_HEAT.help, ((of.GPU_HEAT.prometheus, "{{gpu}}"),), "celsius"),
    Panel("GPU power", of.GPU_POWER.help, ((of.GPU_POWER.prometheus, "{{gpu}}"),), "watt"),
)
WATCH = (
    Panel("Time of a look", of.TICK.help, ((of.TICK.prometheus, "look"),), "s"),
    Panel("Not sent yet", of.BEHIND.help, ((of.BEHIND.prometheus, "{{exporter}}"),), "bytes"),
    Panel("Since the last look", of.TIME.help, ((f"time() - {of.TIME.prometheus}", "ago"),), "s"),
)
ROWS = {"State": STATE, "Stages": STAGES, "Training": TRAINING, "Host": HOST, "GPUs": GPUS, "The watch itself": WATCH}


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [query for panels in ROWS.values() for panel in panels for query, _ in panel.queries]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "Headway",
        "uid": "headway",
        "description": "Runs, stages, training and host of one Headway home",
        "tags": ["headway"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source()]},
        "panels": list(_placed()),
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}


def _placed() -> Iterator[dict[str, Any]]:
    """Panels side by side under the head of their row."""
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, top, WIDTH, 1),
        }
        top += 1
        across = min(len(panels), 4) if len(panels) != 6 else 3
        for index, panel in enumerate(panels):
            number += 1
            width = WIDTH // across
            yield _panel(number, panel, _at(index % across * width, top + index // across * HEIGHT, width, HEIGHT))
        top += -(-len(panels) // across) * HEIGHT


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.limit is not None:
        defaults["max"] = panel.limit
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [_target(i, query, name, panel.kind) for i, (query, name) in enumerate(panel.queries)],
    }


def _target(index: int, query: str, name: str, kind: str) -> dict[str, Any]:
    instant = kind != "timeseries"
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query,
        "legendFormat": name,
        "instant": instant,
        "range": not instant,
        "format": "table" if kind == "table" else "time_series",
    }
