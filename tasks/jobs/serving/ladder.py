"""Which model answers: the full one, else the one before it, else a smaller variant, else none.

Each rung is a model in a process of its own (model_process.py). What lies below the first rung is loaded when it is needed, or
held ready where the memory allows, and left again by itself once the full model is back and proven. HTTP does not live here:
tasks/jobs/serving/api.py marks what a lower rung answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.errors import IntegrityError
from tasks.jobs.serving.runtime import Golden, Runtime
from tasks.storage.manifest import FileEntry

RungName = Literal["full", "previous", "smaller"]


@dataclass(frozen=True)
class Rung:
    """One model that may answer."""

    name: RungName
    model_ref: str
    """Of the artifact; of a variant with its path: `model/tiny@VERSION/variants/int8`."""
    folder: Path
    files: tuple[FileEntry, ...] | None
    """What every byte of `folder` is compared with; None: whoever mounted the folder has verified it."""
    golden: tuple[Golden, ...] = ()
    """Prompts with the answers that prove it; empty: those of `golden.json` in `folder`."""


@dataclass(frozen=True)
class Taken:
    """The rung that answers a request."""

    rung: RungName
    model_ref: str
    runtime: Runtime


def variants(full: Rung) -> list[Rung]:
    """The smaller rungs that the folder of a full model holds in `variants/NAME/`, the largest first."""
    raise NotImplementedError


class Ladder:
    """The rungs of one server, the best first. State: what is loaded, and since when it holds."""

    def __init__(self, rungs: Sequence[Rung], *, threads: int, hang_seconds: float = 30.0) -> None:
        """`hang_seconds`: a model that has work and gives no piece for so long is killed and started again."""
        raise NotImplementedError

    async def start(self) -> None:
        """Load the first rung and prove it; returns once it is ready, or `reason` says why it never will be.

        Raises IntegrityError, with nothing loaded, for files of the first rung that are not what they were. A model that
        crashes while it loads is tried again, with pauses that grow; lower rungs answer meanwhile.
        """
        raise NotImplementedError

    def take(self) -> Taken | None:
        """The best rung that would answer now; None when there is none: 503, and try again in `retry_seconds`.

        Never waits; has lower rungs loaded when they are needed. The rung may go while it answers: its runtime then raises
        Gone. Do not send a request again that raised Gone after its runtime took it: it may be what crashes the model.
        """
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether the full model is up and proven."""
        raise NotImplementedError

    @property
    def reason(self) -> str:
        """Why the full model does not answer; empty while it is first loaded, and when it is ready."""
        raise NotImplementedError

    @property
    def refused(self) -> IntegrityError | None:
        """Set once the full model's files were found changed at a restart: it is not tried again; lower rungs may answer."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Requests of all rungs that have got no piece yet."""
        raise NotImplementedError

    @property
    def retry_seconds(self) -> int:
        """Whole seconds after which a client that got no rung should ask again; at least 1."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give up what is under way, and end the models' processes."""
        raise NotImplementedError
