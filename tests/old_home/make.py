"""Makes the archive that test_old_home.py takes over: a finished tiny home, as commit 0245f4f wrote it.

    git worktree add /somewhere 0245f4f
    PYTHONPATH=/somewhere HEADWAY=/a/venv/bin/headway python tests/old_home/make.py ARCHIVE.tar.xz

The home lies at the path that its records name, and the test puts it back there. It holds two datasets, a policy with one person,
two models of which the second was promoted, an endpoint, a training that was killed in the middle together with its machine, and
Prefect's database with deployments, schedules and their next runs. Its key, token and passwords open nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

HOME = Path("/tmp/headway-home-of-0245f4f")
SOURCES = Path("/tmp/headway-sources")
COMMIT = "0245f4f"
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
PLATFORM = """
schedules:
  - {deployment: retrain/tiny, cron: "0 3 * * 1", timezone: Europe/Berlin, set: [training.seed=7]}
  - {deployment: revalidate/tiny, cron: "30 4 * * *"}
overlap: queue
"""


def headway(*words: str, token: str = "") -> dict:
    environment = {**os.environ, "HEADWAY_HOME": str(HOME)} | ({"HEADWAY_TOKEN": token} if token else {})
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


def main(archive: Path) -> None:
    kill_all(HOME)  # what an earlier run of this left
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    packages = [str(shutil.copytree(library / name, SOURCES / name, dirs_exist_ok=True)) for name in PACKAGES]
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
    (HOME / "told.json").write_text(json.dumps(told, indent=1))
    for unneeded in ("cache", "platform.of.test.yaml"):
        shutil.rmtree(HOME / unneeded, ignore_errors=True)
    _forget_where_python_was(HOME)
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        packed.add(HOME, arcname=".")
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


def _forget_where_python_was(home: Path) -> None:
    """The command lines of processes that are over name the environment of whoever made this."""
    environment = str(Path(os.environ["HEADWAY"]).resolve().parents[1])
    for path in (*home.rglob("process.json"), *home.rglob("*.log")):
        path.write_text(path.read_text(errors="replace").replace(environment, "/opt/headway"))


def _newest_step() -> int:
    lines = [line for path in HOME.glob("jobs/train-*/metrics.jsonl") for line in path.read_text().splitlines()]
    running = [folder for folder in HOME.glob("jobs/train-*") if not (folder / "exit.json").exists()]
    steps = [
        json.loads(line)["step"] for folder in running for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return max(steps, default=0) if lines else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
