"""What `headway doctor` finds of a workspace of Azure ML: whether it knows us, its cluster, and the store of the job folders."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.common.errors import HeadwayError
from tasks.compute import open_backend
from tasks.compute.azureml.backend import AzureMlBackend
from tasks.compute.azureml.render import SERVERLESS
from tasks.config.cluster import ClusterConfig

Found = tuple[str, bool, str, str]
"""Name, whether it is in order, what was seen, the remedy."""


def azureml_findings(config: ClusterConfig) -> Iterator[Found]:
    """Findings: the store first, then the workspace and its cluster."""
    try:
        backend = open_backend(config)
    except (HeadwayError, ValueError) as error:
        yield "azureml store", False, str(error), getattr(error, "remedy", "") or "See docs/azureml.md."
        return
    assert isinstance(backend, AzureMlBackend)
    yield "azureml store", True, f"job folders lie in {backend.store}", ""
    name = config.azureml.compute
    try:
        size = backend.require_cluster(config.nodes, preemptible=config.preemptible)
    except (HeadwayError, ValueError) as error:
        yield "azureml compute", False, str(error), getattr(error, "remedy", "") or "Correct cluster.azureml."
        return
    what = "machines come by themselves" if name == SERVERLESS else f"{name} ({size}) is there"
    yield "azureml compute", True, f"{what}, and {config.nodes} node(s) fit", ""
