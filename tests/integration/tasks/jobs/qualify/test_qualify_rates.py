"""Rates in windows, on this process's own core; rounds; what one rank alone notes of memory, heat and a soak."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from bench_stand import bench, measured, probes

from tasks.jobs.qualify import compute, soak
from tasks.jobs.qualify.bench import Outcome, Rate, Together, any_behind, switch_of
from tasks.jobs.qualify.compute import matmul_windows


@pytest.fixture(autouse=True)
def one_thread():
    """As a rank has it: two threads on two busy cores wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def known(which, measure):
    """Rates of which any or all are known: on a busy machine, others may have the core for nearly all of a window."""
    for _ in range(20):
        rates = measure()
        if which(rate.on_core for rate in rates):
            break
    return rates


def test_a_short_measurement_has_one_window():
    assert len(matmul_windows(32, 0.1)) == 1


def test_rates_are_per_second_and_not_per_window():
    short, long = (known(any, partial(matmul_windows, 128, seconds)) for seconds in (0.1, 0.7))
    assert 0.2 < short[0].on_core / long[0].on_core < 5.0  # seven times apart if it were per window


def test_other_work_on_its_core_is_not_a_slow_part():
    """Four busy processes share the rank's core: it gets a fifth, and is as fast as alone while it has it.

    The machine itself may change its speed between the two measurements, so that both are made again.
    """
    for _ in range(5):
        shared, alone = in_company(), max(window.on_core for window in known(any, lambda: matmul_windows(128, 1.5)))
        rate, on_core = max(window.rate for window in shared), max(window.on_core for window in shared)
        if rate < 0.5 * alone and on_core > 0.7 * alone:
            return
    if not on_core:
        pytest.skip("others had the core for nearly all of every window: this machine is too busy to tell")
    raise AssertionError((rate, on_core, alone))


def in_company():
    """What a rank measures whose core four other processes want too."""
    own = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        core = {min(own)}
        os.sched_setaffinity(0, core)
        for process in busy:
            os.sched_setaffinity(process.pid, core)
        return known(any, lambda: matmul_windows(128, 1.5))
    finally:
        os.sched_setaffinity(0, own)
        for process in busy:
            process.kill()
            process.wait()


def test_slow_parts_are_measured_again_and_their_best_round_counts(tmp_path):
    rounds = iter([[Rate(1, 1), Rate(9, 10)], [Rate(8, 9), Rate(2, 3)], [Rate(5, 5), Rate(5, 5)]])
    together = Together(bench(tmp_path, rounds=3), "compute")
    assert together.best("check", lambda: next(rounds)) == Outcome((Rate(8, 9), Rate(9, 10)))
    assert len(list(rounds)) == 1


def test_with_depth_standard_every_rate_is_measured_several_times_and_all_are_kept(tmp_path):
    rank, rounds = bench(tmp_path, rounds=3, depth="standard"), iter([[Rate(8, 8)], [Rate(9, 9)], [Rate(7, 7)]])
    together = Together(rank, "compute")
    outcome = together.best("check", lambda: next(rounds))
    together.note("matmul_bf16", "TFLOP/s", outcome, where=("GPU 0",), per=2.0)
    rounds = iter([[Rate(3, 3)], [Rate(1, 1)], [Rate(2, 2)]])
    together.note("host_to_device", "GB/s", together.repeated(lambda: next(rounds)), where=("GPU 0",), per=1.0)
    assert [(probe.measured, probe.peers, probe.each) for probe in rank._report.probes] == [
        (4.5, 4.5, (4.0, 4.5, 3.5)),
        (3.0, 3.0, (3.0, 1.0, 2.0)),
    ]


@pytest.mark.parametrize(
    ("address", "pattern", "switch"),
    [
        ("spine.leaf3.gpu-7", "switch.switch.node", "spine.leaf3"),
        ("leaf3.gpu-7.internal", "switch.node", "leaf3"),
        ("gpu-7", "node", ""),
        ("", "", ""),
    ],
)
def test_the_switch_above_a_machine_is_slurms(address, pattern, switch):
    told = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert switch_of(told) == switch
    assert switch_of({}) == ""


def test_a_failure_is_said_and_does_not_take_back_what_was_measured(tmp_path):
    def broken():
        raise RuntimeError("CUDA error: uncorrectable ECC error\nmore")

    rank = bench(tmp_path)
    together = Together(rank, "compute")
    outcome = together.best("one", broken)
    assert outcome == Outcome(status="failed", said="CUDA error: uncorrectable ECC error")
    together.note("matmul_bf16", "TFLOP/s", outcome, where=("GPU 0",), per=1)
    found = probes(measured(tmp_path), "matmul_bf16")[0]
    assert (found.status, found.measured, found.said) == ("failed", None, outcome.said)


