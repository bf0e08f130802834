"""A rollout takes the traffic in steps, loses it when it should, and a deployer that is killed leaves nothing half done."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from endpoint_stand import BLUE, GREEN, Clients, Endpoint, ask
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import GateFailed, JobFailed
from tasks.config.serving import RolloutConfig
from tasks.serving.journal import Journal, accept, refused_models
from tasks.serving.local.rollout import ask_for_traffic_back, go_back
from tasks.serving.protocol.routes import read_routes
from tasks.serving.rollout import roll_out, settle, steps_of

QUICK = RolloutConfig(
    step_requests=12, least_seconds=0, step_seconds=20, max_slowdown=50
)  # a busy machine is slower at one step than at another
AT_ONCE = RolloutConfig(step_requests=0, step_seconds=0)
SEED = 20


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path / "e")
    yield made
    made.stop()


def record(endpoint):
    return process.read_json(endpoint.folder / "endpoint.json")


def model_now(endpoint):
    return json.loads(ask(endpoint.port, {"prompt": "a", "max_tokens": 4})[2])["model"]


def test_a_step_that_may_not_end_is_refused():
    with pytest.raises(ValueError, match="would never end"):
        RolloutConfig(step_requests=1, step_seconds=0)
    with pytest.raises(ValueError, match="end with 100"):
        RolloutConfig(steps=(10, 50))


def test_steps_by_hand():
    assert [(s.name, s.weights["green"], s.mirror) for s in steps_of(AT_ONCE)] == [
        ("mirror", 0, 10), ("10 %", 10, 0), ("50 %", 50, 0), ("100 %", 100, 0)
    ]  # fmt: skip


def test_whatever_ends_a_deployer_that_lives_on_gives_the_traffic_back(endpoint):
    class Ended:
        """The real traffic, but for whoever looks at it."""

        def __init__(self, traffic, error):
            self._traffic, self._error = traffic, error

        def __getattr__(self, name):
            return getattr(self._traffic, name)

        def observe(self):
            raise self._error

    endpoint.serve()
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            roll_out(Ended(endpoint.beside(), error), QUICK, endpoint.journal)
        assert endpoint.journal.open_change() is None and endpoint.journal.lines()[-1]["event"] == "reverted"


def test_a_sound_model_takes_the_traffic_step_by_step_and_nobody_notices(endpoint):
    endpoint.serve()
    traffic, told = endpoint.beside(), []
    with Clients(endpoint.port, rate=100) as clients:
        roll_out(traffic, QUICK, endpoint.journal, report=lambda event, details: told.append((event, details)))
        until(lambda: clients.got[GREEN] > 40)
    assert not clients.failed and clients.got[BLUE] > 20
    assert [event for event, _ in told] == ["step"] * 4 + ["switched"]
    assert [line["event"] for line in endpoint.journal.lines()] == ["begin", *["step"] * 4, "commit", "done"]
    assert (record(endpoint)["model_ref"], record(endpoint)["previous"]["model_ref"]) == (GREEN, BLUE)
    assert endpoint.asked("green")["mirror"] > 0
    assert read_routes(endpoint.gateway.routes).main == "green" and model_now(endpoint) == GREEN
    assert endpoint.journal.open_change() is None


BAD = {
    "5 % errors": {"errors": 0.05},
    "lies about its health": {"errors": 1.0},
    "dies at a request": {"die": True},
    "drops connections": {"drop": 0.3},
    "slow": {"seconds": 0.25},
    "slow only under load": {"crowd": 0.1},
    "says something else": {"text": "\x01\x02\x03"},
}


ONCE_MORE = (
    *("lies about its health", "drops connections", "slow", "slow only under load"),
    "says something else",
)
"""What judge, gateway and test_serving_faults.py have tests of their own for."""


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, id=name, marks=[pytest.mark.long] * (name in ONCE_MORE)) for name, how in BAD.items()],
)
def test_a_bad_model_loses_its_traffic_within_30_seconds_and_no_caller_notices(endpoint, how):
    endpoint.serve(seconds=0.005)
    traffic = endpoint.beside(**how)
    with Clients(endpoint.port, rate=200, threads=8) as clients:
        until(lambda: clients.got[BLUE] > 60)
        began = time.monotonic()
        with pytest.raises(GateFailed, match="lost its traffic at the step") as breach:
            roll_out(traffic, RolloutConfig(step_requests=400, step_seconds=60, mirror=50), endpoint.journal)
        took = time.monotonic() - began
        got = clients.got[BLUE]
        until(lambda: clients.got[BLUE] > got + 20)
    print(f"{breach.value.message}: after {took:.1f} s")
    assert took < limit(30) and not clients.failed
    assert model_now(endpoint) == BLUE and record(endpoint)["model_ref"] == BLUE
    assert not process.alive(process.read_json(endpoint.folder / "servers" / "green" / "handle.json"))
    assert [line["event"] for line in endpoint.journal.lines()][-2:] == ["revert", "reverted"]
    assert list(read_routes(endpoint.gateway.routes).colours) == ["blue"]


def test_beside_a_model_that_must_not_serve_a_new_one_is_judged_by_copies_and_gets_no_share_before_it_is_committed(
    endpoint,
):
    """One whose copies fail leaves the traffic where it is; the sound one after it gets all of it."""
    endpoint.serve()
    told = []
    with Clients(endpoint.port, rate=100) as clients:
        with pytest.raises(GateFailed, match="lost its traffic at the step mirror"):
            roll_out(endpoint.beside(errors=0.5), QUICK, endpoint.journal, barred="revoked")
        assert clients.got[GREEN] == 0 and model_now(endpoint) == BLUE
        assert [line["event"] for line in endpoint.journal.lines()] == ["begin", "step", "revert", "reverted"]
        traffic = endpoint.beside(name="another")  # what a server lost stays with its name
        roll_out(traffic, QUICK, endpoint.journal, barred="revoked", report=lambda *event: told.append(event))
        until(lambda: clients.got[GREEN] > 20)
    assert not clients.failed and record(endpoint)["model_ref"] == GREEN
    assert [(event, details.get("step") or details.get("why")) for event, details in told] == [
        ("one way", "revoked"), ("step", "mirror"), ("switched", None)
    ]  # fmt: skip
    assert [line["event"] for line in endpoint.journal.lines()][4:] == ["begin", "step", "commit", "done"]


DEPLOYER = """
import json, os, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from contextlib import nullcontext
from pathlib import Path
from tasks.serving.journal import Journal
from tasks.serving.local.rollout import LocalTraffic
from tasks.serving.rollout import roll_out
from tasks.config.serving import RolloutConfig
folder, at, after = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "after"
journal = Journal(folder / "journal.jsonl")
traffic = LocalTraffic(folder, journal.open_change().begun)
fsync, count = os.fsync, 0
def dying(descriptor):
    global count
    if count == at and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
