"""Machines taken out of service where the scheduler can do that, and put back: what each backend can, as one answer.

Slurm's way is tasks/compute/slurm/drain.py. What a failed machine needs elsewhere is rendered, and never sent:
tasks/compute/azureml/support_requests.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from tasks.config.cluster import BackendName, ClusterConfig

CANNOT: dict[BackendName, str] = {
    "local": "there is one machine, and no scheduler that could keep jobs away from it",
    "ssh": "there is no scheduler: take the machine out of ssh.hosts",
    "ray": "Ray drains a node only to end it: take the machine out of the Ray cluster",
    "azureml": "Azure ML lets nobody drain a node: the qualification has the requests that replace it",
}
"""Why a backend cannot drain."""


class Drained(BaseModel):
    """What became of one machine."""

    model_config = ConfigDict(frozen=True)

    node: str
    done: bool
    said: str
    """The scheduler's state and reason now, or why nothing changed."""


def drain(config: ClusterConfig, reasons: Mapping[str, str]) -> tuple[Drained, ...]:
    """Take machines out of service, each for its reason. Never raises: no rights, no answer are in what it says."""
    if config.backend != "slurm":
        return tuple(Drained(node=name, done=False, said=CANNOT[config.backend]) for name in reasons)
    from tasks.compute.slurm import drain as slurm_drain
    from tasks.compute.slurm.commands import open_login

    return slurm_drain.drain(open_login(config), reasons)


def resume(config: ClusterConfig, nodes: Iterable[str] = ()) -> tuple[Drained, ...]:
    """Put machines back that Headway drained; without names all of them. Raises ValueError for a backend that cannot, Missing."""
    if config.backend != "slurm":
        raise ValueError(f"backend {config.backend} has no drained machines: {CANNOT[config.backend]}")
    from tasks.compute.slurm import drain as slurm_drain
    from tasks.compute.slurm.commands import open_login

    return slurm_drain.resume(open_login(config), nodes)
