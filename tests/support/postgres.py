"""A PostgreSQL of the test's own: where its programs are, whom it runs as, its data folder, and one that runs."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stand import as_user, free_ports, launch
from waiting import limit


def postgres_programs():
    """The folder of PostgreSQL's own programs: the newest that Debian's package brought, or where initdb is."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return installed[-1].parent if installed else Path(on_path).parent if on_path else None


def postgres_user():
    """Whom PostgreSQL runs as: it refuses to be root."""
    known = [one.pw_name for one in pwd.getpwall()]
    return next(name for name in ("postgres", "nobody") if name in known) if os.getuid() == 0 else ""


def let_through(folder):
    """Have another user, where PostgreSQL is one, pass through our folders to its own."""
    if postgres_user():
        for above in (folder, *folder.parents):
            if above.is_relative_to(tempfile.gettempdir()) and above.stat().st_uid == os.getuid():
                above.chmod(above.stat().st_mode | 0o011)


def make_cluster(programs, folder, user, password):
    """A data folder, with the password of the superuser."""
    secret = folder / "superuser"
    secret.touch(0o600)
    secret.write_text(password)
    options = ["--pgdata=data", "--username=postgres", f"--pwfile={secret}", "--auth-host=scram-sha-256", "--no-sync"]
    if user:
        shutil.chown(secret, user)
    argv = [*as_user(user), str(programs / "initdb"), *options]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=limit(60))


@contextmanager
def postgres(folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """The address, with its password, of an empty database whose owner is no superuser; one host, or a network, may connect."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql, or the like")
    user, password = postgres_user(), secrets.token_urlsafe(12)
    folder.mkdir(parents=True)
    let_through(folder)
    if user:
        shutil.chown(folder, user)
    make_cluster(programs, folder, user, password)
    with open(folder / "data" / "pg_hba.conf", "a") as rules:
        rules.write("host all all samenet scram-sha-256\n")
    port = str(free_ports("postgres")["postgres"])
    settings = [f"listen_addresses={host}", "fsync=off"]
    words = ["postgres", "-D", "data", "-p", port, "-k", str(folder), *(w for one in settings for w in ("-c", one))]
    ready = ["pg_isready", "--quiet", "--host", host, "--port", port]
    running = launch("postgres-server", words, env={}, path=[programs], folder=folder, check=ready, user=user)
    try:
        running.wait(30)
        env = {"PGPASSWORD": password, "PATH": f"{programs}:/usr/bin:/bin"}
        for query in (f"CREATE ROLE headway LOGIN PASSWORD '{password}'", "CREATE DATABASE headway OWNER headway"):
            argv = ["psql", "--no-psqlrc", "-q", "-h", host, "-p", port, "-U", "postgres", "-c", query]
            subprocess.run(argv, env=env, check=True, capture_output=True, timeout=limit(30))
        yield f"postgresql://headway:{password}@{host}:{port}/headway"
    finally:
        running.process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown: it does not wait for connections
        running.stop()


def rows(address: str, query: str) -> list[list[str]]:
    """What a query gives, as text."""
    argv = ["psql", "--no-psqlrc", "-At", "-F", "\t", address, "-c", query]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=limit(30))
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]
