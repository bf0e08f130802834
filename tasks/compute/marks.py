"""The small JSON files that a job leaves in its folder, read from outside: one that is torn or gone says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.common.process import read_json


def read_mark(path: Path) -> dict[str, Any]:
    """What a file says; nothing when it is not there, not whole (a machine that died, a share that lags), or no object."""
    try:
        output = read_json(path)
    except (OSError, ValueError, IntegrityError):
        return {}
    return output if isinstance(output, dict) else {}
