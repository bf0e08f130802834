"""A duty that is taken again and again by a process that must not die of it: the watch's and the bridge's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

Duty = Callable[[float], Any]
"""Takes the time, in seconds since the epoch."""


def take(name: str, duty: Duty, before: str) -> str:
    """Do one duty; what goes wrong is said once, not at every turn. Returns what went wrong, to be handed in as `before`."""
    try:
        duty(time.time())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if said != before:
            logging.exception("%s: %s", name, said)
        return said
    if before:
        logging.info("%s: well again", name)
    return ""
