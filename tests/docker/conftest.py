"""The services of compose.yaml, started once on this machine: PostgreSQL, and on it the servers of Prefect and MLflow."""

import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from containers import IMAGES, Stand, closure, copied, extras, launch, make_env, rendered, virtual_environment

POSTGRES = {"POSTGRES_USER": "postgres"}


def postgres_programs():
    """The folder of PostgreSQL's own programs: the newest that Debian's package brought, or where initdb is."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def free_ports(*names):
    """A free port for each name; they are held until all are chosen, so that no two are the same."""
    held = {name: socket.socket() for name in names}
    for one in held.values():
        one.bind(("127.0.0.1", 0))
    ports = {name: one.getsockname()[1] for name, one in held.items()}
    for one in held.values():
        one.close()
    return ports


def bins(folder, dockerfile, chosen):
    """What an image installs, as a virtual environment; `chosen` are its extras."""
    sources = [path for path in copied(dockerfile) if path in ("flows", "tasks", "deployments")]
    return virtual_environment(folder, closure(*chosen), sources)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """bin/ of a virtual environment with exactly what each image installs, by the name of the image."""
    folder = tmp_path_factory.mktemp("installed")
    named = {path.name.split(".")[0]: path for path in IMAGES if path.name != "cluster.Dockerfile"}
    found = {name: bins(folder / name, path, extras(path)) for name, path in named.items()}
    return {**found, "platform": bins(folder / "platform", named["orchestrator"], ["local"])}


@pytest.fixture(scope="session")
def stand(tmp_path_factory, installed):
    """The services of compose.yaml, with credentials, ports and folders of this machine. Nothing runs yet."""
    # PostgreSQL's user must be able to pass through the folders above its own.
    folder = tmp_path_factory.mktemp("services")
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.getuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    make_env(folder / "env")
    ports = free_ports("postgres:5432", "prefect:4200", "mlflow:5000", "azurite:10000", "azurite:10001", "azurite:10002")
    published = {
        "PREFECT_PORT": str(ports["prefect:4200"]),
        "MLFLOW_PORT": str(ports["mlflow:5000"]),
        "AZURITE_PORT": str(ports["azurite:10000"]),
    }
    services = rendered(folder / "env", **published)["services"]
    environments = {
        "prefect": installed["orchestrator"],
        "mlflow": installed["orchestrator"],
        "headway": installed["platform"],
    }
    return Stand(folder, services, ports, environments)


@pytest.fixture(scope="session")
def database(stand):
    """PostgreSQL with the databases that docker/databases.sh makes, as its image would start it for the first time."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql, or the like")
    folder = stand.folder / "postgres"
    folder.mkdir()
    user = ""
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        user = next(name for name in ("postgres", "nobody") if name in [one.pw_name for one in pwd.getpwall()])
        shutil.chown(folder, user)
    service = stand.services["postgres"]
    password = stand.folder / "superuser"
    password.write_text(service["environment"]["POSTGRES_PASSWORD"])
    password.chmod(0o644)
    made = ["initdb", "--pgdata", "data", "--username", "postgres", "--pwfile", str(password)]
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"] if user else []
    subprocess.run(
        [*as_user, str(programs / made[0]), *made[1:], "--auth-host=scram-sha-256", "--no-sync"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    port = stand.ports["postgres:5432"]
    ready = [{"5432": str(port)}.get(word, word) for word in service["healthcheck"]["test"][1:]]
    running = launch(
        "postgres-server",
        ["postgres", "-D", "data", "-p", str(port), "-k", str(folder), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"],
        env={}, path=[programs], folder=folder, check=[*ready, "--quiet"], user=user,
    )  # fmt: skip
    try:
        running.wait(30)
        script = next(one["source"] for one in service["volumes"] if one["target"].startswith("/docker-entrypoint-initdb.d/"))
        where = {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGPASSWORD": service["environment"]["POSTGRES_PASSWORD"]}
        env = {**service["environment"], **where, "PATH": f"{programs}:/usr/bin:/bin"}
        subprocess.run([script], env=env, check=True, capture_output=True, timeout=60)
        yield {**where, "PATH": f"{programs}:/usr/bin:/bin"}
    finally:
        running.process.send_signal(2)  # fast shutdown: does not wait for connections
        running.stop()


@pytest.fixture(scope="session")
def servers(stand, database):
    """Prefect's server and MLflow's, healthy."""
    running = [stand.start(name) for name in ("prefect", "mlflow")]
    try:
        yield {one.name: one.wait(120) for one in running}
    finally:
        for one in running:
            one.stop()
