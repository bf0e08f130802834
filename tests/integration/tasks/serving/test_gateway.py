"""The real gateway before plain servers: shares, replays, streams, mirrors, health, the number of servers, its own crash."""

import http.client
import json
import os
import signal
import socket
import time
from dataclasses import replace

import pytest
from endpoint_stand import BLUE, GREEN, Clients, Endpoint, ask
from waiting import limit, until

from tasks.common import process
from tasks.serving.protocol.routes import Routes, read_routes, write_routes

BODY = {"prompt": "a", "max_tokens": 4}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path / "e")
    yield made
    made.stop()


def models(endpoint, count):
    got = [ask(endpoint.port, BODY) for _ in range(count)]
    assert {status for status, _, _ in got} == {200}
    return [json.loads(body)["model"] for _, _, body in got]


def state(endpoint):
    return until(endpoint.gateway.state)


def test_requests_go_by_shares_that_hold_over_any_hundred_and_who_names_a_model_gets_it(endpoint):
    endpoint.serve()
    traffic = endpoint.beside()
    assert set(models(endpoint, 10)) == {BLUE}
    traffic.set_traffic({"blue": 90, "green": 10})
    assert models(endpoint, 100).count(GREEN) == 10
    traffic.set_traffic({"blue": 50, "green": 50})
    assert models(endpoint, 20).count(GREEN) == 10
    traffic.set_traffic({"blue": 0, "green": 100})
    assert set(models(endpoint, 10)) == {GREEN}
    assert endpoint.asked("green") == {"user": 10 + 10 + 10}
    assert ask(endpoint.port, method="GET", path="/livez")[0] == 200
    assert json.loads(ask(endpoint.port, method="GET", path="/readyz")[2])["server"] == "blue"  # it is still in service
    traffic.set_traffic({"blue": 50, "green": 50})
    for ref in (BLUE, GREEN):
        said = [json.loads(ask(endpoint.port, {**BODY, "model": ref})[2])["model"] for _ in range(6)]
        assert set(said) == {ref}, "never a turn of the other"


def test_what_green_fails_before_its_first_byte_blue_answers(endpoint):
    endpoint.serve()
    traffic = endpoint.beside(errors=1.0)
    endpoint.config["max_error_share"] = 1.0
    traffic = endpoint.traffic()
    traffic._config = {**traffic._config, "max_error_share": 1.0}  # this is not about the breaker
    traffic.set_traffic({"blue": 50, "green": 50})
    assert set(models(endpoint, 10)) == {BLUE}
    endpoint.behave("green", drop=1.0)
    assert set(models(endpoint, 10)) == {BLUE}
    endpoint.behave("green", die=True)
    assert set(models(endpoint, 10)) == {BLUE}
    seen = traffic.observe()
    assert seen["green"].failures >= 3 and seen["blue"].failures == 0
    assert state(endpoint)["colours"]["green"]["totals"]["replayed"] == seen["green"].failures


def test_a_green_that_hangs_is_counted_and_blue_answers_in_time(endpoint):
    endpoint.config |= {"max_error_share": 1.0, "gateway": {"limits": {"request_seconds": 8}}}
    endpoint.serve()
    traffic = endpoint.beside(seconds=60)
    traffic.set_traffic({"blue": 50, "green": 50})
    assert models(endpoint, 2) == [BLUE, BLUE]
    assert traffic.observe()["green"].failures == 1
    with pytest.raises(TimeoutError):
        ask(endpoint.port, {**BODY, "model": GREEN}, timeout=6)  # who asked does not wait so long
    until(lambda: traffic.observe()["green"].failures == 2)
    assert traffic.observe()["blue"].failures == 0


def test_an_endpoint_that_others_reach_is_asked_by_any_name(endpoint):
    endpoint.config["gateway"] = {"access": {"host": "0.0.0.0", "open": True}}
    endpoint.serve()
    status, _, body = ask(endpoint.port, BODY, headers={"Host": "models.example.com"})
    assert (status, json.loads(body)["model"]) == (200, BLUE)


