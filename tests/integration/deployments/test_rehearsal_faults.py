"""How a rehearsal hurts: processes of a job where they run, and requests on their way to a store."""

import http.client
import random
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import psutil
import pytest
from waiting import until

from deployments.rehearsal.network import CONFLICTS, Proxy
from deployments.rehearsal.scene import NotSeen, Scene, serving
from tasks.common import process
from tasks.common.errors import Missing

TREE = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"


@pytest.fixture
def scene(tmp_path):
    (tmp_path / "home").mkdir()
    return Scene(tmp_path / "home", (), "rehearsal", "rehearsal", (), 10, random.Random(1), lambda line: None)


def test_everything_of_a_job_is_killed_and_nothing_else(scene):
    folder, other = scene.home / "jobs" / "train-1", scene.home / "jobs" / "train-2"
    spec = process.ProcessSpec(argv=[sys.executable, "-c", TREE], env={}, secrets=(), log="log", restarts=5)
    handles = [process.start(one, spec) for one in (folder, other)]
    try:
        trees = [
            until(
                lambda pid=handle["pid"]: (
                    below if len(below := psutil.Process(pid).children(recursive=True)) > 1 else None
                )
            )
            for handle in handles
        ]
        scene.kill_machine(folder, random.Random(1))
        until(lambda: not any(process.process_started(one.pid) for one in trees[0]))
        until(lambda: not process.alive(handles[0]))
        assert process.alive(handles[1])
        assert all(process.process_started(one.pid) for one in trees[1])
        with pytest.raises(Missing, match="ended with exit code"):
            scene.kill_machine(folder, random.Random(1))
    finally:
        process.stop(other)


def test_a_process_that_is_no_rank_is_not_killed_as_one(scene):
    folder = scene.home / "jobs" / "train-1"
    with pytest.raises(NotSeen, match="no rank"):
        scene.signal_rank(folder, random.Random(1))
    bystander = subprocess.Popen(["sleep", "600"], env={"HEADWAY_JOB": f"{folder}0"})
    rank = subprocess.Popen(["sleep", "600"], env={"HEADWAY_JOB": str(folder)})
    try:
        for number in range(scene.cluster.world_size):
            process.write_json(folder / "ranks" / f"{number}.json", {"rank": number, "pid": bystander.pid})
        with pytest.raises(Missing):
            scene.signal_rank(folder, random.Random(1))
        assert bystander.poll() is None
        for number in range(scene.cluster.world_size):
            process.write_json(folder / "ranks" / f"{number}.json", {"rank": number, "pid": rank.pid})
        assert scene.signal_rank(folder, random.Random(1)).startswith("rank ")
        assert rank.wait() == -9
    finally:
        bystander.kill()
        bystander.wait()


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked, and counts."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append(self.path)
        self.send_response(201)
        self.send_header("x-ms-version-id", "7")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    do_GET = do_HEAD = do_PUT  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy():
    Echo.asked = []
    with (
        serving(ThreadingHTTPServer(("127.0.0.1", 0), Echo)) as behind,
        serving(Proxy(behind.server_port, random.Random(3))) as made,
    ):
        yield made


def ask(proxy, method="PUT", body=b"some bytes"):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server_port, timeout=30)
    connection.request(method, "/account/container/blob?comp=block", body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


def test_unhurt_requests_pass_as_they_are(proxy):
    answer, data = ask(proxy)
    assert (answer.status, data, answer.getheader("x-ms-version-id")) == (201, b"some bytes", "7")
    assert ask(proxy, "HEAD")[0].status == 201
    assert Echo.asked == ["/account/container/blob?comp=block"] * 2 and proxy.hit == 0


def test_a_refused_request_never_reaches_the_service_and_says_why(proxy):
    proxy.how, proxy.every = "refused", 1
    answers = [ask(proxy, "GET") for _ in range(20)] + [ask(proxy, "PUT"), ask(proxy, "HEAD")]
    codes = Counter(answer.status for answer, _ in answers)
    assert codes == {409: CONFLICTS, 503: 22 - CONFLICTS}, "reads that end a run are few"
    assert {answer.getheader("x-ms-error-code") for answer, _ in answers} == {"ServerBusy", "BlobBeingRehydrated"}
    assert proxy.hit == 22 and Echo.asked == []


def test_a_lost_request_is_lost_on_its_way_or_its_answer_is(proxy):
    proxy.how, proxy.every = "lost", 1
    for _ in range(20):
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            ask(proxy)
    assert proxy.hit == 20 and 0 < len(Echo.asked) < 20
