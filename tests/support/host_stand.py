"""Hosts of a platform, all on this machine: each with a network, processes, a host name and a home of its own.

A home lies at the same path on each, as on machines that are set up alike. `headway up` runs in the foreground as the first
process of the host, so that whoever kills it kills all that runs there, as when a machine loses its power. Needs root.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from networks import Namespace
from waiting import limit, until

REQUEST = """
import base64, json, sys, urllib.request
url, login, method, path, body = sys.argv[1:]
headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode(), "Content-Type": "application/json"}
request = urllib.request.Request(f"{url}/api{path}", data=body.encode(), headers=headers, method=method)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@dataclass
class Host:
    """One host; `disk` is what lies in the place of `home` there."""

    name: str
    network: Namespace
    disk: Path
    home: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Switch it on, and return when its platform is up."""
        self.disk.mkdir(parents=True, exist_ok=True)
        words = f"hostname {self.name} && mount --bind {self.disk} {self.home} && exec {Path(sys.executable).parent}/headway"
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        log = self.disk.parent / f"{self.name}.log"
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [*self.network.entering, *apart, "bash", "-c", f"{words} up --config {self.home}/asked.yaml"],
                env={**self.environment, "HEADWAY_HOME": str(self.home)},
                cwd=self.home.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        until(lambda: self._up(log), 900, every=1.0, why=lambda: log.read_text(errors="replace")[-3000:])

    def _up(self, log: Path) -> bool:
        assert self.process is not None and self.process.poll() is None, log.read_text(errors="replace")[-3000:]
        return "Prefect " in log.read_text(errors="replace") and self.answers()

    def answers(self) -> bool:
        """Whether the worker is known to the server of this host."""
        try:
            workers = self.ask("POST", "/work_pools/headway/workers/filter", {})
        except (subprocess.SubprocessError, OSError, ValueError):
            return False
        return any(one["status"] == "ONLINE" and one["name"].endswith(self.name) for one in workers)

    def ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """What the Prefect server of this host answers, which only hears its own loopback."""
        server = json.loads((self.disk / "prefect" / "server.json").read_text())
        login = (self.disk / "prefect" / "credentials").read_text()
        words = [sys.executable, "-I", "-c", REQUEST, server["url"], login, method, path, json.dumps(body)]
        done = subprocess.run(
            [*self.network.entering, *words], capture_output=True, text=True, timeout=limit(60), check=True
        )
        return json.loads(done.stdout or "null")

    def pids(self) -> list[int]:
        """All its processes, the first one first."""
        assert self.process is not None
        first = next(iter(children(self.process.pid)), None)
        if first is None:
            return []
        mine = _namespace(first)
        return [first, *(pid for pid in _all() if pid != first and _namespace(pid) == mine)]

    def power_off(self) -> None:
        """kill -9 of everything at once: the kernel ends all processes of a namespace with its first one."""
        assert self.process is not None
        for pid in self.pids()[:1]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(limit(30))
        self.process = None

    def stop(self) -> None:
        """Everything stands still, as in a virtual machine that is paused."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(pid, number)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in path.read_text().split()] if path.exists() else []


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""
