"""Azure's regions that have availability zones, as regions.yaml lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

REGIONS = Path(__file__).with_name("regions.yaml")


def zone_regions() -> tuple[str, ...]:
    return tuple(_read()["with_zones"])


def regions_date() -> str:
    """Of when the list is."""
    return str(_read()["date"])


def _read() -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load(REGIONS.read_text(encoding="utf-8"))
    return result
