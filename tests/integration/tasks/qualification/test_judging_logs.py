"""The verdict on a cluster by logs alone: on each log, machine and pair, and what `headway qualify --from` says."""

import datetime
import functools
import itertools
import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest
from support import HEADWAY

from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.files import find_sku, read_sku
from tasks.qualification import from_logs
from tasks.qualification.from_logs import machines_of, read_logs

pytestmark = pytest.mark.unit

LOGS = Path(__file__).parents[3] / "support" / "logs"
NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)


@functools.cache
def hardware(name):
    return read_sku(find_sku(name))


def judged(*paths, sku="nd96isr_h100_v5"):
    where = [LOGS / path if isinstance(path, str) else path for path in paths]
    return from_logs.judge_logs(read_logs(where), hardware(sku), BenchmarkConfig(), now=NOW)


def why(found):
    reasons = [*(reason for node in found.nodes for reason in node.reasons), *found.reasons]
    return " ".join(reason.sentence for reason in reasons)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("new.log", "healthy"),
        ("old_error_column.log", "healthy"),
        ("stamps.log", "healthy"),
        ("iterations.log", "healthy"),
        ("interleaved.log", "healthy"),
        ("kubectl.log", "healthy"),
        ("split.log", "healthy"),
        ("reduced.log", "healthy"),
        ("run.json", "healthy"),
        ("two_runs.log", "healthy"),
        ("rows_only_all_reduce_vm-01.log", "healthy"),
        ("aznhc_healthy.log", "healthy"),
        ("aznhc_repaired.log", "healthy"),
        ("not_checked.log", "degraded"),
        ("slow_node.log", "failed"),
        ("collapsed.log", "failed"),
        ("erratic.log", "failed"),
        ("socket.log", "failed"),
        ("exponents_wrong.log", "failed"),
        ("failure.log", "failed"),
        ("min_bw.log", "failed"),
        ("aznhc_failed.log", "failed"),
        ("aznhc_warned.log", "failed"),
        ("deepspeed_killed.log", "failed"),
        ("distributed.debug.log", "failed"),
        ("no_rows.log", "unknown"),
        ("no_footer.log", "unknown"),
        ("cut_row.log", "unknown"),
        ("run_cut.json", "unknown"),
        ("no_mpi.log", "unknown"),
        ("wrong_average.log", "unknown"),
        ("false_sample.log", "unknown"),
        ("all_gather.log", "unknown"),
        ("aznhc_unsupported.log", "unknown"),
        ("aznhc_no_end.log", "unknown"),
        ("aznhc_setup.log", "unknown"),
        ("aznhc_timed_out.log", "unknown"),
        ("megatron_skipped.log", "unknown"),
        ("distributed.health.log", "unknown"),
    ],
)
def test_each_trap_has_its_verdict(name, verdict):
    found = judged(name)
    assert found.verdict == verdict, why(found)
    if verdict != "healthy":
        assert why(found)


@pytest.mark.parametrize("name", ["rccl_all_reduce.log", "rccl_asterisk_all_reduce.log"])
def test_rccl_is_judged_by_amds_size(name):
    assert judged(name, sku="nd96isr_mi300x_v5").verdict == ("failed" if "asterisk" in name else "healthy")


def test_a_slow_machine_is_named_with_figure_limit_and_source():
    found = judged("new.log", "slow_node.log")
    assert {node.name: node.verdict for node in found.nodes} == {"vm-01": "healthy", "vm-03": "failed"}
    reason = next(reason for node in found.nodes for reason in node.reasons if reason.verdict == "failed")
    assert (reason.node, reason.unit) == ("vm-03", "GB/s")
    assert 287 < reason.measured < 288
    assert reason.limit == ">= 460"
    assert "azurehpc-health-checks" in reason.source


def test_logs_of_another_hardware_are_unknown():
    found = judged("new.log", "aznhc_healthy.log", sku="nd96isr_h200_v5")
    assert found.verdict == "unknown"
    assert "H100, limit = H200" in why(found)
    assert "aznhc VM SKU" in why(found)


def test_a_machine_of_a_failed_run_is_unknown_unless_another_log_clears_it():
    found = judged("failure.log", "new.log")
    assert {node.name: node.verdict for node in found.nodes} == {"vm-01": "healthy", "vm-02": "unknown"}
    assert [(pair.a, pair.b, pair.busbw_gb_s, pair.verdict) for pair in found.pairs] == [
        ("vm-01", "vm-02", None, "failed")
    ]