@pytest.mark.parametrize("announced, refused", [("Content-Length: 9", 413), ("Transfer-Encoding: chunked", 408)])
def test_slow_bodies_of_whoever_has_no_key_hold_no_connection(endpoint, announced, refused):
    endpoint.config["gateway"] = {"limits": {"read_seconds": 1}}
    endpoint.serve()
    for path in ("", "livez", "readyz", "v1/models", "metrics", "nothing"):
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=limit(10)) as slow:
            slow.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n{announced}\r\n\r\n".encode())
            assert slow.makefile("rb").read().startswith(b"HTTP/1.1 %d " % refused)  # all of it: the connection ends
    assert ask(endpoint.port, BODY)[0] == 200


def test_answers_of_score_are_measured_too(endpoint):
    endpoint.serve()
    traffic = endpoint.beside(text="x\x00")
    traffic.set_traffic({"blue": 0, "green": 100})
    asked = {"input_data": {"input_string": ["a"], "parameters": {"max_new_tokens": 4}}}
    status, headers, _ = ask(endpoint.port, asked, path="/score")
    assert status == 200 and "x-headway-tokens" not in headers
    seen = traffic.observe()["green"]
    assert len(seen.seconds_per_token) == 1 and seen.measures["length"] == [5] and seen.measures["odd"] == [0.5]


def test_a_stream_comes_piece_by_piece_and_a_broken_one_is_cut(endpoint):
    pause = limit(0.25)
    endpoint.serve(pause=pause)
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=limit(20))
    connection.request("POST", "/v1/completions", json.dumps({**BODY, "stream": True}), JSON)
    began, reply = time.monotonic(), connection.getresponse()
    assert reply.getheader("Content-Type") == "text/event-stream"
    first, at = reply.read1(), time.monotonic() - began
    assert first.startswith(b'data: {"choices"') and first.count(b"data:") < 4 and at < 3 * pause
    assert reply.read().endswith(b"data: [DONE]\n\n") and time.monotonic() - began > 3 * pause
    connection.close()
    endpoint.behave("blue", **{"break": 1})
    with pytest.raises(http.client.IncompleteRead):
        ask(endpoint.port, {**BODY, "stream": True})
    assert state(endpoint)["colours"]["blue"]["totals"] == {"requests": 2, "failures": 1, "mirrored": 0, "replayed": 0}


def test_the_first_token_and_the_pace_of_a_stream_are_measured_apart(endpoint):
    endpoint.serve()
    traffic = endpoint.beside(seconds=0.3, pause=0.1)
    traffic.set_traffic({"blue": 0, "green": 100})
    assert ask(endpoint.port, {**BODY, "stream": True})[0] == 200
    assert models(endpoint, 1) == [GREEN]
    seen = traffic.observe()["green"]
    [first], [pace, whole] = seen.first_token, seen.seconds_per_token
    assert first >= 0.3 and pace >= 0.1 and whole >= 0.3 / BODY["max_tokens"]
    assert seen.longest_wait >= first and not list(seen.waiting)


def test_requests_that_hang_lose_the_share_long_before_they_are_given_up(endpoint):
    """The limit of a request is 60 s. Callers of the old model have never waited for half a second."""
    endpoint.serve()
    models(endpoint, 110)
    traffic = endpoint.beside(seconds=600)
    traffic.set_traffic({"blue": 50, "green": 50})
    began, hanging = time.monotonic(), [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(16)]
    body = json.dumps({**BODY, "model": GREEN}).encode()
    for one in hanging:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        one.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    try:
        tripped = until(lambda: state(endpoint)["tripped"])
        assert "under way are late" in tripped["why"] and time.monotonic() - began < limit(50)
        assert set(models(endpoint, 4)) == {BLUE}
        assert len(traffic.observe()["green"].waiting) == len(hanging)
    finally:
        for one in hanging:
            one.close()


