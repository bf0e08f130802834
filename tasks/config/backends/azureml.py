"""The backend azureml, as a configuration sees it: a workspace, its cluster, and who a job is there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.config.backends import BackendSettings, Capabilities, Elasticity


class AzureMlConfig(BackendSettings):
    """A workspace of Azure Machine Learning."""

    capabilities = Capabilities(
        backend="tasks.compute.azureml.backend:AzureMlBackend",
        machines="tasks.compute.azureml.backend:AzureMlMachines",
        elasticity=Elasticity("Azure ML starts all nodes of a job at once and ends it when one fails"),
        packages=("azure.ai.ml", "azure.identity"),
        shared_folder=False,
        starts_again=True,
        cannot_choose="Azure ML lets nobody choose the nodes of a job",
        cannot_drain="Azure ML lets nobody drain a node: the qualification has the requests that replace it",
        size_setting="size",
        preemptible_price="low-priority",  # a tier with meters of its own
        within_quota=True,
    )

    subscription_id: str = ""
    """Subscription of the workspace."""
    resource_group: str = ""
    """Resource group of the workspace."""
    workspace: str = ""
    """Name of the workspace."""
    compute: str = ""
    """Compute cluster that jobs run on."""
    size: str = ""
    """VM size of that cluster, such as Standard_ND96isr_H100_v5; then a job's render has a file that creates it."""
    idle_minutes: float = Field(15.0, gt=0)
    """Time after which an idle node of that cluster is given back; there in the same file."""
    environment: str = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest"
    """Environment when `cluster.image` is empty: a curated one (ACPT) by default."""
    experiment: str = "headway"
    """Experiment in the workspace's studio."""
    shm_size: str = "64g"
    """Shared memory of a node's container, as Docker takes it."""
    identity: Literal["managed", "user"] = "managed"
    """Who the job is when it reads and writes the store: the cluster's managed identity, or whoever submitted it."""
    store: str = ""
    """Store of stores.yaml (docs/storage.md), on Azure Blob, that job folders and inputs lie in. Empty: the home's own."""
    tags: dict[str, str] = Field(default={})
    """Tags of every job."""
    endpoint: str = "https://management.azure.com"
    """Azure Resource Manager of the cloud."""
    ray: bool = False
    """Whether the job starts a Ray head and workers on its nodes, and runs its program on them."""

    def require_complete(self) -> None:
        needed = ("subscription_id", "resource_group", "workspace", "compute")
        if missing := [f"azureml.{key}" for key in needed if not getattr(self, key)]:
            raise ValueError(f"backend azureml needs {', '.join(missing)}")
