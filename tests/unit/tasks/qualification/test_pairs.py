"""Pairs: votes for a machine, a link, a switch or the whole network; parts of a bisection."""

import itertools
import random

import pytest
from made_measurements import (
    BARE,
    CPU,
    GPU,
    complete,
    config,
    curve,
    found,
    names,
    quiet,
    rank,
    sweep,
    together,
    tournament,
)

from tasks.qualification.judge import judge
from tasks.qualification.measured import Row
from tasks.qualification.pairs import EITHER, Blame, blame

pytestmark = pytest.mark.unit

PAIRS = config("pairs")
NODE = names(64)


def of(count, rate, sku=BARE, settings=PAIRS, **fields):
    return complete(judge(quiet(count, tournament(count, rate, **fields), ranks_per_node=1), sku, settings))


def slow_machines(*numbers, rate=100.0):
    return lambda a, b: rate if {a, b} & set(numbers) else 475.0


def slow_links(*links):
    return lambda a, b: 100.0 if (a, b) in links else 475.0


def named(seen, *verdicts):
    return [int(name.removeprefix("node")) for name in seen.named(*(verdicts or ("failed", "unknown")))]


@pytest.mark.parametrize("sku", [BARE, GPU])
@pytest.mark.parametrize(
    ("count", "slow"), [(3, [1]), (4, [0]), (4, [1, 3]), (5, [0, 1, 2]), (8, [7]), (8, [0, 2, 4, 6]), (16, [3, 4, 5])]
)
def test_a_machine_whose_pairs_are_slow_is_blamed(count, slow, sku):
    seen = of(count, slow_machines(*slow), sku)
    assert named(seen) == slow
    assert seen.reasons == ()
    bad = [pair for pair in seen.pairs if pair.verdict == "failed"]
    assert len(bad) == len([p for p in itertools.combinations(range(count), 2) if {*p} & set(slow)])
    assert all(pair.blamed in ("a", "b") for pair in bad if not {pair.a, pair.b} <= set(seen.named("failed")))


def test_the_sentence_says_which_pairs():
    (reason,) = of(4, slow_machines(2)).nodes[2].reasons
    assert reason.said.startswith("3 of its 3 pairs are bad (node00 100 GB/s, node01 100 GB/s, node03 100 GB/s)")
    assert (reason.measured, reason.limit) == (100.0, ">= 332.5")


@pytest.mark.parametrize(("count", "links"), [(3, [(0, 1)]), (4, [(1, 3)]), (8, [(0, 1), (2, 3)]), (16, [(4, 9)])])
def test_one_slow_pair_between_sound_machines_is_the_link(count, links):
    seen = of(count, slow_links(*links))
    assert named(seen) == []
    assert [reason.nodes for reason in seen.reasons] == [(NODE[a], NODE[b]) for a, b in links]
    assert [(p.a, p.b) for p in seen.pairs if p.blamed == "link"] == [(NODE[a], NODE[b]) for a, b in links]
    assert seen.verdict == "failed"


def test_a_slow_machine_and_a_slow_link_elsewhere():
    seen = of(8, lambda a, b: 100.0 if 2 in (a, b) or (a, b) == (5, 6) else 475.0)
    assert named(seen) == [2]
    assert [reason.where for reason in seen.reasons] == ["link node05 - node06"]


def test_of_two_machines_both_are_named_and_nobody_says_which():
    seen = of(2, lambda a, b: 300.0, GPU)
    assert named(seen) == [0, 1]
    assert "one of node00 and node01 or the link" in seen.nodes[0].reasons[0].said
    assert of(2, lambda a, b: 300.0).verdict == "healthy"
    assert of(2, lambda a, b: 475.0, GPU).verdict == "healthy"


def test_where_all_pairs_are_slow_the_network_is():
    seen = of(4, lambda a, b: 300.0, GPU)
    assert (named(seen), [r.where for r in seen.reasons]) == ([], ["all pairs"])
    assert seen.reasons[0].nodes == names(4)


@pytest.mark.parametrize("rack", [{0, 1, 2}, {0, 1, 2, 3}, {1, 5}])
def test_what_is_bad_between_groups_is_the_networks_fault_and_no_machines(rack):
    seen = of(8, lambda a, b: 475.0 if (a in rack) == (b in rack) else 50.0)
    assert (named(seen), [r.where for r in seen.reasons]) == ([], ["network between groups"])
    assert "a switch, its uplinks or a cable between racks, and not a machine" in seen.reasons[0].said
    assert sorted(map(len, seen.groups)) == sorted([len(rack), 8 - len(rack)])
    assert {pair.blamed for pair in seen.pairs if pair.verdict != "healthy"} == {"network"}


