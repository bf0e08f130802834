"""How often a qualification names exactly what is wrong with a cluster: simulated machines and switches, the product's own plans,
votes and comparison with peers.

Networks have leaf switches and a spine. A pair or a larger group reaches the rate of its slowest part, times noise: so the plans
of the job ask, the answers become a measurement, and the verdict on it is compared with what was planted. Nothing is known of
the hardware but what its peers show. GPUs have noise of their own in every measurement.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tasks.hardware.sku import Sku
from tasks.jobs.qualify.plans import Answer, Found, Outcome, Plan, Standard, Step, collectives_plan, pairs_plan
from tasks.jobs.qualify.schedule import Group
from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, Probe, RankReport, Row, Sweep
from tasks.qualification.verdicts import ClusterVerdict
from tasks.qualification_config import BenchmarkConfig

BARE = Sku(name="simulated", vendor="nvidia", sources={})
"""Only peers judge."""
SKU = BARE.model_validate(
    {
        **BARE.model_dump(),
        "sources": {"page": {"what": "the simulation", "date": datetime.date(2026, 11, 24)}},
        "collectives": [
            {"scope": scope, "bytes": 1 << 30, "norm": 450.0, "warn": 400.0, "fail": 300.0, "source": "page"}
            for scope in ("pair", "all")
        ],
    }
)
"""The levels of ND H100 v5."""
SOUND = 450.0
BYTES = 1 << 30
GPUS = 8
LEAF = 16
"""Machines under a leaf switch."""
SLOW = 0.5
"""What a bad machine, a slow spine or a broken uplink leaves of a rate."""
SEED = 20


class Row_(NamedTuple):
    """One line of the table."""

    judgement: str
    stated: str
    measured: str
    truth: str
    seed: int
    trials: int


class Network(NamedTuple):
    """A simulated cluster with a fault of the network, of machines, or of both."""

    truth: str
    machines: int
    leaf: Mapping[int, int]
    """Leaf switch of each machine."""
    slow: Callable[[int, int], bool] = lambda a, b: False
    """Whether the way between two leaf switches is slow."""
    bad: frozenset[int] = frozenset()

    def rate(self, group: Group) -> float:
        """Without noise."""
        leaves = sorted({self.leaf[node] for node in group})
        ways = any(self.slow(a, b) for a in leaves for b in leaves if a < b)
        return SLOW if ways or self.bad & set(group) else 1.0


def leaves(machines: int, dice: random.Random | None = None, size: int = LEAF) -> dict[int, int]:
    """Machines in the order of their switches, or in any order."""
    order = list(range(machines))
    if dice:
        dice.shuffle(order)
    return {node: place // size for place, node in enumerate(order)}


def spine(a: int, b: int) -> bool:
    """All ways between leaf switches."""
    return True


def first_uplink(a: int, b: int) -> bool:
    """The ways of the first leaf switch."""
    return 0 in (a, b)


def networks(dice: random.Random) -> Iterator[Network]:
    """Each fault once; random ones by the dice."""
    yield Network("64 machines, spine at half speed", 64, leaves(64), spine)
    yield Network("128 machines, spine at half speed", 128, leaves(128), spine)
    yield Network("64 machines, a quarter cut off", 64, leaves(64), first_uplink)
    yield Network("16 machines in two halves", 16, leaves(16, size=8), spine)
    yield Network("32 machines in two halves of 16", 32, leaves(32), spine)
    yield Network("50 machines, spine at half speed, leaves of 16 and 2", 50, leaves(50), spine)
    yield Network("64 machines in any order, spine at half speed", 64, leaves(64, dice), spine)
    yield Network("64 machines in any order, a quarter cut off", 64, leaves(64, dice), first_uplink)


def sound(dice: random.Random) -> Iterator[Network]:
    """Nothing is wrong."""
    for machines in (8, 64, 128):
        yield Network(f"{machines} machines, sound", machines, leaves(machines, dice))


def machines_at_fault(dice: random.Random) -> Iterator[Network]:
    """Machines whose network is slow with everybody."""
    for machines, count in ((8, 1), (64, 1), (64, 8)):
        bad = frozenset(dice.sample(range(machines), count))
        yield Network(f"{machines} machines, {count} at half speed", machines, leaves(machines), bad=bad)


class Cluster:
    """Answers a plan's steps, and keeps them as a measurement has them."""

    def __init__(self, network: Network, noise: float, dice: random.Random) -> None:
        self.network, self.noise, self.dice = network, noise, dice
        self.names = [f"node{number:03}" for number in range(network.machines)]
        self.sweeps: list[Sweep] = []
        self.together: Outcome | None = None

    def run(self, plan: Plan[None]) -> None:
        try:
            step = next(plan)
            while True:
                step = plan.send(self._answer(step))
        except StopIteration:
            return

    def _answer(self, step: Step) -> Answer:
        outcomes = {collective: self._measured(step, collective) for collective in step.collectives}
        if step.scope == "all":
            self.together = outcomes["all_reduce"][step.groups[0]]
        return Answer(outcomes, tuple(range(self.network.machines)))

    def _measured(self, step: Step, collective: str) -> Found:
        found = {}
        for group in step.groups:
            rate = SOUND * self.network.rate(group) * max(0.05, self.dice.gauss(1.0, self.noise))
            found[group] = Outcome("measured", {BYTES: rate})
            self.sweeps.append(
                Sweep(
                    collective=collective,
                    scope=step.scope,
                    nodes=tuple(self.names[node] for node in group),
                    ranks=len(group),
                    backend="nccl",
                    tool="simulated",
                    rows=(Row(bytes=BYTES, busbw=rate, wrong=0),),
                    round=step.round,
                )
            )
        return found


