"""How often a qualification names exactly what is wrong with a cluster: simulated machines and switches, the product's own plans,
votes and comparison with peers.

Networks have leaf switches and a spine. Each group of machines reaches the rate of its slowest part, times noise: the job's plans
ask, the answers become a measurement, and the verdict on it is compared with what was planted. GPUs have noise of their own in
each measurement. `python -m benchmarks.operating_characteristics.nodes` prints the table of docs/qualification.md.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from scipy import stats

from benchmarks.operating_characteristics import Line
from tasks.config.qualification import BenchmarkConfig, Collective
from tasks.hardware.sku import Sku
from tasks.jobs.qualify.plans import Answer, Found, Group, Outcome, Plan, Standard, Step, collectives_plan, pairs_plan
from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, RankReport, Row, Sweep
from tasks.qualification.peers import Rate, against_peers
from tasks.qualification.verdicts import ClusterVerdict

BARE = Sku(name="simulated", vendor="nvidia", sources={})
"""Hardware of which nothing is known: only peers judge."""
KNOWN = Sku.model_validate(
    {
        **BARE.model_dump(),
        "sources": {"page": {"what": "levels of nd96isr_h100_v5", "date": datetime.date(2026, 11, 24)}},
        "collectives": [
            {"scope": scope, "bytes": 1 << 30, "norm": 450.0, "warn": 400.0, "fail": 300.0, "source": "page"}
            for scope in ("pair", "all")
        ],
    }
)
"""Hardware with limits for pairs."""
BYTES = 1 << 30
SOUND = 450.0
"""GB/s of a sound pair."""
GPUS = 8
LEAF = 16
"""Machines under a leaf switch."""
CHECKS = ("matmul_bf16", "matmul_fp8", "memory_bandwidth", "host_to_device", "device_to_host", "peer_to_peer")
"""Rates that every GPU has, of which the first one is planted."""
SEED = 20
NOISE_OF_PAIRS = 0.02
NOISE = (0.01, 0.02, 0.03, 0.05)
SIZES = (8, 16, 64)


class Network(NamedTuple):
    """A simulated cluster, and what is wrong with it."""

    truth: str
    leaf: Mapping[int, int]
    """Leaf switch of each machine."""
    slow: Callable[[int, int], bool] = lambda a, b: False
    """Whether the way between two leaf switches is bad."""
    bad: frozenset[int] = frozenset()
    """Machines that are slow with everybody."""
    left: float = 0.5
    """Of the rate, where something is bad."""
    switches: bool = False
    """Whether the scheduler says which switch a machine is under."""

    def rate(self, group: Group) -> float:
        """Without noise, as a share of the sound one."""
        leaves = sorted({self.leaf[node] for node in group})
        ways = any(self.slow(a, b) for a in leaves for b in leaves if a < b)
        return self.left if ways or self.bad & set(group) else 1.0


def leaves(machines: int, dice: random.Random | None = None, size: int = LEAF) -> dict[int, int]:
    """Machines in the order of their switches; with dice in any order."""
    order = list(range(machines))
    if dice:
        dice.shuffle(order)
    return {node: place // size for place, node in enumerate(order)}


def spine(a: int, b: int) -> bool:
    """All ways between leaf switches."""
    return True


def uplink(a: int, b: int) -> bool:
    """The ways of the first leaf switch."""
    return 0 in (a, b)


def network_faults(dice: random.Random) -> Iterator[Network]:
    """Each once: no machine is at fault."""
    yield Network("64 machines, spine at half speed", leaves(64), spine)
    yield Network("128 machines, spine at half speed", leaves(128), spine)
    yield Network("64 machines, a quarter cut off", leaves(64), uplink)
    yield Network("16 machines in two halves", leaves(16, size=8), spine)
    yield Network("32 machines in two halves", leaves(32), spine)
    yield Network("50 machines, spine at half speed, two of them under a switch of their own", leaves(50), spine)
    yield Network("64 machines, spine at 0.65 of its speed", leaves(64), spine, left=0.65)
    yield Network("64 machines in any order, spine at half speed", leaves(64, dice), spine)
    yield Network("64 machines in any order, a quarter cut off", leaves(64, dice), uplink)


def sound(dice: random.Random) -> Iterator[Network]:
    """Nothing is wrong."""
    for machines in (8, 64, 128):
        yield Network(f"{machines} machines, sound", leaves(machines, dice))


def machine_faults(dice: random.Random) -> Iterator[Network]:
    """Machines that are slow with everybody, the network sound or not."""
    for machines, count in ((8, 1), (64, 1), (64, 8)):
        bad = frozenset(dice.sample(range(machines), count))
        yield Network(f"{machines} machines, {count} at half speed with all others", leaves(machines), bad=bad)
    bad = frozenset([dice.randrange(64)])
    truth = "64 machines, spine at half speed, and a machine at half speed with all others"
    yield Network(truth, leaves(64), spine, bad=bad)
    yield Network(f"{truth}; switches known", leaves(64), spine, bad=bad, switches=True)


class Cluster:
    """Answers a plan's steps, and keeps the answers as sweeps of a measurement. State: dice, sweeps."""

    def __init__(self, network: Network, noise: float, dice: random.Random) -> None:
        self.network, self.noise, self.dice = network, noise, dice
        self.nodes = tuple(range(len(network.leaf)))
        self.names = tuple(f"node{number:03}" for number in self.nodes)
        self.sweeps: list[Sweep] = []
        self.together: Outcome | None = None
        self.rounds = 0

    def run(self, plan: Plan[None]) -> None:
        """Follow it to its end."""
        try:
            step = next(plan)
            while True:
                step = plan.send(self._answer(step))
        except StopIteration:
            return

    def measurement(self) -> Measurement:
        """What the machines would have left."""
        reports = (
            RankReport(
                rank=number,
                local_rank=0,
                node=name,
                host=name,
                machine={"switch": f"leaf{self.network.leaf[number]}"} if self.network.switches else {},
                done=("collectives", "pairs"),
            )
            for number, name in enumerate(self.names)
        )
        return Measurement(
            nodes=self.names,
            expected_nodes=len(self.names),
            ranks_per_node=1,
            ranks=tuple(reports),
            sweeps=tuple(self.sweeps),
        )

    def _answer(self, step: Step) -> Answer:
        outcomes = {collective: self._measured(step, collective) for collective in step.collectives}
        if step.scope == "all":
            self.together = outcomes["all_reduce"][step.groups[0]]
        self.rounds += step.scope == "pair"
        return Answer(outcomes, self.nodes)

    def _measured(self, step: Step, collective: Collective) -> Found:
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


