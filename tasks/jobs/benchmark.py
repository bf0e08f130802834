"""The program that measures a cluster: the groups of checks, one after another, on every rank at the same time.

Measures only: what is too slow is judged by the stage (tasks/benchmark.py) against tasks/hardware. A group is a file of
tasks/jobs/qualify. What needs no other machine comes first, so that a machine that cannot be reached has said what it found.
See docs/qualification.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tasks.config.qualification import CheckName
from tasks.jobs.node.runtime import Rank, main
from tasks.jobs.qualify import compute, health, soak, steps, storage, training
from tasks.jobs.qualify.bench import Bench

GROUPS: dict[CheckName, Callable[[Bench], None]] = {
    "health": health.measure,
    "compute": compute.measure,
    "memory": compute.measure_memory,
    "storage": storage.measure,
    "collectives": steps.measure,
    "pairs": steps.measure_pairs,
    "training": training.measure,
    "soak": soak.measure,
}
"""In the order in which they run."""


def run(rank: Rank) -> dict[str, Any]:
    """Measure; what is found lies under `out/`, piece by piece."""
    began, bench = time.monotonic(), Bench(rank)
    for name, measure in GROUPS.items():
        if name in bench.config.groups:
            with bench.group(name), soak.watched(bench, name):
                measure(bench)
    bench.leave(seconds=bench.config.check_seconds)
    return {"seconds": time.monotonic() - began}


if __name__ == "__main__":
    sys.exit(main(run))
