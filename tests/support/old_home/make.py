"""Makes the archives that test_old_home.py takes over: tiny homes, as an earlier commit wrote them.

    git worktree add /somewhere COMMIT
    PYTHONPATH=/somewhere HEADWAY=/a/venv/bin/headway python tests/support/old_home/make.py {finished,platform} COMMIT

writes `home-of-COMMIT.tar.xz` or `platform-of-COMMIT.tar.xz` into the working directory.

Each home lies at the path that its records name, and the test puts it back there. Its key, token and passwords open nothing else.

`finished` holds two datasets, a policy with one person, two models of which the second was promoted, an endpoint, a training that
was killed in the middle together with its machine, and Prefect's database as the kill left it.

`platform` was stopped by `headway down`: deployments, two schedules with their next runs, and a retraining that waits until
somebody approves its model.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

from tasks.common.seal import has_seal, sealed

KIND, COMMIT = sys.argv[1:3]
HOME = Path(f"/tmp/headway-{'home' if KIND == 'finished' else 'platform'}-of-{COMMIT}")
SOURCES = Path("/tmp/headway-sources")
PACKAGES = ("json", "email", "logging", "importlib")
SMALL = (
    "training.network.hidden_size=32",
    "training.network.heads=2",
    "training.network.kv_heads=1",
    "training.network.intermediate_size=64",
    "training.network.layers=1",
    "export.golden_tokens=4",
)
IN_FLIGHT = ("training.seed=3", "training.steps=3000")
WAITING = ("approval.before_deploy=true", "approval.expire_minutes=50000000", "export.speed_seconds=0.1")
"""Nearly a hundred years: no test comes too late to answer."""
FREQUENT = """
schedules:
  - {deployment: retrain/tiny, cron: "0 3 * * 1", timezone: Europe/Berlin, set: [training.seed=7], missed: skip}
  - {deployment: validate/tiny, cron: "*/10 * * * *", missed: run_once}
"""
"""Of the second, all times that Prefect made runs for are over an hour after the home was made; what is made up for is cheap."""
PLATFORM = """
schedules:
  - {deployment: retrain/tiny, cron: "0 3 * * 1", timezone: Europe/Berlin, set: [training.seed=7]}
  - {deployment: revalidate/tiny, cron: "30 4 * * *"}
overlap: queue
"""


def headway(*words: str) -> dict:
    environment = {**os.environ, "HEADWAY_HOME": str(HOME)}
    ran = subprocess.run([os.environ["HEADWAY"], *words, "--json"], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"{words}: {ran.stderr}"
    return json.loads(ran.stdout)


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def kill_all(folder: Path) -> None:
    """What pulling the plug does: every process that works for the home is gone at once."""
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(stat.parent.name)
        try:
            words = stat.read_bytes() + (stat.parent / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)


def begin() -> list[str]:
    """An empty folder, and the packages that datasets are made of."""
    kill_all(HOME)  # what an earlier run of this left
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    return [str(shutil.copytree(library / name, SOURCES / name, dirs_exist_ok=True)) for name in PACKAGES]


def platform() -> None:
    packages = begin()
    headway("dataset", "publish", "tiny", *packages[:2], "--include", "*.py")
    (HOME / "platform.of.test.yaml").write_text(FREQUENT)
    headway("up", "--detach", "--config", str(HOME / "platform.of.test.yaml"))
    began = time.monotonic()
    started = headway("run", "retrain/tiny", *sets(*SMALL, *WAITING))["flow_run"]["id"]
    while not (waiting := headway("approve")["waiting"]):
        assert time.monotonic() - began < 300, headway("status")
        time.sleep(1)
    assert [one["flow_run"] for one in waiting] == [started]
    time.sleep(max(0.0, 75 - (time.monotonic() - began)))  # Prefect's scheduler makes the next runs once a minute
    headway("down", "--yes")
    told = {"commit": COMMIT, "home": str(HOME), "waiting": waiting[0]}
    pack(told)


def finished() -> None:
    packages = begin()
    headway("dataset", "publish", "tiny", *packages, "--include", "*.py")
    headway("dataset", "publish", "other", packages[0], "--include", "*.py")
    (HOME / "platform.of.test.yaml").write_text(PLATFORM)
    headway("up", "--detach", "--config", str(HOME / "platform.of.test.yaml"))
    time.sleep(75)  # Prefect's scheduler makes the next runs once a minute
    first = headway("retrain", "-c", "tiny", *sets(*SMALL))
    second = headway("retrain", "-c", "tiny", *sets(*SMALL, "training.seed=2"))
    person = headway("person", "add", "anna", "--may", "run,publish,promote,roll_back,approve")
    command = subprocess.Popen(
        [
            os.environ["HEADWAY"],
            "retrain",
            "-c",
            "tiny",
            *sets(*SMALL, *IN_FLIGHT),
            "--to",
            "train",
            "--as",
            "anna",
            "--json",
        ],
        env={**os.environ, "HEADWAY_HOME": str(HOME), "HEADWAY_TOKEN": person["token"]},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not any(HOME.glob("jobs/train-*/checkpoints/step-*/attempt-*/manifest.json")) or _newest_step() < 60:
        assert command.poll() is None, command.stderr.read()
        time.sleep(0.05)
    kill_all(HOME)
    time.sleep(2)
    told = {
        "commit": COMMIT,
        "home": str(HOME),
        "small": SMALL,
        "in_flight": IN_FLIGHT,
        "first": first,
        "second": second,
        "token": person["token"],
    }
    pack(told)


def pack(told: dict) -> None:
    (HOME / "told.json").write_text(json.dumps(told, indent=1))
    shutil.rmtree(HOME / "cache", ignore_errors=True)
    (HOME / "platform.of.test.yaml").unlink(missing_ok=True)
    if KIND == "platform":  # what a kill left in a database stays as it is
        for path in HOME.rglob("*.db"):
            with sqlite3.connect(path) as database:
                database.execute("VACUUM")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.close()
    _forget_where_python_was()
    archive = Path(f"{HOME.name.removeprefix('headway-')}.tar.xz")
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        packed.add(HOME, arcname=".")
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


def _forget_where_python_was() -> None:
    """The command lines of processes that are over name the environment of whoever made this."""
    environment = str(Path(os.environ["HEADWAY"]).resolve().parents[1])
    for path in (*HOME.rglob("process.json"), *HOME.rglob("*.log")):
        data = path.read_bytes()
        before = data[: data.rindex(b', "seal"')] + b"}" if has_seal(data) else data
        text = before.replace(environment.encode(), b"/opt/headway")
        text = text.replace(os.environ["PYTHONPATH"].encode(), b"/opt/headway/sources")
        path.write_bytes(sealed(text) if has_seal(data) else text)


def _newest_step() -> int:
    lines = [line for path in HOME.glob("jobs/train-*/metrics.jsonl") for line in path.read_text().splitlines()]
    running = [folder for folder in HOME.glob("jobs/train-*") if not (folder / "exit.json").exists()]
    steps = [
        json.loads(line)["step"] for folder in running for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return max(steps, default=0) if lines else 0


if __name__ == "__main__":
    {"finished": finished, "platform": platform}[KIND]()
