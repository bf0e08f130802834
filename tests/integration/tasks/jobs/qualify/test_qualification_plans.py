"""Who measures with whom, and what is measured again: the plans that the job follows, on invented findings."""

import random
from itertools import combinations

import pytest

from benchmarks.qualification import FAULTS, Fault, cost_of
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import load_sku
from tasks.jobs.qualify.plans import (
    CONFIRMATIONS,
    PAIRS,
    Answer,
    Outcome,
    Standard,
    better,
    collectives_plan,
    disjoint,
    halves,
    pairs_plan,
    quick_tournament,
    sound_rate,
    standard_tournament,
    suspects,
    tournament,
)

SIZE = 16_000_000


def standard(**config):
    return Standard(BenchmarkConfig(**config), load_sku("local-cpu"))


def follow(plan, rate, nodes):
    """Run a plan where `rate(group, step)` is a bandwidth, or None for a group that hangs; the steps."""
    steps, living = [], tuple(range(nodes))
    try:
        step = next(plan)
        while True:
            steps.append(step)
            found = {group: rate(group, step) for group in step.groups}
            outcomes = {
                g: Outcome("timed out") if r is None else Outcome("measured", {SIZE: r}) for g, r in found.items()
            }
            step = plan.send(Answer(dict.fromkeys(step.collectives, outcomes), living))
    except StopIteration:
        return steps


def search(rate, nodes, *, together=None, **config):
    return follow(pairs_plan(range(nodes), standard(**config), together=together), rate, nodes)


def again(steps):
    return [group for step in steps if step.name.startswith("confirm") for group in step.groups]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9, 64])
def test_a_tournament_has_every_pair_once_and_nobody_twice_at_a_time(nodes):
    rounds = tournament(range(nodes))
    assert len(rounds) == nodes - 1 + nodes % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(nodes), 2))
    for pairs in rounds:
        there = [node for pair in pairs for node in pair]
        assert len(there) == len(set(there)) == nodes // 2 * 2


@pytest.mark.parametrize("nodes", [3, 4, 5, 7, 8, 33, 512])
def test_a_quick_one_gives_every_machine_its_neighbours_and_a_far_one(nodes):
    rounds = quick_tournament(range(nodes))
    assert len(rounds) == 3 + (nodes % 2 if nodes > 3 else 0)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    assert {(n, n + 1) for n in range(nodes - 1)} <= set(pairs)
    assert min(sum(node in pair for pair in pairs) for node in range(nodes)) >= (
        3 if nodes > 3 and nodes % 2 == 0 else 2
    )


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 33, 64])
def test_a_standard_one_has_partners_at_every_distance(nodes):
    rounds = standard_tournament(range(nodes))
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs)) and set(pairs) >= {p for r in quick_tournament(range(nodes)) for p in r}
    assert {b - a for a, b in pairs} >= {1 << power for power in range(nodes.bit_length()) if 1 << power < nodes // 2}


@pytest.mark.parametrize("order", [1, 3])
def test_machines_meet_until_each_has_a_sound_partner_or_was_bad_with_every_group(order):
    """Under four switches that are slow between each other; with order 3 few neighbours are under the same one."""
    leaf = {node: node * order % 16 // 4 for node in range(16)}
    steps = search(lambda group, step: 1.0 if len({leaf[node] for node in group}) == 1 else 0.3, 16)
    met = {group for step in steps for group in step.groups}
    assert {leaf[a] for a, b in met if leaf[a] == leaf[b]} == {0, 1, 2, 3}
    assert {node for a, b in met if leaf[a] == leaf[b] for node in (a, b)} == set(range(16))
    assert any(step.name.startswith("meet") for step in steps) == (order == 3)


def test_rounds_of_fresh_runs_have_no_machine_twice():
    pairs = random.Random(1).sample(list(combinations(range(9), 2)), 20)
    rounds = disjoint(pairs, 100)
    assert sorted(pair for found in rounds for pair in found) == sorted(pairs)
    for found in rounds:
        assert len({node for pair in found for node in pair}) == 2 * len(found)
    assert len(disjoint([(0, k) for k in range(1, 30)], CONFIRMATIONS)) == CONFIRMATIONS


def test_halves_end_at_pairs():
    assert halves((0, 1, 2, 3, 4)) == [(0, 1), (2, 3, 4)]
    assert halves((2, 3, 4)) == [(3, 4)]
    assert halves((3, 4)) == []


def test_a_sound_rate_is_seen_when_most_pairs_are_slow():
    """One of three machines is bad: two pairs of three are slow, and the median of the pairs would be too."""
    assert sound_rate({(0, 1): 1.0, (0, 2): 0.1, (1, 2): 0.1}) == 1.0
    assert suspects([(0, 2), (1, 2)], [(0, 1)]) == {2}
    assert sound_rate({}) == 0.0


@pytest.mark.parametrize("depth", ["quick", "standard", "full"])
@pytest.mark.parametrize("nodes", [4, 5, 8, 32])
def test_sound_machines_are_measured_once(nodes, depth):
    steps = search(lambda group, step: 1.0 + 0.1 * (sum(group) % 3), nodes, depth=depth)
    assert not again(steps)
    assert {step.round for step in steps} == {0}


@pytest.mark.parametrize("depth", ["quick", "standard", "full"])
@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 33])
def test_a_slow_machine_meets_sound_ones_again(nodes, depth):
    bad = nodes - 2
    steps = search(lambda group, step: 0.1 if bad in group else 1.0, nodes, depth=depth)
    fresh = again(steps)
    assert fresh
    assert all(bad in group for group in fresh)
    assert len(fresh) <= 4  # two partners in each of two rounds


