"""The small JSON files that a job leaves in its folder, read from outside: one that is torn or gone says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_mark(path: Path) -> dict[str, Any]:
    """What a file says; nothing when it is not there, not whole (a machine that died, a share that lags), or no object."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
