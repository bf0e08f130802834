"""What it costs to wait for many queued jobs: the share of one core that asking the scheduler takes, and supervisors with it.

`python -m benchmarks.polling [--jobs N] [--seconds S]`. Polling: one poller looks at N jobs that a Slurm has queued; squeue is a
small executable that prints all of them at every call. With supervisors: N real ones in one process, each in a thread of its own,
which also asks whether its run was cancelled. This process and the commands that it starts are told apart. The limit of polling
is 2 % of one core; threads that wake cost more where other work has the cores, so the load is told. Run by `make bench`.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.scratch import scratch

LIMIT = 0.02
SBATCH = """#!/bin/sh
exec {python} -S -c 'import fcntl, sys
file = open(sys.argv[1] + "/next", "a+"); fcntl.flock(file, 2); file.seek(0)
number = int(file.read() or 100000) + 1
file.truncate(0); file.write(str(number)); file.close()
name = next(word.partition("=")[2] for line in open(sys.argv[-1]) for word in line.split() if word.startswith("--job-name="))
open(sys.argv[1] + "/queue", "a").write("%d|%s|PENDING|Priority|0|0|(null)|\\n" % (number, name)); print(number)' {stand} "$@"
"""
SQUEUE = """#!/bin/sh
echo >> {stand}/asked
exec cat {stand}/queue
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    chosen = parser.parse_args()
    with scratch() as folder:
        stand = scheduler(folder / "stand")
        told = {"jobs": chosen.jobs, "polling": polled(folder, stand, chosen.jobs, chosen.seconds)}
        told["with supervisors"] = supervised_for(folder, stand, chosen.jobs, chosen.seconds)
    print(json.dumps(told, indent=1))
    for name in ("polling", "with supervisors"):
        row = told[name]
        line = (
            f"{chosen.jobs} queued jobs, {name}: {row['looks']} looks in {row['seconds']:.0f} s, load {row['load']:.0f}"
        )
        print(f"{line}: {row['process']:.2%} of a core, commands {row['commands']:.2%}", file=sys.stderr)
    sys.exit(told["polling"]["process"] + told["polling"]["commands"] > LIMIT)


def scheduler(stand: Path) -> Path:
    """Executables that speak for a Slurm whose queue never moves, alone on PATH."""
    stand.mkdir()
    (stand / "queue").touch()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (stand / name).write_text(text.format(python=sys.executable, stand=stand))
        (stand / name).chmod(0o755)
    for name in ("sinfo", "scancel", "scontrol"):
        (stand / name).write_text("#!/bin/sh\nexit 0\n")
        (stand / name).chmod(0o755)
    os.environ["PATH"] = f"{stand}{os.pathsep}{Path(shutil.which('cat')).parent}"
    return stand


def polled(folder: Path, stand: Path, jobs: int, seconds: float) -> dict[str, float]:
    """The poller alone: `states` for all jobs, every `poll_seconds`."""
    from tasks.compute import open_backend
    from tasks.compute.polling import Poller
    from tasks.config.cluster import ClusterConfig

    names = [f"headway-queued-{number:012x}-1" for number in range(jobs)]
    lines = (f"{500_000 + number}|{name}|PENDING|Priority|0|0|(null)|\n" for number, name in enumerate(names))
    (stand / "queue").write_text("".join(lines))
    poller = Poller(open_backend(ClusterConfig.model_validate({"backend": "slurm"})))
    with ExitStack() as watched:
        for number, name in enumerate(names):
            handle = {"job": str(500_000 + number), "name": name, "submission": 1, "array": 0}
            watched.enter_context(poller.watching(handle, folder / name))
        told = measured(stand, seconds)
    (stand / "queue").write_text("")
    return told


def supervised_for(folder: Path, stand: Path, jobs: int, seconds: float) -> dict[str, float]:
    """The same with a real supervisor for each job, all in this process."""
    queued, over = supervised(folder, jobs)
    wait_until(lambda: len(queued) == jobs, 600)
    told = measured(stand, seconds)
    over.set()
    return told


def measured(stand: Path, seconds: float) -> dict[str, float]:
    """Shares of one core over some seconds in which nothing changes."""
    time.sleep(10)
    asked, began, before = looks(stand), time.monotonic(), spent()
    time.sleep(seconds)
    after, took = spent(), time.monotonic() - began
    shares = {who: (after[who] - before[who]) / took for who in after}
    return {"seconds": took, "looks": looks(stand) - asked, "load": os.getloadavg()[0], **shares}


def supervised(folder: Path, jobs: int) -> tuple[set, threading.Event]:
    """Start so many supervisors; who is queued, and what ends them all."""
    from tasks.common.errors import Cancelled
    from tasks.compute import open_backend
    from tasks.compute.job import Job
    from tasks.compute.polling import Watch
    from tasks.compute.supervisor import run
    from tasks.config.cluster import ClusterConfig
    from tasks.registry.records import StoreJournal
    from tasks.storage import open_store

    cluster = ClusterConfig.model_validate({"backend": "slurm"})
    journal, queued, over = StoreJournal(open_store(folder / "store")), set(), threading.Event()

    def supervise(number: int) -> None:
        job = Job(name="queued", token=f"{number:032x}", program="tasks.jobs.train", settings={}, inputs={})
        watch = Watch(
            event=lambda event: queued.add(number) if event.kind == "queued" else None, cancelled=lambda: over.is_set()
        )
        backend = open_backend(cluster)
        try:
            run(job, backend=backend, folder=folder / f"job-{number}", journal=journal, watch=watch, cluster=cluster)
        except Cancelled:
            return

    for number in range(jobs):
        threading.Thread(target=supervise, args=(number,), daemon=True).start()
        if number % 20 == 19:
            wait_until(lambda number=number: len(list(folder.glob("job-*/job.sbatch"))) >= number - 20, 60)
    return queued, over


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the jobs were not queued in time")
        time.sleep(0.1)


def looks(stand):
    path = stand / "asked"
    return path.stat().st_size if path.exists() else 0


def spent():
    """Seconds of processor time: of this process, and of commands that ended."""
    mine, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"process": mine.ru_utime + mine.ru_stime, "commands": children.ru_utime + children.ru_stime}


if __name__ == "__main__":
    main()
