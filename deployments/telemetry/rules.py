"""The alert rules for those who have Prometheus or Azure Monitor, rendered out of the same rules that the watch follows. Pure.

`python docs/make_monitoring.py` writes them to docs/monitoring/. Prometheus sees by itself what figures show, and takes the
watch's word for the rest; one rule more notices that the watch is silent, which the watch cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from deployments.configuration.platform import AlertsConfig
from deployments.telemetry import instruments as of
from deployments.telemetry.alert_rules import RULES

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
    hold: str = "0s"
    """How long it must hold before it fires."""


def rules(limits: AlertsConfig) -> list[Rendered]:
    """Every rule of the watch, and the one about the watch."""
    own = [Rendered(rule.name, rule.when, rule.remedy, rule.severity, rule.promql(limits)) for rule in RULES]
    silent = Rendered(
        name="watch_silent",
        when=f"The watch told nothing for {SILENT_SECONDS} s: it is down, or its host is. Nothing else is noticed then.",
        remedy="`headway status` on the host; `headway up` starts what is missing. The log: platform/watch/watch.log.",
        severity="critical",
        promql=f"absent({of.TIME.prometheus}) or time() - {of.TIME.prometheus} > {SILENT_SECONDS}",
        hold="1m",
    )
    return [*own, silent]


def prometheus_rules(limits: AlertsConfig) -> str:
    """A rule file, for `rule_files` of Prometheus."""
    group = {"name": "headway", "interval": "30s", "rules": [_prometheus_rule(rule) for rule in rules(limits)]}
    return yaml.safe_dump({"groups": [group]}, sort_keys=False, width=120, allow_unicode=True)


def _prometheus_rule(rule: Rendered) -> dict[str, Any]:
    named = (
        '{{ range $name, $value := $labels }}{{ if ne $name "__name__" }}{{ $name }}={{ $value }} {{ end }}{{ end }}'
    )
    return {
        "alert": camel(rule.name),
        "expr": rule.promql,
        "for": rule.hold,
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.when, "description": named, "remedy": rule.remedy},
    }


def azure_rules(limits: AlertsConfig) -> dict[str, Any]:
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
        "resources": [_azure_rule(rule) for rule in rules(limits)],
    }


def _azure_rule(rule: Rendered) -> dict[str, Any]:
    return {
        "type": "Microsoft.Insights/scheduledQueryRules",
        "apiVersion": API_VERSION,
        "name": f"headway-{rule.name.replace('_', '-')}",
        "location": "[parameters('location')]",
        "properties": {
            "displayName": f"Headway: {rule.name.replace('_', ' ')}",
            "description": f"{rule.when} {rule.remedy}",
            "severity": SEVERITIES[rule.severity],
            "enabled": True,
            "scopes": ["[parameters('component')]"],
            "evaluationFrequency": "PT5M",
            "windowSize": "PT5M",
            "criteria": {"allOf": [_silence() if rule.name == "watch_silent" else _word(rule.name)]},
            "autoMitigate": True,
            "actions": {"actionGroups": "[parameters('actionGroups')]"},
        },
    }


def _word(name: str) -> dict[str, Any]:
    """The watch's own word: one alert for every instance."""
    query = (
        f"customMetrics | where name == '{of.ALERT.name}' | extend alert = tostring(customDimensions.alert), "
        f"instance = tostring(customDimensions.instance) | where alert == '{name}'"
    )
    split = [{"name": "instance", "operator": "Include", "values": ["*"]}]
    return {**_condition(query, "GreaterThan", 0), "dimensions": split}


def _silence() -> dict[str, Any]:
    return _condition(f"customMetrics | where name == '{of.TIME.name}'", "LessThan", 1)


def _condition(query: str, operator: str, threshold: int) -> dict[str, Any]:
    periods = {"numberOfEvaluationPeriods": 1, "minFailingPeriodsToAlert": 1}
    return {
        "query": query,
        "timeAggregation": "Count",
        "operator": operator,
        "threshold": threshold,
        "failingPeriods": periods,
    }


def camel(name: str) -> str:
    """run_failed as Prometheus writes names of alerts: HeadwayRunFailed."""
    return "Headway" + "".join(word.capitalize() for word in name.split("_"))
