"""The gateway while models die and load: a request that a model died with is not sent on, and others wait, within bounds."""

import json
import threading
import time

import pytest
from endpoint_stand import BLUE, Endpoint, ask
from waiting import limit, until

BODY = {"prompt": "a", "max_tokens": 4}


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path / "e")
    yield made
    made.stop()


def servers(endpoint, colour="blue"):
    return {one["server"]: one["health"] for one in until(endpoint.gateway.state)["colours"][colour]["servers"]}


class Asking:
    """A request in a thread of its own; what it got, and after how long."""

    def __init__(self, port):
        self.got, self.seconds = None, 0.0
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def _run(self, port):
        began = time.monotonic()
        self.got = ask(port, BODY, timeout=limit(60))
        self.seconds = time.monotonic() - began

    def end(self):
        self._thread.join(limit(60))
        return self.got


def test_a_request_that_a_model_died_with_is_sent_to_no_other_server(endpoint):
    endpoint.serve(replicas={"least": 2, "most": 2, "queue": 8, "idle_seconds": 300})
    until(lambda: list(servers(endpoint).values()) == ["ready", "ready"])
    for name in servers(endpoint):
        endpoint.behave(name, gone=True)
    status, headers, body = ask(endpoint.port, BODY)
    assert (status, headers["x-headway-gone"], headers["retry-after"]) == (503, "1", "2") and b"no model" in body
    assert sum(endpoint.asked(name)["gone"] for name in servers(endpoint)) == 1


def test_a_green_that_a_request_kills_has_failed_and_blue_is_not_asked_it(endpoint):
    endpoint.serve()
    traffic = endpoint.beside(gone=True)
    traffic.set_traffic({"blue": 0, "green": 100})
    assert ask(endpoint.port, BODY)[0] == 503
    totals = until(endpoint.gateway.state)["colours"]["green"]["totals"]
    assert (totals["requests"], totals["failures"], totals["replayed"]) == (1, 1, 0)
    assert (endpoint.asked("green")["gone"], endpoint.asked("blue").total()) == (1, 0)
    endpoint.behave("green", errors=1.0)  # fails otherwise
    until(lambda: servers(endpoint, "green") == {"green": "ready"})
    assert json.loads(ask(endpoint.port, BODY)[2])["model"] == BLUE


def test_requests_wait_for_a_model_that_is_being_loaded(endpoint):
    endpoint.serve()
    until(lambda: servers(endpoint) == {"blue": "ready"})
    endpoint.behave("blue", loading=True)
    waiting = [Asking(endpoint.port) for _ in range(3)]  # the first ones meet a server of which nobody knows it yet
    until(lambda: until(endpoint.gateway.state)["waiting"] == 3)
    until(lambda: endpoint.asked("blue")["wanted"])  # so that another model may be loaded
    time.sleep(1.0)
    endpoint.behave("blue")
    assert [one.end()[0] for one in waiting] == [200] * 3 and min(one.seconds for one in waiting) > 1
    totals = until(endpoint.gateway.state)["colours"]["blue"]["totals"]
    assert (totals["requests"], totals["failures"]) == (3, 0)


def test_a_server_that_was_woken_and_loads_longer_than_idle_servers_stay_is_not_stopped_again(endpoint):
    endpoint.serve(replicas={"least": 0, "most": 1, "queue": 8, "idle_seconds": 1})
    until(lambda: until(endpoint.gateway.state)["colours"]["blue"]["asleep"])
    endpoint.behave("blue", loading=True)
    one = Asking(endpoint.port)
    until(lambda: servers(endpoint) == {"blue": "loading"})
    time.sleep(2.5)
    assert (endpoint.folder / "gateway" / "gateway.log").read_text().count("is stopped: nobody needs it") == 1
    endpoint.behave("blue")
    assert one.end()[0] == 200


def test_nobody_waits_longer_than_is_allowed_or_where_nothing_is_loaded(endpoint):
    endpoint.config["gateway"] = {"limits": {"loading_seconds": 1.5}}
    endpoint.serve()
    endpoint.behave("blue", loading=True)
    until(lambda: servers(endpoint) == {"blue": "loading"})
    one = Asking(endpoint.port)
    status, headers, _ = one.end()
    assert status == 503 and "retry-after" in headers and 1.4 < one.seconds < limit(20)
    endpoint.behave("blue", mute=True)
    until(lambda: servers(endpoint) == {"blue": "mute"})
    assert ask(endpoint.port, BODY)[0] == 503 and endpoint.asked("blue")["mute"] == 1  # the server itself says why


def test_a_replica_that_is_being_loaded_gets_nothing_while_another_one_answers(endpoint):
    endpoint.serve(replicas={"least": 2, "most": 2, "queue": 8, "idle_seconds": 300})
    until(lambda: list(servers(endpoint).values()) == ["ready", "ready"])
    endpoint.behave("blue", loading=True)
    until(lambda: servers(endpoint)["blue"] == "loading")
    assert {ask(endpoint.port, BODY)[0] for _ in range(4)} == {200} and not endpoint.asked("blue")["loading"]
