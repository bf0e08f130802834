"""Triggers as values: what each is called, and which events it wants. Their automations are deployments/catalogue/triggers.py."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from deployments.configuration.events import EventsConfig, TriggerConfig
from tasks.config.base import digest

STARTABLE = ("retrain", "revalidate")
"""Flows that take a `cause`, so that the same batch of events never has two runs."""


@dataclass(frozen=True)
class Route:
    """A trigger, with its name: the same as long as its settings but the cool-down are the same."""

    name: str
    trigger: TriggerConfig

    def wants(self, name: str, subject: str) -> bool:
        return self.trigger.event == name and fnmatchcase(subject, self.trigger.subject)


def routes(config: EventsConfig) -> list[Route]:
    """All triggers. Raises ValueError for two that are the same."""
    results = [Route(_name(trigger), trigger) for trigger in config.triggers]
    for number, route in enumerate(results):
        if route.name in [earlier.name for earlier in results[:number]]:
            raise ValueError(
                f"events.triggers.{number}: {route.trigger.event} of {route.trigger.subject} starts {route.trigger.start} "
                "twice; leave one of them out"
            )
    return results


def check(config: EventsConfig, deployments: Collection[str]) -> None:
    """Raises ValueError for a trigger that could not start anything."""
    for number, route in enumerate(routes(config)):
        start = route.trigger.start
        if start not in deployments:
            raise ValueError(
                f"events.triggers.{number}: there is no deployment {start!r}; there are {', '.join(sorted(deployments))}"
            )
        if start.partition("/")[0] not in STARTABLE:
            raise ValueError(
                f"events.triggers.{number}: {start} is not started by events; deployments of {' and '.join(STARTABLE)} are. "
                "`schedules` start the others"
            )


def _name(trigger: TriggerConfig) -> str:
    """Readable, and apart from that of every other trigger."""
    subject = [] if trigger.subject == "*" else [trigger.subject]
    words = "-".join(
        re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in (trigger.event, *subject, trigger.start)
    )
    odd = [trigger.subject] if trigger.subject != "*" and re.search(r"[^a-z0-9/.-]", trigger.subject) else []
    differs = [*odd, trigger.dataset, *trigger.set]
    return f"{words}-{digest(differs)[:6]}" if any(differs) else words