def test_a_slow_machine_beside_a_slow_spine_is_unknown_unless_a_sound_one_is_under_its_switch():
    def rate(a, b):
        return 475.0 if a // 4 == b // 4 and 5 not in (a, b) else 200.0

    seen = of(12, rate)
    assert (named(seen, "failed"), named(seen, "unknown")) == ([], [5])
    assert seen.nodes[5].reasons[0].where.startswith(EITHER)
    seen = judge(under_switches(12, tournament(12, rate)), BARE, PAIRS)
    assert (named(seen, "failed"), named(seen, "unknown")) == ([5], [])
    (reason,) = seen.reasons
    assert "switch leaf2 (node08, node09, node10, node11)" in reason.said
    assert "the spine or the uplinks of the switches" in reason.said


def test_a_switch_under_which_everything_is_bad_is_blamed_by_name():
    sweeps = tournament(12, slow_machines(4, 5, 6, 7))
    seen = complete(judge(under_switches(12, sweeps), BARE, PAIRS))
    assert (named(seen), [r.where for r in seen.reasons]) == ([], ["network at switch leaf1"])
    assert seen.reasons[0].nodes == NODE[4:8]
    assert named(judge(quiet(12, sweeps), BARE, PAIRS)) == [4, 5, 6, 7]
    assert named(judge(under_switches(12, tournament(12, slow_machines(4, 5))), BARE, PAIRS)) == [4, 5]


def test_many_bad_ways_between_sound_machines_are_the_networks():
    links = [(0, 4), (1, 5), (2, 6), (3, 7), (0, 9)]
    seen = of(12, slow_links(*links))
    assert (named(seen), [r.where for r in seen.reasons]) == ([], ["network, some of its ways"])
    assert "5 pairs of machines that are sound with others" in seen.reasons[0].said


def under_switches(count, sweeps):
    """Four machines under each leaf switch, as Slurm would say it."""
    ranks = [rank(n, name, machine={"switch": f"leaf{n // 4}"}) for n, name in enumerate(names(count))]
    return together(ranks, sweeps)


def test_the_best_round_of_a_pair_counts():
    first = tournament(4, slow_machines(2))
    again = tournament(4, lambda a, b: 475.0, round=1)
    assert judge(quiet(4, (*first, *again)), BARE, PAIRS).verdict == "healthy"
    again = tournament(4, slow_links((0, 2)), round=1)
    assert found(judge(quiet(4, (*first, *again)), BARE, PAIRS)).keys() == {""}


def test_pairs_that_time_out_point_to_the_machine_that_they_have_in_common():
    seen = of(4, lambda a, b: None if 1 in (a, b) else 475.0)
    assert named(seen, "unknown") == [1]
    assert named(seen, "failed") == []
    assert "timed out" in seen.nodes[1].reasons[0].said
    seen = of(4, lambda a, b: None if (a, b) == (1, 2) else 475.0)
    assert (named(seen), [(r.verdict, r.nodes) for r in seen.reasons]) == ([], [("unknown", ("node01", "node02"))])


def test_a_machine_that_is_slow_with_some_and_lost_with_others_failed():
    seen = of(4, lambda a, b: (None if b == 3 else 100.0) if a == 0 else 475.0)
    assert named(seen, "failed") == [0]


def test_pairs_over_tcp_and_wrong_sums_are_votes_too():
    sweeps = [s.model_copy(update={"transport": ("NET/Socket",)}) if "node01" in s.nodes else s for s in tournament(4)]
    seen = complete(judge(quiet(4, sweeps), GPU, PAIRS))
    assert (named(seen), seen.nodes[1].reasons[0].check) == ([1], "all_reduce transport")
    sweeps = [s.model_copy(update={"rows": curve(475.0, wrong=2)}) if "node01" in s.nodes else s for s in tournament(4)]
    seen = complete(judge(quiet(4, sweeps), GPU, PAIRS))
    assert (named(seen), seen.nodes[1].reasons[0].check) == ([1], "all_reduce wrong elements")


