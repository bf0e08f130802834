"""Clocks of machines, compared through a real store: what is found, how well it is known, and who stays away."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore
from waiting import limit

from tasks.jobs.qualify import health
from tasks.jobs.qualify.health import Offset


@pytest.fixture
def stores():
    """A way to one store for each machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = [
        TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
        for number in range(4)
    ]
    return [PrefixStore("headway-qualify", store) for store in made]


def compared(stores, fast, *, absent=(), seconds=20.0):
    """Each machine's clock is so many seconds fast; returns what the machines know, by machine."""
    known = {}

    def machine(node):
        def clock():
            return time.time() + fast[node]

        try:
            known[node] = health.answer(stores[node], node, clock, seconds=seconds)
        except RuntimeError as error:
            known[node] = error

    threads = [threading.Thread(target=machine, args=(node,)) for node in range(1, len(fast)) if node not in absent]
    for thread in threads:
        thread.start()
    there = [f"skew/{node}/here" for node in range(1, len(fast)) if node not in absent]
    stores[0].wait(there, timedelta(seconds=limit(20)))
    known[0] = health.ask_all(stores[0], len(fast), lambda: time.time() + fast[0], seconds=seconds)
    for thread in threads:
        thread.join()
    return known


def test_the_machine_whose_clock_is_off_is_the_one_that_is_named(stores):
    known = compared(stores, [0.0, 0.0, 90.0, 0.0])
    assert known[0] == known[1] == known[2] == known[3]
    off = {node: health.apart(known[0], node) for node in range(4)}
    assert abs(off[2].seconds - 90.0) <= off[2].bound
    assert all(abs(off[node].seconds) <= off[node].bound for node in (0, 1, 3))
    assert 0.0 < off[2].bound < 5.0


def test_a_first_machine_that_is_off_is_named_and_not_the_others(stores):
    known = compared(stores, [-30.0, 0.0, 0.0, 0.0])[3]
    assert abs(health.apart(known, 0).seconds + 30.0) < 5.0
    assert abs(health.apart(known, 2).seconds) < 5.0


def test_a_machine_that_stays_away_is_left_out(stores):
    known = compared(stores, [0.0, 2.0, 0.0, 0.0], absent=(3,), seconds=limit(2.0))
    assert set(known[0]) == {0, 1, 2}
    assert health._probe(known[0], 3).status == "timed out"


def test_a_machine_that_comes_and_then_says_nothing_is_left_out_and_the_store_still_works(stores, monkeypatch):
    monkeypatch.setattr(health, "ANSWER_SECONDS", limit(1.5))
    stores[2].set("skew/2/here", "")
    known = compared(stores, [0.0, 0.0, 0.0, 50.0], absent=(2,))
    assert set(known[0]) == set(known[3]) == {0, 1, 3}
    stores[0].set("later", "yes")
    assert stores[0].get("later") == b"yes"


def test_two_machines_that_disagree_are_both_off():
    offsets = {0: Offset(0.0, 0.0), 1: Offset(40.0, 0.002)}
    assert [abs(health.apart(offsets, node).seconds) for node in (0, 1)] == [40.0, 40.0]


def test_what_is_noted_is_off_for_sure():
    within = health._probe({0: Offset(0.0, 0.0), 1: Offset(0.001, 0.004)}, 1)
    assert (within.measured, within.unit) == (0.0, "s")
    assert within.said == "+1.0 ms from the median of the others, known to 4.0 ms"
    assert health._probe({0: Offset(0.0, 0.0), 1: Offset(-2.0, 0.5)}, 1).measured == 1.5
