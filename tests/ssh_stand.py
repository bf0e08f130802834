"""Machines for SSH tests: a real sshd in a network namespace each, joined by a bridge, with keys made for the test.

All of them share this machine's files, processes and host name; what is their own is the network. A watcher takes everything
down when the test process is gone, also after a kill. Needs root, and Debian's openssh-server and iproute2.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

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
class Machine:
    """One namespace with its sshd."""

    name: str
    address: str
    folder: Path

    @property
    def host(self) -> str:
        """As a configuration names it."""
        return f"root@{self.address}:{PORT}"

    def inside(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine's network."""
        return ip("netns", "exec", self.name, *command)

    def processes(self) -> list[int]:
        """What runs on it, sshd included."""
        return [int(pid) for pid in ip("netns", "pids", self.name).stdout.split()]

    def running(self, text: str) -> list[int]:
        """Processes on it whose command line has a text in it."""
        return [pid for pid in self.processes() if text in command_line(pid)]

    def take_away(self) -> None:
        """As when a VM is deallocated: the link goes first, then every process."""
        ip("link", "set", f"{self.name}-o", "down")
        for pid in self.processes():
            _kill(pid)

    def start(self) -> None:
        """Its link and sshd, until that answers. An sshd that was there before may still hold the port for a moment."""
        ip("link", "set", f"{self.name}-o", "up")
        deadline = time.monotonic() + 60
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
    deadline = time.monotonic() + seconds
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
        return {"hosts": hosts, "key": str(self.key), "known_hosts": str(self.known_hosts), "connect_seconds": 5.0}


def ip(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False, timeout=60)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=60)
    return path


@contextmanager
def ssh_stand(folder: Path, count: int = 2):
    """Machines with sshd. Skips where a Debian package or root is not there."""
    for program, package in (
        ("/usr/sbin/sshd", "openssh-server"),
        ("ssh-keygen", "openssh-client"),
        ("ip", "iproute2"),
    ):
        if not shutil.which(program):
            pytest.skip(f"needs the Debian package {package}")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    folder.mkdir(parents=True, exist_ok=True)
    stand = _network(folder, count)
    names = {"bridge": stand.bridge, "machines": {m.name: m.address for m in stand.machines}}
    watcher = subprocess.Popen(
        [sys.executable, "-P", __file__, json.dumps(names)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        _build(stand)
        yield stand
    finally:
        watcher.stdin.close()
        watcher.wait(60)


def _network(folder: Path, count: int) -> Stand:
    mark = secrets.token_hex(3)
    taken = ip("-4", "-o", "address").stdout
    subnet = next(s for s in (f"10.213.{secrets.randbelow(250) + 1}" for _ in range(100)) if f" {s}." not in taken)
    machines = [Machine(f"hw{mark}{letter}", f"{subnet}.{11 + k}", folder) for k, letter in enumerate("abcd"[:count])]
    return Stand(folder, f"hw{mark}", f"{subnet}.1", machines)


def _build(stand: Stand) -> None:
    must("link", "add", stand.bridge, "type", "bridge")
    must("address", "add", f"{stand.here}/24", "dev", stand.bridge)
    must("link", "set", stand.bridge, "up")
    make_key(stand.key)
    shutil.copy(stand.key.with_suffix(".pub"), stand.folder / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    for machine in stand.machines:
        must("netns", "add", machine.name)
        must("link", "add", f"{machine.name}-o", "type", "veth", "peer", "name", "eth0", "netns", machine.name)
        must("link", "set", f"{machine.name}-o", "master", stand.bridge)
        for words in (("address", "add", f"{machine.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            must("-n", machine.name, *words)
        must("-n", machine.name, "link", "set", "lo", "up")
        public = make_key(stand.folder / f"host-{machine.name}").with_suffix(".pub").read_text()
        with open(stand.known_hosts, "a") as known:
            known.write(f"[{machine.address}]:{PORT} {public}")
        text = CONFIG.format(port=PORT, address=machine.address, folder=stand.folder, name=machine.name)
        (stand.folder / f"{machine.name}.conf").write_text(text)
        machine.start()


def must(*words: object) -> None:
    said = ip(*words)
    if "Operation not permitted" in said.stderr:
        pytest.skip("network namespaces need the right to make them (CAP_NET_ADMIN)")
    assert said.returncode == 0, f"ip {words}: {said.stderr}"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _take_down(bridge: str, machines: dict[str, str]) -> None:
    for name, address in machines.items():
        for pid in ip("netns", "pids", name).stdout.split():
            _kill(int(pid))
        ip("link", "delete", f"{name}-o")
        ip("netns", "delete", name)
        Path(f"/var/tmp/headway-{os.getuid()}", address).unlink(missing_ok=True)
    ip("link", "delete", bridge)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _take_down(**json.loads(sys.argv[1]))
