"""MLflow's own database, a file or a schema: made once, by whoever comes first, publisher or server.

A tracking server has a database of its own; nothing is done there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.common.process import locked

SCHEME = "sqlite:///"
POSTGRESQL = "postgresql+psycopg2://"
MADE_BY_ONE = 4_866_322_915
"""Number of the lock in PostgreSQL under which the tables are made."""


def prepare(tracking_uri: str, home: Path) -> None:
    """Make the tables of a database. MLflow's unused experiment, `Default`, is put away: people shall find theirs.

    MLflow itself, left alone, would give that experiment the working directory, and two processes at once break each other.
    """
    if tracking_uri.startswith(SCHEME):
        path = Path(tracking_uri.removeprefix(SCHEME))
        made = path.with_name(f".{path.name}.made")
        with locked(path.with_name(f".{path.name}.lock")):
            if not (made.exists() and path.exists()):
                _make(tracking_uri, home)
                made.touch()
    elif tracking_uri.startswith(POSTGRESQL):
        with _alone(tracking_uri) as complete:
            if not complete:
                _make(tracking_uri, home)


def artifact_root(tracking_uri: str, home: Path) -> str | None:
    """Where attached files lie: beside a database file, or in the home. None for a server, which decides for itself."""
    if tracking_uri.startswith(SCHEME):
        return (Path(tracking_uri.removeprefix(SCHEME)).parent / "artifacts").as_uri()
    return (home / "mlflow" / "artifacts").absolute().as_uri() if tracking_uri.startswith(POSTGRESQL) else None


def _make(tracking_uri: str, home: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(tracking_uri, artifact_root(tracking_uri, home))
    default = store.get_experiment("0")
    if default.lifecycle_stage == "active" and not store.search_runs(["0"], "", "ALL", max_results=1):
        store.delete_experiment("0")
    store.engine.dispose()


@contextmanager
def _alone(tracking_uri: str) -> Iterator[bool]:
    """Keep others on whatever host from making the tables too; whether they are complete. The lock ends with its connection."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.pool import NullPool

    engine = create_engine(tracking_uri, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:number)"), {"number": MADE_BY_ONE})
        # MLflow puts away its first experiment last of all.
        tables = connection.execute(text("SELECT to_regclass('experiments')")).scalar()
        made = "SELECT count(*) FROM experiments WHERE lifecycle_stage = 'deleted' OR experiment_id <> 0"
        yield bool(tables and connection.execute(text(made)).scalar())
