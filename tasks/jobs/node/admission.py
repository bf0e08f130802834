"""Whether a machine may join an elastic job: one that the qualification did not measure measures itself before it does.

`python -m tasks.jobs.node.admission FOLDER NAME` runs the qualification's own program (tasks/jobs/benchmark.py) as a job of this
one machine, whose folder is `FOLDER/qualified/NAME`, judges what it measured by the same rules (tasks/qualification), and writes
`verdict.json` there. The agent (__main__.py) waits for it, and ranks start only when the verdict is healthy or degraded. What
machines do together is not measured so: that needs them all at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.common.process import boot_id, die_with_parent, read_json, write_json

POLL_SECONDS = 0.2
PROGRAM = "tasks.jobs.benchmark"
OVERHEAD_SECONDS = 120.0
"""To start the program and to end it, beside the groups of checks, which have limits of their own."""


class Refused(Exception):
    """The machine may not join; `report` is what the job's errors say."""

    def __init__(self, name: str, why: str, place: Path) -> None:
        message = f"machine {name} did not qualify, and the job continues without it: {why}"
        super().__init__(message)
        remedy = f"Repair or replace it; what it measured is in {place}."
        self.report = {"type": "NotQualified", "message": message, "remedy": remedy, "class": "node"}


def admitted(job: dict[str, Any], folder: Path, *, name: str, meanwhile: Callable[[], bool]) -> bool:
    """Whether this machine may start ranks; measures it where nobody did. Raises Refused when it is not sound, or may not be.

    `meanwhile` is called again and again; when it is False, the measurement ends, and the answer is no.
    """
    admission = job.get("admission")
    if not admission or name in admission["proven"]:
        return True
    place = folder / "qualified" / name
    verdict = _known(place, job, hours=float(admission["settings"]["benchmark"]["max_age_hours"]))
    if verdict is None:
        print(f"{name}: nobody measured this machine, so it does that itself before it joins", flush=True)
        child = subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.node.admission", str(folder), name],
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        while child.poll() is None:
            if not meanwhile():
                child.terminate()
                child.wait()
                return False
            time.sleep(POLL_SECONDS)
        verdict = _known(place, job)
    if verdict is None:
        raise Refused(name, "its measurement left no verdict", place)
    if not verdict["passed"]:
        raise Refused(name, verdict["why"], place)
    return True


def _known(place: Path, job: dict[str, Any], *, hours: float = float("inf")) -> dict[str, Any] | None:
    """The verdict on this machine since its last boot, not older than that; a bad one holds for its own submission."""
    verdict: dict[str, Any] | None = read_json(place / "verdict.json")
    if not verdict or verdict["boot_id"] != boot_id() or time.time() - verdict["time"] > hours * 3600:
        return None
    return verdict if verdict["passed"] or verdict["submission"] == job["submission"] else None


def main(folder: Path, name: str) -> None:
    """Measure this machine, judge it, and write the verdict down."""
    # Needed by this process only: an agent starts with every attempt in 0.1 s, and the rules take 0.3 s to import.
    from tasks.config.qualification import BenchmarkConfig
    from tasks.hardware.sku import Sku
    from tasks.qualification.judge import judge
    from tasks.qualification.measured import read_measurement
    from tasks.qualification.remaining import as_told, remaining, usable

    die_with_parent()
    job, place, began = read_json(folder / "job.json"), folder / "qualified" / name, time.monotonic()
    settings = job["admission"]["settings"]
    config = BenchmarkConfig.model_validate(settings["benchmark"]).model_copy(update={"nodes": (name,)})
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    own = {"program": PROGRAM, "module": True, "arguments": [], "settings": settings, "inputs": {}, "nodes": 1}
    alone = {"elastic": None, "scratch": None, "launcher": "torchrun", "progress": "", "restarts": 0}
    write_json(place / "job.json", {**job, **own, **alone})
    write_json(place / "config.json", {"program": PROGRAM, "settings": settings, "inputs": {}, "name": job["name"]})
    limits = [config.check_seconds] * (len(config.groups) + 1) + [config.aznhc_seconds, config.soak_seconds]
    error = _measure(place, name, seconds=sum(limits) + OVERHEAD_SECONDS)
    measured = read_measurement(
        place / "out",
        nodes=1,
        ranks_per_node=int(job["ranks_per_node"]),
        error=error,
        seconds=time.monotonic() - began,
    )
    verdict = judge(measured, Sku.model_validate(settings["sku"]), config)
    left = remaining(verdict, config, 1)
    passed = left.verdict in ("healthy", "degraded") and usable(verdict, left) == (name,)
    reasons = [*(reason for node in verdict.nodes for reason in node.reasons), *verdict.reasons]
    result = {
        "passed": passed,
        "why": "" if passed else "; ".join(reason.sentence for reason in reasons[:1]) or f"it is {left.verdict}",
        "boot_id": boot_id(),
        "submission": job["submission"],
        "time": time.time(),
        "seconds": measured.seconds,
        **as_told(verdict),
    }
    write_json(place / "verdict.json", result)
    print(f"{name} is {verdict.verdict} after {measured.seconds:.0f} s of measuring itself", flush=True)


def _measure(place: Path, name: str, *, seconds: float) -> str:
    """Run the program by an agent of its own, as on any machine; why it ended early, where it did."""
    who = {"HEADWAY_NODE_RANK": "0", "HEADWAY_NODE_NAME": name, "HEADWAY_ATTEMPT": "1"}
    command = [sys.executable, "-m", "tasks.jobs.node", str(place)]
    try:
        code = subprocess.run(
            command, env={**os.environ, **who}, stdin=subprocess.DEVNULL, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"it measured itself for longer than {seconds:.0f} s"
    if not code:
        return ""
    reports = [read_json(path) or {} for path in sorted((place / "errors").glob("*.json"))]
    return next((str(report["message"]) for report in reports if report.get("message")), f"it ended with code {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
