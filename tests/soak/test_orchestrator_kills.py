"""An orchestrator that is killed at any moment leaves one job, which the next one adopts: `make soak N=100 SEED=1`.

Each round kills one to three orchestrators with SIGKILL, at random moments or at a chosen one of the protocol, and then lets one
finish. The job is a small program that counts its starts and its steps. `make test` runs one round, and `make long` nine.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import limit

from tasks.common import process
from tasks.compute.job import Job
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

ROOT = Path(__file__).parents[2]
ROUNDS, SEED = int(os.environ.get("N", "2")), int(os.environ.get("SEED", "1"))
STEPS = 12
LONGEST = 1.4
"""Seconds in which an orchestrator here comes from its start to the end of the job, on a quiet machine."""
MOMENTS = ("time", "time", "time", "intent", "submitted", "handle")
"""Where an orchestrator is killed: after a time; after its intent is written; after the job is submitted and before its handle is
noted; after that."""
PROGRAM = f"""
import os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    with open(rank.folder.parent / "starts", "a") as file:
        file.write(f"{{rank.attempt}} {{os.getpid()}}\\n")
    for step in range({STEPS}):
        rank.metrics(step=step)
        time.sleep(0.03)
    return {{"steps": {STEPS}}}

if __name__ == "__main__":
    sys.exit(main(run))
"""
ORCHESTRATOR = """
import os, signal, sys
from pathlib import Path
from tasks.config.cluster import ClusterConfig
from tasks.compute.job import Job
from tasks.compute.local import LocalBackend
from tasks.compute.supervisor import run
from tasks.compute.polling import Watch
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

base, moment = Path(sys.argv[1]), sys.argv[3]

def die(at):
    if at == moment:
        os.kill(os.getpid(), signal.SIGKILL)

class Dying(LocalBackend):
    def submit(self, job, folder):
        die("intent")
        handle = super().submit(job, folder)
        die("submitted")
        return handle

class Journal(StoreJournal):
    def put(self, key, value):
        done = super().put(key, value)
        if key.endswith("/handle"):
            die("handle")
        return done

job, config = Job.model_validate_json(sys.argv[2]), ClusterConfig()
watch = Watch(event=lambda event: print(event.kind, event.text, file=sys.stderr))
print(run(job, backend=Dying(config), folder=base / "job", journal=Journal(open_store(base)), watch=watch, cluster=config)
      .model_dump_json())
"""


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10))])
def test_killed_orchestrators_leave_one_job(tmp_path, number):
    one_round(tmp_path, f"1-{number}")


@pytest.mark.parametrize("moment", ["intent", "submitted", "handle"])
def test_every_gap_of_the_protocol_is_survived(tmp_path, moment):
    killed = orchestrator(tmp_path, moment)
    assert killed.wait(limit(30)) == -signal.SIGKILL
    assert finish(tmp_path)["adopted"] is (moment != "intent")
    require_one_job(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_kills_of_orchestrators(tmp_path, number):
    print(f"\nround {number}: {one_round(tmp_path, f'{SEED}-{number}')}", file=sys.stderr)


def one_round(base: Path, seed: str) -> str:
    """Kill one to three orchestrators, then let one finish; says where they were killed."""
    dice, where = random.Random(seed), []
    for _ in range(dice.randrange(1, 4)):
        moment, seconds = dice.choice(MOMENTS), dice.uniform(0.0, LONGEST)
        killed = orchestrator(base, moment)
        if moment == "time":
            time.sleep(seconds)
            killed.kill()
        killed.communicate(
            timeout=limit(60)
        )  # one that adopts does not come to the moments of submitting, and finishes
        done = "finished" if killed.returncode == 0 else moment if moment != "time" else f"{seconds:.2f} s"
        where.append(f"{done} ({len(starts(base))} started)")
    submitted = (base / "job" / "handle.json").exists()
    done = finish(base)
    assert done["adopted"] or not submitted
    require_one_job(base)
    return ", ".join(where)


def orchestrator(base: Path, moment: str) -> subprocess.Popen[str]:
    """A process that supervises the job, and dies at a moment."""
    if not (base / "testjobs").exists():  # once: a job may be about to read it
        (base / "testjobs").mkdir()
        (base / "testjobs" / "__init__.py").touch()
        (base / "testjobs" / "program.py").write_text(PROGRAM)
    job = Job(name="soak", token="6" * 32, program="testjobs.program", settings={}, inputs={})
    return subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, str(base), job.model_dump_json(), moment],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{base}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(base: Path) -> dict[str, object]:
    """An orchestrator that nobody kills comes to the result."""
    out, err = orchestrator(base, "never").communicate(timeout=limit(120))
    assert out, err
    return json.loads(out)


def require_one_job(base: Path) -> None:
    """One start of the program, every step once, one submission in the journal, and nothing left running."""
    assert len(starts(base)) == 1
    steps = [json.loads(line)["step"] for line in (base / "job" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))
    intents = [key for key in StoreJournal(open_store(base)).list("jobs/" + "6" * 32) if key.endswith("/intent")]
    assert len(intents) == 1
    deadline = time.monotonic() + limit(20)
    while process.alive(process.read_json(base / "job" / "handle.json")):
        assert time.monotonic() < deadline, "the job's parent outlives the job"
        time.sleep(0.05)


def starts(base: Path) -> list[str]:
    path = base / "starts"
    return path.read_text().splitlines() if path.exists() else []
