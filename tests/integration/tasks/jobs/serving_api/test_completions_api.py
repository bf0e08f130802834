"""What a server answers: OpenAI's client, streams, Azure ML's score, refusals by name, headers, figures and traces."""

import http.server
import json
import socket
import threading
import time

import httpx
import openai
import pytest
from api_stand import serving
from prometheus_client.parser import text_string_to_metric_families
from waiting import limit

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(trust_env=False) as transport:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=transport, max_retries=0)


def test_the_openai_client_gets_golden_answers(client, golden):
    for entry in golden:
        said = client.completions.create(
            model="model/tiny", prompt=entry["prompt"], max_tokens=len(entry["tokens"]), temperature=0
        )
        assert said.choices[0].text == entry["completion"]
        assert said.usage.completion_tokens == len(entry["tokens"])
        assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    assert [one.id for one in client.models.list()] == ["model/tiny"]


def test_the_openai_client_streams(client, golden):
    entry = golden[1]
    asked = {"model": "model/tiny", "prompt": entry["prompt"], "max_tokens": len(entry["tokens"]), "stream": True}
    told = list(client.completions.create(**asked, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].text for one in told[:-1]) == entry["completion"]
    assert [one.choices[0].finish_reason for one in told[:-1]][-1] in ("stop", "length")
    assert len(told) > 3 and len({one.id for one in told}) == 1
    assert told[-1].choices == [] and told[-1].usage.completion_tokens == len(entry["tokens"])
    without = list(client.completions.create(**asked))
    assert all(one.usage is None for one in without) and without[-1].choices


def test_errors_are_those_of_the_openai_client(client):
    with pytest.raises(openai.BadRequestError, match="`suffix` is not supported"):
        client.completions.create(model="model/tiny", prompt="a", suffix="b")
    with pytest.raises(openai.NotFoundError, match="this is model/tiny"):
        client.completions.create(model="model/other", prompt="a")


@pytest.mark.parametrize("body", [{"best_of": 3}, {"suffix": "x"}, {"use_beam_search": True}, {"length_penalty": 0.5}])
def test_what_is_not_done_is_refused_by_name(server, body):
    said = server.complete(**body)
    assert said.status_code == 400
    assert f"`{next(iter(body))}` is not supported" in said.json()["error"]["message"]


