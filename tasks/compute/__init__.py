"""Where jobs run: job.py is the job as data, supervisor.py runs one to its end, and each backend has a file or a folder.

Which backends there are, and what each can do, is declared in tasks/config/backends and listed in tasks/config/cluster.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tasks.azure import arm_client
from tasks.azure.arm_client import OpenFiles
from tasks.compute.job import Backend
from tasks.compute.nodes import Machines
from tasks.config.cluster import ClusterConfig


def open_backend(config: ClusterConfig, files: OpenFiles | None = None) -> Backend:
    """The backend that a cluster's configuration names. Raises Missing when its packages are not installed, ValueError."""
    kind = _imported(config.capabilities.backend)
    backend: Backend = kind(config) if config.shares_folder else kind(config, files or arm_client.open_files)
    return backend


def machines_of(config: ClusterConfig) -> Machines:
    """What can be asked and done of a cluster's machines; nothing is connected to yet."""
    machines: Machines = _imported(config.capabilities.machines)(config)
    return machines


def _imported(kind: str) -> Any:
    module, name = kind.split(":")
    return getattr(import_module(module), name)
