"""How long a training job takes to go on after `kill -9`, and what share of its time is useful when it is killed again and again.

    python -m benchmarks.recovery [--rounds N] [--seed N]
    python -m benchmarks.recovery --goodput [--step-seconds S] [--failures N] [--local-every-steps N] [--seed N]

The job is the tiny training as shipped (deployments/configs/tiny.yaml, with more steps): the local backend's small parent, the
machine's agent, torchrun, two ranks, a writer process beside each, checkpoints every ten steps. *Recovery* kills one rank, all
ranks, torchrun or the agent, in turn, at a seeded moment after a checkpoint. Seconds count from the kill: `noticed`, when
nothing of the attempt runs any more, the others were ended; `begun`, when the next attempt is, after a deliberate pause of 0.4 s;
`training`, when its first step is recorded. `again` are the steps done twice. Goals: noticed in 1 s, training in 15 s.
*Goodput* kills one of them every hundred steps. What a restart costs is absolute, so its share depends on how long a step is: a
tiny step is a hundredth of a second, one of a model worth killing a second or more, so each sleeps as if a GPU were at work.
From the measured restart follows the step length from which 95 % holds. Run on a quiet machine; by `make bench`, without goodput.
"""

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.scratch import scratch
from benchmarks.training import write_tokens
from tasks.common import process
from tasks.compute.job import Job
from tasks.compute.local import LocalBackend
from tasks.config.cluster import ClusterConfig
from tasks.config.files import load
from tasks.planning.spent import goodput

VICTIMS = ("rank", "ranks", "launcher", "agent")
PROGRAMS = {"launcher": "torch.distributed.run", "agent": "tasks.jobs.node"}
STEPS_BETWEEN_FAILURES = 100
GOAL = 0.95
LOOK_SECONDS = 0.005
RECORD_BYTES = 8192
"""More than the last two records of `metrics.jsonl` have."""
BEFORE = {"step": 0, "attempt": 0}
PATIENCE_SECONDS = 300
SLOW = """
import sys, time
from tasks.jobs.node.runtime import main
from tasks.jobs.train import run
from tasks.jobs.training.torch_engine import TorchEngine
plain = TorchEngine.clip
def clip(self):
    time.sleep({seconds})
    return plain(self)
TorchEngine.clip = clip
if __name__ == "__main__":
    sys.exit(main(run))
"""


def measure() -> None:
    given = arguments()
    dice = random.Random(given.seed)
    with scratch() as folder:
        found = useful(folder, given, dice) if given.goodput else recovery(folder, given.rounds, dice)
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count(), **found}, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=2.0, help="what a step sleeps")
    parser.add_argument("--failures", type=int, default=3, help="one every hundred steps")
    parser.add_argument("--local-every-steps", type=int, default=1, help="the second tier; 0: none")
    return parser.parse_args()