def qualified(network: Network, depth: str, noise: float, dice: random.Random, sku: Sku = SKU) -> ClusterVerdict:
    """The verdict on a network, by the plans of a depth."""
    config = BenchmarkConfig(depth=depth, checks=("collectives", "pairs"))
    standard, cluster = Standard(config, sku), Cluster(network, noise, dice)
    nodes = tuple(range(network.machines))
    cluster.run(collectives_plan(nodes, standard, ranks_per_node=1))
    cluster.run(pairs_plan(nodes, standard, together=cluster.together))
    reports = (RankReport(rank=n, local_rank=0, node=name, host=name, done=config.checks) for n, name in enumerate(cluster.names))
    return judge(_measurement(cluster.names, tuple(reports), tuple(cluster.sweeps)), sku, config)


def _measurement(names: list[str], reports: tuple[RankReport, ...], sweeps: tuple[Sweep, ...] = ()) -> Measurement:
    return Measurement(
        nodes=tuple(names), expected_nodes=len(names), ranks_per_node=1, ranks=reports, sweeps=sweeps
    )


def blamed(verdict: ClusterVerdict) -> set[int]:
    """Machines that are not healthy."""
    return {int(name.removeprefix("node")) for name in verdict.named("degraded", "failed", "unknown")}


def names_the_network(verdict: ClusterVerdict) -> bool:
    """Whether a reason of the cluster blames the network, and not a single link."""
    words = ("network", "between groups", "switch")
    return any(word in f"{r.where} {r.said}" for r in verdict.reasons if r.verdict == "failed" for word in words)


if __name__ == "__main__":
    import sys
    for depth in sys.argv[1].split(","):
        for kind in (networks, sound, machines_at_fault):
            trials = 3
            for number in range(len(list(kind(random.Random(0))))):
                wrong, named, missed = [], 0, 0
                for t in range(trials):
                    dice = random.Random(f"{SEED}-{t}")
                    net = list(kind(dice))[number]
                    v = qualified(net, depth, 0.02, dice, SKU if len(sys.argv)<3 else BARE)
                    b = blamed(v)
                    wrong.append(len(b - net.bad)); named += names_the_network(v); missed += len(net.bad - b)
                print(f"{depth:8} {net.truth:60} blamed sound {wrong} named {named}/{trials} missed {missed}", flush=True)
