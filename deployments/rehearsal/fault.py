"""What a fault is, and the checks that several of them make."""

from __future__ import annotations

import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from deployments.rehearsal.scene import Answer, Scene, losses
from tasks.artifacts import Check

RESTART_SECONDS = 60.0
"""Longest that a server may take to come back: docs/reliability.md says that its parent starts it again."""


def check(name: str, measured: float | str, limit: str, passed: bool) -> Check:
    return Check(name=name, measured=measured, limit=limit, passed=passed)


def exits(answer: Answer, code: int) -> Check:
    return check("exit code", answer.summary(), f"exit code {code}", answer.code == code)


def equal_losses(scene: Scene, folder: Path) -> Check:
    """Every step's loss, learning rate and norm of the gradient are those of the undisturbed training, bit for bit."""
    sound, ours = losses(Path(scene.undisturbed("train")["job"]["folder"])), losses(folder)
    same = sum(ours.get(step) == figures for step, figures in sound.items())
    return check(
        "steps with the undisturbed numbers",
        f"{same} of {len(sound)}",
        f"{len(sound)}",
        same == len(ours) == len(sound),
    )


class Fault(ABC):
    """Something that goes wrong on purpose. State between the calls is the object's own."""

    name: ClassVar[str]
    what: ClassVar[str]
    """What happens, as a sentence."""
    promise: ClassVar[str]
    """What must hold, as a sentence."""
    page: ClassVar[str] = "reliability.md"
    """The page of docs/ that promises it."""
    quick: ClassVar[bool] = True
    """Whether `--quick` tries it."""
    local_only: ClassVar[str] = ""
    """Why it is tried only where jobs are processes of this machine; empty: it is tried wherever they run."""

    def impossible(self, scene: Scene) -> str:
        """Why it cannot be tried on this machine; empty when it can."""
        return ""

    alerts: tuple[str, ...] | None = None
    """Alerts of the watch that fired at its end; None where the platform did not run."""

    @abstractmethod
    def inject(self, scene: Scene) -> None:
        """Let it happen, and wait for its end. Raises NotSeen when it did not come about."""

    @abstractmethod
    def expect(self, scene: Scene) -> Iterator[Check]:
        """What must hold now."""

    def undo(self, scene: Scene) -> None:  # noqa: B027
        """Leave the home as the next fault needs it."""


def plant(scene: Scene, source: str, folder: Path) -> None:
    """Have Python import a file of this package wherever it starts for this home: as `sitecustomize.py` in a new folder."""
    folder.mkdir()
    shutil.copyfile(Path(__file__).with_name(source), folder / "sitecustomize.py")
    scene.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def unplant(scene: Scene) -> None:
    """What is started from now on imports nothing more."""
    scene.environment.pop("PYTHONPATH", None)


def flip(path: Path, dice: random.Random) -> bytes:
    """Flip one bit of a file; returns the bytes that it had."""
    before = path.read_bytes()
    data = bytearray(before)
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    rewrite(path, data)
    return before


def rewrite(path: Path, data: bytes | bytearray) -> None:
    """Put other bytes into a file that is there for reading only."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(mode)