def test_bad_machines_meet_sound_ones_and_not_each_other():
    steps = search(lambda group, step: 0.1 if {2, 5} & set(group) else 1.0, 8, depth="full")
    assert {node for group in again(steps) for node in group} > {2, 5}
    assert all(len({2, 5} & set(group)) == 1 for group in again(steps))


def test_the_best_of_several_measurements_counts():
    fast, slow, hung = (
        Outcome("measured", {8: 1.0, 16: 2.0}),
        Outcome("measured", {8: 3.0, 16: 1.0}),
        Outcome("timed out"),
    )
    assert better(fast, slow) == better(slow, fast) == Outcome("measured", {8: 3.0, 16: 2.0})
    assert better(fast, hung) == better(hung, fast) == better(None, fast) == fast


def test_a_slow_link_is_measured_again_and_its_machines_are_not_suspect():
    steps = search(lambda group, step: 0.1 if group == (2, 5) else 1.0, 8, depth="full")
    assert again(steps) == [(2, 5), (2, 5)]


def test_a_passing_disturbance_is_gone_after_fresh_runs():
    """All pairs of machine 1 were slow once: two fresh runs clear it, then its other pairs are measured too."""
    steps = search(lambda group, step: 0.1 if 1 in group and step.round == 0 else 1.0, 8, depth="full")
    assert sorted(set(again(steps))) == sorted((min(1, k), max(1, k)) for k in range(8) if k != 1)


def test_most_of_the_noise_is_gone_and_the_search_ends():
    draws = random.Random(7)
    steps = search(lambda group, step: 1.0 if draws.random() < 0.8 else 0.3, 16, depth="full")
    assert {step.round for step in steps} == {0, 1, 2}
    assert len(steps) <= 15 + 2 * CONFIRMATIONS


def test_a_machine_whose_pairs_hang_meets_two_others_and_then_is_confirmed():
    steps = search(lambda group, step: None if 3 in group else 1.0, 16, depth="full")
    hanging = [group for step in steps if step.name.startswith("pairs") for group in step.groups if 3 in group]
    assert len(hanging) == 2
    assert again(steps)
    assert all(3 in group for group in again(steps))
    measured = {group for step in steps if step.name.startswith("pairs") for group in step.groups}
    assert len(measured) == 15 * 14 // 2 + 2  # all others met


