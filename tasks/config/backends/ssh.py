"""The backend ssh, as a configuration sees it: plain machines that are reached through SSH."""

from __future__ import annotations

from pydantic import Field

from tasks.config.backends import BackendSettings, Capabilities, Elasticity


class SshConfig(BackendSettings):
    """Plain machines that are reached through SSH: VMs, or a VM scale set."""

    capabilities = Capabilities(
        backend="tasks.compute.ssh.backend:SshBackend",
        machines="tasks.compute.ssh.hosts:SshMachines",
        elasticity=Elasticity(
            "each listed machine is asked every 15 s, and joins when it answers and is free; so does one that was lost",
            grows=True,
            shrinks=True,
            survives_first=True,
        ),
        packages=("asyncssh",),
        cannot_mirror="",
        cannot_move="which machines it runs on is written down only in the home of the host that started it",
        size_setting="sku",
        cannot_drain="there is no scheduler: take the machine out of ssh.hosts",
    )

    hosts: tuple[str, ...] = ()
    """Machines as NAME, USER@NAME or USER@NAME:PORT, in the order in which jobs take them."""
    hosts_file: str = ""
    """A file with one such machine a line, instead of `hosts`; `#` begins a comment."""
    user: str = ""
    """User on machines that name none; empty: who runs Headway."""
    key: str = ""
    """Private key file; empty: the keys of ~/.ssh and of a running agent."""
    known_hosts: str = ""
    """File with the machines' host keys; empty: ~/.ssh/known_hosts. An unknown machine is refused."""
    config: str = ""
    """OpenSSH client configuration file, for jump hosts and the like; empty: ~/.ssh/config where there is one."""
    connect_seconds: float = Field(10.0, gt=0)
    """Longest time to connect to a machine."""
    sku: str = Field("", exclude_if=lambda size: not size)
    """VM size of the machines, such as Standard_ND96isr_H100_v5, for NCCL's environment and topology; empty: none is set."""

    def require_complete(self) -> None:
        if not (self.hosts or self.hosts_file):
            raise ValueError("backend ssh needs machines: set ssh.hosts or ssh.hosts_file")
