"""How hot a machine's parts are, as nvidia-smi, rocm-smi or Linux's thermal zones say it. What else they say is health.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tasks.jobs.node.vendor_commands import Hangs, ask

ZONES = Path("/sys/class/thermal")
NVIDIA = ("nvidia-smi", "--query-gpu=index,temperature.gpu", "--format=csv,noheader,nounits")
AMD = ("rocm-smi", "--showtemp", "--json")
SECONDS = 30.0
"""Longest time of one call; a GPU that has fallen off the bus makes nvidia-smi hang."""


def of_gpus() -> dict[str, float]:
    """Degrees Celsius by GPU; empty where no tool says any."""
    for command, read in ((NVIDIA, read_nvidia), (AMD, read_amd)):
        if shutil.which(command[0]):
            return read(_ask(command))
    return {}


def of_zones(root: Path = ZONES) -> dict[str, float]:
    """Degrees Celsius by thermal zone, under the zone's type (x86_pkg_temp); virtual machines have none."""
    found = {}
    for zone in sorted(root.glob("thermal_zone*")):
        try:
            found[(zone / "type").read_text().strip()] = int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):
            continue
    return found


def read_nvidia(text: str) -> dict[str, float]:
    """Lines as `0, 41`; a GPU that says [N/A] is left out."""
    lines = re.findall(r"^\s*(\d+)\s*,\s*(\d+)\s*$", text, re.MULTILINE)
    return {f"GPU {index}": float(degrees) for index, degrees in lines}


def read_amd(text: str) -> dict[str, float]:
    """`{"card0": {"Temperature (Sensor junction) (C)": "45.0", ...}}`; the hottest sensor of a card counts."""
    try:
        cards = json.loads(text)
    except ValueError:
        return {}
    found = {}
    for card, said in cards.items():
        degrees = [float(value) for key, value in said.items() if "Temperature" in key and _is_number(value)]
        if degrees and card.startswith("card"):
            found[f"GPU {card.removeprefix('card')}"] = max(degrees)
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _ask(command: tuple[str, ...]) -> str:
    try:
        return ask(*command, seconds=SECONDS)[1]
    except (OSError, Hangs):
        return ""