os.fsync = dying
roll_out(traffic, RolloutConfig(step_requests=0, step_seconds=0), journal)
"""
WRITES = 13
"""Times that a rollout of four steps writes something that must last; a later kill finds it done."""


def deployer(endpoint, at, after):
    program = DEPLOYER.format(root=str(Path(__file__).parents[4]))
    words = [sys.executable, "-c", program, str(endpoint.folder), str(at), "after" if after else "before"]
    return subprocess.run(words, timeout=limit(60), check=False).returncode


def killed_and_settled(endpoint, at, after):
    """Kill a deployer at a write; what the next start makes of it must be whole, and nobody may notice."""
    endpoint.serve()
    endpoint.beside()
    with Clients(endpoint.port) as clients:
        code = deployer(endpoint, at, after)
        assert sum(colour.weight for colour in read_routes(endpoint.gateway.routes).colours.values()) == 100
        committed = any(line["event"] == "commit" for line in endpoint.journal.lines())
        outcome = settle(endpoint.traffic(), endpoint.journal) if endpoint.journal.open_change() else None
        assert outcome == ("done" if committed else "reverted") or (outcome is None and committed)
        wanted = GREEN if committed else BLUE
        assert (record(endpoint)["model_ref"], model_now(endpoint)) == (wanted, wanted)
        until(lambda: clients.got[wanted] > 3)
    assert not clients.failed, clients.failed[:3]
    assert settle(endpoint.traffic(), endpoint.journal) is None if endpoint.journal.open_change() else True
    return code


SAMPLE = random.Random(SEED).sample([(n, w) for n in range(WRITES) for w in (0, 1)], 3)


@pytest.mark.parametrize(
    ("at", "after"), [SAMPLE[0], *(pytest.param(*one, marks=pytest.mark.long) for one in SAMPLE[1:])]
)
def test_a_deployer_that_is_killed_at_a_step_is_finished_or_reverted_by_the_next_start(endpoint, at, after):
    assert killed_and_settled(endpoint, at, after) == -9


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_deployer_that_is_killed_at_any_step(tmp_path):
    codes = []
    for at in range(WRITES + 4):
        for after in (False, True):
            endpoint = Endpoint(tmp_path / f"{at}-{after}")
            try:
                codes.append(killed_and_settled(endpoint, at, after))
            finally:
                endpoint.stop()
    print(f"{codes.count(-9)} kills, {codes.count(0)} deploys that were done before")
    assert set(codes) == {-9, 0} and codes.count(-9) >= 2 * WRITES


@pytest.mark.parametrize("warm", [True, False])
def test_going_back_takes_seconds_and_loses_nothing_at_50_requests_a_second(endpoint, warm):
    endpoint.config["keep_warm_seconds"] = 300.0 if warm else 0.0
    endpoint.serve()
    roll_out(endpoint.beside(), AT_ONCE, endpoint.journal)
    assert process.alive(process.read_json(endpoint.folder / "servers" / "blue" / "handle.json")) is warm
    record = process.read_json(endpoint.folder / "endpoint.json")
    record = {**record, "settings": "one", "previous": {**record["previous"], "settings": "one" if warm else "two"}}
    process.write_json(endpoint.folder / "endpoint.json", record)
    with Clients(endpoint.port, rate=50) as clients:
        until(lambda: clients.got[GREEN] > 20)
        began = time.monotonic()
        back = go_back(
            endpoint.folder, endpoint.journal, reason="worse", taken=None, report=lambda event, details: None
        )
        took = time.monotonic() - began
        green = clients.got[GREEN]
        until(lambda: clients.got[BLUE] > 20)
    print(f"back after {took:.2f} s, warm {warm}")
    assert took < limit(5) and not clients.failed and clients.got[GREEN] - green <= 4  # those were under way
    assert (back["model_ref"], model_now(endpoint)) == (BLUE, BLUE)
    assert back["settings"] == ("one" if warm else "mixed")  # the gateway keeps what the last deploy set
    assert refused_models(endpoint.folder)[GREEN]["reason"] == "worse"
    accept(endpoint.folder, GREEN)
    assert refused_models(endpoint.folder) == {}
    again = go_back(
        endpoint.folder, endpoint.journal, reason="after all", taken=None, report=lambda event, details: None
    )
    assert again["model_ref"] == GREEN  # and forth


def test_there_is_no_way_back_without_a_model_before_or_to_one_that_does_not_start_in_the_time_that_reading_it_takes(
    endpoint,
):
    def back():
        go_back(endpoint.folder, endpoint.journal, reason="worse", taken=None, report=lambda event, details: None)

    endpoint.config["keep_warm_seconds"] = 0.0
    endpoint.serve()
    with pytest.raises(ValueError, match="no way back"):
        back()
    roll_out(endpoint.beside(), AT_ONCE, endpoint.journal)
    process_file, serve_file = (endpoint.folder / "servers" / "blue" / name for name in ("process.json", "serve.json"))
    spec = process.read_json(process_file)
    ending = {"argv": [sys.executable, "-c", "raise SystemExit(3)"], "restarts": 0}
    process.write_json(process_file, {**spec, **ending})
    with pytest.raises(JobFailed, match="ended while it was starting"):
        back()
    assert model_now(endpoint) == GREEN == record(endpoint)["model_ref"]
    assert read_routes(endpoint.gateway.routes).colours["green"].weight == 100
    process.write_json(process_file, spec)
    for size, within in ((0, "0.01"), (3_000_000_000, "")):
        files = {"start_timeout_seconds": 0.01, "files": [{"path": "m", "size": size}]}
        process.write_json(serve_file, {**process.read_json(serve_file), **files})
        with pytest.raises(JobFailed, match=f"not ready within {within} s") if within else nullcontext():
            back()
    assert model_now(endpoint) == BLUE


def test_a_deploy_that_is_under_way_is_taken_back_by_whoever_asks_and_not_by_what_was_asked_of_the_one_before(endpoint):
    endpoint.serve()
    before = endpoint.beside()
    taken = ask_for_traffic_back(endpoint.folder, "too late")
    asked = (endpoint.folder / "abort.json").read_text()
    assert before.asked_back() == "too late"
    assert settle(before, endpoint.journal) == "reverted"
    (endpoint.folder / "abort.json").write_text(asked)  # as when it was written while the deploy ended
    traffic, failed = endpoint.beside(), []
    assert traffic.asked_back() == "" and endpoint.journal.open_change().begun["time"] != taken

    def deploy():
        try:
            roll_out(traffic, RolloutConfig(step_requests=0, step_seconds=600), endpoint.journal)
        except GateFailed as error:
            failed.append(error)

    deploying = threading.Thread(target=deploy)
    deploying.start()
    until(lambda: any(line.get("step") == "mirror" for line in endpoint.journal.lines()))
    began = time.monotonic()
    taken = ask_for_traffic_back(endpoint.folder, "I saw something")
    deploying.join(limit(10))
    assert time.monotonic() - began < limit(5) and "I saw something" in failed[0].message
    back = go_back(endpoint.folder, endpoint.journal, reason="I saw something", taken=taken, report=lambda e, d: None)
    assert back["model_ref"] == BLUE == model_now(endpoint) and not (endpoint.folder / "abort.json").exists()
    assert ask_for_traffic_back(endpoint.folder, "again") is None


def test_what_was_seen_is_kept_when_the_gateway_starts_again_and_one_of_an_earlier_release_is_understood(
    endpoint, monkeypatch
):
    """That one outlives whoever started it, and tells of the whole step at every look."""
    endpoint.serve()
    traffic = endpoint.beside()
    traffic.set_traffic({"blue": 50, "green": 50})
    for _ in range(10):
        ask(endpoint.port, {"prompt": "a", "max_tokens": 4})
    assert traffic.observe()["green"].requests == traffic.observe()["green"].requests == 5
    pid = until(endpoint.gateway.state)["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: (endpoint.gateway.state() or {}).get("pid") not in (None, pid))
    for _ in range(10):
        ask(endpoint.port, {"prompt": "a", "max_tokens": 4})
    seen = traffic.observe()
    assert (seen["green"].requests, len(seen["green"].seconds_per_token), seen["blue"].requests) == (10, 10, 10)
    traffic = endpoint.traffic()
    told = {"requests": 3, "failures": 1, "seconds_per_token": [0.1, 0.2], "measures": {"odd": [0.0, 0.0]}}
    monkeypatch.setattr(traffic._gateway, "observed", lambda wanted: dict.fromkeys(wanted, told))
    for _ in range(2):
        seen = traffic.observe()["green"]
        assert (seen.requests, seen.failures, list(seen.first_token), list(seen.waiting)) == (3, 1, [], [])


def test_a_line_that_a_kill_cut_is_none(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin(what="deploy")
    journal.write("step", step="10 %")
    with open(journal.path, "ab") as file:
        file.write(b'{"event": "comm')
    change = journal.open_change()
    assert change is not None and not change.committed and len(change.lines) == 2
    journal.write("revert", why="x")
    journal.write("reverted")
    assert journal.open_change() is None and [line["event"] for line in journal.lines()][-1] == "reverted"
