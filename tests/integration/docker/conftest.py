"""The services of compose.yaml, started once on this machine: PostgreSQL, and on it the servers of Prefect and MLflow."""

import shutil
import signal
import subprocess

import pytest
from containers import IMAGES, copied, extras, make_env, rendered, virtual_environment
from postgres import let_through, make_cluster, postgres_programs, postgres_user
from stand import Stand, free_ports, launch
from waiting import limit

from benchmarks.supply import distributions


def bins(folder, dockerfile, chosen):
    """What an image installs, as a virtual environment; `chosen` are its extras."""
    sources = [path for path in copied(dockerfile) if path in ("flows", "tasks", "deployments")]
    return virtual_environment(folder, distributions(*chosen), sources)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """bin/ of a virtual environment with exactly what each image installs, by the name of the image."""
    folder = tmp_path_factory.mktemp("installed")
    named = {path.name.split(".")[0]: path for path in IMAGES if path.name != "cluster.Dockerfile"}
    found = {name: bins(folder / name, path, extras(path)) for name, path in named.items()}
    return {**found, "platform": bins(folder / "platform", named["orchestrator"], ["local"])}


@pytest.fixture(scope="module")
def stand(tmp_path_factory, installed):
    """The services of compose.yaml, with credentials, ports and folders of this machine. Nothing runs yet."""
    folder = tmp_path_factory.mktemp("services")
    let_through(folder)
    make_env(folder / "env")
    ports = free_ports(
        "postgres:5432", "prefect:4200", "mlflow:5000", "azurite:10000", "azurite:10001", "azurite:10002"
    )
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


@pytest.fixture(scope="module")
def database(stand):
    """PostgreSQL with the databases that docker/databases.sh makes, as its image would start it for the first time."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql, or the like")
    told, user = stand.services["postgres"]["environment"], postgres_user()
    folder = stand.folder / "postgres"
    folder.mkdir()
    if user:
        shutil.chown(folder, user)
    make_cluster(programs, folder, user, told["POSTGRES_PASSWORD"])
    port = str(stand.ports["postgres:5432"])
    ready = [port if word == "5432" else word for word in stand.services["postgres"]["healthcheck"]["test"][1:]]
    server = [
        "postgres",
        "-D",
        "data",
        "-p",
        port,
        "-k",
        str(folder),
        "-c",
        "listen_addresses=127.0.0.1",
        "-c",
        "fsync=off",
    ]
    running = launch(
        "postgres-server", server, env={}, path=[programs], folder=folder, check=[*ready, "--quiet"], user=user
    )
    try:
        running.wait(30)
        env = {"PGHOST": "127.0.0.1", "PGPORT": port, "PATH": f"{programs}:/usr/bin:/bin"}
        mounted = stand.services["postgres"]["volumes"]
        script = next(one["source"] for one in mounted if one["target"].startswith("/docker-entrypoint-initdb.d/"))
        superuser = {**told, **env, "PGPASSWORD": told["POSTGRES_PASSWORD"]}
        subprocess.run([script], env=superuser, check=True, capture_output=True, timeout=limit(60))
        yield env
    finally:
        running.process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown: it does not wait for connections
        running.stop()


@pytest.fixture(scope="module")
def servers(stand, database):
    """Prefect's server and MLflow's, healthy."""
    running = [stand.start(name) for name in ("prefect", "mlflow")]
    try:
        yield {one.name: one.wait(120) for one in running}
    finally:
        for one in running:
            one.stop()
