"""What one look at a home came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """Whether something is so (None: nothing shows it), and why."""

    holds: bool | None
    why: str
    applies: bool = True
    """Whether there is anything to judge at all."""
