"""Where a channel of the settings sends to, and sending to it from here. No Prefect: what Prefect sends is notifications.py.

An address holds passwords: nothing here says more of it than how it begins.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import StringIO
from urllib.parse import urlsplit

from deployments.configuration.platform import NotificationConfig


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
