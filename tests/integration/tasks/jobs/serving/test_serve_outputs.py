"""A real server measures what it answers and keeps no word of it, whatever kills it; and never serves files that were changed."""

import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from tiny_model import PROMPTS, export_tiny, files_of
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import JobFailed, Missing
from tasks.common.process import read_json
from tasks.common.seal import opened
from tasks.formats.answers import Answer, line
from tasks.jobs.serving.outputs import FIRST_SEGMENTS, MOST_SEGMENTS, SEGMENT_BYTES, Outputs, prune
from tasks.serving import open_endpoint
from tasks.serving.client import Sampling, complete, ready_state
from tasks.serving.local.endpoint import outputs_of
from tasks.serving.monitor.measures import read

ONE, TWO = "model/tiny@" + "a" * 64, "model/tiny@" + "b" * 64
SECRET = "sesame_open_the_door"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


@pytest.fixture
def endpoint(tmp_path):
    made = open_endpoint(tmp_path / "endpoints", "api")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """An endpoint that serves the model, for all tests to which it does not matter what others asked it."""
    made = open_endpoint(tmp_path_factory.mktemp("endpoints"), "api")
    deploy(made, model)
    yield made
    made.stop()


def deploy(endpoint, model, ref=ONE):
    golden = read_json(model / "golden.json")
    return endpoint.switch(endpoint.start(model, ref, files=files_of(model), golden=golden, timeout=limit(120)))


def lines(endpoint, ref=ONE):
    """Every line of a model's answers; each must be whole."""
    files = sorted(outputs_of(endpoint.folder, ref).glob("*.jsonl"))
    return [
        Answer(**json.loads(opened(line, where="line"))) for path in files for line in path.read_bytes().splitlines()
    ]


def server_of(endpoint):
    parent = read_json(next(endpoint.folder.glob("servers/*/handle.json")))["pid"]
    return process.descendants(parent)[0]  # its last one is the model, a process of its own


def test_every_answer_to_a_user_is_measured_and_no_text_is_kept(shared):
    endpoint, at = shared, shared.observe()
    assert lines(endpoint) == []  # golden prompts are no users
    said = [complete(at.url, prompt, Sampling(24)) for prompt in PROMPTS]
    said.append(complete(at.url, f"def {SECRET}", Sampling(5)))
    with pytest.raises(ValueError, match="shorten it"):
        complete(at.url, "x = 1\n" * 300, Sampling(7))
    with pytest.raises(ValueError, match="max_tokens"):
        complete(at.url, "x", Sampling(513))
    until(lambda: len(lines(endpoint)) == len(said) + 1)
    told = lines(endpoint)
    for answer, reply in zip(told, said, strict=False):
        used = reply["usage"]
        assert (answer.prompt_tokens, answer.completion_tokens) == (used["prompt_tokens"], used["completion_tokens"])
        assert (answer.status, answer.finish_reason) == (200, reply["choices"][0]["finish_reason"])
        assert answer.entropy > 0 and 0 <= answer.odd <= 1 and 0 < answer.seconds < 60 and answer.time <= time.time()
    assert any(answer.repetition is not None for answer in told)
    assert (told[-1].status, told[-1].error, told[-1].completion_tokens) == (400, "Unfit", None)
    kept = b"".join(path.read_bytes() for path in endpoint.folder.glob("outputs/*/*"))
    words = [SECRET, *(reply["choices"][0]["text"] for reply in said)]
    assert not any(word.encode() in kept or json.dumps(word).encode() in kept for word in words if len(word) > 6)