def test_a_caller_that_gives_up_on_a_green_that_is_late_is_a_failure_of_green(endpoint):
    endpoint.config["max_error_share"] = 1.0
    endpoint.serve()
    models(endpoint, 110)
    endpoint.beside(seconds=600)
    traffic = endpoint.traffic()
    traffic.set_traffic({"blue": 50, "green": 50})
    longest = traffic.observe()["blue"].longest_wait
    with pytest.raises(TimeoutError):
        ask(endpoint.port, {**BODY, "model": GREEN}, timeout=3 * longest + 1)
    until(lambda: traffic.observe()["green"].failures == 1)


def test_copies_go_to_green_and_nobody_gets_their_answers(endpoint):
    endpoint.serve()
    traffic = endpoint.beside(text="other")
    traffic.set_traffic({"blue": 100, "green": 0}, mirror=50)
    assert set(models(endpoint, 20)) == {BLUE}
    until(lambda: state(endpoint)["colours"]["green"]["totals"]["mirrored"] == endpoint.asked("green")["mirror"] >= 8)
    assert set(endpoint.asked("green")) == {"mirror"} and endpoint.asked("blue") == {"user": 20}
    until(lambda: traffic.observe()["green"].requests == state(endpoint)["colours"]["green"]["totals"]["mirrored"])
    seen = traffic.observe()["green"]
    assert seen.requests >= 8 and not seen.failures and len(seen.seconds_per_token) == seen.requests
    assert state(endpoint)["colours"]["green"]["totals"]["requests"] == 0


def test_a_green_that_plainly_fails_loses_its_share_without_any_deployer(endpoint):
    endpoint.serve()
    endpoint.beside(errors=1.0).set_traffic({"blue": 90, "green": 10})  # it says that it is ready: it lies
    with Clients(endpoint.port) as clients:
        until(lambda: state(endpoint)["tripped"])
        assert state(endpoint)["weights"] == {"blue": 100, "green": 0}
        until(lambda: clients.got[BLUE] > 100)
    assert not clients.failed and clients.got[GREEN] == 0
    kill_gateway(endpoint)
    until(lambda: (endpoint.gateway.state() or {}).get("port"))
    assert state(endpoint)["weights"] == {"blue": 100, "green": 0}  # it is remembered


