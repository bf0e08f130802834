"""Where the servers of a home keep what they know: in files of the home, or in one PostgreSQL that several hosts share.

`headway up` takes the address from one setting, `database` of the platform's settings, and keeps it in
`platform/database.json`; a password goes into a file of its own, in the form that PostgreSQL's clients read. Prefect and MLflow
have a schema each. Nothing is connected to here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from tasks.common.process import read_json, whole, write_json

PREFECT, MLFLOW = "prefect", "mlflow"
"""Names of the schemas."""
OPTIONS = {"sslmode": "PGSSLMODE", "sslrootcert": "PGSSLROOTCERT", "sslcert": "PGSSLCERT", "sslkey": "PGSSLKEY"}
"""What may stand behind the `?` of an address, and the variable by which both kinds of clients take it."""
FORM = "postgresql://USER@HOST:5432/DATABASE"


@dataclass(frozen=True)
class Database:
    """A database of a PostgreSQL, without the password."""

    user: str
    host: str
    port: int
    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Its address, for people."""
        return f"postgresql://{self.user}@{self.host}:{self.port}/{self.name}"


def parse(address: str) -> tuple[Database, str]:
    """The database and the password of an address. Raises ValueError, which never quotes what may be a password."""
    parts = urlsplit(address)
    try:
        port = parts.port or 5432
    except ValueError as error:
        raise ValueError(f"the database's port is no number: write it as {FORM}") from error
    if parts.scheme not in ("postgresql", "postgres"):
        kind = parts.scheme if re.fullmatch(r"[a-z0-9+]{1,20}", parts.scheme) else "something else"
        raise ValueError(
            f"the database is {kind}, not PostgreSQL: write it as {FORM}; SQLite is what an empty one means"
        )
    missing = [
        what
        for what, value in (("user", parts.username), ("host", parts.hostname), ("database", parts.path.strip("/")))
        if not value
    ]
    if missing:
        raise ValueError(f"the database's address has no {' and no '.join(missing)}: write it as {FORM}")
    options = parse_qsl(parts.query, keep_blank_values=True)
    if unknown := sorted({key for key, _ in options} - OPTIONS.keys()):
        raise ValueError(
            f"the database's address has {', '.join(unknown)} behind the ?: it may have {', '.join(OPTIONS)}"
        )
    name, user, password = unquote(parts.path.strip("/")), unquote(parts.username or ""), unquote(parts.password or "")
    if any(sign in text for sign in ":\\\n" for text in (name, user, password)):
        raise ValueError(
            "the database's user, name or password has a colon, a backslash or a line break in it, which the clients read "
            "differently in a password file: choose others"
        )
    return Database(user, parts.hostname or "", port, name, tuple(options)), password


def keep(home: Path, database: Database | None, password: str) -> None:
    """Keep the address for all that starts later; None: files of the home."""
    if database is None:
        for path in (_kept(home), _password(home)):
            path.unlink(missing_ok=True)
        return
    if password:
        fields = (database.host, str(database.port), database.name, database.user, password)
        with whole(_password(home)) as file:
            file.write(f"{':'.join(fields)}\n".encode())
    else:
        _password(home).unlink(missing_ok=True)
    write_json(_kept(home), asdict(database))


def kept(home: Path) -> Database | None:
    """The database that `headway up` was given; None: files of the home."""
    fields = read_json(_kept(home))
    return (
        Database(**{**fields, "options": tuple((key, value) for key, value in fields["options"])}) if fields else None
    )


def platform_of(home: Path) -> str:
    """What the hosts that share the database of a home have in common, as a part of a name; empty where no other can share it."""
    database = kept(home)
    if database is None:
        return ""
    return hashlib.sha256(f"{database.host}:{database.port}/{database.name}".encode()).hexdigest()[:12]


def mlflow_uri(home: Path) -> str | None:
    """MLflow's schema, as SQLAlchemy takes it, without the password; None where there is no such database."""
    database = kept(home)
    if database is None:
        return None
    query = {"options": f"-csearch_path={MLFLOW}", **dict(database.options)}
    if _password(home).exists():
        query["passfile"] = str(_password(home).absolute())
    return f"postgresql+psycopg2://{_authority(database)}?{urlencode(query, quote_via=quote, safe='/=')}"


def prefect_environment(home: Path) -> dict[str, str]:
    """What Prefect's server is started with; empty where there is no such database."""
    database = kept(home)
    if database is None:
        return {}
    passfile = {"PGPASSFILE": str(_password(home).absolute())} if _password(home).exists() else {}
    return {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{_authority(database)}",
        # What it makes lies in the first one; an extension that was there before may lie in the second.
        "PREFECT_SERVER_DATABASE_SQLALCHEMY_CONNECT_ARGS_SEARCH_PATH": f"{PREFECT},public",
        **{OPTIONS[key]: value for key, value in database.options},
        **passfile,
    }


def _authority(database: Database) -> str:
    host = f"[{database.host}]" if ":" in database.host else database.host
    return f"{quote(database.user, safe='')}@{host}:{database.port}/{quote(database.name, safe='')}"


def _kept(home: Path) -> Path:
    return home / "platform" / "database.json"


def _password(home: Path) -> Path:
    return home / "platform" / "database.pgpass"