def qualified(network: Network, depth: str, dice: random.Random, *, sku: Sku = KNOWN) -> ClusterVerdict:
    """The verdict on a network, by the plans of a depth."""
    config = BenchmarkConfig.model_validate({"depth": depth, "checks": ("collectives", "pairs")})
    standard, cluster = Standard(config, sku), Cluster(network, NOISE_OF_PAIRS, dice)
    cluster.run(collectives_plan(cluster.nodes, standard, ranks_per_node=1))
    cluster.run(pairs_plan(cluster.nodes, standard, together=cluster.together))
    return judge(cluster.measurement(), sku, config)


def blamed(verdict: ClusterVerdict) -> set[int]:
    """Machines that are not healthy."""
    return {int(name.removeprefix("node")) for name in verdict.named("degraded", "failed", "unknown")}


def names_the_network(verdict: ClusterVerdict) -> bool:
    """Whether a reason of the cluster blames the network, and not a single link."""
    about = (f"{r.where} {r.said}" for r in verdict.reasons if not r.check.startswith("all_reduce of"))
    return any("network" in text or "switch" in text for text in about)


class Tally(NamedTuple):
    """Of so many clusters."""

    clusters: int
    blamed: int
    """Sound machines that were blamed, in all of them."""
    wrong: int
    """Clusters in which one was."""
    missed: int
    """Clusters in which a machine at fault was not named."""
    network: int
    """Clusters in which the network was named."""


def tally(faults: Callable[[random.Random], Iterator[Network]], number: int, depth: str, *, trials: int) -> Tally:
    """One fault of several, over and over."""
    counts = [0, 0, 0, 0]
    for trial in range(trials):
        dice = random.Random(f"{SEED}-{depth}-{number}-{trial}")
        network = [*faults(dice)][number]
        # Half of them without limits for pairs: peers alone must do.
        verdict = qualified(network, depth, dice, sku=(KNOWN, BARE)[trial % 2])
        named = blamed(verdict)
        counts[0] += len(named - network.bad)
        counts[1] += bool(named - network.bad)
        counts[2] += not network.bad <= named
        counts[3] += names_the_network(verdict)
    return Tally(trials, *counts)


