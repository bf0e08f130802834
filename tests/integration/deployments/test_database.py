"""PostgreSQL in place of the files of a home: prepared before anything starts, or refused with the reason. A real one."""

import subprocess
import sys
from pathlib import Path

import pytest
from postgres import postgres, rows
from waiting import limit

from deployments.configuration.platform import PlatformConfig
from deployments.services import database
from tasks.common.errors import Missing
from tasks.config.database import kept, mlflow_uri
from tasks.lineage.database import prepare

NAME = "HEADWAY_TEST_DATABASE"
CONFIG = PlatformConfig(database=f"env:{NAME}")
MAKES = """# fork: commands
import sys
from pathlib import Path
from tasks.lineage.database import prepare
prepare(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with postgres(tmp_path_factory.mktemp("database") / "postgres") as made:
        yield made


def test_both_schemas_are_there_before_anything_starts_however_often(address, tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, address)
    for home in (tmp_path / "one", tmp_path / "two", tmp_path / "one"):
        database.settle(home, CONFIG)
    schemas = rows(address, "SELECT schema_name FROM information_schema.schemata")
    assert {"prefect", "mlflow"} <= {name for (name,) in schemas}
    assert kept(tmp_path / "one") == kept(tmp_path / "two")
    database.settle(tmp_path / "one", PlatformConfig())
    assert kept(tmp_path / "one") is None, "the setting is gone, and so is what was kept"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.replace("headway:", "headway:wrong"), "password authentication failed"),
        (lambda a: a.removesuffix("headway") + "nothing", "does not exist"),
        (lambda a: f"{a.rpartition(':')[0]}:1/headway", "refused"),
    ],
)
def test_a_database_that_cannot_be_used_is_said_with_the_reason_and_without_the_password(
    address, tmp_path, monkeypatch, change, words
):
    password = address.split(":")[2].partition("@")[0]
    monkeypatch.setenv(NAME, change(address))
    with pytest.raises(Missing, match=words) as refused:
        database.settle(tmp_path, CONFIG)
    assert "nothing was started" in refused.value.remedy and password not in str(refused.value)
    assert kept(tmp_path) is None


def test_two_hosts_that_make_the_tables_of_mlflow_at_once_make_them_once(address, tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, address)
    database.settle(tmp_path, CONFIG)
    argv = [sys.executable, "-c", MAKES, mlflow_uri(tmp_path), str(tmp_path)]
    both = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) for _ in range(2)]
    ended = [(one.communicate(timeout=limit(300))[1], one.returncode) for one in both]
    assert [code for _, code in ended] == [0, 0], ended
    prepare(mlflow_uri(tmp_path), tmp_path)
    assert rows(address, "SELECT name, lifecycle_stage FROM mlflow.experiments") == [["Default", "deleted"]]
