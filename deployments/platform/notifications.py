"""Who is told of what: Prefect's notification blocks and automations, made from the settings.

A channel of the settings becomes one block, `headway-NAME`, and one automation a notice, `headway-NAME-NOTICE`. Only blocks that
Prefect ships are used, so that any Prefect server can send, without Headway on it. What is told comes
first, as values. Imports Prefect: `prepare` comes first.

An address of a channel holds passwords: no message says more of it than how it begins.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect.blocks.notifications import AppriseNotificationBlock, MicrosoftTeamsWebhook, SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentCreate, BlockDocumentUpdate
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger

from deployments.catalogue.flows import FORMS
from deployments.configuration.platform import NotificationConfig, Occasion, PlatformConfig
from deployments.telemetry.alert_rules import RULES
from deployments.watch.alerts import CLEARED, FIRED


def address_of(channel: NotificationConfig) -> str:
    """The Apprise address of a channel, read from the environment where the settings say so.

    Raises ValueError for a variable that is not set, and for an address that Apprise cannot send to.
    """
    from apprise import Apprise

    address = channel.url
    if address.startswith("env:"):
        name = address.removeprefix("env:")
        if not os.environ.get(name):
            raise ValueError(
                f"notifications: {channel.name!r} takes its address from the variable {name}, which is not set"
            )
        address = os.environ[name]
    with _quietly():
        usable = Apprise.instantiate(address)
    if not usable:
        raise ValueError(
            f"notifications: {channel.name!r} has an address that nothing can be sent to (it begins with "
            f"{address.partition('://')[0][:12]!r}). For example: mailto://USER:PASSWORD@HOST?to=NAME@DOMAIN, slack://TOKENS, "
            "the address of a Slack webhook or of a Teams workflow, or jsons://HOST/PATH for any other"
        )
    # Apprise writes e-mails as HTML, where our lines would run together, unless the address says otherwise.
    parts = urlsplit(address)
    if parts.scheme not in ("mailto", "mailtos") or "format=" in parts.query:
        return address
    return f"{address}{'&' if parts.query else '?'}format=text"


def send(channel: NotificationConfig, subject: str, body: str) -> str:
    """Send a message; returns why it could not be sent, or nothing. Raises what `address_of` raises."""
    from apprise import Apprise

    client = Apprise()
    client.add(address_of(channel))
    with _quietly() as output:
        sent = client.notify(title=subject, body=body)
    why = str(output.getvalue()).strip().replace("\n", " ")
    return "" if sent else why or "it was not accepted"


def _quietly() -> AbstractContextManager[StringIO]:
    """What Apprise complains of, instead of on the terminal."""
    from apprise import LogCapture

    capture: Callable[..., AbstractContextManager[StringIO]] = LogCapture
    return capture(level=logging.WARNING)


# What people are told, on which events of Prefect's, and in which words: values, with templates that Prefect fills in.
#
# A template must give a text whatever the event lacks: Prefect drops a message whose template fails, and says so only
# in its log.


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
        "What to do: the summary on that page says what failed and how to fix it; Retry there continues after the last "
        "finished stage."
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
    wanted = [rule.name for rule in RULES if SAID_ALREADY.get(rule.name) not in channel.occasions]
    for occasion in dict.fromkeys(channel.occasions):
        for notice in NOTICES[occasion]:
            repeats = notice is ALERT and len(wanted) < len(RULES)
            yield replace(notice, labels={"headway.alert": wanted}) if repeats else notice


OURS = "headway-"
BLOCKS: tuple[type[AppriseNotificationBlock], ...] = (SlackWebhook, MicrosoftTeamsWebhook)
"""Prefect's block for Slack hands an address that is not Slack's to Apprise as it is: so it sends e-mail, and all else."""
COMPARED = {"expect", "match", "match_related", "threshold", "posture", "within"}


def apply(client: SyncPrefectClient, config: PlatformConfig) -> list[str]:
    """Make a server's notifications what the settings say; returns the names of the automations that are in force.

    All channels are checked before anything is changed. Raises ValueError for a name that is there twice, an address that cannot
    be, and a variable that is not set. Blocks and automations whose names do not start with `headway-` are left alone.
    """
    names = [channel.name for channel in config.notifications]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"notifications: there are two channels named {twice[0]!r}; each needs a name of its own")
    blocks = {channel.name: block_of(channel) for channel in config.notifications}
    documents = {name: _save(client, name, block) for name, block in blocks.items()}
    wanted: dict[str, AutomationCore] = {}
    for channel in config.notifications:
        for notice in notices_for(channel):
            made = AutomationCore(
                name=f"{OURS}{channel.name}-{notice.name}",
                description=f"Tells the channel {channel.name!r}. Made from Headway's settings: change it there.",
                trigger=EventTrigger(expect=set(notice.events), match=notice.labels, match_related=notice.related),
                actions=[
                    SendNotification(
                        block_document_id=documents[channel.name], subject=notice.subject, body=notice.body
                    )
                ],
            )
            # An update leaves out what was never set, and Prefect refuses it without the defaults; it refuses it with an
            # owner, too.
            wanted[made.name] = AutomationCore.model_validate(made.model_dump(exclude={"owner_resource"}))
    existing = {item.name: item for item in client.read_automations() if item.name.startswith(OURS)}
    for name, automation in wanted.items():
        if name not in existing:
            client.create_automation(automation)
        elif _compared(existing[name]) != _compared(automation):  # written anew, it forgets what it waits for
            client.update_automation(existing[name].id, automation)
    for name in existing.keys() - wanted.keys():
        client.delete_automation(existing[name].id)
    # Blocks of channels that are gone, or that are sent to in another way now.
    for document in (item for kind in BLOCKS for item in _documents(client, kind)):
        if document.id not in documents.values():
            client.delete_block_document(document.id)
    return sorted(wanted)


def block_of(channel: NotificationConfig) -> AppriseNotificationBlock:
    """The block that sends to a channel. Raises ValueError."""
    from apprise.plugins.workflows import NotifyWorkflows

    address = address_of(channel)
    native_teams: Callable[[str], object] = NotifyWorkflows.parse_native_url
    return (MicrosoftTeamsWebhook if native_teams(address) else SlackWebhook)(url=address)


def _save(client: SyncPrefectClient, channel: str, block: AppriseNotificationBlock) -> UUID:
    """Make or update the block document of a channel."""
    data = {"url": block.url.get_secret_value()}
    known = next((item for item in _documents(client, type(block)) if item.name == f"{OURS}{channel}"), None)
    if known is not None:
        client.update_block_document(known.id, BlockDocumentUpdate(data=data, merge_existing_data=False))
        return UUID(str(known.id))
    kind = client.read_block_type_by_slug(block.get_block_type_slug())
    schema = client.get_most_recent_block_schema_for_block_type(kind.id)
    assert schema is not None, f"every Prefect server has the block {block.get_block_type_slug()}"
    new = BlockDocumentCreate(
        name=f"{OURS}{channel}", data=data, block_schema_id=schema.id, block_type_id=kind.id, is_anonymous=False
    )
    return UUID(str(client.create_block_document(new).id))


def _documents(client: SyncPrefectClient, kind: type[AppriseNotificationBlock]) -> list[Any]:
    result = client.read_block_documents_by_type(kind.get_block_type_slug(), include_secrets=False)
    return [document for document in result if document.name and document.name.startswith(OURS)]


def _compared(automation: Any) -> Any:
    return automation.model_dump(
        mode="json", include={"description": True, "enabled": True, "actions": True, "trigger": COMPARED}
    )
