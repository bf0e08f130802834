"""Handshakes: what Event Grid asks before it delivers. They prove to it that we want events, and prove nothing to us.

Event Grid's own schema sends a validation event whose code is sent back; CloudEvents asks with HTTP OPTIONS. Both name an
address that could be opened instead (`validationUrl`, `WebHook-Request-Callback`): it is never read, let alone opened.
https://learn.microsoft.com/azure/event-grid/end-point-validation-event-grid-events-schema and
https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/http-webhook.md#4-abuse-protection
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers

from deployments.bridge.messages import VALIDATION, Told
from deployments.bridge.refusals import NotTaken
from deployments.configuration.events import WebhookConfig

CODE = re.compile(r"[\w.:-]{1,256}", re.ASCII)


def code_of(told: Sequence[Told], config: WebhookConfig) -> str:
    """The code to send back, when what was sent is a validation and nothing else; else nothing.

    Raises NotTaken: 403 for a topic that is not listed, 400 for a validation without a code.
    """
    if len(told) != 1 or told[0].type != VALIDATION:
        return ""
    if not listed(told[0].source, config):
        raise NotTaken(403, f"the topic {told[0].source[:200]!r} is not listed, and may not subscribe")
    if not CODE.fullmatch(told[0].handshake):
        raise NotTaken(400, "the validation event has no code to send back")
    return told[0].handshake


def permission(headers: Headers, config: WebhookConfig) -> dict[str, str]:
    """The headers that let a sender of CloudEvents send here. Raises NotTaken (403) for one that is not listed."""
    origin = headers.get("webhook-request-origin", "").lower()
    if origin not in config.origins:
        raise NotTaken(403, f"CloudEvents are not taken from the origin {origin[:100]!r}")
    return {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"}


def listed(topic: str, config: WebhookConfig) -> bool:
    """Whether a topic may send and subscribe. Azure does not tell upper from lower case in its names."""
    return not config.topics or topic.casefold() in {each.casefold() for each in config.topics}
