"""Where jobs run: job.py is the job as data, supervisor.py runs one to its end, and each backend has a file."""

from __future__ import annotations

from importlib import import_module

from tasks import azureml_door
from tasks.azureml_door import OpenFiles
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


def open_backend(config: ClusterConfig, files: OpenFiles | None = None) -> Backend:
    """The backend that a cluster's configuration names. Raises Missing when its packages are not installed, ValueError."""
    module, name = BACKENDS[config.backend]
    kind = getattr(import_module(module), name)
    with_files = config.backend in WITHOUT_A_SHARED_FOLDER
    backend: Backend = kind(config, files or azureml_door.open_files) if with_files else kind(config)
    return backend