def test_two_machines_have_nobody_to_be_compared_with():
    assert len(search(lambda group, step: 0.3, 2)) == 1


def test_a_pair_below_the_hardwares_limit_is_measured_again():
    sku = load_sku("nd96isr_h100_v5")
    limits = [limit for limit in sku.collectives if limit.scope == "pair" and limit.collective == "all_reduce"]
    if not limits:
        pytest.skip("the file has no limit for pairs")
    low = {max(limit.bytes for limit in limits): 1.0}
    plan = pairs_plan((0, 1), Standard(BenchmarkConfig(), sku), together=None)
    names = []
    try:
        step = next(plan)
        while True:
            names.append(step.name)
            step = plan.send(Answer({PAIRS[0]: {(0, 1): Outcome("measured", low)}}, (0, 1)))
    except StopIteration:
        assert names == ["pairs/0", "confirm/1/0", "confirm/2/0"]


def test_halves_are_searched_when_all_are_slow_together_and_no_pair_is():
    """Machines 4 and 5 are slow only beside a third one: the halves lead there and no further."""

    def rate(group, step):
        return 0.05 if {4, 5} < set(group) and len(group) > 2 else 1.0

    sku = load_sku("local-cpu").model_copy(update={"collectives": ()})
    plan = pairs_plan(range(8), Standard(BenchmarkConfig(), sku), together=Outcome("measured", {SIZE: 0.05}))
    parts = [step.groups for step in follow(plan, rate, 8) if step.scope == "part"]
    assert parts == [((0, 1, 2, 3), (4, 5, 6, 7)), ((4, 5), (6, 7))]


def test_no_halves_where_all_together_are_as_fast_as_pairs():
    assert not [s for s in search(lambda g, s: 1.0, 8, together=Outcome("measured", {SIZE: 0.8})) if s.scope == "part"]


def test_within_and_together_the_slow_ones_are_measured_again():
    plan = collectives_plan(range(4), standard(), ranks_per_node=2)
    steps = follow(plan, lambda group, step: 0.3 if group == (2,) else 1.0, 4)
    assert [(step.name, step.groups, step.round) for step in steps] == [
        ("node/0", ((0,), (1,), (2,), (3,)), 0),
        ("node/1", ((2,),), 1),
        ("node/2", ((2,),), 2),
        ("all/0", ((0, 1, 2, 3),), 0),
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_steps_have_names_that_are_used_once(fault):
    """Names are keys of the launcher's store."""

    def rate(group, step):
        return fault.rate(group, 8)

    slow = Outcome("measured", {SIZE: 1.0})
    alone = follow(collectives_plan(range(8), standard(depth="full"), ranks_per_node=8), rate, 8)
    between = follow(pairs_plan(range(8), standard(depth="full"), together=slow), rate, 8)
    for steps in (alone, between):
        assert len({step.name for step in steps}) == len(steps)


def test_a_full_tournament_grows_with_the_machines_and_a_quick_one_does_not():
    sound = FAULTS[0]
    quick = [cost_of(nodes, BenchmarkConfig(), sound) for nodes in (8, 64)]
    full = [cost_of(nodes, BenchmarkConfig(depth="full"), sound) for nodes in (8, 64)]
    assert [cost.steps["pairs"] for cost in quick] == [3, 3]
    assert [cost.steps["pairs"] for cost in full] == [7, 63]
    assert full[1].seconds > 3 * full[0].seconds
    slow = cost_of(64, BenchmarkConfig(depth="full"), Fault("two", lambda g, n: 1.0 if {3, 9} & set(g) else 490.0))
    assert slow.steps["confirm"] <= 2 * CONFIRMATIONS
