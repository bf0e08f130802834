"""Whatever is killed, the same command goes on: one submission, and nothing finished runs again."""

import base64
import json
import os
import pty
import signal
import threading
import time
import urllib.error
import urllib.request
from functools import partial

import psutil
import pytest
import waiting
from support import HEADWAY, publish_tiny
from waiting import limit

from tasks.common.process import read_json

pytestmark = pytest.mark.e2e
until = partial(waiting.until, every=0.1)
"""What is looked at here is read anew at each look."""
STEPS, LONGER = 240, 1200
"""Of the second, no test waits for the end."""
TRAINING = ("--set", f"training.steps={STEPS}", "--to", "train")
FINISHED = ("validate", "preprocess", "benchmark", "plan")


@pytest.fixture
def training(home, done):
    """Starts a training run of its own (by its seed), and returns the command and its job folder once it trains."""
    started = []

    def start(seed, *, after_step, steps=STEPS):
        known = set(home.path.glob("jobs/train-*"))
        words = (
            "retrain",
            "-c",
            "tiny",
            "--set",
            f"training.seed={seed}",
            *TRAINING,
            "--set",
            f"training.steps={steps}",
            "--set",
            "planning.checkpoint.every_steps=20",
        )
        command = home.start(*words, "--json")
        started.append(command)
        folder = until(lambda: next(iter(set(home.path.glob("jobs/train-*")) - known), None))
        until(lambda: newest_step(folder) >= after_step)
        return command, folder, words

    yield start
    for command in started:
        command.kill()
        command.communicate()


def records(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def newest_step(folder):
    return max((record["step"] for record in records(folder)), default=0)


def rank_pids(folder):
    return [rank["pid"] for rank in json.loads((folder / "handle.json").read_text())["ranks"]]


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_orchestrator_leaves_the_job_and_the_next_one_adopts_it(home, training):
    command, folder, words = training(11, after_step=15, steps=100)
    pids = rank_pids(folder)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    time.sleep(0.5)
    assert all(map(is_running, pids)) or (folder / "result.json").exists()
    again = home.ok(*words)
    job = again.stage("train")["job"]
    assert (job["submissions"], job["adopted"]) == (1, True)
    assert [again.statuses()[name] for name in FINISHED[:3]] == ["reused"] * 3
    assert again.statuses()["train"] == "ran"
    assert [record["step"] for record in records(folder)] == list(range(1, 101))


def test_whatever_ends_a_run_the_same_command_goes_on(home, training):
    """One training: SIGTERM, a cancellation in Prefect whose server was killed before, Ctrl-C on a terminal, SIGTERM again."""
    command, folder, words = training(21, after_step=5, steps=LONGER)
    pids = rank_pids(folder)
    until(lambda: list(folder.glob("checkpoints/step-*/attempt-*/manifest.json")))
    command.terminate()
    out, _ = command.communicate(timeout=limit(60))
    assert command.returncode == 130 and json.loads(out)["status"] == "cancelled"
    assert not any(map(is_running, pids))

    command, log = begun(home, *words)
    until(lambda: '"kind": "submitted"' in log.read_text())
    kill_prefect(home)
    pids = trained_again(folder, pids)
    cancel_in_prefect(home)
    out, _ = command.communicate(timeout=limit(60))
    assert command.returncode == 130 and json.loads(out)["error"]["type"] == "Cancelled"
    assert not any(map(is_running, pids))

    pid, shown = on_a_terminal(home, *words)
    pids = trained_again(folder, pids)
    shown.answer("\x03")
    until(lambda: "[y/N]" in shown.text)
    shown.answer("n\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert all(map(is_running, pids)) or (folder / "result.json").exists()

    command, log = begun(home, *words)
    until(lambda: '"kind": "adopted"' in log.read_text())
    command.terminate()
    command.communicate(timeout=limit(60))
    assert command.returncode == 130 or (folder / "result.json").exists()
    assert not any(map(is_running, pids)) and read_json(folder / "job.json")["submission"] == 3
    steps = [record["step"] for record in records(folder)]
    assert set(steps) == set(range(1, max(steps) + 1)) and steps.count(1) == 1, "it was resumed, and never begun anew"


def begun(home, *words):
    """The command, and the log of its run."""
    known = set(home.path.glob("runs/*/events.jsonl"))
    command = home.start(*words, "--json")
    return command, until(lambda: next(iter(set(home.path.glob("runs/*/events.jsonl")) - known), None))


def trained_again(folder, before):
    """The ranks of a new submission, once they train."""
    known = len(records(folder))

    def pids():
        try:
            return rank_pids(folder)
        except FileNotFoundError:  # its new submission is about to begin
            return before

    until(lambda: pids() != before and len(records(folder)) > known + 3)
    return pids()


def kill_prefect(home):
    """End the server below its small parent, and wait until that has started it again."""
    parent = psutil.Process(json.loads((home.path / "prefect" / "handle.json").read_text())["pid"])
    children = parent.children()
    for child in children:
        child.kill()
    until(lambda: {child.pid for child in parent.children()} - {child.pid for child in children})


def cancel_in_prefect(home):
    server = json.loads((home.path / "prefect" / "server.json").read_text())

    def cancel():
        try:
            newest = prefect(home, server, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]
            state = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True}
            return prefect(home, server, f"flow_runs/{newest['id']}/set_state", state)
        except OSError:  # it is not back yet
            return None

    until(cancel)


def prefect(home, server, path, body):
    login = base64.b64encode((home.path / "prefect" / "credentials").read_bytes()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server['url']}/api/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=limit(10)) as answer:
        return json.load(answer)


