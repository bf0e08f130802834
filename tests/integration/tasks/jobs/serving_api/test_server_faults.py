"""Faults of a server that stands alone: overload, hostile sockets, an open bind, a stop under load, changed files."""

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from api_stand import head, raw, serving, start, status
from tiny_model import files_of
from waiting import limit, until

from tasks.common.process import descendants, process_started

BODY = json.dumps({"prompt": "def ", "max_tokens": 2}).encode()
HOSTILE_LIMITS = {"read_seconds": 1.0, "body_bytes": 100_000}


@pytest.fixture(scope="module")
def strict(model, tmp_path_factory):
    """A server that is soon impatient."""
    with serving(tmp_path_factory.mktemp("strict"), model, limits=HOSTILE_LIMITS) as running:
        yield running


def chunked(*chunks):
    lines = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return head(length=0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"), *lines, b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("expected", "parts", "pause"),
    [
        (200, (head(length=len(BODY)), BODY), 0.0),
        (200, chunked(BODY[:5], BODY[5:]), 0.0),
        (408, (head(length=100), b'{"prompt":'), 0.0),
        (408, (head(length=100), *[b" "] * 6), 0.3),
        (408, (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", b"a", b"b"), 0.2),
        (413, (head(length=100_001),), 0.0),
        (413, (head(length=10**18),), 0.0),
        (413, chunked(*[b" " * 30_000] * 5), 0.0),
        (400, (head(length=8), b"{" * 8), 0.0),
        (400, (head(length=400), b"[" * 200 + b"]" * 200), 0.0),
        (400, (head(length=50_000), b'{"prompt":' * 5_000), 0.0),
        (400, (head(length=4), b"\xff\xfe\x00{"), 0.0),
        (400, (head(length="-5"),), 0.0),
        (400, (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS to a port that has none\r\n\r\n",), 0.0),
        (400, (b"POST /v1/completions HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",), 0.0),
    ],
)
def test_fault_62_hostile_sockets_are_told_off_and_nobody_else_waits(strict, expected, parts, pause):
    began = time.monotonic()
    answer = raw(strict.port, *parts, pause=pause)
    assert status(answer) == expected, answer[:300]
    assert time.monotonic() - began < limit(20)
    assert strict.complete(max_tokens=1).status_code == 200


def test_fault_62_slow_clients_hold_no_place(strict):
    """More of them at once than may wait: whoever asks in one piece is answered meanwhile."""
    answers = []

    def dawdle():
        answers.append(status(raw(strict.port, head(length=500), b'{"prompt": "', pause=0.5)))

    slow = [threading.Thread(target=dawdle) for _ in range(60)]
    for one in slow:
        one.start()
    served = [strict.complete(max_tokens=1).status_code for _ in range(10)]
    for one in slow:
        one.join(limit(60))
    assert served == [200] * 10
    assert answers == [408] * 60


def closed_loop(url, clients, most):
    """Status, seconds and Retry-After of each request, from clients who ask again until so many were accepted and refused."""
    found, codes, end = [], Counter(), time.monotonic() + limit(60)

    def asking():
        with httpx.Client(base_url=url, timeout=limit(60), trust_env=False) as client:
            while min(codes[200], codes[429]) < most and time.monotonic() < end:
                began = time.perf_counter()
                said = client.post("/v1/completions", json={"prompt": "def ", "max_tokens": 4})
                found.append((said.status_code, time.perf_counter() - began, said.headers.get("Retry-After")))
                codes[said.status_code] += 1
                if said.status_code == 429:
                    time.sleep(0.05)

    threads = [threading.Thread(target=asking) for _ in range(clients)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def memory(pid):
    """Of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def test_fault_61_overload_is_refused_and_what_is_accepted_is_answered(model, tmp_path):
    """Figures of latency need cores of their own: benchmarks/overload.py. Here: statuses, Retry-After, no crash, memory."""
    limits = {"waiting": 4, "requests_per_minute": 10**6, "tokens_per_minute": 10**9}
    with serving(tmp_path / "server", model, limits=limits) as server:
        closed_loop(server.url, 40, 20)
        before = memory(server.process.pid)
        found = closed_loop(server.url, 40, 60)
        grown = memory(server.process.pid) - before
        assert server.complete(max_tokens=1).status_code == 200
        assert server.figure('refused_total{status="429",why="waiting"}') > 0
    accepted = [seconds for code, seconds, _ in found if code == 200]
    refused = [wait for code, _, wait in found if code == 429]
    assert {code for code, _, _ in found} == {200, 429}
    assert len(accepted) >= 60 and len(refused) >= 60
    assert set(refused) == {"1"}
    assert grown < 30


def test_fault_64_a_stop_under_load_finishes_what_was_begun(model, tmp_path):
    with serving(tmp_path / "server", model, limits={"drain_seconds": 120}) as server:
        answers, late, begun = [], [], threading.Semaphore(0)
        body = {"prompt": "import ", "max_tokens": 230, "stream": True}

        def long():
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=limit(60), trust_env=False
            ) as said:
                lines = said.iter_lines()
                first = next(lines)
                begun.release()
                answers.append("\n".join([first, *lines]))

        under_way = [threading.Thread(target=long) for _ in range(4)]
        for one in under_way:
            one.start()
        assert all(begun.acquire(timeout=limit(30)) for _ in under_way)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while server.process.poll() is None:
            try:
                late.append(server.complete(max_tokens=1))
            except httpx.TransportError:
                break
            time.sleep(0.02)
        code = server.process.wait(limit(30))
        took = time.monotonic() - began
        for one in under_way:
            one.join(limit(30))
    assert code == 0 and took < limit(25)
    assert len(answers) == 4 and all(text.rstrip().endswith("data: [DONE]") for text in answers)
    refused = [one for one in late if one.status_code == 503]
    assert refused and {one.headers["Retry-After"] for one in refused} == {"1"}
    assert {one.headers["Connection"] for one in refused} == {"close"}


def test_fault_69_the_program_does_not_listen_where_others_could_ask(model, tmp_path):
    server = start(tmp_path / "server", model, access={"host": "0.0.0.0"})
    assert server.process.wait(limit(60)) == 2
    assert "not loopback" in server.log
    assert json.loads((server.folder / "errors" / "serve.json").read_text())["class"] == "user"
    with pytest.raises(httpx.TransportError):
        server.client.get("/livez")
    with serving(tmp_path / "open", model, access={"host": "0.0.0.0", "open": True}) as running:
        assert running.client.get("/livez", headers={"Host": "any.example"}).status_code == 200


def test_changed_files_never_get_ready_and_are_not_tried_again(model, tmp_path):
    files = files_of(model)
    wrong = [{**file, "sha256": "0" * 64} if file["path"] == "config.json" else file for file in files]
    server = start(tmp_path / "server", model, files=wrong, environment={"HEADWAY_ATTEMPT": "3"})
    states = []
    while server.process.poll() is None:
        try:
            said = server.client.get("/readyz")
            states.append((said.status_code, said.json()["reason"]))
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    assert server.process.returncode == 5
    assert {code for code, _ in states} == {503} and any("config.json" in reason for _, reason in states)
    told = json.loads((server.folder / "errors" / "serve.json").read_text())
    assert (told["class"], told["attempt"]) == ("integrity", 3)


def test_a_version_that_is_named_must_be_the_one_that_is_mounted(model, tmp_path):
    from tasks.config.base import digest
    from tasks.storage.manifest import Content, describe

    content = Content(kind="model", files=describe(model)).model_dump(mode="json")
    ref = f"model/tiny@{digest(content)}"
    with serving(tmp_path / "right", model, model_ref=ref, content=content) as server:
        assert server.complete(max_tokens=1).json()["model"] == ref
    for name, told in [("none", {}), ("another", {"content": {**content, "inputs": ["0" * 64]}})]:
        refused = start(tmp_path / name, model, model_ref=ref, **told)
        assert refused.process.wait(limit(60)) == 2
        assert "cannot be verified" in refused.log


def test_a_kill_of_the_model_is_no_end_of_the_server(model, tmp_path):
    """The model's own process is another: tests/integration/tasks/jobs/serving. Here: what a client sees meanwhile."""
    with serving(tmp_path / "server", model) as server:
        (child,) = [
            pid for pid in descendants(server.process.pid) if "model_child" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(child, signal.SIGKILL)
        seen = set()
        deadline = time.monotonic() + limit(60)
        while time.monotonic() < deadline:
            said = server.complete(max_tokens=1)
            seen.add(said.status_code)
            if said.status_code == 503:
                assert int(said.headers["Retry-After"]) >= 1
            elif 503 in seen:
                break
            time.sleep(0.05)
        assert seen == {200, 503}
        server.wait()
        models = descendants(server.process.pid)
        assert models
        server.process.kill()
        until(lambda: not any(map(process_started, models)))


def test_fault_63_a_segfault_is_answered_degraded_until_the_full_model_is_back(model, golden, tmp_path):
    """Marked in the header, the figures and what is kept; the request that the model died of is not sent to another."""
    before = {"name": "previous", "model_ref": "model/tiny@before", "folder": str(model), "files": files_of(model)}
    entry = golden[1]
    with serving(
        tmp_path / "server", model, ladder=[before], environment={"HEADWAY_MODEL_FAULT": "segfault:boom"}
    ) as server:
        deadline = time.monotonic() + limit(60)
        while server.figure("rungs_up") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)  # the second one is held ready where there is memory
        died = server.complete("boom", max_tokens=4)
        assert died.status_code == 503 and int(died.headers["Retry-After"]) >= 1 and "SIGSEGV" in died.text
        assert died.headers["X-Headway-Gone"] == "1"  # whoever stands before it sends it to nobody else
        assert server.client.get("/livez").status_code == 200
        assert server.client.get("/readyz").status_code == 503
        said = server.complete(entry["prompt"], max_tokens=24)
        assert said.headers["X-Headway-Degraded"] == "previous"
        assert said.headers["X-Headway-Model"] == said.json()["model"] == "model/tiny@before"
        assert said.json()["choices"][0]["text"] == entry["completion"]
        assert server.figure('degraded_total{rung="previous"}') == 1
        server.wait()
        back = server.complete(entry["prompt"], max_tokens=24)
        assert "X-Headway-Degraded" not in back.headers and back.json()["model"] == "model/tiny"
        assert server.stop() == 0
    kept = [
        json.loads(line) for path in server.folder.glob("outputs/*/*.jsonl") for line in path.read_text().splitlines()
    ]
    assert [line.get("rung", "") for line in kept if line["status"] == 200] == ["previous", ""]
