"""Run folders and job folders as the flows and jobs of a home write them, for tests of those who look on."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tasks.common import process
from tasks.compute.job import Job, write_folder
from tasks.orchestration.observers import Outcome
from tasks.orchestration.result import RunResult
from tasks.orchestration.run_log import RunLog

ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """What a run's log asks of a lifecycle, and the log itself."""

    home: Path
    identity: str
    subject: str = "tiny"
    flow: str = "retrain"
    config_digest: str = "c0ffee"
    error: BaseException | None = None
    status: str = "completed"
    seconds: float = 1.0
    stopped_at: str = ""
    result: RunResult = field(default_factory=RunResult)

    def __post_init__(self):
        self.flow_run = {"id": self.identity, "url": f"http://127.0.0.1/{self.identity}"}
        self.log = RunLog(self.home, self.identity)
        self.log.opened(self)

    def stage(self, name, status="ran", **fields):
        self.log.started(name, None)
        self.progress(name, 1, 2)
        self.log.ended(Outcome(name, status, 0.5, key="k" * 64, **fields))
        return self

    def progress(self, stage, done, total, text=""):
        self.log._last = 0.0
        self.log.progress(stage, done, total, text, None)

    def close(self, status="completed", error=None, stage=""):
        self.status, self.error, self.stopped_at = status, error, stage
        self.log.closed(self)
        return self


def completed(home, identity, **fields):
    return Run(home, identity, **fields).stage("validate").stage("train").close()


def failed(home, identity, message="the disk is full", **fields):
    return Run(home, identity, **fields).stage("validate").close("failed", RuntimeError(message), "train")


def gate_closed(home, identity, **fields):
    checks = [{"name": "rows", "measured": 3, "limit": ">= 10", "passed": False}]
    run = Run(home, identity, **fields).stage("validate", "gate_closed", checks=checks)
    return run.close("gate_closed", RuntimeError("validation failed"), "validate")


def died(home, identity, subject="tiny"):
    """A run whose process is gone without a word, in the middle of a stage."""
    code = (
        f"import os, pathlib, run_folders; r = run_folders.Run(pathlib.Path({str(home)!r}), {identity!r}, {subject!r});"
        "r.stage('validate'); r.log.started('train', None); os._exit(9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 9


def job(home, name, code, *, restarts=0, stage="train"):
    """A job folder with a real supervised process in it; `code` runs with the folder as `folder`."""
    folder = home / "jobs" / name
    write_folder(Job(name=stage, token="t" * 32, program="-", settings={}, inputs={}), folder)
    argv = [
        sys.executable,
        "-c",
        f"import json, os, pathlib, sys, time; folder = pathlib.Path({str(folder)!r})\n{code}",
    ]
    process.start(folder, process.ProcessSpec(argv=argv, log="launcher.log", restarts=restarts))
    return folder


def metrics(folder, **values):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**values, "attempt": 1, "time": time.time()}) + "\n")
