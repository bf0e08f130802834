"""Every class of failure is recognised by what such a job leaves: the scheduler's word, reports, log lines, exit codes."""

import json
from typing import get_args

import pytest

from tasks.common.errors import JobFailed, Missing
from tasks.common.process import write_json
from tasks.compute.failures import classify, error_of, rules
from tasks.compute.job import Failure, Job, JobState

pytestmark = pytest.mark.unit

JOB = Job(name="train", token="4" * 32, program="p", settings={}, inputs={}, submission=2)


def ended(**fields):
    return JobState(**{"state": "ended", "code": 1, "reason": "ended", **fields})


def report(folder, name, failure, *, attempt=1, **fields):
    said = {"type": "RuntimeError", "message": "it broke", "remedy": "", "class": failure, "attempt": attempt}
    write_json(folder / "errors" / f"{name}.json", {**said, **fields})


def log(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_table_has_every_class_and_nothing_else():
    assert set(rules().classes) == set(get_args(Failure))
    assert all(entry.sentence.endswith(".") and entry.remedy for entry in rules().classes.values())
    assert all(entry.sentence.endswith(".") and entry.remedy for entry in rules().signatures)


LINES = {
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "node",
    "[Sun Nov 22] NVRM: Xid (PCI:0001:00:00): 79, pid=4242, GPU has fallen off the bus.": "node",
    "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-22T05:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***": "node",
    "srun: error: Node failure on n2": "node",
    "slurmstepd: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-11-22T05:00:00 DUE TO PREEMPTION ***": "preempted",
    "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-22T05:00:00 DUE TO TIME LIMIT ***": "timeout",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "out_of_memory",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=8.0. Some of the step tasks have been OOM Killed.": "out_of_memory",
    "[12.3] Out of memory: Killed process 4242 (python) total-vm:9kB": "out_of_memory",
    "OSError: [Errno 28] No space left on device": "missing",
    "cp: error writing 'x': Disk quota exceeded": "missing",
    "ModuleNotFoundError: No module named 'safetensors'": "missing",
    "slurmstepd: error: pyxis: failed to import docker image": "missing",
    "[rank3]:[E1122 ProcessGroupNCCL.cpp:629] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)": "infrastructure",
    "n1:77:99 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.4 with status=12": "infrastructure",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.5]:1234": "infrastructure",
    "OSError: [Errno 116] Stale file handle": "infrastructure",
}  # fmt: skip


@pytest.mark.parametrize(("line", "failure"), LINES.items(), ids=[line[:40] for line in LINES])
def test_a_line_of_a_log_tells_the_class_and_is_shown(tmp_path, line, failure):
    log(tmp_path, "launcher.log", f"starting\n{line}\nsomething after it\n")
    found = classify(JOB, ended(), tmp_path)
    assert found.failure == failure
    assert line in found.what


def test_a_line_names_the_machine_it_was_written_on(tmp_path):
    write_json(tmp_path / "nodes" / "1" / "node.json", {"name": "gpu-7", "host": "gpu-7.local"})
    log(tmp_path, "nodes/1/node.log", "NVRM: Xid (PCI:0001:00:00): 79, GPU has fallen off the bus\n")
    assert classify(JOB, ended(), tmp_path).nodes == ("gpu-7",)
    write_json(tmp_path / "ranks" / "3.json", {"host": "gpu-7.local"})
    log(tmp_path, "nodes/1/node.log", "")
    log(tmp_path, "logs/rank-3.log", "CUDA error: uncorrectable ECC error encountered\n")
    assert classify(JOB, ended(), tmp_path).nodes == ("gpu-7",)
    log(tmp_path, "logs/rank-3.log", "srun: error: Node failure on n2\n")
    assert classify(JOB, ended(), tmp_path).nodes == ("n2",)


@pytest.mark.parametrize(
    ("code", "failure", "sentence"),
    [(137, "infrastructure", "SIGKILL"), (139, "infrastructure", "SIGSEGV"), (127, "missing", "not found")],
)
def test_an_exit_code_tells_where_nothing_else_does(tmp_path, code, failure, sentence):
    found = classify(JOB, ended(code=code), tmp_path)
    assert (found.failure, sentence in found.sentence) == (failure, True)


