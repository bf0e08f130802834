"""Writes docs/monitoring/ out of the metrics and alert rules in the code: `python docs/make_monitoring.py`.

The rules have the limits of the defaults. For your own, write the file elsewhere: `prometheus_rules(your AlertsConfig)` of
deployments/telemetry/monitors.py is what makes the text. A test compares the files with the code.
"""

from __future__ import annotations

import json
from pathlib import Path

from deployments.configuration.platform import AlertsConfig
from deployments.telemetry.monitors import azure_rules, dashboard, prometheus_rules

FOLDER = Path(__file__).parent / "monitoring"


def rendered() -> dict[str, str]:
    """The text of every file."""
    limits = AlertsConfig()
    return {
        "headway-dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        "headway-alerts.yaml": prometheus_rules(limits),
        "headway-alerts-azure.json": json.dumps(azure_rules(limits), indent=1) + "\n",
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
