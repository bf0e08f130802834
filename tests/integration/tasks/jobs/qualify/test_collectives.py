"""Collectives and pairs as they are launched: real torchrun, real gloo, several machines as several processes here."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_stand import bench
from support import python_path
from waiting import limit

from tasks.config.qualification import BenchmarkConfig
from tasks.formats.nccl_tests import read_nccl_tests
from tasks.hardware.sku import load_sku
from tasks.jobs.qualify import steps
from tasks.jobs.qualify.steps import LeftOut, agree, alone, binary, run_binary
from tasks.jobs.qualify.sweeps import sweeping, whole_elements
from tasks.qualification.measured import read_measurement

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "sendrecv": lambda n: 1.0,
}
"""doc/PERFORMANCE.md of nccl-tests, and its sendrecv.cu: written down again, not taken from the code under test."""
LONGEST = 120
"""Seconds of a launch on a busy machine; alone it takes five."""
PROGRAM = """# fork: jobs
import os, signal, sys
from torch import distributed
import tasks.jobs.benchmark as benchmark
from tasks.jobs.qualify import steps, sweeps
from tasks.jobs.node.runtime import main

node, rank = os.environ["HEADWAY_NODE_NAME"], int(os.environ["RANK"])
steps.GRACE_SECONDS = 1.0
if os.environ.get("PLANT") == node:
    fill = sweeps.fill
    def spoiled(buffer, period):
        fill(buffer, period)
        buffer[5] += 1
    sweeps.fill = spoiled
if os.environ.get("STOP") == node:
    measure = steps.measure_pairs
    def stop(bench):
        distributed.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
        measure(bench)
    benchmark.GROUPS["pairs"] = stop
sys.exit(main(benchmark.run))
"""


def launch(folder, *, nodes=1, each=1, enough=None, environment=None, **config):
    """Run the two groups of checks; what was measured. `enough` says when to look no longer."""
    (folder / "program.py").write_text(PROGRAM)
    benchmark = {"seconds": 0.4, "largest_megabytes": 1, "checks": ["collectives", "pairs"], "rounds": 1, **config}
    settings = {
        "benchmark": benchmark,
        "sku": load_sku("local-cpu").model_dump(mode="json"),
        "training": {},
        "threads": 1,
    }
    (folder / "config.json").write_text(json.dumps({"program": "program.py", "settings": settings, "inputs": {}}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [_machine(folder, k, nodes, each, port, environment or {}) for k in range(nodes)]
    deadline = time.monotonic() + limit(LONGEST)
    try:
        while any(process.poll() is None for process in started) and not (enough and enough()):
            assert time.monotonic() < deadline, _logs(folder)
            time.sleep(0.05)
    finally:
        _end(folder, started)
    if not enough:
        assert [process.returncode for process in started] == [0] * nodes, _logs(folder)
    return read_measurement(folder / "out", nodes=nodes, ranks_per_node=each)


def _machine(folder, number, nodes, each, port, environment):
    """Its ranks by torchrun; a single one as mpirun starts it, which saves a process that loads torch."""
    ours = {"HEADWAY_JOB": folder, "HEADWAY_NODE_NAME": f"n{number}", "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, folder / "program.py"]
    if each > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--master-port", port, "--nproc-per-node", each]
    else:
        ours |= {"RANK": number, "WORLD_SIZE": nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {
        **os.environ,
        **{name: str(value) for name, value in ours.items()},
        "PYTHONPATH": python_path(Path.cwd()),
        **environment,
    }
    with open(folder / f"machine-{number}.log", "wb") as log:
        return subprocess.Popen(list(map(str, command)), env=env, stdout=log, stderr=log)


def _end(folder, started):
    for path in folder.glob("ranks/*.json"):
        try:
            os.kill(json.loads(path.read_text())["pid"], signal.SIGCONT)
        except ProcessLookupError:
            continue
    for process in started:
        process.terminate()
    for process in started:
        process.wait(limit(60))


def _logs(folder):
    return "".join(path.read_text()[-2000:] for path in (*folder.glob("machine-*.log"), *folder.glob("logs/*.log")))


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    """One machine with three ranks, everything that a full depth has."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(folder, each=3, depth="full", min_of_peers=0.01)


