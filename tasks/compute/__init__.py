"""Where jobs run: job.py is the job as data, supervisor.py runs one to its end, and each backend has a file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from tasks.cluster_config import ClusterConfig
from tasks.compute.job import Backend

BACKENDS = {
    "local": ("tasks.compute.local", "LocalBackend"),
    "ssh": ("tasks.compute.ssh", "SshBackend"),
    "slurm": ("tasks.compute.slurm", "SlurmBackend"),
    "azureml": ("tasks.compute.azureml", "AzureMlBackend"),
    "ray": ("tasks.compute.ray", "RayBackend"),
}
"""Module and class of each; a class takes the whole cluster's configuration and reads its own section of it."""


WITHOUT_A_SHARED_FOLDER = ("azureml",)
"""Backends whose job folders lie in a store: their class takes `files` too."""
OpenFiles = Callable[[str], Any]
"""Opens the container of a store by its name, as what tasks/compute/azureml_folder.py calls Files. Raises ValueError, Missing."""


def _no_files(store: str) -> Any:
    raise ValueError("this backend keeps job folders in a store on Azure Blob, and none was handed in")


_files: OpenFiles = _no_files


def use_files(files: OpenFiles) -> None:
    """Hand in the stores of this process's home, once, where it is composed: compute itself knows no store."""
    global _files
    _files = files


def open_backend(config: ClusterConfig, files: OpenFiles | None = None) -> Backend:
    """The backend that a cluster's configuration names. Raises Missing when its packages are not installed, ValueError."""
    module, name = BACKENDS[config.backend]
    kind = getattr(import_module(module), name)
    with_files = config.backend in WITHOUT_A_SHARED_FOLDER
    backend: Backend = kind(config, files or _files) if with_files else kind(config)
    return backend
