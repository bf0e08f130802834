"""Where models are served: endpoint.py is the port, tasks/serving/local/endpoint.py serves here,
tasks/serving/azureml/endpoint.py on Azure ML. See docs/DESIGN.md, "Words"."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.serving.endpoint import ServingEndpoint


def open_endpoint(root: Path, name: str, backend: str = "") -> ServingEndpoint:
    """The endpoint of a name; its state lies under `root / name`. Without a backend, as it was deployed, else on this machine.

    Raises ValueError when it was deployed on another backend.
    """
    folder = root / name
    was = "azureml" if (folder / "azureml.json").exists() else "local" if (folder / "journal.jsonl").exists() else ""
    if backend and was and backend != was:
        raise ValueError(
            f"endpoint/{name} is on the backend {was}, and not on {backend}: name another in deployment.endpoint"
        )
    if (backend or was) == "azureml":
        from tasks.serving.azureml.endpoint import AzureMlEndpoint

        return AzureMlEndpoint(root, name)
    from tasks.serving.local.endpoint import LocalEndpoint

    return LocalEndpoint(root, name)
