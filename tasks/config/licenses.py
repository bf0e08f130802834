"""Waivers of licences: somebody's decision that a base model or a dataset may be used although its licence forbids it.

Which licences are known, and what is looked at: tasks/data/licenses.py.
"""

from __future__ import annotations

import datetime
from typing import Annotated

from pydantic import Field

from tasks.config.base import Settings


class LicenseWaiver(Settings):
    """Somebody's decision about one base model or dataset."""

    of: Annotated[str, Field(pattern=r"^(dataset|checkpoint)/[a-z0-9][a-z0-9._-]*$")]
    """What is waived: dataset/NAME or checkpoint/NAME, all of its versions."""
    who: Annotated[str, Field(min_length=1)]
    """Who decided."""
    why: Annotated[str, Field(min_length=1)]
    """Why: the contract, the purpose, the permission."""
    until: datetime.date
    """Last day on which it counts."""


class LicensesConfig(Settings):
    """What was decided about licences that forbid commercial use or derived works."""

    waivers: tuple[LicenseWaiver, ...] = ()
    """Decisions of people; without one the gate closes before anything is spent."""
