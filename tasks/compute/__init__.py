"""Where jobs run: job.py is the job as data, supervisor.py runs one to its end, and each backend has a file."""

from __future__ import annotations

from importlib import import_module

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


def open_backend(config: ClusterConfig) -> Backend:
    """The backend that a cluster's configuration names. Raises Missing when its packages are not installed."""
    module, name = BACKENDS[config.backend]
    backend: Backend = getattr(import_module(module), name)(config)
    return backend
