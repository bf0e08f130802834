"""MLflow's server over the database of a home, as a program: `python -m tasks.lineage.server HOME PORT CREDENTIALS`.

CREDENTIALS is a file with `USER:PASSWORD`, the one login, asked for by MLflow's own basic-auth app. It is one process: MLflow's
command starts its server as a child, which a kill -9 of the command would leave behind on the port. Who starts it is
deployments/services/mlflow_server.py.
"""

from __future__ import annotations

import os
import secrets
import sys
from functools import partial
from pathlib import Path

from tasks.common import process
from tasks.config.database import mlflow_uri

SERVED = "mlflow-artifacts:/"
"""Where files go that people log through the server: through it, to HOME/mlflow/artifacts."""
REMEMBERED_SECONDS = 60
"""The slow hash of the password is not computed anew at each of a page's requests."""
LOGIN = """[mlflow]
default_permission = READ
database_uri = sqlite:///{database}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = {remembered}
"""


def serve(home: Path, port: int, user: str, password: str) -> None:
    """Be the server. What MLflow reads from the environment while it is imported is set before it is imported."""
    login = home / "platform" / "mlflow" / "auth.ini"
    login.write_text(LOGIN.format(database=home / "mlflow" / "auth.db", remembered=REMEMBERED_SECONDS))
    settings = {
        "MLFLOW_AUTH_CONFIG_PATH": str(login),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": process.secret(
            home / "platform" / "mlflow" / "secret", partial(secrets.token_hex, 32)
        ),
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port},localhost:{port}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
    }
    os.environ.update(settings)
    from mlflow.environment_variables import _MLFLOW_SGI_NAME
    from mlflow.server import constants

    # What MLflow's own command tells its child, under the names that the two share.
    places = {
        _MLFLOW_SGI_NAME.name: "uvicorn",
        constants.BACKEND_STORE_URI_ENV_VAR: _database(home),
        constants.REGISTRY_STORE_URI_ENV_VAR: _database(home),
        constants.ARTIFACT_ROOT_ENV_VAR: SERVED,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(home / "mlflow" / "artifacts"),
    }
    os.environ.update(places)
    from tasks.lineage.database import prepare

    prepare(_database(home), home)
    import uvicorn
    from mlflow.server import auth
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(_database(home), _database(home), SERVED)
    app = auth.create_app()
    (home / "mlflow" / "auth.db").chmod(0o600)
    if not auth.store.authenticate_user(user, password):  # it was made anew since the first start
        auth.store.update_user(user, password=password)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=3)


def _database(home: Path) -> str:
    return mlflow_uri(home) or f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"


if __name__ == "__main__":
    name, _, word = Path(sys.argv[3]).read_text().partition(":")
    serve(Path(sys.argv[1]), int(sys.argv[2]), name, word)
