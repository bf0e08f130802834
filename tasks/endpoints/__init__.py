"""Where models are served: endpoint.py is the port, local.py serves here, azureml.py on Azure ML. See docs/DESIGN.md, "Words"."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.endpoints.endpoint import ServingEndpoint


def open_endpoint(root: Path, name: str, backend: str = "") -> ServingEndpoint:
    """The endpoint of a name; its state lies under `root / name`. Without a backend, as it was deployed, else on this machine.

    Raises ValueError when it was deployed on another backend.
    """
    there = root / name
    was = "azureml" if (there / "azureml.json").exists() else "local" if (there / "journal.jsonl").exists() else ""
    if backend and was and backend != was:
        raise ValueError(
            f"endpoint/{name} is on the backend {was}, and not on {backend}: name another in deployment.endpoint"
        )
    if (backend or was) == "azureml":
        from tasks.endpoints.azureml import AzureMlEndpoint

        return AzureMlEndpoint(root, name)
    from tasks.endpoints.local import LocalEndpoint

    return LocalEndpoint(root, name)
