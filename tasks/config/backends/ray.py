"""The backend ray, as a configuration sees it: the cluster that takes jobs, and how their machines are placed on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.config.backends import BackendSettings, Capabilities, Elasticity


class RayConfig(BackendSettings):
    """A Ray cluster that takes jobs."""

    capabilities = Capabilities(
        backend="tasks.compute.ray.backend:RayBackend",
        machines="tasks.compute.ray.local:RayMachines",
        elasticity=Elasticity(
            "each machine has a placement group of its own; one that is lost is replaced, unless it is the head of the cluster",
            grows=True,
            shrinks=True,
            survives_first=True,
        ),
        packages=("ray",),
        extra="ray",
        cannot_mirror="",
        cannot_drain="Ray drains a node only to end it: take the machine out of the Ray cluster",
        cannot_mpi="Ray starts one agent a machine, and mpirun has no way to the others there: use launcher torchrun",
        drivers=True,
        size_setting="sku",
    )

    address: str = ""
    """Address of the cluster's dashboard, such as http://127.0.0.1:8265; empty: one is started on this machine."""
    resources: dict[str, float] = Field(default={})
    """Custom resources that each node of a job needs."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK"] = "STRICT_SPREAD"
    """How the nodes of a job are placed: each on a machine of its own, or not."""
    autoscales: bool = False
    """Whether the cluster adds machines by itself: then a job that no machine of it could hold waits, and is no error."""
    sku: str = Field("", exclude_if=lambda size: not size)
    """VM size of the machines, such as Standard_ND96isr_H100_v5, for NCCL's environment and topology; empty: none is set."""
