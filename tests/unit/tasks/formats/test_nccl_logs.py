"""Logs of nccl-tests and rccl-tests in every form that they have, and what NCCL says in between."""

import gzip
import json
from pathlib import Path

import pytest

from tasks.formats.log_text import lines, text_of
from tasks.formats.nccl_run import collective_of, environment_of, read_log, read_nccl_json, transports
from tasks.formats.nccl_tests import read_nccl_tests

pytestmark = pytest.mark.unit

LOGS = Path(__file__).parents[3] / "support" / "logs"
SIZES = [8, 1 << 20, 16 << 20, 128 << 20, 1 << 30, 8 << 30, 16 << 30]
BUSBW = [0.0, 43.7, 234.45, 400.61, 466.35, 478.87, 479.31]


def runs(name):
    return read_nccl_tests((LOGS / name).read_text(), name)


def run(name):
    (only,) = runs(name)
    return only


def test_a_run_is_read_whole():
    found = run("new.log")
    assert (found.tool, found.version, found.library) == ("nccl-tests", "2.18.3", "2.30.3+cuda13.0")
    assert (found.collective, found.world, found.hosts, found.ranks[3].name) == (
        "all_reduce",
        8,
        ("vm-01",),
        "NVIDIA H100 80GB HBM3",
    )
    last = found.rows[-1]
    assert (last.bytes, last.type, last.redop, last.root) == (16 << 30, "float", "sum", -1)
    assert (last.out.microseconds, last.out.algbw, last.out.busbw, last.out.wrong) == (62725.1, 273.89, 479.31, 0)
    assert last.in_place.busbw == 479.79
    assert (found.out_of_bounds, found.average_accepted, found.unread, found.failures) == (0, None, (), ())


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("new.log", 8),
        ("old_error_column.log", 8),
        ("stamps.log", 8),
        ("iterations.log", 8),
        ("srun.log", 16),
        ("mpirun.log", 16),
        ("kubectl.log", 16),
        ("pod.log", 16),
        ("interleaved.log", 16),
        ("split.log", 8),
    ],
)
def test_every_form_has_the_same_rows_and_its_own_average(name, ranks):
    found = run(name)
    assert [row.bytes for row in found.rows] == SIZES
    assert [row.out.busbw for row in found.rows] == BUSBW
    assert (found.collective, found.world, found.unread) == ("all_reduce", ranks, ())
    assert found.averages_agree
    assert found.average == pytest.approx(found.average_printed, abs=0.001)


@pytest.mark.parametrize("path", sorted(path.name for path in LOGS.glob("*.log")))
def test_every_printed_average_is_the_mean_of_its_rows(path):
    for found in runs(path):
        if found.average_printed is not None and path != "wrong_average.log":
            assert found.average == pytest.approx(found.average_printed, abs=0.006)


def test_an_average_that_is_not_the_mean_is_seen():
    found = run("wrong_average.log")
    assert (found.average_printed, round(found.average, 2), found.averages_agree) == (451.7, 300.62, False)


def test_two_runs_of_a_log_are_two():
    first, second = runs("two_runs.log")
    assert (first.collective, len(first.rows), second.collective, len(second.rows)) == (
        "all_reduce",
        7,
        "all_gather",
        6,
    )
    assert second.ratio == pytest.approx(15 / 16, abs=0.001)
    assert first.lines[1] < second.lines[0]


def test_what_was_not_compared_is_none_and_no_zero():
    assert {row.out.wrong for row in run("not_checked.log").rows} == {None}
    assert run("not_checked.log").validated is False
    assert [(row.out.wrong, row.in_place.wrong) for row in run("alltoall.log").rows] == [(0, None)] * 3


def test_numbers_with_exponents_are_numbers():
    wrong = run("exponents_wrong.log")
    assert [row.out.microseconds for row in wrong.rows] == [20.0, 4915.2, 2.0e7]
    assert (wrong.rows[1].out.wrong, wrong.out_of_bounds) == (1_048_580, 2)