class Stand:
    """A running job, and what its processes are."""

    def __init__(self, folder: Path, *, steps: int, local_every: int = 0, slept: float = 0.0) -> None:
        self.folder = folder / "job"
        config = load("tiny", [f"training.steps={steps}", f"execution.local_every_steps={local_every or 'null'}"])
        settings = {
            "training": config.training.model_dump(mode="json"),
            "execution": config.execution.model_dump(mode="json"),
            "checkpoint_every_steps": config.planning.checkpoint.every_steps,
            "keep_checkpoints": config.planning.checkpoint.keep,
        }
        (folder / "slow_training.py").write_text(SLOW.format(seconds=slept))
        job = Job(
            name="train",
            token="0" * 32,
            program="slow_training" if slept else "tasks.jobs.train",
            settings=settings,
            inputs={"tokens": str(write_tokens(folder / "tokens", 400_000))},
            ranks_per_node=2,
            environment={"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[1]}"},
            progress="checkpoints/LATEST",
        )
        LocalBackend(ClusterConfig()).submit(job, self.folder)

    def records(self) -> list[dict[str, Any]]:
        log = self.folder / "metrics.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def newest(self) -> dict[str, Any]:
        """The last record; before there is one, of no step and no attempt."""
        with suppress(OSError), open(self.folder / "metrics.jsonl", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - RECORD_BYTES))
            whole = log.read().rpartition(b"\n")[0].splitlines()
            return dict(json.loads(whole[-1])) if whole else BEFORE
        return BEFORE

    def attempt(self) -> int:
        return int((process.read_json(self.folder / "attempts.json") or {"attempts": 0})["attempts"])

    def saved(self) -> str:
        latest = self.folder / "checkpoints" / "LATEST"
        return latest.read_text() if latest.exists() else ""

    def processes(self) -> dict[str, list[int]]:
        """Those of the attempt that runs, by what they are."""
        handle = process.read_json(self.folder / "handle.json")
        below = {pid: _command(pid) for pid in process.descendants(int(handle["pid"]))}
        found = {kind: [pid for pid, said in below.items() if name in said] for kind, name in PROGRAMS.items()}
        ranks = [rank["pid"] for rank in handle["ranks"] if rank["attempt"] == handle["attempt"]]
        return {**found, "ranks": ranks, "rank": ranks[1:]}

    def running(self) -> bool:
        return process.alive(process.read_json(self.folder / "handle.json"))

    def until(self, said: Callable[[], bool]) -> float:
        """Wait until something is so; when it was, by the monotonic clock. Raises RuntimeError when the job ends before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not said():
            if time.monotonic() > deadline or not self.running():
                raise RuntimeError("".join(path.read_text() for path in sorted(self.folder.glob("logs/*.log"))))
            time.sleep(LOOK_SECONDS)
        return time.monotonic()


@contextmanager
def standing(folder: Path, **how: Any) -> Iterator[Stand]:
    stand = Stand(folder, **how)
    try:
        yield stand
    finally:
        process.stop(stand.folder)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def recovery(folder: Path, rounds: int, dice: random.Random) -> dict[str, Any]:
    """Seconds of every kill, by what was killed: median and worst."""
    taken: dict[str, list[dict[str, float]]] = {what: [] for what in VICTIMS}
    with standing(folder, steps=10_000_000) as stand:
        for what in VICTIMS * rounds:
            settle(stand)
            time.sleep(dice.random())
            taken[what].append(kill(stand, what))
    table = {}
    for what, kills in taken.items():
        columns = {name: [one[name] for one in kills] for name in kills[0]}
        table[what] = {
            name: {"median": statistics.median(all_of), "worst": max(all_of)} for name, all_of in columns.items()
        }
    return {"rounds": rounds, "kills": table}


def settle(stand: Stand) -> None:
    """Wait until the newest attempt has trained and committed a checkpoint of its own."""
    before = stand.saved()
    stand.until(lambda: stand.newest()["attempt"] == stand.attempt() > 0)
    stand.until(lambda: stand.saved() != before)


def kill(stand: Stand, what: str) -> dict[str, float]:
    """`kill -9`, and when what followed."""
    there, attempt, began = stand.processes(), stand.attempt(), time.monotonic()
    everybody = {pid: process.process_started(pid) for kind in ("ranks", "launcher", "agent") for pid in there[kind]}
    assert there[what], f"no {what} to kill"
    for pid in there[what]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    done = stand.newest()["step"]
    seconds = {
        "noticed": stand.until(lambda: not any(process.process_started(pid) == at for pid, at in everybody.items()))
        - began,
        "begun": stand.until(lambda: stand.attempt() > attempt) - began,
        "training": stand.until(lambda: stand.newest()["attempt"] > attempt) - began,
    }
    first = next(record for record in stand.records() if record["attempt"] > attempt)
    return {**seconds, "again": done - first["step"] + 1}


def useful(folder: Path, given: argparse.Namespace, dice: random.Random) -> dict[str, Any]:
    """The share of useful time of a run that is killed every hundred steps, and what a restart cost in it."""
    steps = STEPS_BETWEEN_FAILURES * (given.failures + 1)
    killed = []
    with standing(folder, steps=steps, local_every=given.local_every_steps, slept=given.step_seconds) as stand:
        for number in range(1, given.failures + 1):
            at = STEPS_BETWEEN_FAILURES * number + dice.randrange(10) - 5
            stand.until(lambda at=at: stand.newest()["step"] >= at)
            time.sleep(dice.random() * given.step_seconds)
            what = dice.choice(VICTIMS)
            killed.append({"what": what, **kill(stand, what)})
        stand.until((stand.folder / "result.json").exists)
        spent = goodput(stand.records())
    restart = (spent.idle + spent.restarting) / given.failures
    again = spent.lost / given.failures / (spent.useful / steps)
    return {
        "step_seconds": spent.useful / steps,
        "seconds": {name: round(value, 2) for name, value in vars(spent).items()},
        "shares": {name: round(value, 4) for name, value in spent.causes.items()},
        "goodput": spent.share,
        "goodput_after_the_start": spent.useful / (spent.total - spent.starting),
        "restart_seconds": restart,
        "steps_lost_a_failure": again,
        "goal_holds_from_step_seconds": break_even(restart, again),
        "killed": killed,
    }


def break_even(restart: float, again: float) -> float:
    """Seconds a step from which GOAL holds at a failure every hundred steps: of 100 s + again s + restart, 100 s is useful.

    With N steps between failures: N s >= GOAL ((N + again) s + restart).
    """
    slack = STEPS_BETWEEN_FAILURES * (1 - GOAL) - GOAL * again
    return GOAL * restart / slack if slack > 0 else float("inf")


if __name__ == "__main__":
    measure()
