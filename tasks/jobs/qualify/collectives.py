"""Collectives within every machine, over all machines and over pairs, in nccl-tests' terms: size, algbw, busbw, wrong elements.

What is measured in which order is plans.py, how steps.py.
"""

from __future__ import annotations

from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.plans import PAIRS, Group, Standard, collectives_plan, pairs_plan
from tasks.jobs.qualify.steps import LeftOut, agree, names_of_all, note_left_out, remembered, run

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


# Pairs of machines in a tournament, and fresh runs until what is slow has a machine, a link or no explanation.
#
# The tournament and the search are plans.py; how a pair is measured is steps.py.


PAIRS_GROUP = "pairs"


def measure_pairs(bench: Bench) -> None:
    """Write the sweeps, where there are several machines."""
    if bench.nodes == 1:
        return
    names = names_of_all(bench, PAIRS_GROUP)
    if not names:
        return
    nodes = _by_switch(bench, tuple(names))
    if not nodes:
        return
    together = remembered(bench, GROUP, "all", nodes, PAIRS[0])
    run(bench, PAIRS_GROUP, pairs_plan(nodes, Standard(bench.config, bench.sku), together=together), names)


def _by_switch(bench: Bench, nodes: Group) -> Group:
    """Machines of one switch one after another, so that neighbours are near; as they are numbered where no switch is known.

    Empty where this machine hears nobody.
    """
    try:
        switches = agree(
            bench, f"{PAIRS_GROUP}/switches", bench.switch, among=nodes, seconds=bench.config.check_seconds
        )
    except LeftOut as left:
        note_left_out(bench, PAIRS_GROUP, left)
        return ()
    return tuple(sorted(switches, key=lambda node: (switches[node], node)))
