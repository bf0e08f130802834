"""What a backend can say and do about its machines beside running jobs: count them, drain them, look whether they answer.

A backend's section (tasks/config/backends) names its own subclass of `Machines`, and declares what cannot be done. What a failed
machine of Azure needs elsewhere is rendered, and never sent: tasks/compute/azureml/support_requests.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from pydantic import BaseModel, ConfigDict

from tasks.common.home import home
from tasks.config.cluster import ClusterConfig
from tasks.hardware.sku import nccl_environment

Finding = tuple[str, bool, str, str]
"""Name, whether it is in order, what was seen, the remedy."""


def network_finding(name: str, size: str, remedy: str) -> Finding:
    """Whether the hardware files know a VM size, by which NCCL's variables are set."""
    try:
        return name, True, f"{size}: {len(nccl_environment(size, home() / 'hardware'))} variables of NCCL", ""
    except ValueError as error:
        return name, False, str(error), remedy


class Drained(BaseModel):
    """What became of one machine."""

    model_config = ConfigDict(frozen=True)

    node: str
    done: bool
    said: str
    """The scheduler's state and reason now, or why nothing changed."""


class Machines:
    """The answers of a backend that knows nothing of its machines and cannot drain them."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    def findings(self) -> Iterator[Finding]:
        """What `headway doctor` says of them; never raises. The packages that the backend needs are installed."""
        yield from ()

    def usable(self) -> set[str] | None:
        """Names of those that may take a job, busy ones too; None where nobody can say. Raises Missing without an answer."""
        return None

    def count(self, only: Collection[str] = ()) -> int | None:
        """How many may take a job, of some only where they are named; None where nobody can say. Raises Missing."""
        existing = self.usable()
        return None if existing is None else len(existing & set(only) if only else existing)

    def drain(self, reasons: Mapping[str, str]) -> tuple[Drained, ...]:
        """Take machines out of service, each for its reason. Never raises: no rights, no answer are in what it says."""
        why = self.config.capabilities.cannot_drain
        return tuple(Drained(node=name, done=False, said=why) for name in reasons)

    def resume(self, nodes: Iterable[str] = ()) -> tuple[Drained, ...]:
        """Put machines back that Headway drained; without names all of them. Raises ValueError where that cannot be, Missing."""
        why = self.config.capabilities.cannot_drain
        raise ValueError(f"backend {self.config.backend} has no drained machines: {why}")
