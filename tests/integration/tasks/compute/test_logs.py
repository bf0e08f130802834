"""Logs of a job as people see them: the failing rank's lines, and all ranks' while they are written."""

import threading

from tasks.common.process import write_json
from tasks.compute.logs import failing_rank, follow, rank_logs, relevant, tail_of_failure


def log(folder, name, text, mode="w"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.write(text)


def test_a_long_traceback_keeps_its_first_line_and_its_end():
    text = "before\nTraceback (most recent call last):\n" + "".join(f"  frame {n}\n" for n in range(30)) + "E: last\n"
    lines = relevant(text, 10).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == "  ... 22 lines ..."
    assert lines[-1] == "E: last"
    assert len(lines) == 10


def test_the_first_rank_to_report_is_the_failing_one_and_torchrun_may_name_it(tmp_path):
    log(
        tmp_path,
        "launcher.log",
        "Root Cause (first observed failure):\n[0]:\n  time : x\n  rank      : 5 (local_rank: 1)\n",
    )
    assert failing_rank(tmp_path) == 5
    write_json(tmp_path / "errors" / "rank-12.json", {"class": "infrastructure", "attempt": 2})
    assert failing_rank(tmp_path) == 12
    assert failing_rank(tmp_path, since_attempt=3) == 5


def test_without_a_report_the_launcher_and_the_first_rank_are_shown(tmp_path):
    log(tmp_path, "launcher.log", "signal 9\n")
    log(tmp_path, "logs/rank-0.log", "step 7\n")
    assert tail_of_failure(tmp_path) == "launcher.log:\nsignal 9\nlogs/rank-0.log:\nstep 7"


def test_ranks_come_in_the_order_of_their_numbers(tmp_path):
    for rank in (10, 2, 0):
        log(tmp_path, f"logs/rank-{rank}.log", "x\n")
    assert list(rank_logs(tmp_path)) == ["rank-0", "rank-2", "rank-10"]
    assert list(rank_logs(tmp_path, [10, 2])) == ["rank-2", "rank-10"]


def test_following_gives_whole_redacted_lines_of_all_ranks_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE_TOKEN", "hunter2hunter2")
    log(tmp_path, "logs/rank-0.log", "".join(f"old {n}\n" for n in range(30)))
    over, seen = threading.Event(), []
    lines = follow(tmp_path, over=over.is_set, lines=2)
    seen += [next(lines), next(lines)]
    assert seen == [("rank-0", "old 28"), ("rank-0", "old 29")]
    log(tmp_path, "logs/rank-0.log", "key hunter2hunter2\nhal", "a")
    log(tmp_path, "logs/rank-1.log", "late\n")
    assert sorted([next(lines), next(lines)]) == [("rank-0", "key [redacted]"), ("rank-1", "late")]
    log(tmp_path, "logs/rank-0.log", "f, without an end of line", "a")
    over.set()
    assert list(lines) == [("rank-0", "half, without an end of line")]


def test_a_log_that_begins_anew_for_a_further_submission_is_read_from_its_start(tmp_path):
    over = threading.Event()
    log(tmp_path, "launcher.log", "first submission, a long line\n")
    lines = follow(tmp_path, over=over.is_set)
    assert next(lines) == ("launcher", "first submission, a long line")
    (tmp_path / "launcher.log").unlink()
    log(tmp_path, "launcher.log", "second\n")
    assert next(lines) == ("launcher", "second")
    over.set()
    assert list(lines) == []
    assert list(follow(tmp_path, [0], over=over.is_set)) == []
