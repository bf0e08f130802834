"""What it costs to supervise many queued jobs: the share of one core that asking the scheduler and waiting takes.

`python -m benchmarks.polling [--jobs N] [--seconds S]`. N real supervisors in one process, each with a job that a Slurm has
queued; sbatch and squeue are small executables, and squeue prints all N jobs at every call. The jobs never start. This process
and the commands that it starts are told apart. The limit is 2 % of one core. Run by `make bench`.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        told = measured(Path(folder), chosen.jobs, chosen.seconds)
    print(json.dumps(told, indent=1))
    line = f"{told['jobs']} queued jobs, {told['looks']} looks in {told['seconds']:.0f} s"
    mine, children = told["supervisors"], told["commands"]
    print(f"{line}: {mine:.2%} of a core, commands {children:.2%}, together {mine + children:.2%}", file=sys.stderr)
    sys.exit(mine + children > LIMIT)


def measured(folder: Path, jobs: int, seconds: float) -> dict[str, float]:
    """Shares of one core over some seconds in which all jobs are queued."""
    stand = folder / "stand"
    stand.mkdir()
    (stand / "queue").touch()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (stand / name).write_text(text.format(python=sys.executable, stand=stand))
        (stand / name).chmod(0o755)
    for name in ("sinfo", "scancel", "scontrol"):
        (stand / name).write_text("#!/bin/sh\nexit 0\n")
        (stand / name).chmod(0o755)
    os.environ["PATH"] = f"{stand}{os.pathsep}{Path(shutil.which('cat')).parent}"
    queued, over = supervised(folder, jobs)
    wait_until(lambda: len(queued) == jobs, 600)
    time.sleep(6)
    asked, began, before = looks(stand), time.monotonic(), spent()
    time.sleep(seconds)
    after, took = spent(), time.monotonic() - began
    over.set()
    shares = {who: (after[who] - before[who]) / took for who in after}
    return {"jobs": jobs, "seconds": took, "looks": looks(stand) - asked, **shares}


def supervised(folder: Path, jobs: int) -> tuple[set, threading.Event]:
    """Start so many supervisors; who is queued, and what ends them all."""
    from tasks.cluster_config import ClusterConfig
    from tasks.compute import open_backend
    from tasks.compute.job import Job
    from tasks.compute.supervisor import run
    from tasks.compute.watching import Watch
    from tasks.errors import Cancelled
    from tasks.registry.journal import StoreJournal
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
    return {"supervisors": mine.ru_utime + mine.ru_stime, "commands": children.ru_utime + children.ru_stime}


if __name__ == "__main__":
    main()
