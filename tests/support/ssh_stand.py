"""Machines for SSH tests: a real sshd in a network namespace each (networks.py), with keys made for the test.

All of them share this machine's files, processes and host name; what is their own is the network. Needs root, and Debian's
openssh-server and iproute2.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from networks import Namespace, command_line, network
from waiting import limit

PORT = 2200
CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host-{name}
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/{name}.pid
Subsystem sftp internal-sftp
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
MaxStartups 100
SetEnv SHLVL=2
"""
"""With SHLVL, bash does not read the tester's own ~/.bashrc, which may start anything, and be killed in it with a machine."""


@dataclass(frozen=True)
class Machine(Namespace):
    """One namespace with its sshd."""

    folder: Path = Path()

    @property
    def host(self) -> str:
        """As a configuration names it."""
        return f"root@{self.address}:{PORT}"

    def running(self, text: str) -> list[int]:
        """Processes on it whose command line has a text in it."""
        return [pid for pid in self.processes() if text in command_line(pid)]

    def take_away(self) -> None:
        """As when a VM is deallocated: the link goes first, then every process."""
        self.link("down")
        self.kill()

    def start(self) -> None:
        """Its link and sshd, until that answers. An sshd that was there before may still hold the port for a moment."""
        self.link("up")
        deadline = time.monotonic() + limit(60)
        while not self.answers():
            assert time.monotonic() < deadline, (self.folder / f"{self.name}.log").read_text()
            settings = ("-f", self.folder / f"{self.name}.conf", "-E", self.folder / f"{self.name}.log")
            said = self.inside("/usr/sbin/sshd", *settings)  # one that finds the port held ends by itself
            assert said.returncode == 0, said.stderr
            wait_for(self.answers, seconds=2)

    def answers(self) -> bool:
        """Whether an sshd says its name there."""
        with suppress(OSError), socket.create_connection((self.address, PORT), timeout=1) as connection:
            return connection.recv(7) == b"SSH-2.0"
        return False


def wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    """Until it is so, or the time is over."""
    deadline = time.monotonic() + limit(seconds)
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


@dataclass(frozen=True)
class Stand:
    """The machines, and what a client needs to log in."""

    folder: Path
    bridge: str
    here: str
    """This machine's address on their network."""
    machines: list[Machine] = field(default_factory=list)

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def settings(self) -> dict[str, object]:
        """The section `ssh` of a cluster."""
        hosts = [machine.host for machine in self.machines]
        return {"hosts": hosts, "key": str(self.key), "known_hosts": str(self.known_hosts), "connect_seconds": 10.0}


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=limit(60))
    return path


@contextmanager
def ssh_stand(folder: Path, count: int = 2):
    """Machines with sshd. Skips where a Debian package or root is not there."""
    for program, package in (("/usr/sbin/sshd", "openssh-server"), ("ssh-keygen", "openssh-client")):
        if not shutil.which(program):
            pytest.skip(f"needs the Debian package {package}")
    folder.mkdir(parents=True, exist_ok=True)
    with network(count) as made:
        machines = [Machine(one.name, one.address, folder) for one in made.machines]
        stand = Stand(folder, made.bridge, made.here, machines)
        _build(stand)
        yield stand


def _build(stand: Stand) -> None:
    make_key(stand.key)
    shutil.copy(stand.key.with_suffix(".pub"), stand.folder / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    for machine in stand.machines:
        public = make_key(stand.folder / f"host-{machine.name}").with_suffix(".pub").read_text()
        with open(stand.known_hosts, "a") as known:
            known.write(f"[{machine.address}]:{PORT} {public}")
        text = CONFIG.format(port=PORT, address=machine.address, folder=stand.folder, name=machine.name)
        (stand.folder / f"{machine.name}.conf").write_text(text)
        machine.start()