def test_pairs_vote_for_the_machine_that_is_slow_in_all_of_its_own(tmp_path):
    names = ["vm-01", "vm-02", "vm-03", "vm-04"]
    text = (LOGS / "srun.log").read_text()
    slow = text.replace(" 479.31 ", "  21.31 ").replace(" 479.79 ", "  21.33 ")
    slow = slow.replace("300.62", "235.202")
    for a in names:
        for b in names[names.index(a) + 1 :]:
            log = slow if "vm-03" in (a, b) else text
            log = log.replace("vm-01", "X").replace("vm-02", b).replace("X", a)
            (tmp_path / f"{a}_{b}.log").write_text(log)
    found = judged(tmp_path)
    assert {node.name: node.verdict for node in found.nodes if node.verdict == "failed"} == {"vm-03": "failed"}
    assert {(pair.a, pair.b) for pair in found.pairs if pair.verdict != "healthy"} == {
        ("vm-01", "vm-03"),
        ("vm-02", "vm-03"),
        ("vm-03", "vm-04"),
    }


def test_a_summary_names_each_machine():
    found = {node.name: node.verdict for node in judged("distributed.health.log").nodes}
    assert (found["mynode-042"], found["mynode-066"], found["mynode-108"]) == ("healthy", "failed", "unknown")


def test_what_is_not_there_or_is_nothing_is_unknown(tmp_path):
    (tmp_path / "vm-02.log").write_text("")
    found = judged("new.log", tmp_path / "vm-02.log")
    assert {node.name: node.verdict for node in found.nodes} == {"vm-01": "healthy", "vm-02": "unknown"}
    assert judged("new.log", tmp_path / "gone.log").verdict == "unknown"
    (tmp_path / "vm-02.log").write_bytes(bytes(range(256)) * 9)
    assert judged("new.log", tmp_path).verdict == "unknown"
    (tmp_path / "vm-02.log").write_text("hello\n")
    assert "nothing in it is of" in why(judged(tmp_path))
    (tmp_path / "vm-02.log").unlink()
    assert judged(tmp_path).verdict == "unknown"
    assert from_logs.judge_logs([], hardware("local-cpu"), BenchmarkConfig(), now=NOW).verdict == "unknown"


def test_a_folder_is_read_with_what_lies_beside_logs(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/run.out").write_text((LOGS / "new.log").read_text())
    (tmp_path / "job/run.err").write_text("")
    (tmp_path / "job/README.md").write_text("notes")
    (tmp_path / ".hidden").write_text("x")
    found = judged(tmp_path)
    assert (found.verdict, [log.log.path for log in found.logs]) == ("healthy", [str(tmp_path / "job/run.out")])


def test_a_verdict_expires_as_its_oldest_log_does(tmp_path):
    log = tmp_path / "a.log"
    log.write_text((LOGS / "new.log").read_text())
    os.utime(log, (1_800_000_000, 1_800_000_000))
    assert judged(log).expires == datetime.datetime.fromtimestamp(1_800_000_000 + 86400, datetime.UTC)


def test_a_file_of_nccls_own_words_tells_of_a_fall_back(tmp_path):
    words = [line for line in (LOGS / "socket.log").read_text().split("\n") if " NCCL INFO " in line]
    log = tmp_path / "nccl.vm-01.123.log"
    log.write_text("\n".join(words))
    found = judged(log)
    assert (found.verdict, found.logs[0].log.tool) == ("failed", "nccl")
    assert "NET/Socket" in why(found)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("logs/vm-07.log", ("vm-07",)),
        ("logs/all_reduce_vm-01_vm-02.log", ("vm-01", "vm-02")),
        ("logs/mynode-042/health.log", ("mynode-042",)),
        ("logs/nd96isr_h100_v5/all_reduce_16G_2nodes.log", ()),
        ("logs/run1.log", ()),
        ("logs/aks-gpu-123-vmss000001.log", ("aks-gpu-123-vmss000001",)),
    ],
)
def test_machines_by_the_name_of_a_file(path, names):
    assert machines_of(path) == names
    assert machines_of("logs/hpc7.log", known=["hpc7", "hpc"]) == ("hpc7",)


