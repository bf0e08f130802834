"""What others' monitors are given: the Grafana dashboard, and the alert rules for Prometheus and Azure Monitor. Pure.

Rows of panels over the metrics of instruments.py, and the same rules that the watch follows (alert_rules.py). Prometheus sees
by itself what figures show, and takes the watch's word for the rest; one rule more notices that the watch is silent, which the
watch cannot tell. `python docs/make_monitoring.py` writes all of them to docs/monitoring/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from deployments.configuration.platform import AlertsConfig
from deployments.telemetry import instruments as of
from deployments.telemetry.alert_rules import RULES

RUNBOOKS = "docs/runbooks.md"
"""Page that rules link to: its path in the repository, because nobody knows where a team's copy of the site is."""
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
QUALITY = (
    Panel("Evaluations", of.EVALUATED.help, ((of.EVALUATED.prometheus, "{{model}} {{metric}}"),)),
    Panel("Drift", of.DRIFTED.help, ((of.DRIFTED.prometheus, "{{dataset}} {{metric}}"),)),
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
ROWS = {
    "State": STATE,
    "Stages": STAGES,
    "Training": TRAINING,
    "Quality": QUALITY,
    "Host": HOST,
    "GPUs": GPUS,
    "The watch itself": WATCH,
}


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [query for panels in ROWS.values() for panel in panels for query, _ in panel.queries]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it: panels side by side under the head of their row."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        head = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**head, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}})
        top += 1
        across = min(len(row), 4) if len(row) != 6 else 3
        width = WIDTH // across
        for index, panel in enumerate(row):
            place = {"x": index % across * width, "y": top + index // across * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, place))
        top += -(-len(row) // across) * HEIGHT
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
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
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.limit is not None:
        defaults["max"] = panel.limit
    instant = panel.kind != "timeseries"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": name,
                "instant": instant,
                "range": not instant,
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for index, (query, name) in enumerate(panel.queries)
        ],
    }


SILENT_SECONDS = 120
SEVERITIES = {"critical": 1, "warning": 2}
"""Azure Monitor's severities: 0 critical to 4 verbose; 0 is left to services that people use."""
API_VERSION = "2023-12-01"


@dataclass(frozen=True)
class Rendered:
    """A rule as the backends need it."""

    name: str
    when: str
    remedy: str
    severity: str
    promql: str
    runbook: str
    """Link to what to do, step by step: its section of the page of runbooks."""
    hold: str = "0s"
    """How long it must hold before it fires."""


def rules(limits: AlertsConfig, runbooks: str = RUNBOOKS) -> list[Rendered]:
    """Every rule of the watch, and the one about the watch."""
    own = [
        Rendered(rule.name, rule.when, rule.remedy, rule.severity, rule.promql(limits), f"{runbooks}#{rule.name}")
        for rule in RULES
    ]
    silent = Rendered(
        name="watch_silent",
        when=f"The watch told nothing for {SILENT_SECONDS} s: it is down, or its host is. Nothing else is noticed then.",
        remedy="`headway status` on the host; `headway up` starts what is missing. The log: platform/watch/watch.log.",
        severity="critical",
        promql=f"absent({of.TIME.prometheus}) or time() - {of.TIME.prometheus} > {SILENT_SECONDS}",
        runbook=f"{runbooks}#watch_silent",
        hold="1m",
    )
    return [*own, silent]


def prometheus_rules(limits: AlertsConfig, runbooks: str = RUNBOOKS) -> str:
    """A rule file, for `rule_files` of Prometheus. `runbooks` is the page that alerts link to."""
    named = (
        '{{ range $name, $value := $labels }}{{ if ne $name "__name__" }}{{ $name }}={{ $value }} {{ end }}{{ end }}'
    )
    entries = [
        {
            "alert": camel(rule.name),
            "expr": rule.promql,
            "for": rule.hold,
            "labels": {"severity": rule.severity},
            "annotations": {
                "summary": rule.when,
                "description": named,
                "remedy": rule.remedy,
                "runbook_url": rule.runbook,
            },
        }
        for rule in rules(limits, runbooks)
    ]
    group = {"name": "headway", "interval": "30s", "rules": entries}
    return yaml.safe_dump({"groups": [group]}, sort_keys=False, width=120, allow_unicode=True)


def azure_rules(limits: AlertsConfig, runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """An ARM template of scheduled query rules on the Application Insights component that the exporter sends to."""
    return {
        "$schema": "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#",
        "contentVersion": "1.0.0.0",
        "parameters": {
            "component": {
                "type": "string",
                "metadata": {"description": "Resource id of the Application Insights component"},
            },
            "actionGroups": {
                "type": "array",
                "defaultValue": [],
                "metadata": {"description": "Resource ids of the action groups to notify"},
            },
            "location": {"type": "string", "defaultValue": "[resourceGroup().location]"},
        },
        "resources": [_azure_rule(rule) for rule in rules(limits, runbooks)],
    }


def _azure_rule(rule: Rendered) -> dict[str, Any]:
    """One rule on the watch's own word, an alert for every instance; the one about the watch fires when there is no word at
    all."""
    silent = rule.name == "watch_silent"
    word = (
        f"customMetrics | where name == '{of.ALERT.name}' | extend alert = tostring(customDimensions.alert), "
        f"instance = tostring(customDimensions.instance) | where alert == '{rule.name}'"
    )
    criterion = {
        "query": f"customMetrics | where name == '{of.TIME.name}'" if silent else word,
        "timeAggregation": "Count",
        "operator": "LessThan" if silent else "GreaterThan",
        "threshold": 1 if silent else 0,
        "failingPeriods": {"numberOfEvaluationPeriods": 1, "minFailingPeriodsToAlert": 1},
    }
    split = [{"name": "instance", "operator": "Include", "values": ["*"]}]
    return {
        "type": "Microsoft.Insights/scheduledQueryRules",
        "apiVersion": API_VERSION,
        "name": f"headway-{rule.name.replace('_', '-')}",
        "location": "[parameters('location')]",
        "properties": {
            "displayName": f"Headway: {rule.name.replace('_', ' ')}",
            "description": f"{rule.when} {rule.remedy} Runbook: {rule.runbook}",
            "severity": SEVERITIES[rule.severity],
            "enabled": True,
            "scopes": ["[parameters('component')]"],
            "evaluationFrequency": "PT5M",
            "windowSize": "PT5M",
            "criteria": {"allOf": [criterion if silent else {**criterion, "dimensions": split}]},
            "autoMitigate": True,
            "actions": {"actionGroups": "[parameters('actionGroups')]"},
        },
    }


def camel(name: str) -> str:
    """run_failed as Prometheus writes names of alerts: HeadwayRunFailed."""
    return "Headway" + "".join(word.capitalize() for word in name.split("_"))