def kill_gateway(endpoint):
    pid = state(endpoint)["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_gateway_that_crashed_is_back_in_seconds_with_the_same_routes(endpoint):
    endpoint.serve()
    endpoint.beside().set_traffic({"blue": 50, "green": 50})
    before = kill_gateway(endpoint)
    began = time.monotonic()

    def answers():
        try:
            return ask(endpoint.port, BODY, timeout=limit(5))[0] == 200
        except OSError:
            return False

    until(answers)
    print(f"back after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < limit(10)  # under 1 s on a machine that does nothing else: benchmarks/rollout.py
    assert until(endpoint.gateway.state)["pid"] != before
    assert models(endpoint, 10).count(GREEN) == 5


def test_shares_whose_deployer_died_go_back_to_blue(endpoint):
    endpoint.serve()
    endpoint.beside().set_traffic({"blue": 50, "green": 50})
    routes = read_routes(endpoint.gateway.routes)
    dead = {**routes.deployer, "pid": 2**22 + 1}
    write_routes(endpoint.gateway.routes, replace(routes, number=routes.number + 1, deployer=dead))
    until(lambda: state(endpoint)["weights"] == {"blue": 100, "green": 0})
    assert "died" in state(endpoint)["tripped"]["why"]


def test_a_server_that_is_not_there_is_waited_for_and_one_that_is_not_ready_is_passed_by(endpoint):
    endpoint.serve(replicas={"least": 2, "most": 2, "queue": 8, "idle_seconds": 300})
    until(lambda: len(ready(endpoint)) == 2)
    copy = next(name for name in ready(endpoint) if name != "blue")
    endpoint.behave("blue", ready=False)
    until(lambda: ready(endpoint) == [copy])
    before = endpoint.asked("blue")["user"]
    models(endpoint, 6)
    assert endpoint.asked("blue")["user"] == before and endpoint.asked(copy)["user"] >= 6
    endpoint.behave("blue")
    until(lambda: len(ready(endpoint)) == 2)
    endpoint.behave("blue", die=True)
    endpoint.behave(copy, die=True)
    assert ask(endpoint.port, BODY)[0] == 502  # both died of it: nobody else is asked
    endpoint.behave("blue")
    endpoint.behave(copy)
    assert models(endpoint, 2) == [BLUE, BLUE]  # held until one is back


def ready(endpoint):
    servers = state(endpoint)["colours"]["blue"]["servers"]
    return [one["server"] for one in servers if one["health"] == "ready"]


def test_servers_are_added_while_requests_wait_and_go_when_idle(endpoint):
    endpoint.serve(seconds=0.2, replicas={"least": 1, "most": 3, "queue": 2, "idle_seconds": 1})
    with Clients(endpoint.port, rate=1000, threads=12) as clients:
        until(lambda: len(ready(endpoint)) == 3)
    assert not clients.failed
    until(lambda: len(ready(endpoint)) == 1)
    assert ready(endpoint) == ["blue"]
    assert until(lambda: len(list((endpoint.folder / "servers").iterdir())) == 1)


def test_an_idle_endpoint_may_have_no_server_and_the_first_request_waits_for_one(endpoint):
    endpoint.serve(replicas={"least": 0, "most": 1, "queue": 8, "idle_seconds": 1})
    assert models(endpoint, 1) == [BLUE]
    until(lambda: state(endpoint)["colours"]["blue"]["asleep"])
    assert not process.alive(process.read_json(endpoint.folder / "servers" / "blue" / "handle.json"))
    kill_gateway(endpoint)
    until(endpoint.gateway.state)
    assert models(endpoint, 1) == [BLUE]


def test_a_client_says_neither_whose_request_it_is_nor_anything_to_the_private_port_and_bad_routes_are_not_followed(
    endpoint,
):
    endpoint.serve()
    ask(endpoint.port, BODY, headers={"X-Headway-Traffic": "mirror"})
    assert endpoint.asked("blue") == {"user": 1}
    control = process.read_json(endpoint.folder / "gateway" / "control.json")
    assert ask(control["port"], method="GET", path="/state")[0] == 401
    good = {"Authorization": f"Bearer {control['token']}"}
    assert ask(control["port"], method="GET", path="/state", headers=good)[0] == 200
    text = ask(control["port"], method="GET", path="/metrics", headers=good)[2].decode()
    assert 'headway_gateway_weight{colour="blue"} 100' in text
    assert (endpoint.folder / "gateway" / "control.json").stat().st_mode & 0o077 == 0
    assert (
        ask(endpoint.port, method="GET", path="/state")[0] == 200
    )  # the server's own affair: nothing of the gateway's
    assert b"weights" not in ask(endpoint.port, method="GET", path="/state")[2]
    routes = read_routes(endpoint.gateway.routes)
    with pytest.raises(ValueError, match="sum to 100"):
        replace(routes, colours={"blue": replace(routes.colours["blue"], weight=90)})
    broken = process.read_json(endpoint.gateway.routes)
    broken["colours"]["blue"]["weight"], broken["number"] = 90, 99
    process.write_json(endpoint.gateway.routes, broken)
    assert "sum to 100" in until(lambda: state(endpoint)["problem"])
    assert state(endpoint)["applied"] == routes.number and models(endpoint, 2) == [BLUE, BLUE]
    assert isinstance(routes, Routes)


def test_a_caller_that_goes_away_frees_its_place(endpoint):
    endpoint.serve(seconds=600.0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as caller:
        body = json.dumps(BODY).encode()
        caller.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        caller.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        until(lambda: state(endpoint)["colours"]["blue"]["servers"][0]["inflight"] == 1)
    until(lambda: state(endpoint)["colours"]["blue"]["servers"][0]["inflight"] == 0)