def test_damaged_logs_are_judged_and_nothing_is_raised(tmp_path):
    """Seeded; 6,000 others were run once."""
    texts = [path.read_bytes() for path in sorted(LOGS.iterdir())]
    for seed in range(40):
        chance = random.Random(seed)
        text = bytearray(chance.choice(texts))
        for _ in range(chance.randint(1, 9)):
            place = chance.randrange(len(text) + 1)
            other = chance.choice(texts)
            start = chance.randrange(len(other))
            text[place : place + chance.randint(0, 150)] = other[start : start + chance.randint(0, 300)]
        (tmp_path / "log").write_bytes(bytes(text))
        assert judged(tmp_path / "log").verdict in ("healthy", "degraded", "failed", "unknown")


def nccl_log(sizes, rate):
    """One machine's run with these sizes, all of one bus bandwidth in GB/s."""
    lines = (LOGS / "new.log").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if "(elements)" in line) + 1
    half = f"{{us:10.2f}} {rate / 1.75:7.2f} {rate:7.2f} 0"
    rows = [
        f"{size:12} {size // 4:12} float sum -1 {half.format(us=size / rate * 1.75 / 1000)} "
        f"{half.format(us=size / rate * 1.75 / 1000)}"
        for size in sizes
    ]
    end = ["# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {rate}", lines[-2]]
    return "\n".join([*lines[:first], *rows, *end, ""])


@pytest.mark.parametrize(
    ("largest", "rate", "verdict"),
    [(29, 5.0, "failed"), (29, 480.0, "healthy"), (20, 5.0, "unknown"), (24, 41.0, "unknown")],
)
def test_a_log_of_small_messages_is_cleared_by_no_norm(tmp_path, largest, rate, verdict):
    """The hardware's file has norms from 1 MiB on, and limits from 1 GiB on."""
    (tmp_path / "run.log").write_text(nccl_log([1 << n for n in range(20, largest + 1)], rate))
    found = judged(tmp_path)
    assert (found.verdict, [node.verdict for node in found.nodes]) == (verdict, [verdict])
    assert verdict == "healthy" or f"{rate:g} GB/s" in why(found)


def test_a_machine_with_a_good_and_a_bad_log_failed_and_says_why(tmp_path):
    (tmp_path / "good.log").write_text((LOGS / "new.log").read_text())
    (tmp_path / "bad.log").write_text((LOGS / "slow_node.log").read_text().replace("vm-03", "vm-01"))
    (node,) = judged(tmp_path).nodes
    assert (node.name, node.verdict) == ("vm-01", "failed")
    assert [(r.check, r.limit) for r in node.reasons if r.verdict == "failed"] == [
        ("all_reduce busbw at 16 GiB", ">= 460")
    ]


def run_log(nodes, rate, gpus=4, largest=34):
    """Of so many GPUs of each machine, from 1 MiB to 2^largest bytes, levelling off at a bus bandwidth in GB/s."""
    lines = (LOGS / "srun.log").read_text().replace("0: ", "").splitlines()
    world = gpus * len(nodes)
    factor = 2 * (world - 1) / world
    devices = [
        f"#  Rank {rank:2} Group  0 Pid  {10563 + rank} on {nodes[rank // gpus]:>10} device {rank % gpus:2} "
        f"[000{rank % gpus + 1}:00:00] NVIDIA H100 80GB HBM3"
        for rank in range(world)
    ]
    rates = {1 << n: rate * min(1.0, 0.25 + 0.15 * (n - 20)) for n in range(20, largest + 1)}
    halves = {size: f"{size * factor / b / 1000:10.2f} {b / factor:7.2f} {b:7.2f} 0" for size, b in rates.items()}
    rows = [f"{size:12} {size // 4:12} float sum -1 {half} {half}" for size, half in halves.items()]
    average = sum(round(b, 2) for b in rates.values()) / len(rates)
    heads = next(n for n, line in enumerate(lines) if "out-of-place" in line)
    end = ["# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {average:g}", *lines[-3:]]
    return "\n".join([*lines[:5], *devices, *lines[heads - 2 : heads + 3], *rows, *end, ""])


def pairs_of_four_gpus(folder, slow=(), names=("vm-01", "vm-02", "vm-03", "vm-04")):
    for a, b in itertools.combinations(names, 2):
        (folder / f"{a}_{b}.log").write_text(run_log((a, b), 60.0 if {a, b} & {*slow} else 190.0))
    return folder


