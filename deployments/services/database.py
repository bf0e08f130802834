"""The database that `headway up` is given for Prefect and MLflow: prepared before anything starts, and kept for later starts.

Without one, both have files in the home. Nothing is moved between the two: a new database begins empty.
"""

from __future__ import annotations

from pathlib import Path

from deployments.configuration.platform import PlatformConfig
from deployments.services import mlflow_server, prefect_server
from tasks.common.errors import Missing
from tasks.common.redaction import redact
from tasks.config import database
from tasks.config.database import MLFLOW, PREFECT, Database

CONNECT_SECONDS = 8
EXTENSION = "pg_trgm"
"""What Prefect's tables need."""


def settle(home: Path, config: PlatformConfig) -> None:
    """Keep the database of the settings, ready for both servers. Nothing is asked while both run with it.

    Raises ValueError for an address that is none, or another one than the servers run with; Missing for a database that cannot be
    used.
    """
    address = config.database_address()
    wanted, password = database.parse(address) if address else (None, "")
    running = [
        name
        for name, part in (("Prefect's", prefect_server.status(home)), ("MLflow's", mlflow_server.status(home)))
        if part
    ]
    if running and wanted != (known := database.kept(home)):
        raise ValueError(
            f"{' and '.join(running)} server runs with {known or 'files of the home'} as its database, and the settings name "
            f"{wanted or 'files of the home'}: stop the platform first (headway down), and start it again"
        )
    if running:
        return
    if wanted is not None:
        _make_ready(wanted, password)
    database.keep(home, wanted, password)


def _make_ready(wanted: Database, password: str) -> None:
    """Have a schema for each server, and what they need. Raises Missing."""
    try:
        import psycopg2
    except ImportError as error:
        raise Missing(
            "the settings name a PostgreSQL, and psycopg2 is not installed",
            remedy="pip install -c constraints.txt -e '.[local]'",
        ) from error
    secret = {"password": password} if password else {}
    try:
        connection = psycopg2.connect(
            host=wanted.host,
            port=wanted.port,
            dbname=wanted.name,
            user=wanted.user,
            connect_timeout=CONNECT_SECONDS,
            **dict(wanted.options),
            **secret,
        )
    except psycopg2.Error as error:
        raise Missing(
            f"the database {wanted} cannot be used: {_words(error, password)}",
            remedy="Correct `database` in the settings of the platform, or start the server; nothing was started.",
        ) from error
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for schema in (PREFECT, MLFLOW):
                cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
            cursor.execute(f"CREATE EXTENSION IF NOT EXISTS {EXTENSION} WITH SCHEMA {PREFECT}")
    except psycopg2.errors.UniqueViolation:  # another host was first in the same moment
        return
    except psycopg2.Error as error:
        raise Missing(
            f"the database {wanted} cannot be prepared: {_words(error, password)}",
            remedy=f"Have its owner run: GRANT CREATE ON DATABASE {wanted.name} TO {wanted.user}; and install the extension "
            f"{EXTENSION}.",
        ) from error
    finally:
        connection.close()


def _words(error: Exception, password: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return redact(text.replace(password, "...") if password else text)
