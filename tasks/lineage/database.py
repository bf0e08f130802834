"""MLflow's own database file: made once, by whoever comes first, publisher or server.

A tracking server has a database of its own; nothing is done there.
"""

from __future__ import annotations

from pathlib import Path

from tasks.common.process import locked

SCHEME = "sqlite:///"


def prepare(tracking_uri: str) -> None:
    """Make the tables of a database file. MLflow's unused experiment, `Default`, is put away: people shall find theirs.

    MLflow itself, left alone, would give that experiment the working directory, and two processes at once break each other.
    """
    if not tracking_uri.startswith(SCHEME):
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path = Path(tracking_uri.removeprefix(SCHEME))
    made = path.with_name(f".{path.name}.made")
    with locked(path.with_name(f".{path.name}.lock")):
        if made.exists() and path.exists():
            return
        store = SqlAlchemyStore(tracking_uri, artifact_root(tracking_uri))
        default = store.get_experiment("0")
        if default.lifecycle_stage == "active" and not store.search_runs(["0"], "", "ALL", max_results=1):
            store.delete_experiment("0")
        store.engine.dispose()
        made.touch()


def artifact_root(tracking_uri: str) -> str | None:
    """Where attached files lie: beside a database file. None for a server, which decides for itself."""
    if not tracking_uri.startswith(SCHEME):
        return None
    return (Path(tracking_uri.removeprefix(SCHEME)).parent / "artifacts").as_uri()