def slow_machine(
    machines: int, noise: float, depth: str, *, slower: float, trials: int, count: int = 1
) -> tuple[int, int]:
    """Clusters in which all machines whose GPUs are all slower in one rate were named, and clusters in which a sound one was.

    Where machines are slow, the other rates have no noise: they are there for the comparisons that they add.
    """
    config = BenchmarkConfig.model_validate({"depth": depth})
    found = false = 0
    for trial in range(trials):
        dice = random.Random(f"{SEED}-{machines}-{noise}-{depth}-{slower}-{count}-{trial}")
        slow = set(dice.sample(range(machines), count)) if slower else set()
        rates = [
            Rate(f"node{node:03}", f"GPU {gpu}", check, max(each), "TFLOP/s", each)
            for node in range(machines)
            for check in CHECKS
            for share in [1.0 - slower if node in slow and check == CHECKS[0] else 1.0]
            for gpu in range(GPUS)
            for spread in [noise if check == CHECKS[0] or not slow else 0.0]
            for each in [tuple(share * (dice.gauss(1.0, spread) if spread else 1.0) for _ in range(config.repeats))]
        ]
        named = {int(reason.node.removeprefix("node")) for reason in against_peers(rates, BARE, config) if reason.node}
        found += slow <= named
        false += bool(named - slow)
    return found, false


def share(count: int, trials: int) -> str:
    """With Clopper and Pearson's exact 95 % interval."""
    low, high = stats.binomtest(count, trials).proportion_ci(method="exact")
    return f"{count / trials:.1%} [{low:.1%}, {high:.1%}]"


def rows(quick: bool) -> Iterator[Line]:
    """All of it: seconds with `quick`, else minutes."""
    for depth, trials in (("quick", 40), ("standard", 40), ("full", 10)):
        yield from _network_rows(depth, trials=2 if quick else trials)
    for depth in ("quick", "standard"):
        yield from _power_rows(depth, trials=10 if quick else 500)


def _network_rows(depth: str, *, trials: int) -> Iterator[Line]:
    for faults, stated in (
        (network_faults, "0 machines blamed, the network named"),
        (sound, "0 machines blamed, nothing named"),
        (machine_faults, "exactly these machines named"),
    ):
        for number, network in enumerate(faults(random.Random(0))):
            seen = tally(faults, number, depth, trials=trials)
            said = [f"{seen.blamed} sound machines blamed", f"network named in {seen.network} of {seen.clusters}"]
            if network.bad:
                said.append(f"machines missed in {seen.missed} of {seen.clusters}")
            yield Line(f"nodes: pairs, {depth}", stated, "; ".join(said), network.truth, SEED, trials)


def _power_rows(depth: str, *, trials: int) -> Iterator[Line]:
    for machines in SIZES:
        for noise in NOISE:
            _, false = slow_machine(machines, noise, depth, slower=0.0, trials=trials)
            truth = f"{machines} sound machines, noise {noise:.0%}"
            yield Line(
                f"nodes: rates, {depth}", "<= 1 % of clusters", f"blamed in {share(false, trials)}", truth, SEED, trials
            )
    for machines, noise, slower, stated in (
        (64, 0.02, 0.10, ">= 95 %"),
        (8, 0.03, 0.10, ">= 95 %" if depth == "standard" else "see docs/qualification.md"),
        (64, 0.03, 0.10, ">= 95 %"),
        (64, 0.05, 0.20, ">= 95 %"),
    ):
        found, _ = slow_machine(machines, noise, depth, slower=slower, trials=trials)
        truth = f"1 of {machines} machines, all GPUs {slower:.0%} slow in one rate, noise {noise:.0%}"
        yield Line(f"nodes: rates, {depth}", stated, f"found in {share(found, trials)}", truth, SEED, trials)


def main() -> None:
    """Print the table of powers."""
    trials = 200
    print("| machines | depth | slower | " + " | ".join(f"noise {noise:.0%}" for noise in NOISE) + " |")
    print("| --- | --- | --- |" + " --- |" * len(NOISE))
    for machines in SIZES:
        for depth in ("quick", "standard"):
            for slower in (0.0, 0.05, 0.10, 0.20):
                cells = []
                for noise in NOISE:
                    found, false = slow_machine(machines, noise, depth, slower=slower, trials=trials)
                    cells.append(f"{(found if slower else false) / trials:.0%}")
                what = f"{slower:.0%}" if slower else "none: false alarms"
                print(f"| {machines} | {depth} | {what} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