def test_values_that_change_nothing_are_taken(server):
    neutral = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "presence_penalty": 0.0}
    said = server.complete(max_tokens=4, **neutral, frequency_penalty=0, logit_bias={}, user="me", stop=None, seed=None)
    assert said.status_code == 200
    assert said.json()["choices"] == server.complete(["def "], max_tokens=4).json()["choices"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": []}, "`prompt` must be a text"),
        ({"prompt": 5}, "`prompt` must be a text"),
        ({"prompt": ["a", 5]}, "prompt.1: "),
        ({"prompt": ["a"] * 17}, "16"),
        ({"prompt": [5, "a"]}, "prompt.0.1: "),
        ({"prompt": [300]}, "300 is no token of this model, whose tokens are 0 to 299"),
        ({"prompt": [1] * 256}, "256 tokens"),
        ({"prompt": ["a"] * 9, "n": 8}, "72 answers: ask for up to 64"),
        ({"prompt": "a", "max_tokens": 0}, "`max_tokens` is 0"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "`min_tokens` 3"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: "),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias: 300 is no token"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty: "),
        ({"prompt": "a", "max_tokens": 513}, "512"),
        ({"prompt": "a", "top_p": 0.0}, "top_p: "),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": list("abcde")}, "stop"),
        ({"prompt": "a", "stream": "yes"}, "stream: "),
        ({"prompt": "\ud800"}, "prompt.0: "),
        ({"prompt": "x = 1\n" * 300}, "shorten it"),
    ],
)
def test_a_wrong_body_is_told_what_is_wrong(server, body, said):
    reply = server.client.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_stop_text_ends_the_answer(server, golden):
    whole = golden[3]["completion"]
    stop = whole[3:5]
    said = server.complete(golden[3]["prompt"], max_tokens=24, stop=stop).json()["choices"][0]
    assert (said["text"], said["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_azure_mls_form_is_answered_in_its_own(server, golden):
    prompts = [entry["prompt"] for entry in golden[:3]]
    how = {"max_new_tokens": 24, "do_sample": False, "temperature": 1.5}
    said = server.client.post("/score", json={"input_data": {"input_string": prompts, "parameters": how}})
    assert said.status_code == 200
    assert said.json() == [{str(number): entry["completion"] for number, entry in enumerate(golden[:3])}]
    full = {"input_data": {"input_string": prompts[:1], "parameters": {**how, "return_full_text": True}}}
    assert server.client.post("/score", json=full).json() == [{"0": prompts[0] + golden[0]["completion"]}]
    drawn = {"max_new_tokens": 24, "temperature": 1.5, "seed": 5}
    texts = [_score(server, prompts[0], **(drawn | more)) for more in ({}, {}, {"seed": 6}, {"stop": ["e", "a", " "]})]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(texts[3]) and len(texts[3]) < len(texts[0])
    wrong = server.client.post("/score", json={"input_data": {"input_string": []}})
    assert wrong.status_code == 400 and "input_data.input_string" in wrong.json()["error"]["message"]


def _score(server, prompt, **how):
    said = server.client.post("/score", json={"input_data": {"input_string": [prompt], "parameters": how}})
    return said.json()[0]["0"]


def test_every_answer_says_what_answered_and_has_an_id_of_its_own(server):
    ids = set()
    for method, path, status in [
        ("GET", "/livez", 200),
        ("GET", "/readyz", 200),
        ("GET", "/", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/completions", 415),
    ]:
        reply = server.client.request(method, path, headers={"X-Request-Id": "chosen"})
        assert (reply.status_code, reply.headers["X-Headway-Model"]) == (status, "model/tiny"), path
        ids.add(reply.headers["X-Request-Id"])
    said = server.complete(max_tokens=1)
    assert said.headers["X-Request-Id"] == said.json()["id"]
    assert "X-Headway-Degraded" not in said.headers and "X-Headway-Tokens" not in said.headers
    assert len(ids) == 7 and "chosen" not in ids


def test_prometheus_reads_the_figures(server):
    before = server.figure('tokens_total{kind="completion"}')
    count = server.figure('requests_total{route="/v1/completions",status="200"}')
    assert server.complete("class ", max_tokens=3).status_code == 200
    assert server.figure('tokens_total{kind="completion"}') == before + 3
    assert server.figure('requests_total{route="/v1/completions",status="200"}') == count + 1
    assert server.figure("model_up") == 1 and server.figure("waiting") == 0
    families = {one.name: one for one in text_string_to_metric_families(server.client.get("/metrics").text)}
    first = families["headway_endpoint_first_token_seconds"]
    assert first.type == "histogram" and any(one.labels.get("le") == "+Inf" for one in first.samples)
    assert "process_resident_memory_bytes" in families


def test_a_client_that_goes_away_leaves_its_place(server):
    body = b'{"prompt": "import ", "max_tokens": 240}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as hasty:
        hasty.sendall(head.encode() + body)
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "import ", "max_tokens": 200, "stream": True}
    ) as said:
        next(said.iter_lines())
    deadline = time.monotonic() + limit(20)
    while server.figure("waiting") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.figure("waiting") == 0
    assert server.complete(max_tokens=2).status_code == 200


class _Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    """An OTLP collector, as far as an exporter sees it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    server.got = []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_trace_goes_on_where_the_callers_was_and_holds_no_text(model, tmp_path, collector):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    address = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
    with serving(tmp_path / "server", model, environment=address) as server:
        traced = {"traceparent": f"00-{CALLER}-{PARENT}-01"}
        body = {"prompt": "def canary_7f3a", "max_tokens": 3}
        said = server.client.post("/v1/completions", json=body, headers=traced)
        assert server.stop() == 0
    path, data = collector.got[0]
    assert path == "/v1/traces"
    spans = ExportTraceServiceRequest.FromString(data).resource_spans[0].scope_spans[0].spans
    (span,) = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (CALLER, PARENT, "POST /v1/completions")
    told = {one.key: one.value for one in span.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 3
    assert told["headway.request_id"].string_value == said.headers["X-Request-Id"]
    assert told["http.response.status_code"].int_value == 200
    assert all(b"canary" not in data for _, data in collector.got)
