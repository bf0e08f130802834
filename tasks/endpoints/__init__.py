"""Where models are served: endpoint.py is the port, local.py serves on this machine. See docs/DESIGN.md, "Words"."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.endpoints.endpoint import ServingEndpoint


def open_endpoint(root: Path, name: str) -> ServingEndpoint:
    """The endpoint of a name; its state lies under `root / name`. This release serves on this machine."""
    from tasks.endpoints.local import LocalEndpoint

    return LocalEndpoint(root, name)
