"""The backend local, as a configuration sees it: this machine, without settings of its own."""

from __future__ import annotations

from tasks.config.backends import BackendSettings, Capabilities, Elasticity


class LocalConfig(BackendSettings):
    """This machine."""

    capabilities = Capabilities(
        backend="tasks.compute.local:LocalBackend",
        machines="tasks.compute.local:LocalMachines",
        elasticity=Elasticity("there is one machine, and nothing to grow to"),
        this_machine=True,
        cannot_choose="backend local has one machine",
        cannot_drain="there is one machine, and no scheduler that could keep jobs away from it",
    )