def test_pairs_that_are_merely_under_the_warning_degrade():
    sku = GPU.model_validate(
        {
            **GPU.model_dump(),
            "collectives": [{"scope": "pair", "bytes": 1 << 30, "warn": 450.0, "fail": 300.0, "source": "page"}],
        }
    )
    seen = of(4, slow_machines(2, rate=440.0), sku)
    assert named(seen, "degraded") == [2]
    seen = of(4, lambda a, b: 440.0 if (a, b) == (0, 1) else 475.0, sku)
    assert (seen.verdict, named(seen, "degraded")) == ("degraded", [])


def test_a_full_qualification_lacks_no_pair():
    few = [s for s in tournament(4) if s.nodes != ("node01", "node02")]
    assert judge(quiet(4, few), BARE, PAIRS).verdict == "healthy"
    assert judge(quiet(4, few), BARE, config("pairs", depth="full")).verdict == "unknown"
    none = [s for s in tournament(4) if "node02" not in s.nodes]
    assert named(complete(judge(quiet(4, none), BARE, PAIRS))) == [2]


def test_noise_between_busy_cpus_is_no_fault():
    noisy = {(0, 1): 1.3, (0, 2): 0.95, (0, 3): 1.0, (1, 2): 1.05, (1, 3): 0.9, (2, 3): 0.98}
    assert of(4, lambda a, b: noisy[a, b], CPU).verdict == "healthy"
    shaped = {pair: 0.006 if 1 in pair else rate for pair, rate in noisy.items()}
    assert named(of(4, lambda a, b: shaped[a, b], CPU)) == [1]


def test_one_pair_that_is_slow_within_the_noise_is_no_link():
    """Real rates of gloo over loopback on two busy cores, in GB/s: a factor of three and a half between sound pairs."""
    busy = {(0, 1): 0.458, (0, 2): 1.3, (0, 3): 1.571, (1, 2): 1.013, (1, 3): 1.606, (2, 3): 0.9}
    assert of(4, lambda a, b: busy[a, b], CPU).verdict == "healthy"
    broken = {**busy, (0, 1): 0.006}
    assert [r.where for r in of(4, lambda a, b: broken[a, b], CPU).reasons] == ["link node00 - node01"]
    dice = random.Random(1)
    wide = {pair: dice.gauss(100.0, 20.0) for pair in itertools.combinations(range(12), 2)} | {(0, 1): 60.0}
    assert of(12, lambda a, b: wide[a, b]).verdict == "healthy"
    close = {pair: dice.gauss(100.0, 2.0) for pair in wide} | {(0, 1): 60.0}
    assert [r.nodes for r in of(12, lambda a, b: close[a, b]).reasons] == [("node00", "node01")]


def test_a_second_collective_does_not_confirm_the_first_ones_doubt():
    rate = {(0, 1): 0.3, (0, 2): 1.0, (0, 3): 1.1, (1, 2): 0.9, (1, 3): 1.0, (2, 3): 1.0}
    sweeps = [*tournament(4, lambda a, b: rate[a, b]), *tournament(4, lambda a, b: 1.0, collective="alltoall")]
    assert judge(quiet(4, sweeps), CPU, PAIRS).verdict == "healthy"
    both = [
        *tournament(4, lambda a, b: rate[a, b]),
        *tournament(4, lambda a, b: rate[a, b] / 10, collective="alltoall"),
    ]
    assert judge(quiet(4, both), CPU, PAIRS).verdict == "healthy"


def test_votes_are_even_or_they_are_not():
    def pairs(*ends):
        return [tuple(end) for end in ends]

    assert blame(pairs("ab"), ()).nodes == ()
    assert blame(pairs("ab", "ac", "bc"), pairs("ad", "bd", "cd")).nodes == ("d",)
    assert blame(pairs("ab"), pairs("bc")).nodes == ("c",)
    assert blame(pairs("ab"), pairs("cd")).either == (("c", "d"),)
    assert blame((), pairs("ab", "bc", "ac")).all
    assert blame(pairs("ac", "bc"), pairs("ab"), doubtful=pairs("ab")).noise == (("a", "b"),)
    assert blame(pairs("ab", "ac", "bc"), pairs("ad", "bd", "cd"), doubtful=pairs("ad", "bd", "cd")).nodes == ("d",)
    ring = pairs("ab", "bc", "cd", "de", "ef", "af")
    assert blame(ring, [p for p in itertools.combinations("abcdef", 2) if p not in ring]).nodes == ()
    two = pairs("ab", "bc", "de", "ef")
    between = [pair for pair in itertools.combinations("abcdef", 2) if (pair[0] in "abc") != (pair[1] in "abc")]
    assert blame(two, between) == Blame(groups=(("a", "b", "c"), ("d", "e", "f")))
    assert blame(two, pairs("cd")) == Blame(links=(("c", "d"),))
    assert blame(two, [*between, *pairs("ag", "dg")]).unclear == ("g",)
    few = pairs("ab", "ac", "bc", "cd"), pairs("ad", "bd")
    assert (blame(*few).nodes, blame(*few, most=0.7).nodes) == (("d",), ())