def feedback(url, **said):
    request = urllib.request.Request(
        f"{url}/v1/feedback", json.dumps(said).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=limit(60)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_label_reaches_the_request_that_it_is_about_through_a_real_endpoint(shared, model):
    endpoint, at = shared, shared.observe()
    before = len(lines(endpoint))
    said = [complete(at.url, prompt, Sampling(4)) for prompt in PROMPTS[:3]]
    status, kept = feedback(at.url, request_id=said[0]["id"], label="right", comment=SECRET)
    assert (status, kept) == (200, {"request_id": said[0]["id"], "model": ONE, "right": 1.0, "comment_kept": False})
    assert feedback(at.url, request_id=said[1]["id"], score=0.25)[0] == 200
    unknown, why = feedback(at.url, request_id="cmpl-" + "0" * 32, label="right")
    assert unknown == 404 and "no answer to a request" in why["error"]["message"]
    assert feedback(at.url, request_id=said[0]["id"])[0] == 400
    until(lambda: len(lines(endpoint)) == before + len(said))
    deploy(endpoint, model, TWO)  # another server, of another model, knows it from the disk
    assert feedback(at.url, request_id=said[2]["id"], label="wrong")[1]["model"] == ONE
    labels = read(outputs_of(endpoint.folder, TWO)).labels + read(outputs_of(endpoint.folder, ONE)).labels
    assert {(label.id, label.right, label.model) for label in labels} == {
        (said[0]["id"], 1.0, ONE),
        (said[1]["id"], 0.25, ONE),
        (said[2]["id"], 0.0, ONE),
    }


def test_a_kill_loses_no_line_that_was_answered_a_moment_ago_and_a_switch_tears_none(endpoint, model):
    at = deploy(endpoint, model)
    for _ in range(20):
        complete(at.url, "import ", Sampling(4))
    until(lambda: len(lines(endpoint)) == 20)
    before = server_of(endpoint)
    os.kill(before, signal.SIGKILL)
    until(lambda: (endpoint.observe() or at).ready and server_of(endpoint) != before)
    answered, stop = [], threading.Event()

    def hammer():
        while not stop.wait(0.1):
            try:
                answered.append(complete(at.url, "class ", Sampling(8))["model"])
            except (Missing, ValueError) as error:
                answered.append(str(error))

    clients = [threading.Thread(target=hammer) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        until(lambda: len(answered) > 10)
        deploy(endpoint, model)  # the same model: two servers write at once
        deploy(endpoint, model, TWO)
        until(lambda: TWO in answered)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert set(answered) == {ONE, TWO}
    until(lambda: len(lines(endpoint)) + len(lines(endpoint, TWO)) == 20 + len(answered))
    assert len(lines(endpoint, TWO)) == answered.count(TWO)
    assert len(list(outputs_of(endpoint.folder, ONE).glob("*.jsonl"))) >= 3


def flip(path):
    """Change one byte and keep size and times, as somebody who knows would."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_server_that_crashed_does_not_start_again_on_changed_files(endpoint, copy):
    at = deploy(endpoint, copy)
    flip(copy / "model.onnx.data")
    assert complete(at.url, "def ", Sampling(2))["model"] == ONE  # what runs has read it
    folder = next(endpoint.folder.glob("servers/*"))
    private = read_json(folder / "serve.json")["port"]
    os.kill(server_of(endpoint), signal.SIGKILL)
    said = []
    until(lambda: said.append(ready_state(f"http://127.0.0.1:{private}")) or (said[-1] or {}).get("reason"))
    assert not said[-1]["ready"] and "model.onnx.data (sha256)" in said[-1]["reason"]
    until(lambda: endpoint.observe() is None)
    ended = read_json(folder / "exit.json")
    assert (ended["code"], ended["attempts"]) == (5, 2)  # it was not tried again
    assert "model.onnx.data (sha256)" in (folder / "server.log").read_text()
    flip(copy / "model.onnx.data")
    assert deploy(endpoint, copy).ready


def one_more(folder):
    (folder / "custom_ops.so").write_bytes(b"\x7fELF")


def one_less(folder):
    (folder / "parity.json").unlink()


def change(folder):
    flip(folder / "model.onnx")


@pytest.mark.parametrize(
    "spoil", [change, *(pytest.param(one, marks=pytest.mark.long) for one in (one_more, one_less))]
)
def test_a_new_server_reads_no_file_that_it_was_not_handed(shared, copy, spoil):
    endpoint, before = shared, shared.observe()
    files, golden = files_of(copy), read_json(copy / "golden.json")
    spoil(copy)
    with pytest.raises(JobFailed, match=r"(custom_ops.so \(extra|parity.json \(missing|model.onnx \(sha256)"):
        endpoint.start(copy, TWO, files=files, golden=golden, timeout=limit(60))
    assert endpoint.observe() == before


def test_files_are_bounded_and_the_first_ones_of_a_model_stay(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, count in ((other, 10), (own, MOST_SEGMENTS)):
        folder.mkdir()
        for number in range(count):
            (folder / f"s-{number:06d}.jsonl").write_text("{}")
            os.utime(folder / f"s-{number:06d}.jsonl", (number, number))
    prune(own)
    left = [sorted(int(path.stem[2:]) for path in folder.iterdir()) for folder in (other, own)]
    assert left == [[*range(FIRST_SEGMENTS)], [*range(FIRST_SEGMENTS), *range(FIRST_SEGMENTS + 6, MOST_SEGMENTS)]]


def test_a_file_that_is_full_is_followed_by_another_and_one_that_was_taken_away_is_made_again(tmp_path):
    outputs = Outputs(tmp_path / "v", "srv")
    outputs.add(Answer(1.0, 0.1, 8))
    outputs.counting = True
    one = len(line(Answer(10_000.0, 0.123456, 64, prompt_tokens=10)))
    count = SEGMENT_BYTES // one + 1000
    for number in range(count):
        outputs.add(Answer(float(number), 0.123456, 64, prompt_tokens=10))
        while outputs._waiting.qsize() > 5000:
            time.sleep(0.01)
    outputs.close()
    until(lambda: not outputs._thread.is_alive())  # on a busy machine it is left to its work
    files = sorted((tmp_path / "v").iterdir())
    assert [path.name for path in files] == ["srv-000001.jsonl", "srv-000002.jsonl"]
    assert all(path.stat().st_size <= SEGMENT_BYTES for path in files)
    times = [json.loads(line)["time"] for path in files for line in path.read_bytes().splitlines()]
    assert times == [float(number) for number in range(count)]
    again = Outputs(tmp_path / "v", "srv")
    again.counting = True
    shutil.rmtree(tmp_path / "v")
    again.add(Answer(7.0, 0.1, 8))
    again.close()
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["srv-000003.jsonl"]


def test_a_request_that_the_runtime_fails_is_an_error_of_the_servers(tmp_path):
    outputs = Outputs(tmp_path / "v", "srv")
    outputs.counting = True
    with pytest.raises(RuntimeError), outputs.measuring(8):
        raise RuntimeError("CUDA error")
    outputs.close()
    (path,) = (tmp_path / "v").iterdir()
    told = json.loads(path.read_text())
    assert (told["status"], told["error"]) == (500, "RuntimeError") and "CUDA" not in path.read_text()