def test_pairs_of_fewer_gpus_vote_for_the_slow_machine_and_say_what_could_not_be_judged(tmp_path):
    """Four and four of ND H100, whose limits hold for eight and eight: 190 GB/s are no fault, 60 beside them are."""
    found = judged(pairs_of_four_gpus(tmp_path, slow=["vm-03"]))
    assert found.verdict == "failed"
    verdicts = {node.name: node.verdict for node in found.nodes}
    assert verdicts == {"vm-01": "healthy", "vm-02": "healthy", "vm-03": "failed", "vm-04": "healthy"}
    (reason,) = found.nodes[2].reasons
    assert (reason.check, reason.measured) == ("all_reduce busbw at 16 GiB against other pairs", 60.0)
    assert "3 of its 3 pairs are bad" in reason.said
    assert {(p.a, p.b) for p in found.pairs if p.verdict == "healthy"} == {
        ("vm-01", "vm-02"),
        ("vm-01", "vm-04"),
        ("vm-02", "vm-04"),
    }
    (level,) = found.reasons
    assert (level.check, level.verdict) == ("level of all machines", "unknown")
    assert "all 8 GPUs" in level.limit and "whether all of them are slow is not" in level.said


def test_machines_that_are_only_as_fast_as_each_other_did_not_pass(tmp_path):
    found = judged(pairs_of_four_gpus(tmp_path))
    assert (found.verdict, {node.verdict for node in found.nodes}) == ("unknown", {"healthy"})
    assert [reason.check for reason in found.reasons] == ["level of all machines"]
    (tmp_path / "whole.log").write_text(run_log([f"vm-0{n}" for n in range(1, 5)], 440.0, gpus=8))
    found = judged(tmp_path)
    assert (found.verdict, found.reasons) == ("healthy", ())


def test_one_pair_of_fewer_gpus_is_compared_with_nothing(tmp_path):
    (tmp_path / "pair.log").write_text(run_log(("vm-01", "vm-02"), 190.0))
    found = judged(tmp_path)
    assert (found.verdict, [node.verdict for node in found.nodes]) == ("unknown", ["unknown"] * 2)
    assert "8 GPUs of 2 machines, limit = 16" in why(found)


def test_machines_by_themselves_on_fewer_gpus_are_compared_too(tmp_path):
    for name, rate in (("vm-01", 300.0), ("vm-02", 305.0), ("vm-03", 120.0), ("vm-04", 298.0)):
        (tmp_path / f"{name}.log").write_text(run_log((name,), rate))
    found = judged(tmp_path)
    assert [node.name for node in found.nodes if node.verdict == "failed"] == ["vm-03"]
    assert [node.verdict for node in found.nodes].count("healthy") == 3
    assert "all_reduce of 4 GPUs against its peers" in why(found)


def test_runs_of_fewer_and_of_all_gpus_of_the_same_pair_are_not_mixed(tmp_path):
    pairs_of_four_gpus(tmp_path)
    (tmp_path / "whole.log").write_text(run_log(("vm-01", "vm-02"), 250.0, gpus=8))
    found = judged(tmp_path)
    assert {node.name: node.verdict for node in found.nodes}["vm-03"] == "healthy"
    assert [(p.verdict, p.a, p.b) for p in found.pairs if p.verdict != "healthy"] == [("failed", "vm-01", "vm-02")]


def lines_of(*names):
    """Logs of AzNHC, line by line in turns."""
    logs = ((LOGS / name).read_text().splitlines() for name in names)
    return [line for lines in itertools.zip_longest(*logs, fillvalue="") for line in lines]


def test_node_health_checks_of_two_machines_under_a_label(tmp_path):
    lines = lines_of("aznhc_healthy.log", "aznhc_failed.log")
    (tmp_path / "job.log").write_text("".join(f"{n % 2}: {line}\n" for n, line in enumerate(lines)))
    found = judged(tmp_path)
    assert {node.name: node.verdict for node in found.nodes} == {"vm-01": "healthy", "vm-02": "failed"}


def test_node_health_checks_of_two_machines_line_by_line_are_nobodys(tmp_path):
    healthy = (LOGS / "aznhc_healthy.log").read_text()
    both = zip(healthy.splitlines(), healthy.replace("vm-01", "vm-02").splitlines(), strict=True)
    (tmp_path / "job.log").write_text("\n".join(line for lines in both for line in lines))
    found = judged(tmp_path)
    assert found.verdict == "unknown"
    assert "two machines in one log, line by line: vm-01 and vm-02" in why(found)
    (tmp_path / "job.log").write_text("\n".join(lines_of("aznhc_healthy.log", "aznhc_failed.log")))
    assert judged(tmp_path).verdict not in ("healthy", "degraded")


