"""What people are told, on which events of Prefect's, and in which words: values, with templates that Prefect fills in.

A template must give a text whatever the event lacks: Prefect drops a message whose template fails, and says so only in its log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.catalogue.flows import FORMS
from deployments.configuration.platform import NotificationConfig, Occasion
from deployments.telemetry.alert_rules import RULES
from deployments.watch.alert_events import CLEARED, FIRED


@dataclass(frozen=True)
class Notice:
    """A message and when it is sent: names of events, labels of their resource and of a related one."""

    name: str
    events: frozenset[str]
    subject: str
    body: str
    labels: dict[str, Any] = field(default_factory=dict)
    related: dict[str, Any] = field(default_factory=dict)


GATE = "*GateFailed:*"
"""What Prefect's message of a flow run's state contains when one of our gates stayed closed."""
RUN = "{{ event.resource.name }}"
STATE = "{{ event.resource['prefect.state-name'] | lower }}"
WHY = (
    "{{ (event.resource['prefect.state-message'] or 'No reason was given.') "
    "| replace('Flow run encountered an exception: ', '') | replace('GateFailed: ', '') }}"
)
PAGE = "{{ flow_run | ui_url if flow_run else event.resource.id }}"
FAILED = Notice(
    name="failed",
    events=frozenset({"prefect.flow-run.*"}),
    labels={"prefect.state-type": ["FAILED", "CRASHED"], "prefect.state-message": f"!{GATE}"},
    related={"prefect.resource.role": "flow", "prefect.resource.name": sorted(FORMS)},
    subject=f"Headway: {RUN} {STATE}",
    body=(
        f"The flow run {RUN} {STATE}.\n\n{WHY}\n\n{PAGE}\n\n"
        "What to do: the summary on that page says what failed and how to mend it; Retry there goes on from the last finished "
        "stage."
    ),
)
GATE_CLOSED = Notice(
    name="gate-closed",
    events=FAILED.events,
    labels={**FAILED.labels, "prefect.state-message": GATE},
    related=FAILED.related,
    subject=f"Headway: a gate stayed closed in {RUN}",
    body=(
        f"A gate stayed closed in the flow run {RUN}; what is served did not change.\n\n{WHY}\n\n{PAGE}\n\n"
        "What to do: the summary on that page, and the report, name each check with its remedy."
    ),
)
APPROVAL_NEEDED = Notice(
    name="approval-needed",
    events=frozenset({"headway.approval.needed"}),
    subject="Headway asks: {{ event.payload.question }}",
    body=(
        "{{ event.payload.question }}\n\n{{ event.payload.url }}\n\n"
        "{% if event.payload.minutes_left %}"
        "It waits for {{ event.payload.minutes_left | round | int }} more minutes.{% endif %}"
    ),
)
DETAILS = "{% if event.payload.details %}{{ event.payload.details }}\n\n{% endif %}"
LINK = "{% if event.payload.url %}{{ event.payload.url }}\n\n{% endif %}"
NAME = "Alert: {{ event.payload.alert or event.resource.id }}"
ALERT = Notice(
    name="alert",
    events=frozenset({FIRED}),
    subject="Headway: {{ event.payload.summary }}",
    body=(
        f"{{{{ event.payload.summary }}}}\n\n{DETAILS}{LINK}"
        f"{{% if event.payload.remedy %}}What to do: {{{{ event.payload.remedy }}}}\n\n{{% endif %}}{NAME}"
    ),
)
ALERT_OVER = Notice(
    name="alert-over",
    events=frozenset({CLEARED}),
    subject="Headway: over: {{ event.payload.summary }}",
    body=f"Over: {{{{ event.payload.summary }}}}\n\n{LINK}{NAME}",
)
NOTICES: dict[Occasion, tuple[Notice, ...]] = {
    "failed": (FAILED,),
    "gate_closed": (GATE_CLOSED,),
    "approval_needed": (APPROVAL_NEEDED,),
    "alert": (ALERT, ALERT_OVER),
}
SAID_ALREADY: dict[str, str] = {"run_failed": "failed", "flow_run_died": "failed", "gate_closed": "gate_closed"}
"""Alerts that begin with what an occasion of its own tells at once: who is told of that is not told again."""


def notices_for(channel: NotificationConfig) -> Iterator[Notice]:
    """What a channel is told of, each thing once."""
    for occasion in dict.fromkeys(channel.occasions):
        for notice in NOTICES[occasion]:
            yield _without_repeats(notice, channel) if notice is ALERT else notice


def _without_repeats(notice: Notice, channel: NotificationConfig) -> Notice:
    wanted = [rule.name for rule in RULES if SAID_ALREADY.get(rule.name) not in channel.occasions]
    return notice if len(wanted) == len(RULES) else replace(notice, labels={"headway.alert": wanted})
