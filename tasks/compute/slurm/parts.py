"""The machines of an elastic job as Slurm's jobs of one node each: their names, scripts, and how often each was submitted.

`rendezvous/parts/K-N.json` is the Nth submission of machine K, create-only and written before sbatch is called, so that nobody
submits it twice; `K.job` is the job that has the part. Who decides what is submitted: elastic.py.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tasks.common.process import read_json
from tasks.compute.job import Job
from tasks.compute.slurm import render
from tasks.compute.slurm.states import QUEUED, Row
from tasks.config.cluster import SlurmConfig

UNHEARD_SECONDS = 60.0
"""After which a submission that nobody knows of never arrived: its answer was lost, or who sent it died."""
STARTING = ("CONFIGURING", "POWER_UP_NODE")
ALIVE = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED", *STARTING, *QUEUED)


@dataclass(frozen=True)
class Part:
    """One machine of an elastic job."""

    job: Job
    folder: Path
    number: int

    @property
    def name(self) -> str:
        """As Slurm knows it."""
        return f"{self.job.submission_id}.e{self.number}"

    @property
    def file(self) -> str:
        return f"part-{self.number}.sbatch"

    def script(self, config: SlurmConfig, seen: Path) -> str:
        """Its batch script; `seen` is the job folder as the nodes see it."""
        one = self.job.model_copy(update={"nodes": 1})
        log = shlex.quote(f"{str(seen).replace('%', '%%')}/part-{self.number}.log")
        own = {"--job-name": f"--job-name={self.name}", "--output": f"--output={log}"}
        options = (own.get(option.partition("=")[0], option) for option in render.options(one, config, seen))
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options if option), ""]
        lines += [*render.setting(one, config, seen), f"part={self.number}"]
        body = resources.files("tasks.compute.slurm").joinpath("elastic_body.sh").read_text(encoding="utf-8")
        step = " \\\n    ".join(render.srun(one, config, seen, rank=str(self.number)))
        return "\n".join([*lines, "", body.replace("@SRUN@", step)])

    def begin(self) -> bool:
        """Write down that it is submitted now; False when somebody else just did."""
        place = self.folder / "rendezvous" / "parts"
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{self.number}-{len(self._submissions()) + 1}.json"
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"time": time.time(), "marker": self._marker()}, file)
        except FileExistsError:
            return False
        (place / f"{self.number}.job").unlink(missing_ok=True)
        return True

    def unheard(self) -> bool:
        """Whether its last submission may still be on its way."""
        last = self._submissions()[-1:]
        return bool(last) and time.time() - float(last[0].get("time", 0.0)) < UNHEARD_SECONDS

    def tries(self) -> int:
        """Submissions since the job last got on."""
        now, count = self._marker(), 0
        for submission in reversed(self._submissions()):
            if submission.get("marker") != now:
                break
            count += 1
        return count

    def _submissions(self) -> list[dict[str, Any]]:
        paths = sorted((self.folder / "rendezvous" / "parts").glob(f"{self.number}-*.json"), key=_number)
        return [_read(path) for path in paths]

    def _marker(self) -> str:
        file = self.folder / self.job.progress
        return hashlib.sha256(file.read_bytes()).hexdigest() if self.job.progress and file.is_file() else ""


def parts_of(job: Job, folder: Path) -> list[Part]:
    """All machines that a job may have."""
    assert job.elastic
    return [Part(job, folder, number) for number in range(job.elastic.max_nodes)]


def newest(rows: list[Row], part: Part) -> Row | None:
    """What Slurm knows of a part: of those that live, else of all, the last one."""
    mine = sorted((row for row in rows if row.name == part.name and not row.refused), key=lambda row: int(row.job))
    return next((row for row in reversed(mine) if row.state in ALIVE), mine[-1] if mine else None)


def bad_machines(folder: Path) -> Iterator[str]:
    """Machines that a health check named."""
    for path in sorted((folder / "errors").glob("node-*.json")):
        report = read_json(path) or {}
        if report.get("class") == "node" and report.get("type") not in ("NodeLost", "NodeMissing"):
            yield from report.get("nodes", [])


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # being written just now
        return {"time": time.time()}
