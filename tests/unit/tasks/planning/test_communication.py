"""Collectives and transfers against sums by hand and the definition of bus bandwidth."""

from __future__ import annotations

import dataclasses

import pytest
from plan_machines import A100

from tasks.hardware.machines import machine_of_gpu
from tasks.planning.prediction import Constants
from tasks.planning.steps import Link, all_gather_seconds, all_reduce_seconds, dispatch_seconds, link, send_seconds

pytestmark = pytest.mark.unit

PLAIN = Constants(bus_share=1.0, link_latency=0.0, network_latency=0.0, hop_latency=0.0)
EIGHT = Link(ranks=8, bandwidth=200e9, latency=0.0, tree_latency=0.0, inside=200e9)


def test_an_all_reduce_is_what_nccl_tests_would_have_measured() -> None:
    """8 GB over eight GPUs in 70 ms: algorithm 114.3 GB/s, bus 200 GB/s (nccl-tests doc/PERFORMANCE.md: times 2 x 7 / 8)."""
    assert all_reduce_seconds(8e9, EIGHT) == pytest.approx(0.070)


def test_a_gather_is_half_an_all_reduce() -> None:
    assert all_gather_seconds(8e9, EIGHT) == pytest.approx(0.035)


def test_a_token_goes_to_each_expert_in_its_machine_and_once_to_each_other_machine() -> None:
    """Two copies of 1 GB over eight GPUs of one machine: 2 x 7/8 / 200e9. Over two machines of four: 2 x (1 - 1/4) = 1.5 are met,
    half of them the other one: 0.75 GB through an adapter of 25 GB/s more."""
    assert dispatch_seconds(1e9, 2, EIGHT) == pytest.approx(1.75 / 200)
    apart = dataclasses.replace(EIGHT, machines=2, adapter=25e9)
    assert dispatch_seconds(1e9, 2, apart) == pytest.approx(1.75 / 200 + 0.75 / 25)


def test_ever_more_copies_cross_to_each_other_machine_once() -> None:
    apart = dataclasses.replace(EIGHT, machines=2, adapter=25e9, inside=float("inf"))
    assert dispatch_seconds(1e9, 1000, apart) == pytest.approx(1 / 25)


def test_one_rank_talks_to_nobody() -> None:
    alone = link(A100, 1)
    assert all_reduce_seconds(1e12, alone) == all_gather_seconds(1e12, alone) == dispatch_seconds(1e12, 2, alone) == 0


def test_a_small_message_takes_the_latency_and_a_large_one_its_bytes() -> None:
    slow = Link(ranks=2, bandwidth=100e9, latency=50e-6, tree_latency=80e-6)
    assert send_seconds(8, slow) == pytest.approx(50e-6, rel=1e-3)
    assert send_seconds(100e9, slow) == pytest.approx(1, rel=1e-3)
    assert all_reduce_seconds(8, slow) == pytest.approx(80e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "stride", "bandwidth"),
    [
        (8, 1, 230e9),  # one machine
        (4, 2, 230e9),
        (16, 1, 23e9 * 8),  # all adapters of two machines
        (64, 4, 23e9 * 2),  # two ranks of the group in a machine
        (16, 8, 23e9),  # each in a machine of its own
        (4, 64, 23e9),
    ],
)
def test_a_group_leaves_a_machine_through_its_own_adapters(ranks: int, stride: int, bandwidth: float) -> None:
    assert link(A100, ranks, stride, constants=PLAIN).bandwidth == pytest.approx(bandwidth)


def test_a_group_over_machines_is_never_faster_than_in_one() -> None:
    fast = dataclasses.replace(A100, network_bandwidth=100e9)
    assert link(fast, 16, constants=PLAIN).bandwidth == 230e9


def test_without_a_network_for_gpus_the_ethernet_is_shared() -> None:
    bare = dataclasses.replace(A100, network_bandwidth=0.0)
    assert link(bare, 16, 8, constants=PLAIN).bandwidth == pytest.approx(10e9 / 8)
    assert link(bare, 16, 1, constants=PLAIN).bandwidth == pytest.approx(10e9)


def test_many_machines_reduce_small_messages_by_a_tree() -> None:
    """A ring of 1,024 waits for 2 x 1,024 hops, a tree of 128 machines for 14."""
    hops = Constants(bus_share=1.0, link_latency=0.0, network_latency=0.0, hop_latency=1e-6)
    assert all_reduce_seconds(0, link(A100, 1024, constants=hops)) == pytest.approx(14e-6)
    assert all_gather_seconds(0, link(A100, 1024, constants=hops)) == pytest.approx(1024e-6)


@pytest.mark.parametrize("times", [1.5, 4.0])
def test_more_bandwidth_is_never_slower(times: float) -> None:
    wider = dataclasses.replace(
        A100, network_bandwidth=A100.network_bandwidth * times, link_bandwidth=A100.link_bandwidth * times
    )
    for ranks, stride in ((8, 1), (64, 1), (64, 8)):
        for total in (0.0, 1e3, 1e6, 1e9):
            assert all_reduce_seconds(total, link(wider, ranks, stride)) <= all_reduce_seconds(
                total, link(A100, ranks, stride)
            )


def test_gpus_that_share_switches_are_one_machine() -> None:
    rack = machine_of_gpu("GB200")
    assert rack.gpus == 4 and rack.joined == 72
    over = link(rack, 64)
    assert over.machines == 1 and over.bandwidth == link(rack, 4).bandwidth > link(rack, 128, 4).bandwidth / 18
    assert link(dataclasses.replace(rack, link_gpus=0), 64).machines == 16
