"""What a failed machine on Azure needs, as requests that somebody may send: Headway renders them and sends none.

A Guest Health Report tells Azure that the hardware under a VM is bad (preview; the subscription must be onboarded); a redeploy
moves the VM to other hardware; a node of Azure ML's compute cluster is replaced when the cluster gives it back. Sources:
MicrosoftDocs/azure-compute-docs, articles/azure-impact-reporting/guest-health-report.md (2025-09);
REST reference of Microsoft.Compute and Microsoft.MachineLearningServices.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tasks.config.backends.azureml import AzureMlConfig
from tasks.config.cluster import ClusterConfig
from tasks.qualification.aznhc_findings import impact_of

IMPACT_VERSION, COMPUTE_VERSION, ML_VERSION = "2023-02-01-preview", "2024-07-01", "2024-10-01"
UNHEALTHY = "Resource.Hpc.Unhealthy."
CATEGORIES = {
    "gpu_count": "HpcMissingGpu",
    "gpu_smi": "UnhealthyGPUNvidiasmi",
    "ecc": "DBEOverLimit",
    "rows": "HpcRowRemapFailure",
    "throttle": "HpcDcgmiThermalReport",
    "temperature": "HpcDcgmiThermalReport",
    "soak_drop": "HpcDcgmiThermalReport",
    "nvlink_down": "NvLink",
    "ib_ports_active": "IBPortDown",
    "ib_rate": "IBPerformance",
    "link_flaps": "IBPortFlapping",
    "memory_bandwidth": "GPUMemoryBWFailure",
    "host_to_device": "GPUMemoryBWFailure",
    "device_to_host": "GPUMemoryBWFailure",
    "xid": "HpcGenericFailure",
    "nvme_count": "HpcGenericFailure",
}
"""Azure's category of a check of ours; of any other, somebody looks at the machine."""
ANY = "ManualInvestigation"


class Request(BaseModel):
    """A request of Azure Resource Manager's; who sends it needs a token for the URL's host."""

    model_config = ConfigDict(frozen=True)

    node: str
    what: Literal["report", "redeploy", "replace"]
    method: Literal["PUT", "POST", "PATCH"]
    url: str
    body: dict[str, Any] | None = None
    note: str = ""


def requests(
    node: str, facts: Mapping[str, str], *, cluster: ClusterConfig, check: str, text: str, when: str
) -> tuple[Request, ...]:
    """What may be sent for a machine; none where it did not say who it is. `facts` is what it said of itself.

    Args:
        check: The check that failed, or AzNHC's fault code.
        when: Time of the finding, UTC, ISO 8601.
    """
    host = cluster.azureml.endpoint.rstrip("/")
    if isinstance(cluster.section, AzureMlConfig):
        return (_replace(node, cluster.azureml, nodes=cluster.nodes),)
    vm = facts.get("resource_id", "")
    if not vm:
        return ()
    note = "The VM stops, and starts on other hardware; what lies on its temporary disk is lost."
    return (
        *_report(node, host, vm, facts, check=check, text=text, when=when),
        Request(
            node=node,
            what="redeploy",
            method="POST",
            url=f"{host}{vm}/redeploy?api-version={COMPUTE_VERSION}",
            note=note,
        ),
    )


def _report(
    node: str, host: str, vm: str, facts: Mapping[str, str], *, check: str, text: str, when: str
) -> tuple[Request, ...]:
    """Azure takes no report without the name of the physical host."""
    physical = facts.get("physical_host", "")
    if not physical:
        return ()
    subscription = "/".join(vm.split("/")[:3])
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{vm} {check} {when}")
    more = {"VmUniqueId": facts["vm_id"]} if facts.get("vm_id") else {}
    properties = {
        "startDateTime": when,
        "impactCategory": impact_of(check) or UNHEALTHY + CATEGORIES.get(check, ANY),
        "impactDescription": text,
        "impactedResourceId": vm,
        "additionalProperties": {"PhysicalHostName": physical, **more},
    }
    url = f"{host}{subscription}/providers/Microsoft.Impact/workloadImpacts/{name}?api-version={IMPACT_VERSION}"
    note = "Collect logs first: Azure may take the hardware out of service. The subscription must be onboarded."
    return (Request(node=node, what="report", method="PUT", url=url, body={"properties": properties}, note=note),)


def _replace(node: str, config: AzureMlConfig, *, nodes: int) -> Request:
    workspace = (
        f"/subscriptions/{config.subscription_id}/resourceGroups/{config.resource_group}/providers"
        f"/Microsoft.MachineLearningServices/workspaces/{config.workspace}"
    )
    scale = {"minNodeCount": 0, "maxNodeCount": nodes, "nodeIdleTimeBeforeScaleDown": "PT2M"}
    return Request(
        node=node,
        what="replace",
        method="PATCH",
        url=f"{config.endpoint.rstrip('/')}{workspace}/computes/{config.compute}?api-version={ML_VERSION}",
        body={"properties": {"properties": {"scaleSettings": scale}}},
        note=(
            "Idle nodes are given back after two minutes, and the next job gets others; set the cluster's own scale settings "
            "again afterwards. Azure ML lets nobody replace one node."
        ),
    )
