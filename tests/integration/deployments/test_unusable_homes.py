"""A home that cannot be read or written ends a command with exit code 6, whose it is, and what to do: that is no bug."""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest
from waiting import limit

from deployments.cli.output import of_the_disk
from tasks.common.redaction import redact

CAPABILITIES = "-dac_override,-dac_read_search,-fowner,-chown"
SOMEBODY = 12345


def headway(home, command, tmp_path):
    """Run a command with the rights of an ordinary user, whoever we are; its exit code, error, and what it said on stderr."""
    dropped = ["setpriv", f"--bounding-set={CAPABILITIES}", "--inh-caps=-all"] if os.geteuid() == 0 else []
    words = command.format(corpus=tmp_path / "corpus").split()
    told = {**os.environ, "HEADWAY_HOME": str(home), "TESTS_FORK_SERVER": ""}
    code = "from deployments.cli.main import run; run()"
    ran = subprocess.run(
        [*dropped, sys.executable, "-c", code, *words, "--json"],
        env=told,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    return ran.returncode, json.loads(ran.stdout)["error"], ran.stderr


def closed(home):
    """Another user's, who lets nobody in; our own, if we cannot be somebody else."""
    (home / "prefect").mkdir(parents=True)
    (home / "prefect" / "credentials").write_text("ada:" + "s" * 20)
    return shut(home)


def with_a_closed_store(home):
    """What is there must not be said to be nothing."""
    (home / "store" / "artifacts" / "dataset").mkdir(parents=True)
    return shut(home / "store" / "artifacts" / "dataset")


def shut(folder):
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, SOMEBODY, SOMEBODY)
    folder.chmod(0)
    return folder


def unwritable(home):
    home.mkdir()
    home.chmod(0o500)
    return home


def below_a_file(home):
    home.parent.mkdir(exist_ok=True)
    shutil.rmtree(home.parent)
    home.parent.write_text("")
    return home.parent


@pytest.mark.parametrize(
    ("made", "command"),
    [
        (closed, "status"),
        (with_a_closed_store, "artifacts"),
        (unwritable, "dataset publish tiny {corpus}"),
        (below_a_file, "down"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_home_that_cannot_be_used_is_said_with_the_remedy(tmp_path, made, command):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("words")
    home = tmp_path / "place" / "home"
    home.parent.mkdir()
    place = made(home)
    code, error, said = headway(home, command, tmp_path)
    place.chmod(0o700)
    assert code == 6, said
    assert str(home) in error["message"] and "HEADWAY_HOME" in error["remedy"]
    assert "Traceback" not in said and "bug" not in said
    if made in (closed, with_a_closed_store) and os.geteuid() == 0:
        assert f"uid {SOMEBODY}" in error["message"] and "chown -R" in error["remedy"]


@pytest.mark.unit
def test_databases_of_a_home_that_may_not_be_written_are_said_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    sqlite3.connect(tmp_path / "a.db").execute("CREATE TABLE t (x)")
    with pytest.raises(sqlite3.OperationalError) as raised:
        sqlite3.connect(f"file:{tmp_path}/a.db?mode=ro", uri=True).execute("INSERT INTO t VALUES (1)")
    said, remedy = of_the_disk(raised.value)
    assert str(tmp_path) in said and "whose it is" in remedy
    assert of_the_disk(sqlite3.OperationalError("no such table: t")) is None
    assert of_the_disk(OSError(errno.ECONNREFUSED, "Connection refused")) is None


@pytest.mark.unit
def test_a_login_that_we_may_not_read_does_not_keep_us_from_speaking(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    (tmp_path / "prefect" / "credentials").mkdir(parents=True)  # it cannot be read, whoever we are
    assert redact("password=abcdefgh") == "password=[redacted]"
