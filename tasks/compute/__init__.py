"""Where jobs run: job.py is the job as data, supervisor.py runs one to its end, and each backend has a file."""

from __future__ import annotations

from importlib import import_module

from tasks.azure import arm_client
from tasks.azure.arm_client import OpenFiles
from tasks.compute.job import Backend
from tasks.config.cluster import ClusterConfig

BACKENDS = {
    "local": ("tasks.compute.local", "LocalBackend"),
    "ssh": ("tasks.compute.ssh.backend", "SshBackend"),
    "slurm": ("tasks.compute.slurm.backend", "SlurmBackend"),
    "azureml": ("tasks.compute.azureml.backend", "AzureMlBackend"),
    "ray": ("tasks.compute.ray.backend", "RayBackend"),
}
"""Module and class of each; a class takes the whole cluster's configuration and reads its own section of it."""


WITHOUT_A_SHARED_FOLDER = ("azureml",)
"""Backends whose job folders lie in a store: their class takes `files` too."""


def open_backend(config: ClusterConfig, files: OpenFiles | None = None) -> Backend:
    """The backend that a cluster's configuration names. Raises Missing when its packages are not installed, ValueError."""
    module, name = BACKENDS[config.backend]
    kind = getattr(import_module(module), name)
    with_files = config.backend in WITHOUT_A_SHARED_FOLDER
    backend: Backend = kind(config, files or arm_client.open_files) if with_files else kind(config)
    return backend
