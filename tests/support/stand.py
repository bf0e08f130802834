"""What a container starts, started on this machine without a container engine.

A service of compose.yaml is started by exactly its command and environment; only what an engine would give it is replaced: names
of hosts, ports, folders that are mounted, and the packages of its image. What the files say is in containers.py.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from containers import ROOT, environment, json_form
from waiting import limit


@dataclass
class Running:
    """A service's program and its health check. Everything that it started goes with it."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    healthy: Callable[[], bool]

    def wait(self, seconds: float) -> "Running":
        deadline = time.monotonic() + limit(seconds)
        while not self.healthy():
            said = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{said}"
            assert time.monotonic() < deadline, f"{self.name} is not healthy after {seconds:g} s:\n{said}"
            time.sleep(0.3)
        return self

    def stop(self, seconds: float = 15.0) -> int:
        """Ask it to stop, and return its exit status; it and whatever is left of its group is killed when it does not."""
        self.process.terminate()
        try:
            self.process.wait(limit(seconds))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def launch(
    name: str, argv: list[str], *, env: dict[str, str], path: list[Path], folder: Path, check: list[str], user: str = ""
) -> Running:
    """Start a program with an environment of its own, nothing inherited; `check` is its health check's command."""
    folder.mkdir(parents=True, exist_ok=True)
    search = os.pathsep.join([*map(str, path), "/usr/bin", "/bin"])
    whole = {"PATH": search, "LANG": "C.UTF-8", **env}
    log = folder.parent / f"{name}.log"

    def resolve(words: list[str]) -> list[str]:
        return [shutil.which(words[0], path=search) or words[0], *words[1:]]

    with open(log, "ab") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        process = subprocess.Popen(
            [*as_user(user), *resolve(argv)], env=whole, cwd=folder, start_new_session=True, **streams
        )

    def healthy() -> bool:
        return (
            subprocess.run(resolve(check), env=whole, cwd=folder, capture_output=True, timeout=limit(30)).returncode
            == 0
        )

    return Running(name, process, log, healthy)


def as_user(user: str) -> list[str]:
    """What stands before a command that another user is to run; only root can."""
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"] if user else []


@dataclass(frozen=True)
class Stand:
    """Stands in for the container engine: gives services addresses, folders and the packages of their image."""

    folder: Path
    services: dict[str, Any]
    ports: dict[str, int]
    """Port of this machine for each address in the network of the containers, as `prefect:4200`."""
    environments: dict[str, Path] = field(default_factory=dict)
    """bin/ of what each service's image has installed."""

    def start(self, name: str, path: list[Path] | None = None) -> Running:
        """Start a service by its own command, with its own environment and health check."""
        service = self.services[name]
        folders = self.folders(name, service)
        ours = [ROOT / service["build"]["dockerfile"]] if "build" in service else []
        env = {key: value for image in ours for key, value in environment(image).items()} | service["environment"]
        told = service.get("healthcheck", {}).get("test")
        check = told[1:] if told else json_form(ours[0], "HEALTHCHECK")

        def translated(text: str) -> str:
            return self.here(name, text, folders)

        return launch(
            name,
            [translated(word) for word in service["command"]],
            env={key: translated(value) for key, value in env.items()},
            path=path or [self.environments[name]],
            folder=self.folder / name,
            check=[translated(word) for word in check],
        )

    def folders(self, name: str, service: dict[str, Any]) -> dict[str, Path]:
        """What is mounted where: named volumes and tmpfs become folders, files of the repository copies of themselves."""
        found = {}
        for volume in service.get("volumes", []):
            target, source = volume["target"], Path(volume["source"])
            place = self.folder / name / target.strip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if volume["type"] == "bind":
                place.write_text(self.here(name, source.read_text(), {}))
            else:
                place.mkdir(exist_ok=True)
            found[target] = place
        for one in service.get("tmpfs", []):
            target = one.split(":")[0]
            found[target] = self.folder / name / target.strip("/")
            found[target].mkdir(parents=True, exist_ok=True)
        return found

    def here(self, name: str, text: str, folders: dict[str, Path]) -> str:
        """A text of the container's world in words of this machine."""
        for address, port in self.ports.items():
            owner, inside = address.split(":")
            text = re.sub(rf"\b{owner}:{inside}\b", f"127.0.0.1:{port}", text)
            if owner == name:
                text = re.sub(rf"(?<=127\.0\.0\.1:){inside}\b|(?<=[Pp]ort=){inside}\b|^{inside}$", str(port), text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        if not folders:
            return text
        targets = "|".join(map(re.escape, sorted(folders, key=len, reverse=True)))
        return re.sub(rf"(?<![\w/.])({targets})(?=/|$)", lambda match: str(folders[match[1]]), text)


def free_ports(*names: str) -> dict[str, int]:
    """A free port for each name; they are held until all are chosen, so that no two are the same."""
    held = {name: socket.socket() for name in names}
    for one in held.values():
        one.bind(("127.0.0.1", 0))
    ports = {name: int(one.getsockname()[1]) for name, one in held.items()}
    for one in held.values():
        one.close()
    return ports