def test_the_server_refuses_who_has_no_password(home, done):
    server = json.loads((home.path / "prefect" / "server.json").read_text())
    request = urllib.request.Request(
        f"{server['url']}/api/flow_runs/filter", b"{}", {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=limit(10))


@pytest.fixture
def measuring(home, done):
    """Starts a benchmark of its own and returns the command and its job folder once both ranks are there."""
    commands = []

    def start(seconds):
        known = set(home.path.glob("jobs/benchmark-*"))
        words = ("retrain", "-c", "tiny", "--to", "benchmark", "--set", f"benchmark.seconds={seconds}", "--json")
        commands.append(home.start(*words))
        folder = until(lambda: next(iter(set(home.path.glob("jobs/benchmark-*")) - known), None))
        until(lambda: (folder / "handle.json").exists() and len(rank_pids(folder)) == 2)
        return commands[-1], folder

    yield start
    for command in commands:
        command.kill()
        command.communicate()


@pytest.mark.long
def test_a_result_that_was_never_written_closes_the_gate(measuring):
    command, folder = measuring(3.1)
    os.kill(rank_pids(folder)[1], signal.SIGKILL)
    out, _ = command.communicate(timeout=limit(60))
    said = json.loads(out)
    assert command.returncode == 3 and said["status"] == "gate_closed"
    found = [(check["name"].split()[-1], check["measured"]) for check in said["error"]["checks"]]
    assert ("compute", "not finished") in found, found


@pytest.mark.long
def test_a_run_that_was_killed_is_killed_in_mlflow_too(home, training):
    command, _, _ = training(15, after_step=5)
    spool = max((home.path / "lineage").iterdir())
    os.kill(command.pid, signal.SIGKILL)
    until(lambda: (spool / "done").exists())
    assert json.loads((spool / "published.json").read_text())["open"] == []


@pytest.mark.long
def test_another_home_can_use_the_same_machine_at_once(fresh):
    publish_tiny(fresh)
    assert fresh.ok("retrain", "-c", "tiny", "--to", "preprocess").statuses()["preprocess"] == "ran"


@pytest.mark.long
@pytest.mark.parametrize("answer, keeps", [("n", True), ("y", False)])
def test_ctrl_c_on_a_terminal_asks_whether_the_job_stops_too(home, done, answer, keeps):
    known = set(home.path.glob("jobs/train-*"))
    words = ("retrain", "-c", "tiny", "--set", f"training.seed={16 + keeps}", *TRAINING)
    pid, shown = on_a_terminal(home, *words)
    folder = until(lambda: next(iter(set(home.path.glob("jobs/train-*")) - known), None))
    until(lambda: newest_step(folder) >= 5)
    pids = rank_pids(folder)
    shown.answer("\x03")
    until(lambda: "[y/N]" in shown.text)
    shown.answer(f"{answer}\n")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert "train      cancelled" in shown.text and ("continues to run. To end it" in shown.text) == keeps
    assert all(map(is_running, pids)) == keeps or (keeps and (folder / "result.json").exists())
    job = home.ok(*words).stage("train")["job"]
    assert (job["adopted"], job["submissions"]) == ((True, 1) if keeps else (False, 2))


def on_a_terminal(home, *words):
    """Start a command on a terminal of its own: its pid, and what it shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(HEADWAY, ["headway", *words], home.environment() | {"TERM": "xterm"})
    return pid, Shown(terminal)


class Shown(threading.Thread):
    """Reads what a terminal shows, as it comes."""

    def __init__(self, terminal):
        super().__init__(daemon=True)
        self.terminal, self.text = terminal, ""
        self.start()

    def answer(self, text):
        os.write(self.terminal, text.encode())

    def run(self):
        while True:
            try:
                self.text += os.read(self.terminal, 4096).decode(errors="replace")
            except OSError:
                return
