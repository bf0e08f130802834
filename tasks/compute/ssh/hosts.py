"""The machines of the ssh backend: which there are, whether they answer, and which of them a job may use. How they are reached is
tasks/compute/connection.py."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.errors import Missing
from tasks.compute.connection import Connection, parse_address, run_all
from tasks.compute.job import Job
from tasks.compute.nodes import Finding, Machines, require_executed
from tasks.config.backends.ssh import SshConfig


@dataclass(frozen=True)
class Host:
    """One machine: `name` is what errors, logs and excluded nodes call it, `address` how it is reached."""

    name: str
    address: str


class SshMachines(Machines):
    """The machines that `ssh.hosts` or `ssh.hosts_file` names."""

    def findings(self) -> Iterator[Finding]:
        """Every host, asked at once."""
        try:
            hosts = {host: Connection(host.address, self.config.ssh) for host in read_hosts(self.config.ssh)}
        except ValueError as error:
            yield "ssh hosts", False, str(error), "Correct cluster.ssh."
            return
        output = run_all({connection: "uname -n" for connection in hosts.values()}, seconds=10.0)
        for host, connection in hosts.items():
            answer, name = output[connection], f"ssh {host.address}"
            if isinstance(answer, Exception):
                yield name, False, str(answer), getattr(answer, "remedy", "")
            else:
                seen = answer.stdout.strip() or answer.stderr.strip()
                yield name, answer.code == 0, seen, "Log in there by hand."
            connection.close()

    def execute(self, node: str, script: str, *, handle: Mapping[str, Any]) -> None:
        address = next((host.address for host in read_hosts(self.config.ssh) if host.name == node), "")
        if not address:
            raise Missing(
                f"cluster.ssh names no machine {node}", remedy="Run this with the settings of the job's cluster."
            )
        connection = Connection(address, self.config.ssh)
        ran = connection.run(shlex.join(("sh", "-c", script)))
        connection.close()
        require_executed(node, ran.code, ran.stderr)

    def usable(self) -> set[str]:
        return {host.name for host in read_hosts(self.config.ssh)} - set(self.config.exclude)


def read_hosts(config: SshConfig) -> list[Host]:
    """All machines, in the order in which jobs take them. Raises ValueError for one that is written wrong or twice."""
    texts = list(config.hosts)
    if not texts:
        file = Path(config.hosts_file).expanduser()
        if not file.is_file():
            raise ValueError(
                f"ssh.hosts_file is {config.hosts_file}, and there is no such file: write one machine a line into it"
            )
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
        texts = [line for line in lines if line]
    addresses = [parse_address(text) for text in texts]
    twice = [text for text, count in Counter(map(str, addresses)).items() if count > 1]
    if twice:
        raise ValueError(f"ssh.hosts names {twice[0]} twice: a machine takes one job at a time, so name it once")
    names = Counter(address.name for address in addresses)
    return [Host(a.name if names[a.name] == 1 else f"{a.name}:{a.port or 22}", str(a)) for a in addresses]


def usable(job: Job, hosts: Sequence[Host]) -> list[Host]:
    """The machines that are not excluded. Raises ValueError when they are too few, and for what SSH cannot do."""
    if job.image:
        raise ValueError(f"backend ssh runs plain processes, image is {job.image!r}: leave cluster.image empty")
    existing = [host.name for host in hosts]
    unknown = set(job.only_nodes) - set(existing)
    if unknown:
        raise ValueError(
            f"{job.name} names the machines {', '.join(sorted(unknown))}, which ssh.hosts does not have: it has "
            f"{', '.join(existing)}"
        )
    left = [host for host in hosts if not _called(host) & set(job.excluded_nodes)]
    if job.only_nodes:
        left = [host for host in left if _called(host) & set(job.only_nodes)]
    if job.fewest_nodes > len(left):
        excluded = f", of which {len(hosts) - len(left)} excluded" if len(left) < len(hosts) else ""
        raise ValueError(
            f"{job.name} needs {job.fewest_nodes} machines, and ssh.hosts has {len(hosts)}{excluded}: lower cluster.nodes, or "
            "name more"
        )
    return left


def _called(host: Host) -> set[str]:
    return {host.name, host.address, parse_address(host.address).name}