def test_every_collective_has_its_factor_and_no_wrong_element(three_ranks):
    _, measured = three_ranks
    assert {(sweep.collective, sweep.scope) for sweep in measured.sweeps} == {
        (name, scope) for name in FACTORS for scope in ("node", "all")
    }
    for sweep in measured.sweeps:
        assert (sweep.status, sweep.said, sweep.ranks, sweep.nodes) == ("measured", "", 3, ("n0",))
        assert (sweep.backend, sweep.transport) == ("gloo", ("tcp/lo",))
        assert [row.bytes for row in sweep.rows] == sorted(row.bytes for row in sweep.rows)
        assert 1_000_000 <= sweep.rows[-1].bytes < 1_000_012
        for row in sweep.rows:
            assert row.algbw == pytest.approx(row.bytes / row.microseconds / 1e3, rel=1e-6)
            assert row.busbw == pytest.approx(row.algbw * FACTORS[sweep.collective](3), rel=1e-6)
            assert row.wrong == 0
            if sweep.collective in ("alltoall", "sendrecv"):
                assert (row.microseconds_in_place, row.busbw_in_place, row.wrong_in_place) == (None, None, None)
            else:
                algbw = row.bytes / row.microseconds_in_place / 1e3
                assert row.busbw_in_place == pytest.approx(algbw * FACTORS[sweep.collective](3), rel=1e-6)
                assert row.wrong_in_place == 0


def test_the_table_in_the_log_reads_as_one_of_nccl_tests(three_ranks):
    folder, measured = three_ranks
    runs = {run.collective: run for run in read_nccl_tests((folder / "logs" / "rank-0.log").read_text())}
    assert set(runs) == set(FACTORS)
    for sweep in measured.sweeps:
        run = runs[sweep.collective]
        assert [row.bytes for row in run.rows] == [row.bytes for row in sweep.rows]
        assert [row.out.busbw for row in run.rows] == [pytest.approx(row.busbw, abs=0.006) for row in sweep.rows]
        assert [row.in_place.wrong for row in run.rows] == [row.wrong_in_place for row in sweep.rows]
        assert run.averages_agree
        assert run.out_of_bounds == 0


@pytest.fixture(scope="module")
def three_machines(tmp_path_factory):
    """One rank each. Machine 1 sends one wrong element a message; machine 2 stands still while it
    connects to its first partner, when that one waits for it already."""
    folder = tmp_path_factory.mktemp("three")

    def over():
        reports = [folder / "out" / "ranks" / f"{rank}.json" for rank in (0, 1)]
        return all(path.exists() and "pairs" in json.loads(path.read_text())["done"] for path in reports)

    limits = {"collective_seconds": 12.0, "check_seconds": 100.0}
    return folder, launch(folder, nodes=3, enough=over, environment={"PLANT": "n1", "STOP": "n2"}, **limits)


def test_a_wrong_element_is_found_wherever_it_goes(three_machines):
    """Each rank has it in its sum; of an alltoall, each gets a part with one."""
    folder, measured = three_machines
    wrong = {(s.collective, s.nodes): {row.wrong for row in s.rows} for s in measured.sweeps if s.status == "measured"}
    everyone = ("n0", "n1", "n2")
    assert wrong == {("all_reduce", everyone): {3}, ("alltoall", everyone): {3}, ("all_reduce", ("n0", "n1")): {2}}
    assert "FAILED" in (folder / "logs" / "rank-0.log").read_text()


def test_a_machine_that_stands_still_costs_its_time_and_no_more(three_machines):
    """The others wait for it once, meet each other, and say that it did not answer."""
    _, measured = three_machines
    pairs = {sweep.nodes: sweep for sweep in measured.sweeps if sweep.scope == "pair"}
    assert {nodes: sweep.status for nodes, sweep in pairs.items()} == {
        ("n0", "n1"): "measured",
        ("n1", "n2"): "timed out",
    }
    assert pairs["n1", "n2"].said.startswith("n2 did not answer")
    assert [report.node for report in measured.ranks if "pairs" in report.done] == ["n0", "n1"]


