"""What `headway doctor -c CONFIG` finds of a cluster's backend: its packages, its commands, whether its machines answer.

Only the configured backend is looked at. What a backend alone can know is beside it, in tasks/compute/NAME/findings.py.
"""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from deployments.cli.operations.doctor import Finding
from tasks.config.cluster import ClusterConfig

ANSWER_SECONDS = 10.0
INSTALL = "pip install -c constraints.txt -e '.[orchestrator]'"
NEEDS = {"ssh": ("asyncssh",), "azureml": ("azure.ai.ml", "azure.identity"), "ray": ("ray",)}


def backend_findings(cluster: ClusterConfig) -> Iterator[Finding]:
    """Findings of the backend that a cluster's configuration names."""
    packages = NEEDS.get(cluster.backend, ())
    missing = [package for package in packages if not _installed(package)]
    if missing:
        yield Finding(f"backend {cluster.backend}", False, f"missing: {', '.join(missing)}", INSTALL)
        return
    if packages:
        yield Finding(f"backend {cluster.backend}", True, f"{', '.join(packages)} installed")
    yield from LOOKS[cluster.backend](cluster)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


def _local(cluster: ClusterConfig) -> Iterator[Finding]:
    yield Finding("backend local", True, f"this machine, {cluster.ranks_per_node} rank(s)")


def _ssh(cluster: ClusterConfig) -> Iterator[Finding]:
    """Every host, asked at once."""
    from tasks.compute.connection import Connection, run_all
    from tasks.compute.ssh.hosts import read_hosts

    try:
        hosts = {host: Connection(host.address, cluster.ssh) for host in read_hosts(cluster.ssh)}
    except ValueError as error:
        yield Finding("ssh hosts", False, str(error), "Correct cluster.ssh.")
        return
    output = run_all({connection: "uname -n" for connection in hosts.values()}, seconds=ANSWER_SECONDS)
    for host, connection in hosts.items():
        answer = output[connection]
        name = f"ssh {host.address}"
        if isinstance(answer, Exception):
            yield Finding(name, False, str(answer), getattr(answer, "remedy", ""))
        else:
            yield Finding(
                name, answer.code == 0, answer.stdout.strip() or answer.stderr.strip(), "Log in there by hand."
            )
        connection.close()


def _slurm(cluster: ClusterConfig) -> Iterator[Finding]:
    from tasks.compute.slurm.findings import slurm_findings

    yield from (Finding(*each) for each in slurm_findings(cluster))


def _azureml(cluster: ClusterConfig) -> Iterator[Finding]:
    from tasks.compute.azureml.findings import azureml_findings

    yield from (Finding(*each) for each in azureml_findings(cluster))


def _ray(cluster: ClusterConfig) -> Iterator[Finding]:
    address = cluster.ray.address
    if not address:
        yield Finding("ray cluster", True, "none is named: one is started on this machine")
        return
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=ANSWER_SECONDS) as answer:
            yield Finding("ray cluster", True, f"{address} answers: {answer.read(500).decode(errors='replace')}")
    except urllib.error.HTTPError as error:
        yield Finding(
            "ray cluster", error.code in (401, 403), f"{address} answers with {error.code}", "See cluster.ray."
        )
    except (OSError, ValueError) as error:
        yield Finding(
            "ray cluster", False, f"{address} does not answer: {error}", "Start it, or correct cluster.ray.address."
        )


LOOKS: dict[str, Callable[[ClusterConfig], Iterator[Finding]]] = {
    "local": _local,
    "ssh": _ssh,
    "slurm": _slurm,
    "azureml": _azureml,
    "ray": _ray,
}