def test_an_error_over_the_tolerance_has_an_asterisk_in_old_forms():
    found = run("rccl_asterisk_all_reduce.log")
    assert [row.out.wrong for row in found.rows] == [0, 0, 1, 0, 0, 0]
    assert (found.tool, found.version, found.out_of_bounds) == ("rccl-tests", "develop:448c4c7", 2)


def test_rccl_tests_with_devices_without_names():
    found = run("rccl_all_reduce.log")
    assert (found.tool, found.version, found.collective, found.hosts) == (
        "rccl-tests",
        "develop:a52452e",
        "all_reduce",
        ("amd-01",),
    )
    assert {rank.name for rank in found.ranks} == {""}


def test_no_end_no_rows_and_a_row_that_is_cut():
    assert (run("no_footer.log").average_printed, len(run("no_footer.log").rows)) == (None, 4)
    empty = run("no_rows.log")
    assert (empty.header, empty.rows, empty.average) == (True, (), None)
    cut = run("cut_row.log")
    assert len(cut.rows) == 5
    assert cut.unread[0].startswith("line 24: ")


def test_a_failure_is_kept_with_its_lines():
    found = run("failure.log")
    assert len(found.failures) == 6
    assert "remote process exited" in found.failures[0]
    assert (found.rows, found.hosts) == ((), ("vm-01", "vm-02"))


def test_groups_and_reduced_messages():
    assert (run("split.log").groups, run("split.log").world, run("split.log").hosts) == (2, 8, ("vm-01", "vm-02"))
    assert run("reduced.log").reduced_to == 8 << 30


def test_processes_that_do_not_know_each_other_are_one_run_of_one_rank():
    found = run("no_mpi.log")
    assert (found.processes, found.world, found.average) == (4, 1, 0.0)


def test_what_nccl_tests_min_bw_said_is_kept():
    assert run("min_bw.log").average_accepted is False


def test_a_log_without_a_head_has_its_collective_from_its_name_and_its_ranks_from_the_figures():
    found = run("rows_only_all_reduce_vm-01.log")
    assert (found.collective, found.world, len(found.rows)) == ("all_reduce", 8, 7)
    text = (LOGS / "all_gather.log").read_text().replace("# Collective test starting: all_gather_perf\n", "")
    assert read_nccl_tests(text, "alltoall_vm-01.log")[0].collective == "alltoall"
    assert (
        read_nccl_tests("+ srun /opt/nccl-tests/build/all_gather_perf -b 8\n" + text, "x")[0].collective == "all_gather"
    )
    assert collective_of("reduce_scatter_perf_mpi") == "reduce_scatter"
    assert collective_of("notes") == ""


def test_in_place_only_rows_have_no_other_figures():
    text = (LOGS / "new.log").read_text().split("\n")
    number = next(number for number, line in enumerate(text) if line.split()[:1] == ["1048576"])
    text[number] = text[number][:52] + " " * 32 + text[number][-33:]
    found = read_nccl_tests("\n".join(text))[0]
    assert (found.rows[1].out.busbw, found.rows[1].in_place.busbw) == (None, 43.74)


def test_transports_topology_and_networks_by_machine():
    found = read_log((LOGS / "interleaved.log").read_text())
    assert found.transports == ("NET/IB/GDRDMA", "P2P")
    assert dict(found.networks) == {"vm-01": "IBext_v8", "vm-02": "IBext_v8"}
    assert dict(found.topologies)["vm-02"] == "/opt/microsoft/ndv5-topo.xml"
    assert dict(found.ranks) == {0: "vm-01", 8: "vm-02"}
    assert found.warnings[0][0] == "vm-02"
    fallen = read_log((LOGS / "socket.log").read_text())
    assert (fallen.transports, fallen.without_device) == (("NET/Socket",), ("vm-01",))


