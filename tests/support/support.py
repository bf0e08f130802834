"""What tests share: the `headway` command as a user runs it, and the corpora that they publish."""

import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import limit

from tasks.config.flows import STAGES

HEADWAY = Path(sys.executable).parent / "headway"
STDLIB = Path(sysconfig.get_path("stdlib"))
PACKAGES = ("json", "email", "logging", "importlib")


def python_path(*folders: object) -> str:
    """A PYTHONPATH of these folders, and of what is there: without tests/support/forks a program imports everything itself."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    said: dict[str, Any]
    stderr: str

    def statuses(self) -> dict[str, str]:
        return {stage["name"]: stage["status"] for stage in self.said["stages"]}

    def stage(self, name: str) -> dict[str, Any]:
        return next(stage for stage in self.said["stages"] if stage["name"] == name)


@dataclass(frozen=True)
class Home:
    """A home folder, and the `headway` command in it."""

    path: Path

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
        return {**kept, "HEADWAY_HOME": str(self.path)}

    def command(self, *words: object) -> list[str]:
        return [str(HEADWAY), *map(str, words)]

    def start(self, *words: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*words),
            env=self.environment(),
            cwd=self.path.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object) -> Ran:
        """Run a command with --json; its stdout must be exactly one object."""
        process = self.start(*words, "--json")
        out, err = process.communicate(timeout=limit(300))
        return Ran(process.returncode, json.loads(out) if out.strip() else {}, err)

    def retrain(self, *words: object) -> Ran:
        return self.run("retrain", "-c", "tiny", *words)

    def ok(self, *words: object) -> Ran:
        ran = self.run(*words)
        assert ran.code == 0, ran.stderr
        return ran

    def stop(self) -> None:
        """Stop its endpoints, and the rest as `headway down` does, but in this process: without a command, and whoever may."""
        if any(self.path.glob("endpoints/*")):
            for endpoint in self.run("endpoint", "list").said.get("endpoints", []):
                self.run("endpoint", "stop", endpoint["ref"])
        if self.path.is_dir():
            from deployments.platform.start_stop import down

            down(self.path)

    def folder_of(self, ref: str) -> Path:
        kind, _, rest = ref.partition("/")
        name, _, version = rest.partition("@")
        return self.path / "store" / "artifacts" / kind / name / version

    def wait_for(self, pattern: str, *, timeout: float = 120.0) -> Path:
        """The first path below home that fits a pattern."""
        deadline = time.monotonic() + limit(timeout)
        while time.monotonic() < deadline:
            found = next(iter(self.path.glob(pattern)), None)
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{pattern} did not appear within {timeout} s")


def publish_tiny(home: Home) -> Ran:
    return home.ok("dataset", "publish", "tiny", *(STDLIB / name for name in PACKAGES), "--include", "*.py")


def everything_reused() -> dict[str, str]:
    return dict.fromkeys(STAGES, "reused")
