"""`refused.json` of an endpoint: what a person rolled back here. It is deployed here again only when a person promotes it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tasks.common.process import read_json, write_json


def refused_models(endpoint: Path) -> dict[str, dict[str, Any]]:
    """What a person rolled back here, by reference: `reason`, `time`."""
    result: dict[str, dict[str, Any]] = read_json(endpoint / "refused.json") or {}
    return result


def remember_refused(endpoint: Path, model_ref: str, reason: str) -> None:
    """A person rolled a model back."""
    output = {**refused_models(endpoint), model_ref: {"reason": reason, "time": time.time()}}
    write_json(endpoint / "refused.json", output, seal=True)


def accept(endpoint: Path, model_ref: str) -> None:
    """A person promoted a model: it may be deployed here again."""
    left = {ref: value for ref, value in refused_models(endpoint).items() if ref != model_ref}
    if left != refused_models(endpoint):
        write_json(endpoint / "refused.json", left, seal=True)
