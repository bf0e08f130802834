"""Who is left after a verdict, and what proves the rest together."""

import itertools
import time

import pytest
from made_measurements import BARE, GPU, complete, config, curve, names, quiet, rank, rates, sweep, together, tournament
from waiting import limit

from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, Probe
from tasks.qualification.remaining import remaining
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, PairVerdict

pytestmark = pytest.mark.unit

BOTH = config("collectives", "pairs")
NODE = names(16)


def measured(count, slow=(), top=475.0, pairs=True, links=()):
    """All machines together at the rate of the slowest, and every pair."""

    def rate(a, b):
        return 100.0 if {a, b} & set(slow) or (a, b) in links else 475.0

    whole = sweep("all", names(count), 100.0 if slow else top)
    return quiet(count, (whole, *(tournament(count, rate) if pairs else ())))


def left(measurement, needed, sku=GPU, settings=BOTH):
    return remaining(complete(judge(measurement, sku, settings)), settings, needed)


def test_a_sound_cluster_is_left_whole():
    found = left(measured(4), 4)
    assert (found.nodes, found.excluded, found.enough, found.verdict) == (names(4), {}, True, "healthy")
    assert not found.needs_fresh_run


def test_without_the_slow_machine_the_rest_is_proven_by_its_pairs():
    found = left(measured(4, slow=[2]), 3)
    assert found.nodes == ("node00", "node01", "node03")
    assert (found.enough, found.verdict, found.reasons, found.needs_fresh_run) == (True, "healthy", (), False)
    assert "node02 pairs: all_reduce busbw" in found.excluded["node02"]


def test_too_few_are_left():
    found = left(measured(4, slow=[2]), 4)
    assert (found.enough, found.verdict, found.needs_fresh_run) == (False, "failed", False)
    nobody = left(Measurement(), 1)
    assert (nobody.enough, nobody.verdict) == (False, "unknown")
    assert left(Measurement(), 0).enough is False


def test_without_pairs_the_rest_must_be_qualified_by_itself():
    ranks = [
        rank(n, name, Probe(check="gpu_count", measured=7.0 if n == 2 else 8.0)) for n, name in enumerate(names(4))
    ]
    found = left(together(ranks, [sweep("all", names(4), 100.0)]), 3, settings=config("collectives"))
    assert (found.enough, found.verdict, found.needs_fresh_run) == (True, "unknown", True)
    assert found.reasons[-1].check == "the rest together"
    assert "--nodes node00,node01,node03" in found.reasons[-1].remedy
    found = left(together(ranks, [sweep("all", names(4))]), 3, settings=config("collectives"))
    assert (found.verdict, found.needs_fresh_run) == ("healthy", False)


def test_what_did_nothing_together_needs_no_proof_of_it():
    settings = config("compute")
    found = remaining(judge(rates(10.0, 10.0, 10.0, 3.0), BARE, settings), settings, 3)
    assert (found.verdict, found.nodes, found.needs_fresh_run) == ("healthy", names(3), False)


def test_pairs_that_do_not_connect_the_rest_prove_nothing():
    few = [s for s in tournament(5) if s.nodes in ((NODE[0], NODE[1]), (NODE[2], NODE[3]))]
    bad = [s.model_copy(update={"rows": curve(100.0)}) for s in tournament(5) if NODE[4] in s.nodes]
    found = left(quiet(5, (sweep("all", names(5), 100.0), *few, *bad)), 4)
    assert (found.verdict, found.needs_fresh_run, found.nodes) == ("unknown", True, names(4))


def test_parts_prove_the_rest_too():
    n = names(8)
    sweeps = [sweep("all", n, 100.0)]
    sweeps += [
        sweep("part", part, top) for part, top in ((n[:4], 470.0), (n[4:], 100.0), (n[4:6], 470.0), (n[6:], 100.0))
    ]
    sweeps += [sweep("part", part, top) for part, top in (((n[0], n[6]), 470.0), ((n[1], n[7]), 100.0))]
    found = left(quiet(8, sweeps), 6, settings=config("collectives"))
    assert list(found.excluded) == ["node07"]
    assert found.needs_fresh_run
    sweeps.append(sweep("part", (n[3], n[4]), 470.0))
    found = left(quiet(8, sweeps), 6, settings=config("collectives"))
    assert (found.verdict, found.needs_fresh_run) == ("healthy", False)


def test_one_end_of_a_bad_link_is_left_out():
    found = left(measured(4, links=[(1, 2)]), 3)
    assert list(found.excluded) == ["node02"]
    assert (found.verdict, found.reasons) == ("healthy", ())
    assert "its pairs with node01 are failed" in found.excluded["node02"]
    assert list(left(measured(8, links=[(1, 2), (1, 5)]), 3).excluded) == ["node01"]
    assert left(measured(4, links=[(1, 2)]), 4).enough is False


