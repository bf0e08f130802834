"""Clusters with planted faults and noise, and how often the verdict names exactly them. Pure: seeds in, counts out."""

import itertools
import random
from typing import NamedTuple

from made_measurements import BARE, CPU, config, names, rank, together
from scipy import stats

from tasks.qualification.judge import judge
from tasks.qualification.measured import Probe, Row, Sweep

SETTINGS = config("compute", "pairs")
SLOW = 0.5
"""Rate of a planted part, as a share of a sound one."""
BROKEN = 0.1
"""The same of pairs of CPU machines, whose noise is wider: a link of 50 Mbit/s is 0.01 and less."""


class Scenario(NamedTuple):
    """A kind of cluster."""

    machines: int
    noise: float
    """Standard deviation of a pair's figure, as a share. Of a rank's own rate on CPUs, which is freed of other work: a third."""
    fault: str
    """none, a machine's network or compute, several of them, a link, a rack, half."""
    vendor: str = "nvidia"
    rounds: int = 1
    """Most times that slow pairs are measured."""

    def __str__(self) -> str:
        return f"{self.machines} machines, noise {self.noise:.0%}, {self.fault}, {self.vendor}, {self.rounds} rounds"


class Planted(NamedTuple):
    """What is wrong: machines by what is slow, and links."""

    network: frozenset = frozenset()
    compute: frozenset = frozenset()
    rack: frozenset = frozenset()
    links: frozenset = frozenset()

    @property
    def nodes(self):
        """At fault; the machines of a rack are not, their switch is."""
        return self.network | self.compute


def plant(scenario: Scenario, dice: random.Random) -> Planted:
    """Choose the machines."""
    count = scenario.machines
    some = {"network": 1, "compute": 1, "half network": count // 2, "half compute": count // 2}
    if scenario.fault == "link":
        return Planted(links=frozenset([tuple(sorted(dice.sample(range(count), 2)))]))
    if scenario.fault == "rack":
        first = dice.randrange(4) * (count // 4)
        return Planted(rack=frozenset(range(first, first + count // 4)))
    if scenario.fault in some:
        return Planted(**{scenario.fault.split()[-1]: frozenset(dice.sample(range(count), some[scenario.fault]))})
    return Planted()


def measured(scenario: Scenario, planted: Planted, dice: random.Random):
    """Compute of every machine, and every pair; a pair that came out slow is measured again."""
    named = names(scenario.machines)

    def noisy(rate: float, share: float = 1.0) -> float:
        return rate * max(0.05, dice.gauss(1.0, share * scenario.noise))

    def pair(a: int, b: int) -> float:
        across = len({a, b} & planted.rack) == 1
        bad = {a, b} & planted.network or (a, b) in planted.links or across
        return (BROKEN if scenario.vendor == "cpu" else SLOW) if bad else 1.0

    ranks = []
    for n, name in enumerate(named):
        rate = noisy(SLOW if n in planted.compute else 1.0, 1 / 3 if scenario.vendor == "cpu" else 1.0)
        ranks.append(rank(n, name, Probe(check="matmul_bf16", measured=rate, peers=rate)))
    sweeps = []
    for a, b in itertools.combinations(range(scenario.machines), 2):
        tries = [noisy(pair(a, b))]
        while min(tries[-1:]) < 0.75 and len(tries) < scenario.rounds:
            tries.append(noisy(pair(a, b)))
        made = {"collective": "all_reduce", "scope": "pair", "nodes": (named[a], named[b]), "ranks": 2}
        made |= {"backend": "nccl", "tool": "simulated"}
        sweeps += [Sweep(rows=(Row(bytes=1 << 30, busbw=v, wrong=0),), round=n, **made) for n, v in enumerate(tries)]
    return together(ranks, sweeps)


class Rates(NamedTuple):
    """Of so many clusters."""

    clusters: int
    found: int
    """All that was planted was named, and nothing else."""
    missed: int
    """Something that was planted was not named."""
    false: int
    """Something sound was named: a machine or a link."""

    def interval(self, count: int) -> tuple[float, float]:
        """Clopper and Pearson's exact 95 % interval of a share."""
        low = stats.beta.ppf(0.025, count, self.clusters - count + 1) if count else 0.0
        high = stats.beta.ppf(0.975, count + 1, self.clusters - count) if count < self.clusters else 1.0
        return float(low), float(high)

    def __str__(self) -> str:
        def shown(what: str, count: int) -> str:
            low, high = self.interval(count)
            return f"{what} {count / self.clusters:.1%} [{low:.1%}, {high:.1%}]"

        return "  ".join((shown("exact", self.found), shown("missed", self.missed), shown("false", self.false)))


def simulate(scenario: Scenario, clusters: int, seed: int) -> Rates:
    """Plant, measure, judge, count."""
    found = missed = false = 0
    for number in range(clusters):
        dice = random.Random(f"{seed}-{number}-{scenario}")
        planted = plant(scenario, dice)
        sku = CPU if scenario.vendor == "cpu" else BARE
        verdict = judge(measured(scenario, planted, dice), sku, SETTINGS)
        blamed = {int(name.removeprefix("node")) for name in verdict.named("failed", "unknown")}
        links = {
            tuple(int(name.removeprefix("node")) for name in r.nodes)
            for r in verdict.reasons
            if r.where.startswith("link")
        }
        groups = {frozenset(int(name.removeprefix("node")) for name in group) for group in verdict.groups}
        racks = {planted.rack, frozenset(range(scenario.machines)) - planted.rack} if planted.rack else set()
        missed += not (planted.nodes <= blamed and planted.links <= links and racks <= groups)
        false += bool(blamed - planted.nodes or links - planted.links or groups - racks)
        found += (blamed, links, groups) == (planted.nodes, planted.links, racks)
    return Rates(clusters, found, missed, false)