@pytest.mark.parametrize(
    ("said", "transport"),
    [
        ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0(8)/GDRDMA(PCI)/Shared", "NET/IB/GDRDMA"),
        ("Channel 00/0 : 0[0] -> 8[0] [receive] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric/GDRDMA"),
        ("Ring 00 : 15 -> 0 [receive] via NET/IB/0", "NET/IB"),
        ("Ring 00 : 0[0] -> 1[1] via direct shared memory", "SHM"),
        ("Channel 02 : 0[0] -> 1[1] via SHM/direct/direct", "SHM"),
        ("Channel 02 : 0[0] -> 1[1] via P2P/direct pointer", "P2P"),
        ("CollNet 00/0 : 3 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP/GDRDMA"),
        ("Connected NVLS tree", "NVLS"),
    ],
)
def test_each_transport_by_its_words(said, transport):
    assert transports(f"[1,3]<stdout>:vm-1:81:92 [0] NCCL INFO {said}\n") == (transport,)
    assert transports(f"vm-1:81:92 [0] NCCL INFO NVLS multicast support is available on dev 0\n# {said}") == ()


def test_json_has_what_the_text_has_and_no_secret():
    text = (LOGS / "run.json").read_text()
    found = read_nccl_json(text, "run.json")
    same = run("new.log")
    assert [row.bytes for row in found.rows] == [row.bytes for row in same.rows]
    assert found.rows[-1].out.busbw == pytest.approx(479.31)
    assert (found.collective, found.world, found.library, found.out_of_bounds) == ("all_reduce", 8, "2.30.3", 0)
    assert found.rows[0].in_place.wrong is None
    assert found.average == pytest.approx(found.average_printed, abs=1e-5)
    assert found.environment["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"
    assert "not-a-real-one" not in str(found)
    assert "0123456789abcdef" not in str(found)
    assert environment_of(["HF_TOKEN=abcdefghijkl"]) == {"HF_TOKEN": "[redacted]"}


def test_json_of_a_killed_run_is_read_as_far_as_it_goes():
    found = read_nccl_json((LOGS / "run_cut.json").read_text())
    assert (len(found.rows), found.average_printed, len(found.unread)) == (5, None, 1)
    assert (
        read_nccl_json('{"version": 3, "results": [{"size": 8, "out_of_place": {"bus_bw": inf, "alg_bw": "nan"}}]}')
        .rows[0]
        .out.busbw
        is None
    )
    assert read_nccl_json(json.dumps({"answer": 42})) is None
    assert read_nccl_json("{" * 5000) is None


def test_prefixes_of_launchers_are_not_part_of_a_line():
    wanted = "#  Rank  0 Group"
    for prefix in ("0: ", " 12: ", "[1,0]<stdout>:", "[prterun-vm-1-7@1,3]<stdout>: ", "Thu Nov 19 10:00:00 2026[1,0]<stdout>:",
                   "2026-11-19T10:00:00.123456789Z [pod/a-b/c] ", "[rank0]: ", "vm-07: "):  # fmt: skip
        assert lines(prefix + wanted)[0].text.strip() == wanted
    assert lines("vm-1:81:92 [0] NCCL INFO x")[0].text == "vm-1:81:92 [0] NCCL INFO x"


def test_text_of_any_bytes():
    text = (LOGS / "new.log").read_text()
    plain = text.encode()
    coloured = text.replace("#", "\x1b[32m#\x1b[0m").encode()
    encoded = (text.encode("utf-16"), text.encode("utf-16-le"), b"\xef\xbb\xbf" + plain, b"\0" * 400 + plain)
    for raw in (gzip.compress(plain), *encoded, text.replace("\n", "\r\n").encode(), coloured):
        assert text_of(raw).text == text
    cut = text_of(gzip.compress(text.encode())[:-40])
    assert cut.problems == ("its gzip data is cut off",)
    assert text.startswith(cut.text)
    assert text_of(bytes(range(256)) * 40).text == ""
    assert text_of(b"").problems == ("the file is empty",)
    assert text_of(b" \n\t\n").problems == ("nothing is written in it",)


def test_a_list_of_devices_that_is_cut_does_not_hide_ranks():
    text = "\n".join(
        line for line in (LOGS / "new.log").read_text().split("\n") if "Rank  " not in line or "Rank  0" in line
    )
    (found,) = read_nccl_tests(text)
    assert (len(found.ranks), found.world) == (1, 8)