def test_a_kill_is_for_memory_only_when_the_kernel_says_so(tmp_path):
    log(tmp_path, "slurm-8.out", "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=8.batch.\n")
    assert classify(JOB, ended(code=137), tmp_path).failure == "out_of_memory"


def test_what_the_program_says_of_itself_stands_before_the_scheduler_and_the_logs(tmp_path):
    report(tmp_path, "rank-0", "user", message="steps must be above 0")
    log(tmp_path, "launcher.log", "Connection closed by peer\n")
    found = classify(JOB, ended(failure="node", failed_nodes=("n1",)), tmp_path)
    assert (found.failure, found.what) == ("user", "steps must be above 0")


def test_what_the_scheduler_says_stands_before_what_ranks_felt_of_it(tmp_path):
    report(tmp_path, "rank-0", "infrastructure", message="Connection closed by peer")
    found = classify(JOB, ended(failure="node", reason="NODE_FAIL", failed_nodes=("n2",)), tmp_path)
    assert (found.failure, found.nodes, found.what) == ("node", ("n2",), "NODE_FAIL (n2), exit code 1")


def test_a_machines_report_names_it(tmp_path):
    report(tmp_path, "rank-0", "infrastructure")
    report(tmp_path, "node-n3", "node", nodes=["n3"], message="Xid 79 on GPU 2", remedy="Drain it.")
    found = classify(JOB, ended(), tmp_path)
    assert (found.failure, found.nodes, found.what, found.remedy) == ("node", ("n3",), "Xid 79 on GPU 2", "Drain it.")


def test_reports_of_attempts_that_were_got_over_do_not_count(tmp_path):
    report(tmp_path, "rank-0", "missing", attempt=1, message="old")
    found = classify(JOB, ended(attempts=2, code=139), tmp_path)
    assert (found.failure, "SIGSEGV" in found.sentence) == ("infrastructure", True)


def test_a_folder_that_others_wrote_into_says_nothing_more_of_the_failure(tmp_path):
    report(tmp_path, "rank-0", "preempted")
    log(tmp_path, "launcher.log", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    found = classify(JOB, ended(failure="integrity", code=5, reason="out/x is not from the job"), tmp_path)
    assert (found.failure, found.what) == ("integrity", "out/x is not from the job")


def test_a_torn_report_is_left_out(tmp_path):
    log(tmp_path, "errors/rank-0.json", '{"class": "us')
    assert classify(JOB, ended(), tmp_path).failure == "infrastructure"


def test_a_cancel_by_hand_counts_for_its_own_submission_only(tmp_path):
    write_json(tmp_path / "cancelled.json", {"submission": 1})
    assert classify(JOB, ended(), tmp_path).failure == "infrastructure"
    write_json(tmp_path / "cancelled.json", {"submission": 2})
    assert classify(JOB, ended(), tmp_path).failure == "cancelled"


def test_the_failing_rank_comes_first_in_the_error_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE_TOKEN", "hunter2hunter2")
    log(tmp_path, "logs/rank-0.log", "rank 0 only lost its peer\n")
    log(tmp_path, "logs/rank-3.log", "Traceback (most recent call last):\nRuntimeError: hunter2hunter2 was refused\n")
    log(tmp_path, "launcher.log", "noise\n")
    report(tmp_path, "rank-3", "infrastructure", message="hunter2hunter2 was refused")
    state = ended()
    error = error_of(JOB, classify(JOB, state, tmp_path), state, tmp_path, submissions=2, why_not_again="Enough.")
    assert isinstance(error, JobFailed)
    head, why, *lines = error.message.splitlines()
    assert head == "the job of train failed after 1 attempt(s) and 2 submissions: RuntimeError: [redacted] was refused"
    assert why.endswith("Enough.")
    assert lines == ["Traceback (most recent call last):", "RuntimeError: [redacted] was refused"]
    assert "hunter2" not in json.dumps([error.message, error.remedy])


def test_what_is_missing_comes_with_the_remedy_of_its_line(tmp_path):
    log(tmp_path, "launcher.log", "OSError: [Errno 28] No space left on device\n")
    state = ended()
    error = error_of(JOB, classify(JOB, state, tmp_path), state, tmp_path, submissions=1, why_not_again="")
    assert isinstance(error, Missing)
    assert "Free space" in error.remedy
