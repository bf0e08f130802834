"""Collectives within every machine and over all machines, in nccl-tests' terms: size, algbw, busbw, wrong elements.

What is measured in which order is plans.py, how steps.py; pairs of machines are pairs.py.
"""

from __future__ import annotations

from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.plans import Standard, collectives_plan
from tasks.jobs.qualify.steps import names_of_all, run

GROUP = "collectives"


def measure(bench: Bench) -> None:
    """Write the sweeps, where there are several ranks."""
    if bench.world_size == 1:
        return
    names = names_of_all(bench, GROUP)
    if not names:
        return
    standard = Standard(bench.config, bench.sku)
    run(bench, GROUP, collectives_plan(tuple(names), standard, ranks_per_node=bench.ranks_per_node), names)