def test_node_health_checks_that_name_no_machine(tmp_path):
    """Every run counts, because nobody knows whether a later one is of the same machine; a name of the file helps."""
    healthy, failed = (
        re.sub(r"(?m)^(VM|COMPUTER|VM HOST) NAME:.*\n", "", (LOGS / f"aznhc_{name}.log").read_text())
        for name in ("healthy", "failed")
    )
    for text, verdict in ((failed + healthy, "failed"), (healthy + failed, "failed"), (healthy, "unknown")):
        (tmp_path / "job.log").write_text(text)
        assert judged(tmp_path / "job.log").verdict == verdict
        assert "neither the log nor its file's name says which it is of" in why(judged(tmp_path / "job.log"))
    (tmp_path / "vm-07.log").write_text(failed + healthy)
    assert [(node.name, node.verdict) for node in judged(tmp_path / "vm-07.log").nodes] == [("vm-07", "failed")]


@pytest.mark.parametrize("label", ["", "0: ", "[1,0]<stdout>:"])
def test_a_line_of_a_summary_that_is_not_understood_is_unknown(tmp_path, label):
    lines = [
        "vm-01 | Healthy",
        "vm-02 | Ailing",
        "vm-03 |",
        "vm-04 | ERROR: nhc: Health check failed: check_gpu_xid: Xid 79",
    ]
    (tmp_path / "job.log").write_text("".join(f"{label}{line}\n" for line in lines))
    found = {node.name: node.verdict for node in judged(tmp_path).nodes}
    assert found == {"vm-01": "healthy", "vm-02": "unknown", "vm-03": "unknown", "vm-04": "failed"}


def command(*arguments, home):
    program = [HEADWAY, "qualify", *map(str, arguments)]
    return subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, "HEADWAY_HOME": str(home)}, check=False
    )


@pytest.mark.integration
def test_the_command_says_one_object_with_every_field(tmp_path):
    done = command(
        "--from", LOGS / "two_runs.log", LOGS / "new.log", "--sku", "nd96isr_h100_v5", "--json", home=tmp_path
    )
    said = json.loads(done.stdout)
    assert done.returncode == said["exit_code"] == 0, done.stderr
    assert list(said) == [
        "schema",
        "exit_code",
        "error",
        "verdict",
        "sku",
        "expires",
        "nodes",
        "pairs",
        "reasons",
        "logs",
    ]
    assert said["nodes"][0] == {"name": "vm-01", "verdict": "healthy", "reasons": []}
    assert said["pairs"] == [{"a": "vm-01", "b": "vm-02", "busbw_gb_s": 479.55, "verdict": "healthy"}]
    log = said["logs"][0]
    assert {key: log[key] for key in ("tool", "collective", "ranks", "verdict", "average_printed")} == {
        "tool": "nccl-tests",
        "collective": "all_reduce",
        "ranks": 16,
        "verdict": "healthy",
        "average_printed": 300.62,
    }
    assert list(log)[-1] == "average_recomputed"
    assert log["rows"][-1] == {
        "bytes": 17179869184,
        "algbw": 255.63,
        "busbw": 479.31,
        "wrong": 0,
        "algbw_in_place": 255.89,
        "busbw_in_place": 479.79,
        "wrong_in_place": 0,
    }
    assert not (tmp_path / "store").exists()


@pytest.mark.integration
def test_the_command_leaves_with_three_for_failed_and_unknown(tmp_path):
    done = command(
        "--from", LOGS / "slow_node.log", LOGS / "alltoall.log", "--sku", "nd96isr_h100_v5", "--json", home=tmp_path
    )
    said = json.loads(done.stdout)
    assert done.returncode == said["exit_code"] == 3
    assert said["error"]["type"] == "GateFailed"
    assert said["error"]["checks"]
    reasons = next(node["reasons"] for node in said["nodes"] if node["name"] == "vm-03")
    assert set(reasons[0]) == {"check", "measured", "unit", "limit", "source"}
    assert said["logs"][1]["rows"][0]["wrong_in_place"] is None
    shown = command("--from", LOGS / "slow_node.log", "--sku", "nd96isr_h100_v5", home=tmp_path)
    assert shown.returncode == 3
    assert "vm-03" in shown.stdout
    assert ">= 460" in shown.stdout
