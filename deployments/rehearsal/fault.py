"""What a fault is, and the checks that several of them make."""

from __future__ import annotations

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


def exits(answer: Answer, *codes: int) -> Check:
    wanted = " or ".join(map(str, codes))
    return check("exit code", answer.ended(), f"exit code {wanted}", answer.code in codes)


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

    def impossible(self, scene: Scene) -> str:
        """Why it cannot be tried on this machine; empty when it can."""
        return ""

    @abstractmethod
    def inject(self, scene: Scene) -> None:
        """Let it happen, and wait for its end. Raises NotSeen when it did not come about."""

    @abstractmethod
    def expect(self, scene: Scene) -> Iterator[Check]:
        """What must hold now."""

    def undo(self, scene: Scene) -> None:  # noqa: B027
        """Leave the home as the next fault needs it."""


def rewrite(path: Path, data: bytes) -> None:
    """Put other bytes into a published file, which is there for reading only."""
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o444)