def test_a_group_whose_time_is_over_says_so(tmp_path):
    together = Together(bench(tmp_path, check_seconds=1e-9), "compute")
    assert together.best("one", lambda: [Rate(1, 1)]).status == "timed out"


def test_who_is_behind_its_peers():
    assert any_behind([10, 10, 6], 0.7) and not any_behind([10, 10, 8], 0.7)
    assert not any_behind([10], 0.7) and not any_behind([], 0.7)


def test_arrays_are_beyond_the_caches_and_within_the_memory(tmp_path):
    (tmp_path / "size").write_text("32768K\n")
    assert compute.array_bytes(1, tmp_path / "size") == 128 << 20
    assert compute.array_bytes(4, tmp_path / "size") == compute.LEAST_ARRAY
    assert compute.array_bytes(1, tmp_path / "none") == compute.LEAST_ARRAY
    (tmp_path / "size").write_text("99999999K\n")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 8 * 3 * compute.array_bytes(8, tmp_path / "size") <= total / 20


def test_a_triad_counts_three_arrays_and_a_copy_two():
    """Both move bytes at the memory's rate, so they agree; counted alike they would be apart by half."""
    triad, copy = known(all, lambda: compute.triad_and_copy(64 << 20, 1.0))
    assert 0.3 < triad.on_core / copy.on_core < 3


def test_a_soak_says_the_drop_and_each_tenth(tmp_path):
    soak.measure(bench(tmp_path, soak_seconds=0.5))
    found = probes(measured(tmp_path), "soak_drop")[0]
    if found.status == "failed":  # on a busy machine
        assert "is unknown: other work had the core" in found.said
        return
    shares = [float(share) for share in found.said.partition(": ")[2].split(", ")]
    assert len(shares) == 10 and shares[0] == 1
    assert found.measured == pytest.approx(1 - shares[-1], abs=0.001)


def test_a_tenth_without_a_rate_is_no_drop_and_no_error():
    """Other work had the core for nearly all of a window: see measure_windows."""
    parts = [[Rate(1, 1), Rate(1, 0)], *[[Rate(2, 2), Rate(2, 2)]] * 8, [Rate(1, 0.5), Rate(1, 1)]]
    told, unknown = soak._drops([Outcome(tuple(tenth)) for tenth in parts], ("rank 0", "rank 1"), "late")
    assert (told.status, told.measured, told.where) == ("measured", 0.5, "rank 0")
    assert (unknown.status, unknown.measured, unknown.where) == ("failed", None, "rank 1")
    assert "tenth 1 of 10 is unknown" in unknown.said


def test_a_soak_that_is_cut_off_is_not_a_soak(tmp_path):
    soak.measure(bench(tmp_path, soak_seconds=0.5, check_seconds=1e-9))
    assert probes(measured(tmp_path), "soak_drop")[0].status == "timed out"


def test_zones_of_linux_in_degrees(tmp_path):
    for number, (kind, degrees) in enumerate((("x86_pkg_temp", "48000"), ("acpitz", "27800"), ("broken", ""))):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "type").write_text(f"{kind}\n")
        (zone / "temp").write_text(f"{degrees}\n")
    assert soak.of_zones(tmp_path) == {"x86_pkg_temp": 48.0, "acpitz": 27.8}
    assert soak.of_zones(tmp_path / "none") == {}


def test_degrees_of_gpus_by_the_vendors_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert soak.of_gpus() == {}
    amd = {
        "card0": {"Temperature (Sensor edge) (C)": "41.0", "Temperature (Sensor junction) (C)": "45.5"},
        "system": {},
    }
    amd["card1"] = {"Temperature (Sensor junction) (C)": "N/A"}
    for tool, said in (("rocm-smi", json.dumps(amd)), ("nvidia-smi", "0, 41\n1, [N/A]\n10, 87\n")):
        (tmp_path / tool).write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
        (tmp_path / tool).chmod(0o755)
        expected = {"GPU 0": 45.5} if tool == "rocm-smi" else {"GPU 0": 41.0, "GPU 10": 87.0}
        assert soak.of_gpus() == expected


def test_cores_as_linux_lists_them():
    assert compute.read_cores("0-3,8\n") == {0, 1, 2, 3, 8}
    assert compute.read_cores("\n") == set()
