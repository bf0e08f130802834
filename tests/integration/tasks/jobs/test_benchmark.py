"""The benchmark as it is launched: ranks of torchrun that say what they reach, one that is throttled, one that stands still."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from bench_stand import bench, launched, measured, pid_of, probes, settings
from waiting import limit

from tasks.config.qualification import FULL
from tasks.jobs.benchmark import GROUPS, run


def numpy_rate(once, amount, seconds=0.3):
    """Another library's, with whatever threads it takes: its best of many tries, which other work on the machine hits less."""
    began, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        once()
        best = min(best, time.perf_counter() - start)
    return amount / best


def until(there, running, seconds=90):
    deadline = time.monotonic() + limit(seconds)
    while not there():
        assert all(process.poll() is None for process in running) and time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def throttled(pid, *, stopped=0.18, running=0.02):
    """A process gets a tenth of its time, which is less than a busy machine leaves the other."""
    over = threading.Event()

    def throttle():
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running)

    working = threading.Thread(target=throttle)
    working.start()
    try:
        yield
    finally:
        over.set()
        working.join()


@pytest.mark.long
def test_a_throttled_rank_is_slower_than_its_peer(tmp_path):
    """Tried again on a busy machine, where the free one may be slowed down as much."""
    for number in range(3):
        folder = tmp_path / str(number)
        with launched(folder, settings("compute", seconds=1.5), nodes=2) as running:
            until(lambda folder=folder: len(measured(folder).ranks) == 2, running)
            with throttled(running[1].pid):
                until(lambda folder=folder: len(probes(measured(folder), "matmul_fp32")) == 2, running)
            assert [process.wait(limit(60)) for process in running] == [0, 0]
        free, slow = (probes(measured(folder), "matmul_fp32")[rank].peers for rank in (0, 1))
        if free and slow and slow < 0.7 * free:  # neither has a peer where the time was too short to judge
            return
    raise AssertionError(f"{slow} is not below {free}")


@pytest.mark.long
def test_ranks_say_what_they_reach_and_one_that_stands_still_costs_its_time_once(tmp_path):
    """Rank 1 is stopped when it has multiplied, goes on when the other is through, and is late for what is left."""
    said = settings("compute", "memory", "storage", check_seconds=6.0)
    with launched(tmp_path, said, ranks=2) as running:
        until(lambda: len(probes(measured(tmp_path), "matmul_fp32")) == 2, running)
        os.kill(stopped := pid_of(tmp_path, 1), signal.SIGSTOP)
        until(lambda: len(measured(tmp_path).ranks[0].done) == 3, running)
        alone = measured(tmp_path)
        os.kill(stopped, signal.SIGCONT)
        assert running[0].wait(limit(60)) == 0
    assert {"memory_bandwidth", "store_write"} <= {probe.check for probe in alone.ranks[0].probes}
    assert all(probe.status == "measured" for probe in alone.ranks[0].probes)
    assert not set(probes(alone, "memory_bandwidth")) - {0} and "memory" not in alone.ranks[1].done
    after = measured(tmp_path)
    assert [report.done for report in after.ranks] == [("compute", "memory", "storage")] * 2
    assert json.loads((tmp_path / "result.json").read_text())["seconds"] > 0
    _are_rates_of_ranks(after)
    _are_near_numpys(after, tmp_path)


RATES = {"matmul_fp32": "TFLOP/s", "memory_bandwidth": "GB/s"}


def _are_rates_of_ranks(said):
    for check, unit in RATES.items():
        probe = probes(said, check)[0]
        assert (probe.where, probe.unit) == ("rank 0", unit)
        assert 0 < probe.measured <= (probe.peers or probe.measured) * 1.001
        assert bool(probe.peers) == (check == "matmul_fp32")  # memory is the machine's: ranks are not compared
    assert "read and written" in probes(said, "memory_bandwidth")[0].said


def _are_near_numpys(said, folder, tries=5):
    """The best of the ranks beside the best of numpy: tried again, each for itself, where other work hit one of them."""
    ranks, numpys = _best_rates(said), _numpys_rates()
    for number in range(tries):
        if all(numpys[check] / 20 < ranks[check] < numpys[check] * 20 for check in RATES):
            return
        (alone := folder / f"alone-{number}").mkdir()
        run(bench(alone, "compute", "memory", seconds=0.3).rank)
        ranks, numpys = _better(ranks, _best_rates(measured(alone))), _better(numpys, _numpys_rates())
    raise AssertionError(f"ranks reach {ranks}, numpy {numpys}")


def _best_rates(said):
    return {check: max(probe.peers or probe.measured for probe in probes(said, check).values()) for check in RATES}


def _numpys_rates():
    left, source = np.random.rand(256, 256).astype("f4"), np.ones(8_000_000, "f4")
    target = np.empty_like(source)
    matmul = numpy_rate(lambda: left @ left, 2 * 256**3) / 1e12
    copy = numpy_rate(lambda: np.copyto(target, source), 2 * source.nbytes) / 1e9
    return {"matmul_fp32": matmul, "memory_bandwidth": copy}


def _better(one, other):
    return {check: max(one[check], other[check]) for check in RATES}


def test_one_rank_needs_no_process_group(tmp_path):
    groups = ("compute", "memory", "collectives", "storage")
    assert run(bench(tmp_path, *groups, seconds=0.1).rank)["seconds"] > 0
    assert measured(tmp_path).ranks[0].done == ("compute", "memory", "storage", "collectives")


def test_every_group_of_checks_has_a_room():
    assert {"compute", "memory", "storage", "collectives", "training", "soak"} <= set(GROUPS) <= set(FULL)
