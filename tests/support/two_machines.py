"""Machines of a job, all on this one: the parent and the agent of each, as a backend starts them, and a launcher without torch.

The launcher stands in for torchrun where a test is about the agents: it starts the ranks, forwards SIGTERM and fails when one
does. What a real torchrun does is seen in test_node.py's first test.
"""

import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from support import python_path
from waiting import limit, until

from tasks.common.process import descendants, read_json
from tasks.compute.job import Job
from tasks.compute.nodes import node_command, node_environment, write_nodes
from tasks.config.cluster import WatchConfig

TORCHRUN = """
import os, signal, subprocess, sys, time
options, rest = {}, sys.argv[1:]
while rest[0].startswith("--"):
    options[rest[0]], rest = rest[1], rest[2:]
node, each = int(options.get("--node-rank", 0)), int(options["--nproc-per-node"])
world = int(options.get("--nnodes", 1)) * each
ranks = []
for local in range(each):
    env = {**os.environ, "RANK": str(node * each + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
    ranks.append(subprocess.Popen([sys.executable, *rest], env=env))
def stop(*_):
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.wait()
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
while any(rank.poll() is None for rank in ranks):
    if any(rank.poll() for rank in ranks):
        stop()
    time.sleep(0.05)
sys.exit(max(abs(rank.returncode) for rank in ranks))
"""


def belonging(folder):
    """Every process of a job on this machine, but the parents: by the environment that its launcher gave it."""
    mark, found = f"HEADWAY_JOB={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@dataclass
class Machines:
    """A job folder, and the parents that were started in it."""

    base: Path
    torch: bool = False
    silent: float = 20.0
    parents: dict = field(default_factory=dict)

    @property
    def folder(self):
        return self.base / "job"

    def job(self, program, **fields):
        """A job of one rank a machine whose program is Python text; `rank` and `settings` come from runtime.main."""
        path = self.base / "program.py"
        path.write_text(program)
        watch = WatchConfig(silent_node_seconds=self.silent, join_node_seconds=60, probe_seconds=5, grace_seconds=2)
        plain = {"name": "t", "token": "a" * 32, "program": str(path), "module": False, "settings": {}, "inputs": {}}
        return Job(**{**plain, "nodes": 2, "watch": watch, **fields})

    def write(self, job):
        write_nodes(job, self.folder)

    def start(self, job, *ranks, **environment):
        """Start the parents of machines n0, n1, ..."""
        shim = self.base / "shim"
        if not self.torch:
            (shim / "torch" / "distributed").mkdir(parents=True, exist_ok=True)
            for name, text in (("__init__.py", ""), ("distributed/__init__.py", ""), ("distributed/run.py", TORCHRUN)):
                (shim / "torch" / name).write_text(text)
        for rank in ranks:
            env = {**os.environ, **node_environment(job), **environment}
            env |= {"HEADWAY_LEADER": "127.0.0.1", "HEADWAY_NODE_NAME": f"n{rank}"}
            env["PYTHONPATH"] = (
                python_path(env["PYTHONPATH"]) if self.torch else os.pathsep.join([str(shim), env["PYTHONPATH"]])
            )
            self.parents[rank] = subprocess.Popen(node_command(job, self.folder, rank), env=env)

    def run(self, job, **environment):
        """Run a job on its machines until all have ended; how they did."""
        self.write(job)
        self.start(job, *range(job.nodes), **environment)
        return [self.ended(rank) for rank in range(job.nodes)]

    def ended(self, rank):
        """How a machine's parent ended, by its own word."""
        self.parents[rank].wait(limit(60))
        return read_json(self.folder / "nodes" / str(rank) / "exit.json")

    def lose(self, rank):
        """A machine that is gone: its parent and all below it, at once."""
        parent = self.parents[rank]
        for pid in (parent.pid, *descendants(parent.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        parent.wait()

    def file(self, name):
        return read_json(self.folder / name)

    def ranks_run(self, count, attempt=1):
        """Wait until so many ranks are there."""
        return until(lambda: self._ranks(attempt) if len(self._ranks(attempt)) == count else None)

    def _ranks(self, attempt):
        said = [read_json(path) for path in (self.folder / "ranks").glob("*.json")]
        return [rank for rank in said if rank and rank["attempt"] == attempt]

    def end(self):
        """Nothing that was started is left."""
        for rank, parent in self.parents.items():
            if parent.poll() is None:
                self.lose(rank)
        for pid in belonging(self.folder):
            os.kill(pid, signal.SIGKILL)
