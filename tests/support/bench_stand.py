"""The benchmark's program as it is launched, on machines that are all this one; and a rank at the bench in this process."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from support import python_path
from waiting import limit

from tasks.hardware.sku import load_sku
from tasks.jobs.node.runtime import Rank
from tasks.jobs.qualify.bench import Bench
from tasks.qualification.measured import read_measurement

ROOT = Path(__file__).parents[2]
SMALL = {"matmul_size": 128, "largest_megabytes": 1, "seconds": 0.5, "rounds": 1}
TRAINING = {
    "sequence_length": 32,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "network": {"layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
}


def settings(*checks, training=TRAINING, **benchmark):
    return {
        "benchmark": {**SMALL, "checks": checks, **benchmark},
        "sku": load_sku("local-cpu").model_dump(mode="json"),
        "training": training,
        "threads": 1,
        "vocab_size": 320,
    }


def bench(folder, *checks, training=TRAINING, **benchmark):
    """One rank alone, in this process."""
    (folder / "out").mkdir(exist_ok=True)
    said = settings(*checks, training=training, **benchmark)
    rank = Rank(folder=folder, rank=0, world_size=1, attempt=1, settings=said, inputs={}, output=folder / "out")
    return Bench(rank)


def probes(measurement, check):
    """Those of one name, by rank."""
    return {report.rank: probe for report in measurement.ranks for probe in report.probes if probe.check == check}


def measured(folder, *, nodes=1, ranks=1):
    return read_measurement(folder / "out", nodes=nodes, ranks_per_node=ranks)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def places(ranks, nodes):
    """Machine, launcher and environment of each process: torchrun on one machine; else ranks with places, as under mpirun."""
    if nodes == 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [(0, torchrun if ranks > 1 else [], {})]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nodes * ranks)}
    local = {"LOCAL_WORLD_SIZE": str(ranks)}
    return [
        (rank // ranks, [], {**meeting, **local, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks)})
        for rank in range(nodes * ranks)
    ]


@contextmanager
def launched(folder, said, *, ranks=1, nodes=1):
    """The launchers' processes; what is left of them is killed, and their ranks with them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"settings": said, "inputs": {}}))
    running = []
    for node, launcher, place in places(ranks, nodes):
        ours = {"HEADWAY_JOB": str(folder), "OMP_NUM_THREADS": "1", "HEADWAY_NODE_NAME": f"node-{node}"}
        running.append(
            subprocess.Popen(
                [sys.executable, *launcher, "-m", "tasks.jobs.benchmark"],
                env={**os.environ, "PYTHONPATH": python_path(ROOT), **ours, **place},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def launch(folder, said, *, ranks=1, nodes=1, seconds=120):
    """Run it to its end; the measurement."""
    with launched(folder, said, ranks=ranks, nodes=nodes) as running:
        ended = [process.wait(limit(seconds)) for process in running]
    logs = "".join(path.read_text() for path in sorted(folder.glob("logs/*.log")))
    assert not any(ended), logs
    assert json.loads((folder / "result.json").read_text())["seconds"] > 0
    return measured(folder, nodes=nodes, ranks=ranks)


def pid_of(folder, rank, *, seconds=60):
    """The process of a rank, as soon as it has registered."""
    deadline = time.monotonic() + limit(seconds)
    while not (folder / "ranks" / f"{rank}.json").exists():
        assert time.monotonic() < deadline, "the rank did not start"
        time.sleep(0.02)
    return json.loads((folder / "ranks" / f"{rank}.json").read_text())["pid"]
