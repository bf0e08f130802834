"""Supervised processes, with real ones: who is started, restarted, stopped, and what of it is left."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import limit, until

from tasks.common import process
from tasks.common.process import ProcessSpec, alive, descendants, process_started, read_json, start, stop, write_json

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
SLEEP = "import time; time.sleep(60)"
TWICE = "import sys; from pathlib import Path; from tasks.common.process import *; print(start(Path(sys.argv[1]), SPEC)['pid'])"


@pytest.fixture
def folder(tmp_path):
    """A process's folder; whatever still runs in it is killed in the end."""
    place = tmp_path / "place"
    yield place
    handle = read_json(place / "handle.json")
    if alive(handle):
        below = descendants(handle["pid"])
        for pid in (handle["pid"], *below):
            if process_started(pid):
                os.kill(pid, signal.SIGKILL)


def spec(folder, code, **options):
    """Runs Python code that counts its starts in `starts`: a line a start, with the attempt and its pid."""
    begin = "import os; open('starts', 'a').write(os.environ['HEADWAY_ATTEMPT'] + ' ' + str(os.getpid()) + '\\n')"
    argv = [sys.executable, "-S", "-c", f"import os; os.chdir({str(folder)!r}); {begin}\n{code}"]
    return ProcessSpec(argv=argv, **options)


def starts(folder):
    """Attempt and pid of every start of the program."""
    path = folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(int(part) for part in line.split()) for line in lines]


def ended(folder):
    """How it ended, once it did and its parent is gone."""
    said = until(lambda: read_json(folder / "exit.json"))
    until(lambda: not alive(read_json(folder / "handle.json")))
    return said


def test_a_program_that_ends_well_is_run_once(folder):
    handle = start(folder, spec(folder, "print('said'); print(os.environ['WORD'])", env={"WORD": "given"}, restarts=2))
    said = ended(folder)
    assert (said["code"], said["reason"], said["attempts"]) == (0, "ended", 1)
    assert not alive(handle)
    assert (folder / "process.log").read_text() == "said\ngiven\n"
    assert len(starts(folder)) == 1


