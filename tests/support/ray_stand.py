"""A real Ray cluster of several nodes on this machine: one raylet a node, own ports, own folder, nothing left behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from waiting import limit

from tasks.common.process import descendants, die_with_parent, process_started

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "120",
}


class RayStand:
    """Head `n1`, further nodes on demand. A node is a folder of processes below one `ray start --block`."""

    def __init__(self, *, cpus=2, hidden=(), environment=None):
        """In the place of `hidden` folders each node has a disk of its own, which ends with it."""
        self.folder = Path(tempfile.mkdtemp(prefix="hwray-", dir="/tmp"))
        self.cpus, self.hidden, self.environment = cpus, tuple(hidden), environment or {}
        self.nodes = {}
        self._start("n1", self._head, lambda: self._get("/api/version"))

    def add(self, name, *, blind=None, resources=None):
        """Start a node and wait until the cluster knows it; one that is `blind` to a folder sees an empty one there."""
        where = ["--address", f"127.0.0.1:{self.gcs}"]
        more = [*where, *(["--resources", json.dumps(resources)] if resources else [])]
        self._start(name, lambda: more, lambda: name in self.alive(), hidden=[blind] if blind else [])

    def alive(self):
        """Names of the living nodes."""
        nodes = self._get("/nodes?view=summary")["data"]["summary"]
        return {node["raylet"]["nodeName"] for node in nodes if node["raylet"]["state"] == "ALIVE"}

    def kill(self, name):
        """Pull a node's plug: its raylet and everything of Ray below it die at once."""
        node = self.nodes.pop(name)
        for pid in [node.pid, *descendants(node.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.wait()

    def runs(self, name, program):
        """Whether a process of the node has a program in its command line."""
        for pid in descendants(self.nodes[name].pid):
            with suppress(OSError):  # it ended meanwhile
                if program in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    return True
        return False

    def jobs(self):
        return self._get("/api/jobs/")

    def close(self):
        below = [pid for node in self.nodes.values() for pid in [*descendants(node.pid), node.pid]]
        for node in reversed(self.nodes.values()):
            node.terminate()
        for node in self.nodes.values():
            try:
                node.wait(limit(15))
            except subprocess.TimeoutExpired:
                node.kill()
        for pid in below:
            if process_started(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _head(self):
        """Words that start the head, on ports that are free now."""
        self.gcs, dashboard = free_port(), free_port()
        self.address = f"http://127.0.0.1:{dashboard}"
        more = ["--head", "--port", self.gcs, "--dashboard-host", "127.0.0.1", "--dashboard-port", dashboard]
        return [*more, "--temp-dir", self.folder / "t", "--ray-client-server-port", free_port()]

    def _start(self, name, more, done, *, hidden=()):
        """Three tries: `ray start` gives up after 30 s, which a busy machine may need, or hangs where its port was taken."""
        for _ in range(3):
            self._launch(name, more(), apart(*self.hidden, *hidden))
            if self._wait(self.nodes[name], done):
                return
            self.kill(name)
        logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
        raise AssertionError(f"the Ray stand did not start\n{logs}")

    def _launch(self, name, more, before):
        own = ["--node-name", name, "--num-cpus", self.cpus, "--object-store-memory", 80 * 2**20]
        quiet = ["--block", "--disable-usage-stats", "--dashboard-agent-listen-port", free_port()]
        argv = [*before, sys.executable, "-m", "ray.scripts.scripts", "start", *quiet, *own, *more]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.nodes[name] = subprocess.Popen(
                [str(word) for word in argv],
                env={**os.environ, **ENVIRONMENT, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def _get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=limit(10)) as answer:
            return json.load(answer)

    def _wait(self, node, done, *, timeout=60):
        """Whether the node is there within `timeout`; the three tries of a node stay below pytest's own limit."""
        until = time.monotonic() + min(limit(timeout), 180)
        while time.monotonic() < until and node.poll() is None:
            try:
                if done():
                    return True
            except (OSError, KeyError):
                pass
            time.sleep(0.2)
        return False


def apart(*hidden):
    """Words before a command that is to have disks of its own in the place of some folders."""
    if not hidden:
        return []
    mounts = " && ".join(f"mount -t tmpfs none {path}" for path in hidden)
    return ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def using(folder):
    """Processes that have a folder in their command line or their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in said and process_started(int(entry.name)):
            found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]))
    return found
