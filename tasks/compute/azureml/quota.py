"""Asks Azure ML what a subscription may have in the region of a workspace. What the answer means is tasks/planning/quota.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.common.errors import Missing
from tasks.compute.azureml.client import Workspace
from tasks.config.cluster import ClusterConfig


def account_usages(config: ClusterConfig, files: Callable[[str], Any]) -> tuple[str, list[dict[str, Any]]]:
    """The region, and its usages as the service tells them. `files` opens a store by its name, whose login is used too.

    Raises ValueError where no workspace is configured, and Missing where it does not answer.
    """
    if not (config.azureml.subscription_id and config.azureml.resource_group and config.azureml.workspace):
        raise ValueError(
            "no workspace is configured: set cluster.azureml.subscription_id, resource_group and workspace"
        )
    try:
        return Workspace(config.azureml, files(config.azureml.store).token).usages()
    except ModuleNotFoundError as error:
        raise Missing(
            "Azure ML needs its SDK",
            remedy="pip install -c constraints.txt -e '.[azureml]', or write limits.yaml by hand",
        ) from error
