"""Machines as network namespaces, joined by a bridge: an address of their own each, this machine's files and processes.

`slow` shapes a machine's link (tc tbf), `throttle` takes most of the time of its processes away. A watcher takes everything down
when the test process is gone, also after a kill. Needs root, and Debian's iproute2.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import limit


@dataclass(frozen=True)
class Namespace:
    """One machine's network."""

    name: str
    address: str

    def inside(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a command in it."""
        return ip("netns", "exec", self.name, *command)

    @property
    def entering(self) -> tuple[str, ...]:
        """Words before a command that is to run in it with /sys as it is here, which `ip netns exec` mounts anew."""
        return ("nsenter", f"--net=/run/netns/{self.name}")

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).stdout.split()]

    def link(self, state: str) -> None:
        """Its cable: up or down."""
        ip("link", "set", f"{self.name}-o", state)

    def kill(self) -> None:
        """Every process on it."""
        for pid in self.processes():
            _kill(pid)

    def slow(self, rate: str) -> None:
        """Shape what it sends, as tc takes it: 50mbit."""
        said = self.inside(
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *f"rate {rate} burst 64kb latency 400ms".split()
        )
        assert said.returncode == 0, said.stderr

    def restore(self) -> None:
        self.inside("tc", "qdisc", "del", "dev", "eth0", "root")

    @contextmanager
    def throttled(self, program: str, *, share: float = 0.5) -> Iterator[None]:
        """Stop its processes of a program for a part of each tenth of a second, as a cgroup's quota of CPU time does."""
        over = threading.Event()
        thread = threading.Thread(target=self._throttle, args=(program, share, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _throttle(self, program: str, share: float, over: threading.Event) -> None:
        known: list[int] = []
        looked = 0.0
        while not over.is_set():
            if time.monotonic() - looked > 0.5:
                known, looked = [pid for pid in self.processes() if program in command_line(pid)], time.monotonic()
            _send(known, signal.SIGSTOP)
            time.sleep(0.1 * (1 - share))
            _send(known, signal.SIGCONT)
            time.sleep(0.1 * share)


@dataclass(frozen=True)
class Network:
    """All of them."""

    bridge: str
    here: str
    """This machine's address there."""
    machines: list[Namespace] = field(default_factory=list)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many machines, up and joined. Skips where root or a Debian package is not there."""
    if not shutil.which("ip"):
        pytest.skip("needs the Debian package iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    mark = secrets.token_hex(3)
    taken = ip("-4", "-o", "address").stdout
    subnet = next(s for s in (f"10.213.{secrets.randbelow(250) + 1}" for _ in range(100)) if f" {s}." not in taken)
    machines = [Namespace(f"hw{mark}{letter}", f"{subnet}.{11 + k}") for k, letter in enumerate("abcdefgh"[:count])]
    made = Network(f"hw{mark}", f"{subnet}.1", machines)
    told = {"bridge": made.bridge, "machines": {m.name: m.address for m in machines}}
    watcher = subprocess.Popen(
        [sys.executable, __file__, json.dumps(told)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        _build(made)
        yield made
    finally:
        assert watcher.stdin
        watcher.stdin.close()
        assert watcher.wait(limit(60)) == 0, "the watcher failed: namespaces and the bridge may be left"


def ip(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False, timeout=limit(60))


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _build(made: Network) -> None:
    _must("link", "add", made.bridge, "type", "bridge")
    _must("address", "add", f"{made.here}/24", "dev", made.bridge)
    _must("link", "set", made.bridge, "up")
    for machine in made.machines:
        _must("netns", "add", machine.name)
        _must("link", "add", f"{machine.name}-o", "type", "veth", "peer", "name", "eth0", "netns", machine.name)
        _must("link", "set", f"{machine.name}-o", "master", made.bridge)
        for words in (("address", "add", f"{machine.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _must("-n", machine.name, *words)
        _must("-n", machine.name, "link", "set", "lo", "up")
        machine.link("up")


def _must(*words: object) -> None:
    said = ip(*words)
    if "Operation not permitted" in said.stderr:
        pytest.skip("network namespaces need the right to make them (CAP_NET_ADMIN)")
    assert said.returncode == 0, f"ip {words}: {said.stderr}"


def _send(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def _kill(pid: int) -> None:
    _send([pid], signal.SIGKILL)


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
