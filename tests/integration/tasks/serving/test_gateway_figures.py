"""`GET /metrics` of an endpoint: the figures of all its servers, through the real gateway; what is counted never falls."""

import pytest
from endpoint_stand import Endpoint, ask
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from tasks.common import process
from tasks.jobs.serving.metrics import Metrics

ROUTE = {"route": "/v1/completions", "status": "200"}


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path / "e")
    yield made
    made.stop()


def figures(*, requests, waiting, seconds=()):
    """What a server of ours says at /metrics after so many requests."""
    metrics = Metrics()
    metrics.watch("waiting", "Requests without any text yet", lambda: waiting)
    metrics.requests.labels(**ROUTE).inc(requests)
    for took in seconds:
        metrics.seconds.observe(took)
    return metrics.text().decode()


def read(endpoint):
    """Every figure of the endpoint, by name and labels; and each family's kind."""
    status, headers, body = ask(endpoint.port, method="GET", path="/metrics")
    assert status == 200 and {key.lower(): value for key, value in headers.items()}["content-type"].startswith(
        "text/plain"
    )
    families = list(text_string_to_metric_families(body.decode()))
    assert len({family.name for family in families}) == len(families)
    found = [
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert len({one[:2] for one in found}) == len(found)
    return {one[:2]: one[2] for one in found}, {family.name: family.type for family in families}


def of(told, name, **labels):
    return told[0].get((f"headway_endpoint_{name}", frozenset({"colour": "blue", **labels}.items())))


def two_servers(endpoint):
    """Blue with a copy; the copy's name."""
    endpoint.serve(replicas={"least": 2, "most": 2})

    def names():
        colours = (endpoint.gateway.state() or {}).get("colours", {})
        return [one["server"] for one in colours.get("blue", {}).get("servers", []) if one["health"] == "ready"]

    until(lambda: len(names()) == 2)
    return next(name for name in names() if name != "blue")


def test_counters_and_histograms_are_summed_and_gauges_stand_by_replica(endpoint):
    copy = two_servers(endpoint)
    endpoint.behave("blue", figures=figures(requests=3, waiting=1, seconds=(0.02, 7.0)))
    endpoint.behave(copy, figures=figures(requests=40, waiting=5, seconds=(0.02,)))
    told = read(endpoint)
    assert of(told, "requests_total", **ROUTE) == 43
    assert of(told, "request_seconds_count") == 3 and of(told, "request_seconds_sum") == pytest.approx(7.04)
    buckets = [of(told, "request_seconds_bucket", le=le) for le in ("0.01", "0.025", "5.0", "10.0", "+Inf")]
    assert buckets == [0, 2, 2, 3, 3]
    assert [of(told, "waiting", replica=name) for name in ("blue", copy)] == [1, 5] and of(told, "waiting") is None
    assert [of(told, "replica_answers", replica=name) for name in ("blue", copy)] == [1, 1]
    kinds = told[1]
    assert kinds["headway_endpoint_requests"] == "counter" and kinds["headway_endpoint_request_seconds"] == "histogram"
    assert kinds["headway_endpoint_waiting"] == kinds["process_resident_memory_bytes"] == "gauge"


def test_what_was_counted_stays_when_a_server_starts_anew_or_goes(endpoint):
    copy = two_servers(endpoint)
    endpoint.behave("blue", figures=figures(requests=3, waiting=1, seconds=(0.02,)))
    endpoint.behave(copy, figures=figures(requests=40, waiting=5))
    assert of(read(endpoint), "requests_total", **ROUTE) == 43
    endpoint.behave("blue", figures=figures(requests=1, waiting=0))  # another process, that has had one request
    told = read(endpoint)
    assert of(told, "requests_total", **ROUTE) == 44 and of(told, "request_seconds_count") == 1
    endpoint.behave(copy, figures="no figures {")
    told = read(endpoint)
    assert of(told, "requests_total", **ROUTE) == 44
    assert of(told, "replica_answers", replica=copy) == 0 and of(told, "waiting", replica=copy) is None
    process.stop(endpoint.folder / "servers" / copy)
    assert of(read(endpoint), "requests_total", **ROUTE) == 44


def test_asking_for_figures_wakes_nobody(endpoint):
    endpoint.serve(replicas={"least": 0, "most": 1, "queue": 8, "idle_seconds": 1})
    until(lambda: until(endpoint.gateway.state)["colours"]["blue"]["asleep"])
    assert of(read(endpoint), "replica_answers", replica="blue") == 0
    assert until(endpoint.gateway.state)["colours"]["blue"]["asleep"]


def test_figures_are_for_whoever_may_ask_the_endpoint(endpoint):
    endpoint.config["gateway"] = {"access": {"ask_for_keys": True}}
    endpoint.serve()
    assert ask(endpoint.port, method="GET", path="/metrics")[0] == 401
