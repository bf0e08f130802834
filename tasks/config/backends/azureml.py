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
        extra="azure",
        shared_folder=False,
        cannot_mirror="",
        starts_again=True,
        cannot_choose="Azure ML lets nobody choose the nodes of a job",
        cannot_drain="Azure ML lets nobody drain a node: the qualification has the requests that replace it",
        environment_setting="environment",
        placeholders={
            "image": "my-registry.azurecr.io/headway-cluster:0.2.0",
            "azureml.subscription_id": "00000000-0000-0000-0000-000000000000",
            "azureml.resource_group": "my-resource-group",
            "azureml.workspace": "my-workspace",
            "azureml.compute": "my-cluster",
        },
        pool_setting="compute",
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
    max_nodes: int = Field(0, ge=0, exclude_if=lambda nodes: not nodes)
    """Most nodes of that cluster, there in the same file; 0, or fewer than the job has: as many as the job."""
    subnet: str = Field("", exclude_if=lambda name: not name)
    """Subnet of that cluster's nodes, there in the same file: its name, or its whole id in Azure Resource Manager."""
    vnet: str = Field("", exclude_if=lambda name: not name)
    """Virtual network of that subnet, where it is named by its name alone."""
    cluster_identity: str = Field("", exclude_if=lambda identity: not identity)
    """Resource id of the user-assigned identity of that cluster's nodes, there in the same file; empty: none is named there."""
    public_address: bool = Field(True, exclude_if=lambda wanted: wanted)
    """Whether that cluster's nodes have public addresses, there in the same file."""
    environment: str = Field("", pattern=r"^$|^azureml:[^:/]+:[^:/]+$|^azureml://registries/|^/subscriptions/")
    """Environment of jobs without `cluster.image`: azureml:NAME:VERSION, azureml://registries/..., or an id. Python 3.11+."""
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
