"""Machines against each other: humps, ties, two of them, parts of one, odd readings."""

import random

import pytest
from made_measurements import BARE, CPU, GPU, ONLY, complete, config, found, names, quiet, rank, rates, sweep, together

from tasks.qualification.judge import judge
from tasks.qualification.measured import Probe
from tasks.qualification.peers import FALSE_ALARMS, Item, reference, slow_ones

pytestmark = pytest.mark.unit

COMPUTE = config(*ONLY)
ROSNER = """-0.25 0.68 0.94 1.15 1.20 1.26 1.26 1.34 1.38 1.43 1.49 1.49 1.55 1.56 1.58 1.65 1.69 1.70 1.76 1.77 1.81 1.91
1.94 1.96 1.99 2.06 2.09 2.10 2.14 2.15 2.23 2.24 2.26 2.35 2.37 2.40 2.47 2.54 2.62 2.64 2.90 2.92 2.92 2.93 3.21 3.26 3.30
3.59 3.68 4.30 4.64 5.34 5.42 6.01"""


def verdicts(*values, sku=BARE, settings=COMPUTE):
    return [node.verdict for node in complete(judge(rates(*values), sku, settings)).nodes]


def failed(*values, sku=BARE):
    """Numbers of the machines that failed, of these rates."""
    return [n for n, verdict in enumerate(verdicts(*values, sku=sku)) if verdict == "failed"]


@pytest.mark.parametrize("sku", [BARE, CPU])
@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ((10, 10, 7, 10), []),
        ((10, 10, 6.9, 10), [2]),
        ((10, 6, 10), [1]),
        ((10, 6, 6, 10), [1, 2]),
        ((10, 10, 10, 10), []),
        ((10, 10, 10, 10, 1, 6), [4, 5]),
        ((10, 10, 3, 3, 3, 3, 3, 3), [2, 3, 4, 5, 6, 7]),
        ((0, 10, 10), [0]),
    ],
)
def test_those_below_their_share_of_the_fast_ones_fail(values, slow, sku):
    assert failed(*map(float, values), sku=sku) == slow


