"""The address of the database: what it may say, what is kept of it, and where the password is not."""

import os
import stat

import pytest

from deployments.configuration.platform import PlatformConfig
from tasks.common.errors import Missing
from tasks.config.base import tracking_uri
from tasks.config.database import Database, keep, kept, mlflow_uri, parse, prefect_environment

pytestmark = pytest.mark.unit

WHOLE = "postgresql://head%40way:p%25w%3B@db.example:6432/plat?sslmode=verify-full&sslrootcert=/etc/ca.pem"


def test_an_address_is_read_and_its_password_kept_apart(tmp_path):
    database, password = parse(WHOLE)
    assert password == "p%w;" and str(database) == "postgresql://head@way@db.example:6432/plat"
    keep(tmp_path, database, password)
    assert kept(tmp_path) == database
    secret = tmp_path / "platform" / "database.pgpass"
    assert secret.read_text() == "db.example:6432:plat:head@way:p%w;\n"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    environment = prefect_environment(tmp_path)
    assert (
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://head%40way@db.example:6432/plat"
    )
    assert (environment["PGSSLMODE"], environment["PGPASSFILE"]) == ("verify-full", str(secret))
    assert "p%w;" not in f"{environment}{mlflow_uri(tmp_path)}{(tmp_path / 'platform' / 'database.json').read_text()}"


def test_runs_are_published_in_it_and_without_it_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    keep(tmp_path, *parse("postgres://me@db/plat"))
    assert tracking_uri() == "postgresql+psycopg2://me@db:5432/plat?options=-csearch_path%3Dmlflow".replace("%3D", "=")
    keep(tmp_path, None, "")
    assert tracking_uri() == f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}" and prefect_environment(tmp_path) == {}


def test_an_address_without_a_password_leaves_it_to_the_clients(tmp_path):
    keep(tmp_path, *parse(WHOLE))
    keep(tmp_path, *parse("postgresql://me@[::1]/plat"))
    assert not (tmp_path / "platform" / "database.pgpass").exists() and kept(tmp_path).host == "::1"
    assert prefect_environment(tmp_path)["PREFECT_SERVER_DATABASE_CONNECTION_URL"].endswith("me@[::1]:5432/plat")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("mysql://me@db/plat", "the database is mysql, not PostgreSQL"),
        ("/var/lib/prefect.db", "not PostgreSQL"),
        ("postgresql://db/plat", "has no user"),
        ("postgresql://me@db", "has no database"),
        ("postgresql:///plat", "has no user and no host"),
        ("postgresql://me@db:many/plat", "port is no number"),
        ("postgresql://me@db/plat?options=-cx", "has options behind the"),
        ("postgresql://me:hidden%3Aone@db/plat", "a colon, a backslash or a line break"),
    ],
)
def test_what_is_no_address_is_refused_with_the_form_and_never_with_the_password(address, words):
    with pytest.raises(ValueError, match=words) as refused:
        parse(address)
    assert "hidden" not in str(refused.value)


def test_a_password_is_not_written_into_the_settings(monkeypatch):
    with pytest.raises(ValueError, match="env:NAME") as refused:
        PlatformConfig(database="postgresql://me:hidden@db/plat")
    assert PlatformConfig(database="env:HEADWAY_TEST_DATABASE").database
    monkeypatch.delenv("HEADWAY_TEST_DATABASE", raising=False)
    with pytest.raises(Missing, match="HEADWAY_TEST_DATABASE is not set"):
        PlatformConfig(database="env:HEADWAY_TEST_DATABASE").database_address()
    assert "it holds a password" in str(refused.value)
    monkeypatch.setitem(os.environ, "HEADWAY_TEST_DATABASE", WHOLE)
    assert PlatformConfig(database="env:HEADWAY_TEST_DATABASE").database_address() == WHOLE


def test_equal_databases_are_equal_however_they_are_written():
    assert (
        parse("postgres://me@db/plat")[0]
        == parse("postgresql://me@db:5432/plat")[0]
        == Database("me", "db", 5432, "plat")
    )