def test_its_working_directory_is_its_folder_and_stays_when_the_one_that_it_was_started_in_goes(
    folder, tmp_path, monkeypatch
):
    """Prefect deletes the directory of a flow run that ended; paths that were relative to it mean what they meant."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    places = ("HEADWAY_HOME", "HEADWAY_POLICY", "HEADWAY_TRUST", "HEADWAY_STORES")
    for name in places:
        monkeypatch.setenv(name, name.lower())
    monkeypatch.setenv("PYTHONPATH", "modules")
    code = (
        "import os; print(os.getcwd(), os.environ['PYTHONPATH'].split(os.pathsep)[1]); "
        f"print(*(os.environ[name] for name in {places}))"
    )
    start(folder, ProcessSpec(argv=[sys.executable, "-S", "-c", code]))
    monkeypatch.chdir(tmp_path)
    gone.rmdir()
    ended(folder)
    said = (folder / "process.log").read_text().split()
    assert said == [str(folder), str(gone / "modules"), *(str(gone / name.lower()) for name in places)]


def test_what_runs_is_not_started_a_second_time(folder):
    handle = start(folder, spec(folder, SLEEP))
    assert alive(handle)
    until(lambda: starts(folder))
    again = start(folder, spec(folder, SLEEP))
    assert again["pid"] == handle["pid"]
    assert again["started"] == handle["started"]
    time.sleep(0.3)
    assert len(starts(folder)) == 1
    assert len(descendants(handle["pid"])) == 1
    stop(folder)
    assert not alive(handle)


def test_of_six_that_start_at_once_one_wins_and_all_are_told_who(folder):
    code = TWICE.replace("SPEC", repr(spec(folder, SLEEP)))
    command = [sys.executable, "-c", code, str(folder)]
    callers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(process.__file__).parents[1])
        for _ in range(6)
    ]
    pids = {caller.communicate(timeout=limit(30))[0].strip() for caller in callers}
    assert [caller.returncode for caller in callers] == [0] * 6
    assert pids == {str(read_json(folder / "handle.json")["pid"])}
    until(lambda: starts(folder))
    assert len(starts(folder)) == 1


def test_a_start_that_meets_a_parent_without_a_handle_yet_waits_for_it(folder):
    folder.mkdir()
    with open(folder / ".lock", "w") as lock:  # as a parent does, before it writes its handle
        fcntl.flock(lock, fcntl.LOCK_EX)
        holder = threading.Timer(0.5, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        holder.start()
        handle = start(folder, spec(folder, SLEEP))
        holder.join()
    assert alive(handle)


def test_after_its_end_it_can_be_started_again_and_attempts_go_on(folder):
    first = start(folder, spec(folder, ""))
    ended(folder)
    second = start(folder, spec(folder, SLEEP))
    assert second["pid"] != first["pid"]
    until(lambda: len(starts(folder)) == 2)
    assert not (folder / "exit.json").exists()
    assert [attempt for attempt, _ in starts(folder)] == [1, 2]


def test_a_program_that_is_killed_is_restarted_until_it_may_not(folder):
    start(folder, spec(folder, SLEEP, restarts=1))
    for number in (1, 2):
        until(lambda number=number: len(starts(folder)) == number)
        os.kill(starts(folder)[-1][1], signal.SIGKILL)
    said = ended(folder)
    assert (said["code"], said["attempts"]) == (-signal.SIGKILL, 2)
    assert [attempt for attempt, _ in starts(folder)] == [1, 2]


def test_progress_forgives_earlier_failures(folder):
    """With one restart: two failures with progress after the first do not count, the fourth failure does."""
    code = "n = int(os.environ['HEADWAY_ATTEMPT']); n in (2, 3) and open('step', 'w').write(str(n)); os._exit(n)"
    start(folder, spec(folder, code, restarts=1, progress="step"))
    said = ended(folder)
    assert (said["code"], said["attempts"]) == (4, 4)


def test_the_same_content_written_again_is_no_progress(folder):
    start(folder, spec(folder, "open('step', 'w').write('same'); os._exit(3)", restarts=1, progress="step"))
    assert ended(folder)["attempts"] == 2


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [
        ("user", 1),
        ("integrity", 1),
        ("missing", 1),
        ("diverged", 1),
        ("limit", 1),
        ("preempted", 1),
        ("infrastructure", 2),
    ],
)
def test_an_error_that_a_restart_does_not_mend_is_not_restarted(folder, kind, attempts):
    report = '{"class": "%s", "attempt": %s}' % (kind, "' + os.environ['HEADWAY_ATTEMPT'] + '")  # noqa: UP031
    code = f"os.makedirs('errors', exist_ok=True); open('errors/rank-0.json', 'w').write('{report}'); os._exit(1)"
    start(folder, spec(folder, code, restarts=1, fatal="errors"))
    assert ended(folder)["attempts"] == attempts


def test_an_old_report_is_not_taken_for_this_attempts(folder):
    write_json(folder / "errors" / "rank-0.json", {"class": "user", "attempt": 0})
    start(folder, spec(folder, "os._exit(1)", restarts=1, fatal="errors"))
    assert ended(folder)["attempts"] == 2


def test_time_is_limited_over_all_attempts(folder):
    began, allowed = time.monotonic(), limit(1.0)
    start(folder, spec(folder, SLEEP, restarts=5, time_limit=allowed))
    said = ended(folder)
    assert said["reason"] == "timeout"
    assert said["attempts"] == 1
    assert allowed < time.monotonic() - began < allowed + limit(10)
    assert process_started(starts(folder)[0][1]) is None


FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
children = [subprocess.Popen([sys.executable, '-S', '-c', child], stdout=subprocess.PIPE) for _ in range(2)]
for child in children: child.stdout.readline()
open('family', 'w').write(' '.join(str(child.pid) for child in children))
time.sleep(60)
"""


def test_stop_leaves_no_process_though_all_ignore_the_request(folder):
    handle = start(folder, spec(folder, FAMILY, grace=0.3, restarts=5))
    family = [int(pid) for pid in until(lambda: _words(folder / "family"))]
    everyone = [handle["pid"], *descendants(handle["pid"])]
    assert set(family) < set(everyone)
    assert len(everyone) == 4
    stop(folder)
    assert ended(folder)["reason"] == "cancelled"
    until(lambda: not any(process_started(pid) for pid in everyone))
    assert len(starts(folder)) == 1


