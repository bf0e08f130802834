"""The benchmark as it is launched: two torchrun ranks over gloo, and one rank alone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tasks.jobs.benchmark import matmul_windows

SETTINGS = {"benchmark": {"matmul_size": 128, "largest_megabytes": 1, "seconds": 1.0}, "threads": 1}


def launch(folder, *, ranks):
    """Run the program on a job folder; returns the result and the measurement."""
    (folder / "config.json").write_text(
        json.dumps({"program": "tasks.jobs.benchmark", "settings": SETTINGS, "inputs": {}})
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), "-m", "tasks.jobs.benchmark"],
        env={**os.environ, "HEADWAY_JOB": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    logs = "".join(path.read_text() for path in folder.glob("logs/*.log"))
    assert done.returncode == 0, done.stderr + logs
    return json.loads((folder / "result.json").read_text()), json.loads((folder / "out/measurement.json").read_text())


def test_two_ranks_report_both_rates_and_a_right_sum(tmp_path):
    result, measurement = launch(tmp_path, ranks=2)
    assert result["measurement"] == measurement
    assert [rank["rank"] for rank in measurement["ranks"]] == [0, 1]
    for rank in measurement["ranks"]:
        assert rank["host"]
        assert len(rank["windows"]) == 2
        assert min(rank["windows"]) <= rank["matmul_gflops"] <= max(rank["windows"])
        assert 0.5 < rank["matmul_gflops"] <= rank["on_core_gflops"] < 5000
    assert measurement["allreduce"]["megabytes"] == 1
    assert measurement["allreduce"]["correct"] is True
    assert 0.005 < measurement["allreduce"]["gigabytes_per_second"] < 500
    slowest = min(rank["matmul_gflops"] for rank in measurement["ranks"])
    assert result["metrics"]["matmul_gflops_per_rank"] == slowest


def test_one_rank_needs_no_process_group(tmp_path):
    result, measurement = launch(tmp_path, ranks=1)
    assert [rank["rank"] for rank in measurement["ranks"]] == [0]
    assert result["metrics"]["matmul_gflops_per_rank"] > 0.5
    assert measurement["allreduce"] == {"megabytes": 1, "gigabytes_per_second": 0.0, "correct": True}


@pytest.fixture(autouse=True)
def one_thread():
    """As a rank has it: two threads on two busy cores wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def throttled_rates():
    """Rates of a process of its own that is stopped three quarters of the time."""
    program = (
        "from tasks.jobs.benchmark import matmul_windows\n"
        "print('ready', flush=True)\n"
        "print(*(window.on_core for window in matmul_windows(128, 1.5)), flush=True)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout.readline() == "ready\n"
    over = threading.Event()

    def throttle():
        while not over.is_set():
            rank.send_signal(signal.SIGSTOP)
            time.sleep(0.15)
            rank.send_signal(signal.SIGCONT)
            time.sleep(0.05)

    throttling = threading.Thread(target=throttle)
    throttling.start()
    rates = sorted(float(rate) for rate in rank.stdout.read().split())
    over.set()
    throttling.join()
    rank.wait()
    return rates


def test_a_rank_that_is_stopped_most_of_the_time_shows_it():
    """Tried again on a busy machine, where the free one may be slowed down as much."""
    for _ in range(5):
        throttled, free = throttled_rates(), sorted(window.on_core for window in matmul_windows(128, 1.5))
        assert len(throttled) == len(free) == 3
        if throttled[1] < 0.7 * free[1]:
            return
    raise AssertionError(f"{throttled} is not below {free}")


def test_a_short_measurement_has_one_window():
    assert len(matmul_windows(32, 0.1)) == 1


def test_rates_are_per_second_and_not_per_window():
    short, long = matmul_windows(128, 0.1), matmul_windows(128, 0.7)
    assert 0.2 < short[0].on_core / long[0].on_core < 5.0  # seven times apart if it were per window


def test_other_work_on_its_core_is_not_a_slow_part():
    """Four busy processes share the rank's core: it gets a fifth, and is as fast as alone while it has it."""
    own = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        core = {min(own)}
        os.sched_setaffinity(0, core)
        for process in busy:
            os.sched_setaffinity(process.pid, core)
        shared = matmul_windows(128, 1.5)
    finally:
        os.sched_setaffinity(0, own)
        for process in busy:
            process.kill()
            process.wait()
    alone = max(window.on_core for window in matmul_windows(128, 1.5))
    assert max(window.rate for window in shared) < 0.5 * alone
    assert max(window.on_core for window in shared) > 0.7 * alone