def part(nodes, top, **fields):
    return sweep("part", nodes, top, **fields)


def of_parts(*sweeps, count=8, sku=BARE):
    return complete(judge(quiet(count, (sweep("all", names(count), 200.0), *sweeps)), sku, config("collectives")))


def test_a_pair_is_not_asked_for_the_large_messages_of_all_machines():
    assert of(4, lambda a, b: 440.0, GPU, rows=curve(440.0, count=8)).verdict == "healthy"


def test_bisection_finds_one_machine():
    n = names(8)
    sweeps = [part(n[:4], 470.0), part(n[4:], 200.0), part(n[4:6], 470.0), part(n[6:], 200.0)]
    sweeps += [part((n[6], n[0]), 470.0), part((n[7], n[1]), 200.0)]
    for sku in (BARE, GPU):
        seen = of_parts(*sweeps, sku=sku)
        assert seen.named("failed") == ("node07",)
        assert ("node00", "node01", "node02", "node03") in seen.together


def test_parts_on_busy_cpus_differ_by_noise():
    n = names(8)
    half = [part(n[:4], 400.0), part(n[4:], 200.0)]
    assert of_parts(*half, sku=CPU).verdict == "healthy"
    assert of_parts(half[0], part(n[4:], 4.0), sku=CPU).named("unknown") == n[4:]


def test_suspects_of_a_bisection_that_stopped_early_are_unknown():
    n = names(8)
    seen = of_parts(part(n[:4], 470.0), part(n[4:], 200.0))
    assert (seen.named("unknown"), seen.named("failed")) == (n[4:], ())
    assert "node04, node05, node06, node07" in seen.nodes[4].reasons[0].said
    seen = of_parts(part(n[:4], 470.0), part(n[4:], 200.0), sku=GPU)
    assert [len(node.reasons) for node in seen.nodes] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_machine_with_which_sweeps_time_out():
    n = names(4)
    lost = {"rows": (), "status": "timed out"}
    seen = of_parts(
        part(n[:2], 470.0),
        part(n[2:], 1.0, **lost),
        part((n[0], n[2]), 470.0),
        part((n[1], n[3]), 1.0, **lost),
        count=4,
    )
    assert seen.named("unknown") == ("node03",)


def test_all_machines_together_blame_nobody_without_parts():
    seen = judge(quiet(8, [sweep("all", names(8), 200.0)]), GPU, config("collectives"))
    assert (seen.named("failed", "unknown"), [r.nodes for r in seen.reasons]) == ((), [names(8)])


def test_where_a_fault_may_be_the_other_machines_it_says_so():
    """By these words nobody drains a sound machine (tasks/orchestration/node_exclusion.py)."""
    seen = of(2, lambda a, b: 300.0, GPU)
    assert [reason.where for node in seen.nodes for reason in node.reasons] == ["pair with node01", "pair with node00"]
    assert all(reason.where.startswith(EITHER) for node in seen.nodes for reason in node.reasons)
    guilty = of(4, slow_machines(2)).nodes[2].reasons
    assert not any(reason.where.startswith(EITHER) for reason in guilty)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_pair_whose_rate_is_no_number_condemns_nobody(odd):
    rows = (Row(bytes=1 << 30, busbw=odd, busbw_in_place=odd),)
    sweeps = [s.model_copy(update={"rows": rows}) if s.nodes == NODE[:2] else s for s in tournament(4)]
    for sku in (BARE, GPU, CPU):
        seen = complete(judge(quiet(4, sweeps), sku, PAIRS))
        assert (named(seen), [(r.verdict, r.nodes) for r in seen.reasons]) == ([], [("unknown", NODE[:2])])