def _words(path):
    return path.read_text().split() if path.exists() else []


def test_a_program_that_heeds_the_request_ends_by_itself(folder):
    """What it does on SIGTERM is done: a checkpoint is saved."""
    code = "import signal, time; signal.signal(15, lambda *_: (open('saved', 'w').close(), os._exit(0)))\nprint(flush=True)\n"
    start(folder, spec(folder, code + "open('ready', 'w').close()\n" + SLEEP))
    until((folder / "ready").exists)
    stop(folder)
    assert (folder / "saved").exists()
    assert ended(folder)["reason"] == "cancelled"


def test_stop_of_what_does_not_run_does_nothing(folder):
    stop(folder)
    start(folder, spec(folder, ""))
    before = ended(folder)
    stop(folder)
    assert read_json(folder / "exit.json") == before


@linux
def test_the_program_dies_with_its_parent(folder):
    handle = start(folder, spec(folder, SLEEP, restarts=5))
    until(lambda: starts(folder))
    program = starts(folder)[0][1]
    os.kill(handle["pid"], signal.SIGKILL)
    until(lambda: not process_started(program))
    until(lambda: not alive(handle))
    assert not (folder / "exit.json").exists()
    again = start(folder, spec(folder, SLEEP))  # the dead parent's lock is free
    assert alive(again)
    assert again["pid"] != handle["pid"]


def test_the_parent_outlives_who_started_it(folder):
    code = TWICE.replace("SPEC", repr(spec(folder, SLEEP))) + "; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(process.__file__).parents[1], check=False)
    until(lambda: starts(folder))
    assert alive(read_json(folder / "handle.json"))


def test_a_reused_pid_is_not_taken_for_the_process(folder):
    handle = start(folder, spec(folder, SLEEP))
    assert alive(handle)
    assert not alive({**handle, "started": str(int(handle["started"]) - 1)})
    assert not alive({**handle, "boot_id": "another boot"})
    assert not alive({**handle, "pid": 2**22 - 1})
    assert not alive({})
    assert not alive(None)
    forged = {**handle, "started": "1"}
    write_json(folder / "handle.json", forged)
    stop(folder)  # whoever has that pid now is not to be signalled
    assert alive(handle)
    write_json(folder / "handle.json", handle)


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    handle = {"pid": child.pid, "started": process_started(child.pid), "boot_id": process.boot_id()}
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists() or sys.platform != "linux"
    assert process_started(child.pid) is None
    assert not alive(handle)
    child.wait()


def test_the_handle_names_the_ranks_of_this_attempt(folder):
    me = {"rank": 0, "pid": 1, "host": "here", "attempt": 1}
    write_json(folder / "ranks" / "0.json", me)
    write_json(folder / "ranks" / "1.json", {**me, "rank": 1, "attempt": 0})
    start(folder, spec(folder, SLEEP))
    assert until(lambda: read_json(folder / "handle.json")["ranks"]) == [me]


def test_a_reader_of_json_sees_the_old_value_or_the_new_one(tmp_path):
    path = tmp_path / "value.json"
    begin = "import sys; from pathlib import Path; from tasks.common.process import write_json"
    code = begin + "\nwhile True: [write_json(Path(sys.argv[1]), [n] * 20000) for n in (1, 2)]"
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=Path(process.__file__).parents[1])
    until(path.exists)
    seen = {(len(value), len(set(value))) for value in (read_json(path) for _ in range(40))}
    writer.kill()
    writer.wait()
    assert seen == {(20000, 1)}
    assert read_json(tmp_path / "none.json") is None


def test_a_child_whose_parent_is_gone_already_ends_at_once(tmp_path):
    """Between the start of a process and its first line, who started it may have died."""
    program = "import sys; from tasks.common.process import die_with_parent; die_with_parent(int(sys.argv[1])); print('lives')"
    for parent, code in ((os.getpid(), 0), (os.getpid() + 1, -signal.SIGKILL)):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(parent)], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout.strip()) == (code, "lives" if code == 0 else "")
