"""A Ray cluster of this machine's own, for whoever names none: started once a home, found again, and stopped by `headway down`.

It runs under the small parent of tasks/common/process.py and outlives the orchestrator. Its ports are its own, its dashboard
answers on loopback only, and every door of it asks for a token: Ray's own ports listen on all addresses. What `headway doctor`
finds of any Ray cluster is in this module, too. It imports no Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import Missing
from tasks.compute.nodes import Finding, Machines, execute_on_this_machine, require_executed

START_SECONDS = 180.0
"""Longest time to its first answer: 5 to 7 s on two quiet cores."""
EXECUTE_SECONDS = 60.0
"""Longest time of a script beside a job; the driver of a Ray job takes some seconds to start."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's least is 75 MB; jobs of ours keep nothing in it, where Ray would take 30 % of the memory."""
LONGEST_SOCKET_FOLDER = 38
"""Letters of the folder that Ray puts sockets in, 66 letters below it; a socket's path has 107 at most (unix(7))."""


@dataclass(frozen=True)
class LocalCluster:
    """A cluster that runs here."""

    address: str
    """Of its dashboard."""
    token: str


def start_local_cluster(home: Path) -> LocalCluster:
    """The cluster of a home; it is started when it does not run. Raises Missing when it does not start."""
    folder = home / "ray"
    with process.locked(folder / "start.lock"):
        running = living_cluster(home)
        if running is None:
            process.write_text(folder / "token", secrets.token_hex(32))
            with ExitStack() as held:
                free = {name: held.enter_context(socket.socket()) for name in ("gcs", "client", "dashboard", "agent")}
                for each in free.values():
                    each.bind(("127.0.0.1", 0))
                ports = {name: each.getsockname()[1] for name, each in free.items()}
            process.write_json(folder / "ports.json", ports)
            process.start(folder, spec(folder, ports))
            running = _wait(home)
        return running


def living_cluster(home: Path) -> LocalCluster | None:
    """The cluster of a home while its process lives; None when there is none."""
    folder = home / "ray"
    if not process.alive(process.read_json(folder / "handle.json")):
        return None
    port = process.read_json(folder / "ports.json")["dashboard"]
    return LocalCluster(f"http://127.0.0.1:{port}", (folder / "token").read_text())


def stop_local_cluster(home: Path) -> bool:
    """Stop it, with every job and process of it; whether there was one."""
    if living_cluster(home) is None:
        return False
    process.stop(home / "ray", timeout=60.0)
    return True


def spec(folder: Path, ports: dict[str, int]) -> process.ProcessSpec:
    """What the parent is told."""
    return process.ProcessSpec(
        argv=[
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--port", str(ports["gcs"]), "--ray-client-server-port", str(ports["client"])),
            *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports["dashboard"])),
            *("--dashboard-agent-listen-port", str(ports["agent"])),
            *("--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", str(_socket_folder(folder))),
            "--disable-usage-stats",
        ],
        env={
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",  # also "it is switched off" is reported (usage_stats_head.py)
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else it waits 30 s for jobs, which end with it all the same
            "RAY_memory_monitor_refresh_ms": "0",  # it would end a whole machine's part for memory that others use
        },
        secrets=(),
        log="ray.log",
        restarts=2,  # `ray start` gives up after 30 s, which a busy machine may need
        steady=600.0,
        grace=30.0,
    )


def _wait(home: Path) -> LocalCluster:
    """Until its dashboard answers."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        running = living_cluster(home)
        if running is None:
            break
        if _answers(running):
            return running
        time.sleep(0.2)
    process.stop(home / "ray")
    raise Missing(
        "the Ray cluster of this machine did not start",
        remedy=f"Its log is {home / 'ray' / 'ray.log'}; or set ray.address to a cluster that runs.",
    )


def _answers(cluster: LocalCluster) -> bool:
    asked = urllib.request.Request(
        f"{cluster.address}/api/version", headers={"Authorization": f"Bearer {cluster.token}"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _socket_folder(folder: Path) -> Path:
    """Under the home; where its path is too long for sockets, a folder of this user's below /tmp."""
    below = folder / "t"
    if len(str(below)) <= LONGEST_SOCKET_FOLDER:
        return below
    short = Path("/tmp") / f"headway-ray-{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"
    short.mkdir(mode=0o700, exist_ok=True)
    known = short.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid():
        raise Missing(f"{short} is somebody else's", remedy="Set HEADWAY_HOME to a shorter path.")
    return short


class RayMachines(Machines):
    """The machines of a Ray cluster, which Ray alone knows."""

    def findings(self) -> Iterator[Finding]:
        address = self.config.ray.address
        if not address:
            yield "ray cluster", True, "none is named: one is started on this machine", ""
            return
        try:
            with urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=10.0) as answer:
                yield "ray cluster", True, f"{address} answers: {answer.read(500).decode(errors='replace')}", ""
        except urllib.error.HTTPError as error:
            yield "ray cluster", error.code in (401, 403), f"{address} answers with {error.code}", "See cluster.ray."
        except (OSError, ValueError) as error:
            remedy = "Start it, or correct cluster.ray.address."
            yield "ray cluster", False, f"{address} does not answer: {error}", remedy

    def execute(self, node: str, script: str, *, handle: Mapping[str, Any]) -> None:
        """As a Ray job that is tied to the machine by Ray's id of it; it takes no CPU of the cluster."""
        if not self.config.ray.address:
            execute_on_this_machine(node, script)
            return
        nodes = self._ask("/nodes?view=summary")["data"]["summary"]
        ids = [one["raylet"]["nodeId"] for one in nodes if one["raylet"].get("nodeName") == node]
        if not ids:
            raise Missing(f"the Ray cluster has no machine {node}", remedy="`ray status` on its head lists them.")
        tied = {
            "entrypoint": shlex.join(("sh", "-c", script)),
            "entrypoint_label_selector": {"ray.io/node-id": ids[-1]},
        }
        job = self._ask("/api/jobs/", tied)["submission_id"]
        deadline = time.monotonic() + EXECUTE_SECONDS
        while (state := self._ask(f"/api/jobs/{job}"))["status"] in ("PENDING", "RUNNING"):
            if time.monotonic() > deadline:
                raise Missing(
                    f"Ray did not run {job} on machine {node} within {EXECUTE_SECONDS:.0f} s", remedy="Look at its log."
                )
            time.sleep(0.1)
        require_executed(node, int(state["status"] != "SUCCEEDED"), str(state.get("message", "")))

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the cluster's dashboard answers. Raises Missing."""
        address = self.config.ray.address.rstrip("/")
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(address + path, json.dumps(body).encode() if body else None, headers)
        try:
            with urllib.request.urlopen(asked, timeout=30.0) as answer:
                return json.load(answer)
        except OSError as error:
            raise Missing(
                f"the Ray cluster at {address} refused {path}: {error}", remedy="Check cluster.ray.address."
            ) from error
