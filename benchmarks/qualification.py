"""What a qualification costs: rounds and time for 8, 64 and 512 machines, by the plans that the job runs, on invented findings.

`python -m benchmarks.qualification` prints the table. The steps are counted, not estimated: plans.py yields them here as it does
in the job. What one step takes is assumed (Costs): nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import load_sku
from tasks.jobs.qualify.plans import Answer, Group, Outcome, Plan, Standard, Step, collectives_plan, pairs_plan
from tasks.jobs.qualify.steps import GRACE_SECONDS
from tasks.jobs.qualify.sweeps import sweeping

SIZES = (8, 64, 512)
SKU = "nd96isr_h100_v5"
GPUS = 8
ROW = "{:>8}  {:8}  {:18}  {:>4}  {:>4}  {:>5}  {:>4}  {:>5}  {:>5}  {:>7}"
SOUND = 500.0
"""GB/s of every sound group: above every limit of the hardware's file, so that nothing sound is measured again."""


@dataclass(frozen=True)
class Costs:
    """Seconds that were assumed, for machines of 8 GPUs."""

    meeting: float = 0.2
    """That all agree on what a step found, and the next one begins."""
    opening: float = 3.0
    """A communicator of two machines or of one."""
    opening_of_a_rank: float = 0.005
    """More for each rank of a larger one."""
    size: float = 0.15
    """Buffers, checked run and comparison of one size."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with the machines, as the rate of a group; None: the group hangs."""

    name: str
    rate: Callable[[Group, int], float | None]
    silent: frozenset[int] = frozenset()
    """Machines that say nothing after their first hanging group."""


FAULTS = (
    Fault("none", lambda group, nodes: SOUND),
    Fault("one slow machine", lambda group, nodes: SOUND / 10 if 3 in group else SOUND),
    Fault("one slow link", lambda group, nodes: SOUND / 10 if {2, 5} <= set(group) and len(group) == 2 else SOUND),
    Fault(
        "a quarter cut off", lambda group, nodes: SOUND / 2 if len({node < nodes // 4 for node in group}) > 1 else SOUND
    ),
    Fault("slow from half on", lambda group, nodes: SOUND / 10 if len(group) > nodes // 2 else SOUND),
    Fault("one machine hangs", lambda group, nodes: None if 3 in group and len(group) > 1 else SOUND),
    Fault("one machine dies", lambda group, nodes: None if 3 in group and len(group) > 1 else SOUND, frozenset({3})),
)


@dataclass
class Cost:
    """Steps by kind, and seconds."""

    steps: Counter[str]
    seconds: float = 0.0


class Invented:
    """Stands for the machines: answers a plan's steps by a fault, and counts what they cost."""

    def __init__(self, standard: Standard, costs: Costs, fault: Fault, nodes: int) -> None:
        self.standard, self.costs, self.fault, self.nodes = standard, costs, fault, nodes
        self.living = tuple(range(nodes))
        self.cost = Cost(Counter())
        self.together: Outcome | None = None

    def run(self, plan: Plan[None]) -> None:
        try:
            step = next(plan)
            while True:
                step = plan.send(self._answer(step))
        except StopIteration:
            return

    def _answer(self, step: Step) -> Answer:
        found = {group: self._outcome(group) for group in step.groups}
        hung = any(outcome.status != "measured" for outcome in found.values())
        lost = {
            node for group in step.groups for node in group if found[group].status != "measured"
        } & self.fault.silent
        self.living = tuple(node for node in self.living if node not in lost)
        self.cost.steps[step.name.split("/")[0]] += 1
        self.cost.seconds += self._seconds(step, hung=hung, lost=bool(lost))
        if step.scope == "all":
            self.together = next(iter(found.values()))
        return Answer(dict.fromkeys(step.collectives, found), self.living)

    def _outcome(self, group: Group) -> Outcome:
        rate = self.fault.rate(group, self.nodes)
        return Outcome("timed out") if rate is None else Outcome("measured", {2**34: rate})

    def _seconds(self, step: Step, *, hung: bool, lost: bool) -> float:
        """A group that hangs costs all others its time limit; a machine that is silent, the whole time of the step."""
        config, ranks = self.standard.config, GPUS * max(map(len, step.groups))
        if lost:
            return config.collective_seconds * len(step.collectives) + GRACE_SECONDS
        how = sweeping(config, self.standard.sku, gpu=True, every_size=step.scope != "pair")
        opening = self.costs.opening + self.costs.opening_of_a_rank * max(0, ranks - 2 * GPUS)
        each = how.limit if hung else how.seconds + self.costs.size * len(how.sizes)
        return self.costs.meeting + opening + each * (1 if hung else len(step.collectives))


def cost_of(nodes: int, config: BenchmarkConfig, fault: Fault, costs: Costs | None = None) -> Cost:
    """Of the groups of checks collectives and pairs."""
    standard = Standard(config, load_sku(SKU))
    machines = Invented(standard, costs or Costs(), fault, nodes)
    machines.run(collectives_plan(machines.living, standard, ranks_per_node=GPUS))
    machines.run(pairs_plan(machines.living, standard, together=machines.together))
    return machines.cost


def main() -> None:
    print(f"Collectives and pairs on {SKU}, {GPUS} GPUs a machine; steps are counted, seconds assumed: {Costs()}")
    print(ROW.format("machines", "depth", "fault", "node", "all", "pairs", "meet", "again", "parts", "minutes"))
    for nodes in SIZES:
        for depth in ("quick", "standard", "full"):
            for fault in FAULTS:
                cost = cost_of(nodes, BenchmarkConfig(depth=depth), fault)
                steps = [cost.steps[kind] for kind in ("node", "all", "pairs", "meet", "confirm", "part")]
                print(ROW.format(nodes, depth, fault.name, *steps, f"{cost.seconds / 60:.1f}"))


if __name__ == "__main__":
    main()