@pytest.mark.parametrize("count", [4, 8, 64])
def test_half_of_the_machines_may_be_slow(count):
    dice = random.Random(count)
    slow = sorted(dice.sample(range(count), count // 2))
    values = [(0.5 if n in slow else 1.0) * dice.gauss(1, 0.01) for n in range(count)]
    assert failed(*values) == slow


def test_equal_figures_have_no_deviation_and_no_outliers():
    fast = reference([Item(name, 5.0) for name in names(8)], 0.85)
    assert fast is not None
    assert (fast.center, fast.spread) == (5.0, 0.0)
    assert verdicts(*[5.0] * 7, 4.9) == ["healthy"] * 8


def test_two_cannot_outvote_each_other():
    seen = complete(judge(rates(10.0, 6.0), BARE, COMPUTE))
    assert [node.verdict for node in seen.nodes] == ["unknown", "unknown"]
    assert "two cannot outvote each other: node00 10, node01 6" in seen.nodes[0].reasons[0].said
    assert "spare_nodes" in seen.nodes[0].reasons[0].remedy
    assert verdicts(10.0, 7.0) == ["healthy", "healthy"]


def test_of_two_the_hardwares_file_decides():
    assert verdicts(769.0, 500.0, sku=GPU) == ["healthy", "failed"]
    assert verdicts(1200.0, 750.0, sku=GPU) == ["healthy", "degraded"]


def test_parts_of_one_machine_are_that_machines_fault():
    slow = Probe(check="matmul_bf16", measured=1.0, where="GPU 1")
    ranks = [
        rank(n, "node00", slow.model_copy(update={"measured": rate, "where": f"GPU {n}"}))
        for n, rate in enumerate((10.0, 6.0))
    ]
    (node,) = complete(judge(together(ranks, ranks_per_node=2), BARE, COMPUTE)).nodes
    assert [(r.where, r.verdict) for r in node.reasons] == [("GPU 1", "failed")]


def test_one_slow_gpu_of_two_machines_is_named():
    ranks = [
        rank(n, f"node0{n // 8}", Probe(check="matmul_bf16", measured=6.0 if n == 11 else 10.0, where=f"GPU {n % 8}"))
        for n in range(16)
    ]
    seen = complete(judge(together(ranks, ranks_per_node=8), BARE, COMPUTE))
    assert [(r.node, r.where) for node in seen.nodes for r in node.reasons] == [("node01", "GPU 3")]


def test_three_that_do_not_agree_are_measured_by_their_median():
    assert failed(10.0, 8.0, 5.0) == [2]


def test_one_far_ahead_is_odd_and_condemns_nobody():
    seen = complete(judge(rates(16.0, 10.0, 10.0, 10.1), BARE, COMPUTE))
    assert (seen.verdict, found(seen)) == ("degraded", {"": ["matmul_bf16 against its peers"]})
    assert judge(rates(1200.0, 769.0, 769.0, 770.0), GPU, COMPUTE).verdict == "healthy"


def test_a_little_slow_is_degraded_where_the_others_are_close():
    close = [100.0, 100.4, 99.6, 100.2, 99.8, 100.1, 99.9, 100.0]
    assert verdicts(*close, 93.0)[-1] == "degraded"
    assert verdicts(*close, 96.0)[-1] == "healthy"
    assert verdicts(*close, 93.0, sku=CPU)[-1] == "healthy"
    wide = [100.0, 108.0, 92.0, 104.0, 96.0, 102.0, 98.0, 100.0]
    assert verdicts(*wide, 86.0)[-1] == "healthy"


def test_peers_are_compared_by_what_was_freed_of_other_work():
    probes = [
        Probe(check="matmul_fp32", measured=measured, peers=peers)
        for measured, peers in ((4.0, 10.0), (10.0, 10.0), (9.0, 5.0))
    ]
    ranks = [rank(n, f"node0{n}", probe) for n, probe in enumerate(probes)]
    assert found(judge(together(ranks), CPU, COMPUTE)) == {"node02": ["matmul_fp32 against its peers"]}


def test_plain_rates_of_busy_cpus_are_not_compared():
    ranks = [
        rank(n, f"node0{n}", Probe(check="memory_bandwidth", measured=rate)) for n, rate in enumerate((10.0, 10.0, 3.0))
    ]
    assert judge(together(ranks), CPU, COMPUTE).verdict == "healthy"
    assert found(judge(together(ranks), BARE, COMPUTE)) == {"node02": ["memory_bandwidth against its peers"]}


def test_the_spread_of_few_excuses_nobody_and_the_spread_of_many_does():
    assert failed(10.0, 9.0, 8.0, 4.5, sku=CPU) == [3]
    assert failed(10.0, 10.5, 9.5, 9.0, 8.5, 8.0, 11.0, 11.5, 6.5, sku=CPU) == []


def test_no_share_is_no_comparison():
    assert verdicts(10.0, 1.0, 10.0, settings=config(*ONLY, min_of_peers=0.0)) == ["healthy"] * 3


def test_sweeps_within_machines_are_compared():
    sweeps = [
        sweep("all", names(4)),
        *(sweep("node", (name,), 100.0 if name == "node02" else 480.0) for name in names(4)),
    ]
    seen = complete(judge(quiet(4, sweeps), BARE, config("collectives")))
    assert found(seen) == {"node02": ["all_reduce of node against its peers"]}


def test_the_fastest_stand_first():
    seen = judge(rates(10.0, 9.0, 9.5), BARE, COMPUTE)
    standing = [node.standing for node in seen.nodes]
    assert standing[1] < standing[2] <= standing[0] == 1.0


def test_gpus_that_fall_off_by_steps_excuse_nobody():
    """No gap is wide enough to divide them, so that their spread is wide; between GPU machines that is no noise of other work."""
    steps = [100.0 * 0.87**n for n in range(9)]
    assert failed(*steps) == [7, 8]
    assert failed(*steps, sku=CPU) == []


def of_eight_gpus(machines, slow=(), noise=0.03, seed=1, rate=0.9):
    """Eight GPUs a machine, each with noise of its own; all of a slow one's are slow."""
    dice = random.Random(seed)
    return together(
        [
            rank(n, name, Probe(check="matmul_bf16", measured=value, peers=value, where=f"GPU {gpu}"))
            for n, name in enumerate(name for name in names(machines) for _ in range(8))
            for gpu, value in [(n % 8, (rate if n // 8 in slow else 1.0) * dice.gauss(700.0, 700.0 * noise))]
        ],
        ranks_per_node=8,
    )


@pytest.mark.parametrize("slow", [{5}, {5, 6, 40}, set(range(16))])
def test_a_machine_all_of_whose_gpus_are_ten_percent_slow_is_degraded(slow):
    """At 3 % noise no single GPU of it is outside the others' spread; the median of eight is."""
    seen = complete(judge(of_eight_gpus(64, slow), BARE, COMPUTE))
    assert {int(name.removeprefix("node")) for name in seen.named("degraded")} == slow
    (reason,) = seen.nodes[5].reasons
    assert (reason.where, reason.check) == ("median of 8 measurements", "matmul_bf16 against its peers")
    assert "of the mean of the others; a sound machine is above" in reason.said


def test_sound_machines_have_no_outliers_and_few_machines_none_at_all():
    for seed in range(20):
        assert judge(of_eight_gpus(16, seed=seed), BARE, COMPUTE).verdict == "healthy"
    assert judge(of_eight_gpus(5, {2}), BARE, COMPUTE).verdict == "healthy"
    assert judge(of_eight_gpus(16, {2}), CPU, COMPUTE).verdict == "healthy"


def test_every_measurement_counts_in_the_median_and_the_best_by_itself():
    """A part's best of three is sound, so it did not fail; that two of three were slow is seen."""
    each = [(10.0, 10.0, 10.0)] * 7 + [(9.0, 10.0, 9.1)]
    ranks = [
        rank(n, name, Probe(check="matmul_bf16", measured=max(tries), peers=max(tries), each=tries))
        for n, (name, tries) in enumerate(zip(names(8), each, strict=True))
    ]
    assert found(judge(together(ranks), BARE, COMPUTE)) == {"node07": ["matmul_bf16 against its peers"]}


def test_outliers_are_those_of_a_published_example():
    """Rosner's 54 observations, as the NIST handbook has them (1.3.5.17.3): three are too large. One-sided here, so they are
    turned."""
    figures = {f"{n:02}": -float(value) for n, value in enumerate(ROSNER.split())}
    # Two-sided at 5 %: each side has half of it. The share of false alarms is divided among the comparisons.
    seen = slow_ones(figures, comparisons=FALSE_ALARMS / 0.025)
    assert sorted(seen.names) == ["51", "52", "53"]


def test_what_is_no_number_is_no_rate():
    nan = float("nan")
    assert found(complete(judge(rates(10.0, nan, 10.0, 10.0), BARE, COMPUTE))) == {"node01": ["matmul_bf16"]}
    odd = rank(1, "node01", Probe(check="matmul_bf16", measured=10.0, peers=float("inf")))
    ranks = [odd if report.node == "node01" else report for report in rates(10.0, 10.0, 10.0).ranks]
    assert judge(together(ranks), BARE, COMPUTE).verdict == "healthy"