def test_of_two_halves_one_is_left():
    halves = tournament(8, lambda a, b: 475.0 if (a < 4) == (b < 4) else 50.0)
    found = left(quiet(8, (sweep("all", names(8), 50.0), *halves)), 4)
    assert (found.nodes, found.verdict, found.needs_fresh_run) == (names(4), "healthy", False)


def test_of_groups_between_which_the_network_is_bad_the_largest_is_left_where_it_is_large_enough():
    racks = tournament(8, lambda a, b: 475.0 if (a < 2) == (b < 2) else 50.0)
    seen = quiet(8, (sweep("all", names(8), 50.0), *racks))
    found = left(seen, 6)
    assert (found.nodes, found.verdict, found.needs_fresh_run) == (NODE[2:8], "healthy", False)
    assert list(found.excluded) == ["node00", "node01"]
    assert "the network between it and the machines that are used is bad" in found.excluded["node00"]
    found = left(seen, 7)
    assert (found.excluded, found.verdict) == ({}, "failed")


def test_a_slow_network_leaves_nobody_enough():
    found = left(quiet(4, (sweep("all", names(4), 100.0), *tournament(4, lambda a, b: 100.0))), 2)
    assert (found.enough, found.verdict) == (False, "failed")


@pytest.mark.parametrize(("degraded", "nodes"), [("use", names(4)), ("exclude", names(3))])
def test_degraded_machines_are_used_or_not(degraded, nodes):
    settings = config("compute", act={"degraded": degraded})
    found = remaining(judge(rates(769.0, 769.0, 769.0, 739.0), GPU, settings), settings, 3)
    assert found.nodes == nodes
    assert found.verdict == ("degraded" if degraded == "use" else "healthy")


def test_where_nobody_is_excluded_the_verdict_is_the_clusters():
    settings = config("collectives", "pairs", act={"exclude": False})
    found = left(measured(4, slow=[2]), 3, settings=settings)
    assert (found.excluded, found.verdict, found.needs_fresh_run) == ({}, "failed", False)


def test_the_healthiest_come_first():
    settings = config("compute")
    found = remaining(judge(rates(760.0, 739.0, 780.0, 770.0), GPU, settings), settings, 2)
    assert found.nodes == ("node02", "node03", "node00", "node01")


def test_machines_without_a_name_are_out_and_their_job_ended():
    found = left(rates(10.0, 10.0, 10.0, expected_nodes=4, error="killed"), 3, sku=BARE, settings=config("compute"))
    assert found.nodes == names(3)
    assert "machine 4 of 4: result is unknown" in found.excluded["machine 4 of 4"]
    assert found.verdict == "healthy"


def test_a_whole_cluster_that_failed_together_is_not_excused():
    found = left(measured(4, top=100.0), 3)
    assert (found.excluded, found.verdict, [r.check for r in found.reasons]) == (
        {},
        "failed",
        ["all_reduce busbw at 1 GiB"],
    )


def test_a_machine_that_is_bad_by_itself_is_no_excuse_for_what_all_did_together():
    """A missing GPU does not make the network slow; a machine that is slow with all others, or that is silent, does."""
    seen = measured(4, top=100.0)
    seven = Probe(check="gpu_count", measured=7.0)
    ranks = [r.model_copy(update={"probes": (seven,)}) if r.node == "node02" else r for r in seen.ranks]
    found = left(seen.model_copy(update={"ranks": tuple(ranks)}), 3)
    assert (list(found.excluded), found.verdict, found.needs_fresh_run) == (["node02"], "unknown", True)
    both = measured(4, slow=[2]).model_copy(update={"ranks": tuple(ranks)})
    assert (left(both, 3).verdict, left(both, 3).needs_fresh_run) == ("healthy", False)
    silent = seen.model_copy(update={"ranks": tuple(r for r in seen.ranks if r.node != "node02")})
    assert (left(silent, 3).verdict, left(silent, 3).needs_fresh_run) == ("healthy", False)


def test_bad_pairs_of_many_machines_are_sorted_out_in_no_time():
    """2016 bad links. Seconds of the processor, because others are at work too; twenty when all are counted anew for each."""
    nodes = tuple(NodeVerdict(name=name, verdict="healthy") for name in names(64))
    bad = [PairVerdict(a=a, b=b, busbw_gb_s=1.0, verdict="failed") for a, b in itertools.combinations(names(64), 2)]
    whole = ClusterVerdict(verdict="failed", sku="bare", sku_digest="d", nodes=nodes, pairs=tuple(bad))
    began = time.process_time()
    found = remaining(whole, BOTH, 2)
    assert time.process_time() - began < limit(1.0)
    assert (found.nodes, len(found.excluded), found.enough) == (names(1), 63, False)
