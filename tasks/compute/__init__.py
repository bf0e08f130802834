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


def _no_files(store: str) -> Any:
    raise ValueError("this backend keeps job folders in a store on Azure Blob, and none was handed in")


def open_backend(config: ClusterConfig, files: Callable[[str], Any] = _no_files) -> Backend:
    """The backend that a cluster's configuration names. Raises Missing when its packages are not installed, ValueError.

    `files` opens the container of a store by its name: tasks/storage's `open_files`, for what tasks/compute/azureml_folder.py
    calls Files.
    """
    module, name = BACKENDS[config.backend]
    kind = getattr(import_module(module), name)
    backend: Backend = kind(config, files) if config.backend in WITHOUT_A_SHARED_FOLDER else kind(config)
    return backend
