"""The database that `headway up` is given for Prefect and MLflow: prepared before anything starts, and kept for later starts.

Without one, both have files in the home. Nothing is moved between the two: a new database begins empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deployments.catalogue.flows import POOL
from deployments.configuration.platform import PlatformConfig
from deployments.services import mlflow_server, prefect_server
from deployments.services.parts import WORKER, worker_name
from tasks.common.errors import Conflict, Missing
from tasks.common.redaction import redact
from tasks.config import database
from tasks.config.database import MLFLOW, PREFECT, Database
from tasks.storage import open_store
from tasks.storage.store import Store

CONNECT_SECONDS = 8
MADE_BY_ONE = 4_866_322_916
"""Number of the lock in PostgreSQL under which the schemas are made."""
OTHERS = f"""SELECT DISTINCT worker.name FROM {PREFECT}.worker JOIN {PREFECT}.work_pool ON work_pool.id = work_pool_id
WHERE work_pool.name = %s AND worker.name <> %s AND last_heartbeat_time > now() - interval '60 seconds'"""
"""Workers of other hosts that run: each writes every ten seconds that it does, and the database's own clock judges it."""
EXTENSION = "pg_trgm"
"""What Prefect's tables need."""


def settle(home: Path, config: PlatformConfig) -> None:
    """Keep the database of the settings, ready for both servers. Nothing is asked while both run with it.

    Raises ValueError for an address that is none, or another one than the servers run with; Missing for a database that cannot be
    used; Conflict where other hosts work with it and not in the store of this home.
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
        _make_ready(wanted, password, open_store(home))
    database.keep(home, wanted, password)


def _make_ready(wanted: Database, password: str, store: Store) -> None:
    """Have a schema for each server, and what they need. Raises Missing, and Conflict."""
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
            cursor.execute("SELECT pg_advisory_lock(%s)", (MADE_BY_ONE,))  # until the connection ends
            for schema in (PREFECT, MLFLOW):
                cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
            cursor.execute(f"CREATE EXTENSION IF NOT EXISTS {EXTENSION} WITH SCHEMA {PREFECT}")
            _require_one_store(cursor, store)
    except psycopg2.Error as error:
        raise Missing(
            f"the database {wanted} cannot be prepared: {_words(error, password)}",
            remedy=f"Have its owner run: GRANT CREATE ON DATABASE {wanted.name} TO {wanted.user}; and install the extension "
            f"{EXTENSION}.",
        ) from error
    finally:
        connection.close()


def _require_one_store(cursor: Any, store: Store) -> None:
    """Raise Conflict where other hosts work with the database, and this one would not see what they make.

    The store is noted in the database by whoever starts while no other host works with it.
    """
    cursor.execute(
        "SELECT to_regclass(%s), obj_description(%s::regnamespace, 'pg_namespace')", (f"{PREFECT}.worker", MLFLOW)
    )
    tables, noted = cursor.fetchone()
    others: list[str] = []
    if tables:
        cursor.execute(OTHERS, (POOL, worker_name()))
        others = sorted(name.removeprefix(WORKER) for (name,) in cursor.fetchall())
    mine = f"store {store.uri}"
    if others and (store.claims is None or noted != mine):
        where = "a folder" if store.claims is None else store.uri
        raise Conflict(
            f"other hosts ({', '.join(others)}) work with this database already, and the store of this home is {where}",
            remedy="Hosts that share a database share one store in Azure Blob, too: use the same stores.yaml on each "
            "(docs/platform.md, Several hosts). Or stop the platform there, or name another database.",
        )
    if noted != mine:
        cursor.execute(f"COMMENT ON SCHEMA {MLFLOW} IS %s", (mine,))


def _words(error: Exception, password: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return redact(text.replace(password, "...") if password else text)
