"""`headway notify test`: a message through each channel, and what became of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import CommandError, say
from tasks.common.errors import Missing, Unknown
from tasks.common.home import home


def test(
    channel: Annotated[str, typer.Argument(help="Name of a channel; without it, all.")] = "",
    as_json: Json = False,
) -> None:
    """Send a test message through each channel of the platform's settings, and say what happened.

    It is sent from here, with this command's environment; Prefect's server sends the real ones, from where it runs.
    """
    from deployments.configuration.platform import load_settings

    channels = load_settings(home()).notifications
    names = [one.name for one in channels]
    if channel and channel not in names:
        raise Unknown(f"there is no channel {channel!r}; there are: {', '.join(names) or 'none'}")
    if not channels:
        raise Missing(
            "nobody is told of anything: the platform's settings name no channel",
            remedy="Name one under `notifications` in a file, and give it to `headway up --config FILE`.",
        )
    tried = [_try(one) for one in channels if channel in ("", one.name)]
    words = "\n".join(f"{one['channel']:<24}{'sent' if one['sent'] else one['why']}" for one in tried)
    bad = [one for one in tried if not one["sent"]]
    if not bad:
        say({"channels": tried}, words, as_json=as_json)
        return
    if not as_json:
        print(words)
    text = "; ".join(f"{one['channel']}: {one['why']}" for one in bad)
    remedy = "Mend the address in the platform's settings, or what listens there; docs/notifications.md has examples."
    raise CommandError(Missing(text, remedy=remedy), {"channels": tried})


def _try(channel: Any) -> dict[str, Any]:
    from deployments.platform.channels import send

    body = f"This is a test of the channel {channel.name}. It is told of: {', '.join(channel.occasions)}."
    try:
        why = send(channel, "Headway: a test", body)
    except ValueError as error:
        why = str(error)
    return {"channel": channel.name, "sent": not why, "why": why}
