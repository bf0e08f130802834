"""The local MLflow server: a view of the database that publishers write into, so that nothing is lost while it is away.

It listens on loopback and asks for the same login as Prefect's page, by MLflow's own basic-auth app. It keeps its port as long as
nobody else takes it. As a program (`python -m deployments.platform.mlflow_server HOME PORT`) it is the server itself, in one
process: MLflow's own command starts it as a child, which a kill -9 of the command would leave behind on the port.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deployments.platform.checks import choose_port, not_locked
from deployments.platform.prefect_server import password
from tasks import process
from tasks.errors import Missing

START_SECONDS = 120.0
LOGIN_REMEMBERED_SECONDS = 60
"""The slow hash of the password is not computed anew at each of a page's requests."""
SERVED = "mlflow-artifacts:/"
"""Where files go that people log through the server: through it, to HOME/mlflow/artifacts."""
LOGIN = """[mlflow]
default_permission = READ
database_uri = sqlite:///{database}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = {remembered}
"""


def start(home: Path, port: int | None = None) -> dict[str, Any]:
    """Start the server unless it runs. Does not wait: see `wait`.

    Raises ValueError when a wanted port is taken, Missing when the database is locked.
    """
    found = status(home)
    if found:
        return found
    folder = home / "platform" / "mlflow"
    not_locked(home / "mlflow" / "mlflow.db")
    known = process.read_json(folder / "server.json") or {}
    port = choose_port(port, known.get("port"))
    password(home)
    argv = [sys.executable, "-m", "deployments.platform.mlflow_server", str(home), str(port)]
    spec = process.ProcessSpec(argv=argv, log="server.log", restarts=20, steady=20.0, grace=5.0)
    handle = process.start(folder, spec)
    server = {"url": f"http://127.0.0.1:{port}", "port": port, "pid": handle["pid"], "since": time.time()}
    process.write_json(folder / "server.json", {**server, "folder": str(folder), "home": str(home)})
    return {**server, "folder": str(folder), "home": str(home)}


def wait(server: dict[str, Any], timeout: float = START_SECONDS) -> None:
    """Return when the server answers to our login. Raises Missing with the end of its log."""
    deadline = time.monotonic() + timeout
    folder = Path(server["folder"])
    while not _answers(server):
        died = not process.alive(process.read_json(folder / "handle.json"))
        if died or time.monotonic() > deadline:
            log = folder / "server.log"
            end = log.read_text(errors="replace")[-1000:] if log.exists() else ""
            raise Missing(
                f"the MLflow server at {server['url']} does not answer; the end of {log}:\n{end}",
                remedy="Runs go on without it. `headway doctor` tells more; `headway up` starts it again.",
            )
        time.sleep(0.1)


def status(home: Path) -> dict[str, Any] | None:
    """The local server when it runs: address, since when, pid."""
    folder = home / "platform" / "mlflow"
    server: dict[str, Any] | None = process.read_json(folder / "server.json")
    return server if server and process.alive(process.read_json(folder / "handle.json")) else None


def down(home: Path) -> bool:
    """Stop the local server; whether one ran."""
    ran = status(home) is not None
    process.stop(home / "platform" / "mlflow")
    return ran


def _answers(server: dict[str, Any]) -> bool:
    login = base64.b64encode(password(Path(server["home"])).encode()).decode()
    address = f"{server['url']}/api/2.0/mlflow/experiments/search?max_results=1"
    request = urllib.request.Request(address, headers={"Authorization": f"Basic {login}"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def serve(home: Path, port: int) -> None:
    """Be the server. What MLflow reads from the environment while it is imported is set before it is imported."""
    os.environ.update(_settings(home, port))
    os.environ.update(_places(home))
    from tasks.lineage.database import prepare

    prepare(_database(home))
    import uvicorn
    from mlflow.server import auth
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(_database(home), _database(home), SERVED)
    app = auth.create_app()
    (home / "mlflow" / "auth.db").chmod(0o600)
    user, _, word = password(home).partition(":")
    if not auth.store.authenticate_user(user, word):  # the credentials were made anew since the first start
        auth.store.update_user(user, password=word)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=3)


def _settings(home: Path, port: int) -> dict[str, str]:
    user, _, word = password(home).partition(":")
    login = home / "platform" / "mlflow" / "auth.ini"
    login.write_text(LOGIN.format(database=home / "mlflow" / "auth.db", remembered=LOGIN_REMEMBERED_SECONDS))
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(login),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": word,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": _secret(home / "platform" / "mlflow" / "secret"),
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port},localhost:{port}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }


def _places(home: Path) -> dict[str, str]:
    """What MLflow's own command tells its child, under the names that the two share."""
    from mlflow.environment_variables import _MLFLOW_SGI_NAME
    from mlflow.server import constants

    return {
        _MLFLOW_SGI_NAME.name: "uvicorn",
        constants.BACKEND_STORE_URI_ENV_VAR: _database(home),
        constants.REGISTRY_STORE_URI_ENV_VAR: _database(home),
        constants.ARTIFACT_ROOT_ENV_VAR: SERVED,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(home / "mlflow" / "artifacts"),
    }


def _database(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"


def _secret(path: Path) -> str:
    """The key that signs the login app's forms, made at first use, readable by its owner only."""
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path.read_text()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
