"""The machine that is looked at: its files under a root, its commands on the PATH, each within a time limit.

State: none beyond where to look, so that tests look at a recorded machine. What is looked for is in the rooms health*.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tasks.formats import gpu_health
from tasks.formats.gpu_health import Rules
from tasks.jobs.node.probes import RULES
from tasks.jobs.node.vendor_commands import ask


class Missing(Exception):
    """There is no way to look: no such command or file, or no rights."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Machine:
    """Where to look."""

    root: Path = Path("/")
    rules: Rules = field(default_factory=lambda: gpu_health.read_rules(RULES.read_text(encoding="utf-8")))
    imds: str = "http://169.254.169.254"
    """Azure's instance metadata."""
    clock: Callable[[], float] = time.time

    @property
    def is_this(self) -> bool:
        """Whether it is the machine that this process runs on, and no recorded one."""
        return self.root == Path("/")

    def text(self, path: str | Path) -> str:
        """What a file says; empty where it is not there or may not be read, or the driver refuses."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def places(self, pattern: str) -> list[Path]:
        """Files and folders of a pattern under the root."""
        return sorted(self.root.glob(pattern))

    def ask(self, *command: str, seconds: float | None = None) -> tuple[int, str]:
        """Exit code and output of a command. Raises Missing, and Hangs after the time limit."""
        try:
            return ask(*command, seconds=seconds or self.rules.command_seconds)
        except (FileNotFoundError, PermissionError) as error:
            raise Missing(f"there is no {command[0]}" if error.errno == 2 else f"{command[0]}: {error}") from error

    def says(self, *command: str) -> str:
        """The output of a command that ended well. Raises Missing when it did not: it was no way to look."""
        code, said = self.ask(*command)
        if code:
            raise Missing(f"{command[0]} ended with {code}: {' '.join(said.split())[:200]}")
        return said

    @property
    def uptime(self) -> float:
        """Seconds since the machine's start. Raises Missing where /proc/uptime says nothing."""
        said = self.text("proc/uptime").split()
        if not said:
            raise Missing("/proc/uptime says nothing")
        return float(said[0])