FAKE = """#!{python}
import os, sys, time
words = sys.argv[1:]
assert words == ["-b", "1024", "-e", "4096", "-f", "2", "-g", "8", "-c", "1"], words
assert not [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "RANK", "PMI", "WORLD_SIZE"))]
assert os.environ["NCCL_DEBUG"] == "INFO" and "NCCL_DEBUG_FILE" not in os.environ
{first}
print("# nccl-tests version 2.18.3 nccl-headers=23003 nccl-library=23003")
print("# Collective test starting: all_reduce_perf")
print("# nThread 1 nGpus 8 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1")
print("node1:100:200 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read")
print("#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong")
print("        1024           256     float     sum      -1    37.89    0.03    0.05       0    35.31    0.03    0.05       0")
print("        4096          1024     float     sum      -1    38.00    0.11    0.19       0    36.00    0.11    0.20       1")
print("# Out of bounds values : 1 FAILED")
print("# Avg bus bandwidth    : 0.1225")
sys.exit({code})
"""


def fake(folder, *, first="", code=0):
    path = folder / "all_reduce_perf"
    path.write_text(FAKE.format(python=sys.executable, first=first, code=code))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_nccl_tests_own_program_is_found_run_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("RANK", "0")
    fake(tmp_path)
    program = binary("all_reduce", str(tmp_path))
    ran = run_binary(program, [1024, 4096], gpus=8, seconds=30)
    assert ran.tool == "nccl-tests 2.18.3"
    assert [(row.bytes, row.busbw, row.wrong, row.wrong_in_place) for row in ran.rows] == [
        (1024, 0.05, 0, 0),
        (4096, 0.19, 0, 1),
    ]
    assert ran.transport == ("P2P",)
    assert binary("alltoall", str(tmp_path)) is None


def test_a_program_that_fails_or_hangs_says_so(tmp_path):
    failed = run_binary(fake(tmp_path, code=3), [1024, 4096], gpus=8, seconds=30)
    assert "exit code 3" in failed.failed
    hanging = run_binary(fake(tmp_path, first="time.sleep(60)"), [1024, 4096], gpus=8, seconds=0.5)
    assert hanging.failed.startswith("timed out")
    assert hanging.rows == ()


CHILD = """
import subprocess
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(__file__).with_name("child").write_text(str(child.pid))
time.sleep(60)
"""


def test_a_program_whose_child_keeps_its_output_open_is_not_waited_for(tmp_path, monkeypatch):
    """As one that hangs in the driver: the job would never end."""
    monkeypatch.setattr(steps, "LAST_SECONDS", 0.2)
    began = time.monotonic()
    hanging = run_binary(fake(tmp_path, first=CHILD), [1024, 4096], gpus=8, seconds=3.0)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert (hanging.failed.startswith("timed out"), hanging.rows) == (True, ())
    assert time.monotonic() - began < limit(50)


def test_a_machine_that_is_not_to_meet_the_others_does_not_wait_for_them(tmp_path):
    with pytest.raises(LeftOut, match="is not among those that meet"):
        agree(bench(tmp_path), "pairs/1", {}, among={1, 2}, seconds=60.0)


def test_a_program_alone_has_no_place_in_a_job():
    kept = alone({"PATH": "/bin", "RANK": "3", "PMIX_RANK": "3", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG_FILE": "x"})
    assert kept == {"PATH": "/bin", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


def test_sizes_have_the_largest_and_those_that_the_hardware_is_judged_at():
    sku = load_sku("nd96isr_h100_v5")
    named = {limit.bytes for limit in sku.collectives}
    for depth in ("quick", "full"):
        how = sweeping(BenchmarkConfig(depth=depth), sku, gpu=True, every_size=True)
        assert named <= set(how.sizes)
        assert how.sizes[-1] == max(named)
    assert len(how.sizes) > 20
    cpu = sweeping(BenchmarkConfig(largest_megabytes=16), load_sku("local-cpu"), gpu=False, every_size=True)
    assert cpu.sizes == (15_625, 500_000, 1_000_000, 16_000_000)


def test_a_size_that_ranks_cannot_divide_becomes_larger_not_smaller():
    assert whole_elements("all_gather", 2**30, 24) * 4 >= 2**30
    assert whole_elements("all_gather", 2**30, 24) % 24 == 0
    assert whole_elements("all_reduce", 2**30, 24) * 4 == 2**30
