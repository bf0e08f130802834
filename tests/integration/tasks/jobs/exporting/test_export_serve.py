"""A tiny checkpoint is exported, proven, served, replaced under load, and survives kills: by the real programs."""

import hashlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_model import CONTEXT, CORPUS, PROMPTS, VOCABULARY, files_of, make_checkpoint, start_export
from waiting import limit, until

from tasks.artifacts import require_checks
from tasks.common import process
from tasks.common.errors import GateFailed, IntegrityError, JobFailed, Missing
from tasks.common.process import read_json
from tasks.config.serving import ExportConfig
from tasks.export import parity_checks
from tasks.serving import open_endpoint, servers
from tasks.serving.client import Sampling, complete, ready_state
from tasks.serving.local.endpoint import port_free


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def log_of(job):
    return (job / "logs" / "rank-0.log").read_text()


@pytest.fixture(scope="session")
def exports(checkpoint, tmp_path_factory):
    """The same checkpoint exported twice, by two processes in two folders."""
    root = tmp_path_factory.mktemp("exports")
    jobs = [root / "one", root / "a-longer-name-than-the-first" / "two"]
    running = [start_export(job, checkpoint, hash_seed=str(seed)) for seed, job in enumerate(jobs)]
    for child, job in zip(running, jobs, strict=True):
        assert child.wait(limit(120)) == 0, log_of(job)
    return jobs


@pytest.fixture(scope="session")
def model(exports):
    return exports[0] / "out"


@pytest.fixture(scope="session")
def golden(model):
    return json.loads((model / "golden.json").read_text())


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def test_the_export_holds_the_model_and_proves_it(exports, golden):
    out, result = exports[0] / "out", read_json(exports[0] / "result.json")
    names = {"model.onnx", "model.onnx.data", "genai_config.json", "config.json", "golden.json", "parity.json"}
    told = {"README.md", "reference.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names | told
    assert result["metrics"]["max_logit_error"] < 1e-4
    assert (result["metrics"]["greedy_equal"], result["metrics"]["greedy_total"]) == (5, 5)
    parity = {
        name: result["metrics"][name] for name in ("max_logit_error", "logit_scale", "greedy_equal", "greedy_total")
    }
    assert read_json(out / "parity.json") == parity
    assert result["metrics"]["onnx_bytes"] == sum(
        (out / name).stat().st_size for name in ("model.onnx", "model.onnx.data")
    )
    assert min(result["metrics"][f"tokens_per_second_{side}"] for side in ("onnx", "torch")) > 0
    assert result["golden"] == golden
    assert result["sample"] == {name: golden["prompts"][0][name] for name in ("prompt", "completion")}


def test_the_golden_answers_are_not_trivial(golden):
    assert [entry["prompt"] for entry in golden["prompts"]] == PROMPTS
    assert all(len(set(entry["tokens"])) >= 4 for entry in golden["prompts"])
    ends = [entry["tokens"][-1] == 0 for entry in golden["prompts"]]
    assert any(ends) and not all(ends)


def test_two_exports_are_bitwise_equal_and_know_nothing_of_where_they_were_made(exports, checkpoint):
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (job / "out").iterdir()}
        for job in exports
    ]
    assert digests[0] == digests[1]
    for path in (exports[0] / "out").iterdir():
        assert not any(str(place).encode() in path.read_bytes() for place in (checkpoint, exports[0], Path.cwd()))


def test_the_graph_is_not_stamped_with_a_commit(model):
    import onnx
    import onnxruntime_genai

    stamp = onnx.load(model / "model.onnx", load_external_data=False).producer_version
    assert stamp == onnxruntime_genai.__version__


def link_data(folder):
    (folder / "model.onnx.data").rename(folder.parent / "data")
    (folder / "model.onnx.data").symlink_to(folder.parent / "data")


def hard_link_data(folder):
    os.link(folder / "model.onnx.data", folder.parent / "data")


def cut_data(folder):
    os.truncate(folder / "model.onnx.data", (folder / "model.onnx.data").stat().st_size - 1)


def move_data(location):
    def tamper(folder):
        import onnx

        graph = onnx.load(folder / "model.onnx", load_external_data=False)
        next(e for e in graph.graph.initializer[0].external_data if e.key == "location").value = location
        (folder / "model.onnx").write_bytes(graph.SerializeToString())

    return tamper


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (link_data, "holds links: model.onnx.data"),
        (hard_link_data, "holds links: model.onnx.data"),
        (cut_data, "the graph reads"),
        (move_data("../data"), r"\.\./data"),
        (move_data("/etc/passwd"), "/etc/passwd"),
    ],
)
def test_data_outside_of_the_folder_is_refused(copy, tamper, said):
    from tasks.formats.onnx_data import require_plain_folder

    require_plain_folder(copy)
    tamper(copy)
    with pytest.raises(IntegrityError, match=said):
        require_plain_folder(copy)


def damage(folder):
    """Change weights in the middle of the model, as a wrong export would."""
    data = bytearray((folder / "model.onnx.data").read_bytes())
    for place in range(len(data) // 2, len(data) // 2 + 40_000, 4):
        data[place + 3] ^= 0x80
    (folder / "model.onnx.data").write_bytes(data)


def test_a_wrong_export_shows_in_the_parity_and_closes_the_gate(checkpoint, model, copy):
    from tasks.jobs.exporting.comparison import Exported, Original, answer, parity

    original = Original(checkpoint)
    exported = Exported(model, threads=1)
    assert not {"generation", "network"} & vars(exported).keys()
    (right,) = answer(original, exported, PROMPTS[1:2], max_tokens=24)
    assert "network" not in vars(exported)  # the two are never loaded at once
    assert right.equal and right.logit_error < 1e-4
    damage(copy)
    (wrong,) = answer(original, Exported(copy, threads=1), PROMPTS[1:2], max_tokens=24)
    assert not wrong.equal and wrong.logit_error > 1e-4
    require_checks("export", parity_checks(parity([right]), ExportConfig()))
    with pytest.raises(GateFailed) as closed:
        require_checks("export", parity_checks(parity([right, wrong]), ExportConfig()))
    failed = [check["name"].partition(",")[0] for check in closed.value.checks]
    assert failed == ["logit error", "greedy completions equal"]


def test_an_architecture_that_cannot_be_exported_is_the_users_error(checkpoint, tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    from tasks.jobs.exporting.graph import build

    folder = shutil.copytree(checkpoint, tmp_path / "bloom")
    BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(folder)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be exported.*LlamaForCausalLM"):
        build(folder, tmp_path / "out", precision="fp32")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        build(folder, tmp_path / "out", precision="fp32")


def test_decoding_and_encoding_are_those_of_hugging_face(checkpoint, model):
    from transformers import PreTrainedTokenizerFast

    from tasks.jobs.serving.generation import ByteLevelText, Generation

    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    text = ByteLevelText(json.loads((model / "tokenizer.json").read_text()))
    chance = random.Random(1)
    for _ in range(300):
        tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(20))]
        assert text.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    generation = Generation(model, 1)
    for prompt in [
        "naïve 漢字 🙂<|endoftext|>x",
        "  \n\n\t  a\r\n",
        "e\u0301\u2028ſ don't 123",
        CORPUS[:300],
    ]:
        assert generation.encode(prompt) == PreTrainedTokenizerFast.from_pretrained(model)(prompt)["input_ids"]


def test_generation_ends_with_the_context_and_samples_when_asked(model):
    from tasks.jobs.serving.generation import Generation

    generation = Generation(model, 1)
    prompt = generation.encode(PROMPTS[2])
    long = generation.complete(prompt, 10_000)
    assert len(prompt) + len(long.tokens) == CONTEXT or long.finish_reason == "stop"
    assert generation.complete(prompt, 16).tokens == generation.complete(prompt, 16).tokens
    assert len({tuple(generation.complete(prompt, 16, temperature=1.0).tokens) for _ in range(4)}) > 1


def deploy(endpoint, model, ref, *, port=None, journal=None):
    golden = read_json(model / "golden.json")
    candidate = endpoint.start(
        model, ref, files=files_of(model), golden=golden, timeout=limit(60), port=port, journal=journal
    )
    return endpoint.switch(candidate, journal=journal)


def pids_of(endpoint):
    """The parents, servers and models' processes that run for an endpoint."""
    parents = [read_json(path)["pid"] for path in endpoint.folder.glob("servers/*/handle.json")]
    living = [pid for pid in parents if process.process_started(pid)]
    return living + [child for pid in living for child in process.descendants(pid)]


@pytest.fixture
def endpoint(tmp_path):
    endpoint = open_endpoint(tmp_path / "endpoints", "local")
    yield endpoint
    endpoint.stop()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    endpoint = open_endpoint(tmp_path_factory.mktemp("endpoints"), "api")
    yield endpoint, deploy(endpoint, model, "model/tiny@aaaaaaaa")
    endpoint.stop()


def ask(port, method, path, body=None, *, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit(60))
    sent = json.dumps(body) if body is not None else None
    connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
    reply = connection.getresponse()
    content = reply.read().decode()
    connection.close()
    return reply, json.loads(content) if "json" in (reply.getheader("Content-Type") or "") else content


def test_the_server_speaks_openais_completions(served, golden):
    _, at = served
    entry = golden["prompts"][0]
    reply, said = ask(at.port, "POST", "/v1/completions", {"prompt": entry["prompt"], "max_tokens": 24})
    assert reply.status == 200
    assert said["choices"] == [{"index": 0, "text": entry["completion"], "finish_reason": "stop", "logprobs": None}]
    assert (said["object"], said["model"]) == ("text_completion", "model/tiny@aaaaaaaa")
    used = said["usage"]
    assert used["completion_tokens"] == len(entry["tokens"])
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert said["id"].startswith("cmpl-") and reply.getheader("X-Request-Id") == said["id"]
    assert ask(at.port, "GET", "/v1/models")[1]["data"][0]["id"] == "model/tiny@aaaaaaaa"
    assert ask(at.port, "GET", "/livez")[0].status == 200
    ready = ask(at.port, "GET", "/readyz")
    assert (ready[0].status, ready[1]["ready"], ready[1]["model"]) == (200, True, "model/tiny@aaaaaaaa")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "prompt: Field required"),
        ({"prompt": ""}, 400, "`prompt` must be a text"),
        ({"prompt": 7}, 400, "`prompt` must be a text"),
        ({"prompt": "a", "max_tokens": 513}, 400, "max_tokens: "),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens: "),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens: "),
        ({"prompt": "a", "temperature": 2.5}, 400, "temperature: "),
        ({"prompt": "a", "max_token": 5}, 400, "max_token: Extra inputs are not permitted"),
        ({"prompt": "x = 1\n" * 300}, 400, "shorten it"),
        ({"prompt": "a\x00b"}, 400, "NUL"),
        ([], 400, "body: "),
        ({"prompt": "a", "model": "model/other@bbbbbbbb"}, 404, "model/other@bbbbbbbb"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(served, body, status, said):
    reply, answer = ask(served[1].port, "POST", "/v1/completions", body)
    assert reply.status == status
    assert said in answer["error"]["message"]


@pytest.mark.parametrize("name", ["tiny", "model/tiny", "model/tiny@aaaaaaaa", "tiny@aaaaaaaa", None])
def test_a_model_answers_to_its_stable_name_and_says_its_version(served, name):
    reply, answer = ask(served[1].port, "POST", "/v1/completions", {"prompt": "def ", "max_tokens": 1, "model": name})
    assert (reply.status, answer["model"]) == (200, "model/tiny@aaaaaaaa")


@pytest.mark.parametrize(
    "name", ["tin", "model/tiny@", "tiny@aaaa", "tiny@bbbbbbbb", "checkpoint/tiny", "endpoint/", ""]
)
def test_a_name_of_something_else_is_refused_with_the_one_that_is_served(served, name):
    reply, answer = ask(served[1].port, "POST", "/v1/completions", {"prompt": "def ", "max_tokens": 1, "model": name})
    assert reply.status == 404 and "Name it 'tiny'" in answer["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/engines", 404), ("GET", "/v1/completions", 405)])
def test_an_unknown_path_is_answered_in_openais_form_with_what_there_is(served, method, path, status):
    reply, answer = ask(served[1].port, method, path)
    assert (reply.status, answer["error"]["code"]) == (status, status)
    assert path in answer["error"]["message"] and "POST /v1/completions" in answer["error"]["message"]


def test_the_client_turns_refusals_into_errors_of_the_house(served):
    with pytest.raises(ValueError, match="shorten it"):
        complete(served[1].url, "x = 1\n" * 300)
    with pytest.raises(Missing, match="does not answer"):
        complete("http://127.0.0.1:1", "a")
    assert ready_state("http://127.0.0.1:1") is None


def test_a_person_can_try_it_and_another_site_cannot(served):
    reply, page = ask(served[1].port, "GET", "/")
    assert reply.status == 200 and "<form" in page
    assert "http://" not in page and "https://" not in page and "src=" not in page
    assert ask(served[1].port, "GET", "/readyz", headers={"Host": "evil.example"})[0].status == 400


def test_the_server_has_no_torch_in_it(served):
    server = pids_of(served[0])[-1]
    maps = Path(f"/proc/{server}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "libonnxruntime" in maps.read_text()
    assert "libtorch" not in maps.read_text()


@pytest.mark.long
def test_too_many_waiting_requests_are_sent_away_and_the_rest_answered(served):
    body = {"prompt": "class ", "max_tokens": 200, "temperature": 0.0}
    with ThreadPoolExecutor(80) as pool:
        replies = list(pool.map(lambda _: ask(served[1].port, "POST", "/v1/completions", body), range(80)))
    assert {reply.status for reply, _ in replies} == {200, 429}
    assert sum(reply.status == 200 for reply, _ in replies) >= 32
    assert {reply.getheader("Retry-After") for reply, _ in replies if reply.status == 429} == {"1"}
    assert len({said["choices"][0]["text"] for reply, said in replies if reply.status == 200}) == 1


def test_a_killed_server_comes_back_on_its_port(served):
    endpoint, at = served
    parent, server, *_ = pids_of(endpoint)
    os.kill(server, signal.SIGKILL)
    until(lambda: endpoint.observe() == at and pids_of(endpoint)[1:2] not in ([], [server]))
    assert pids_of(endpoint)[0] == parent
    assert complete(at.url, "def ", Sampling(2))["model"] == at.model_ref


def test_a_model_is_replaced_without_losing_a_request(endpoint, model):
    told = []
    first = deploy(endpoint, model, "model/tiny@aaaaaaaa", journal=lambda event, details: told.append((event, details)))
    assert [event for event, _ in told] == ["starting", "answering", "switched"]
    served, failures, stop = [], [], threading.Event()

    def hammer():
        while not stop.wait(0.05):
            try:
                served.append(complete(first.url, "import ", Sampling(24))["model"])
            except (Missing, ValueError) as error:
                failures.append(str(error))

    clients = [threading.Thread(target=hammer) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        second = deploy(
            endpoint, model, "model/tiny@bbbbbbbb", journal=lambda event, details: told.append((event, details))
        )
        until(lambda: served.count("model/tiny@bbbbbbbb") >= 10)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert failures == []
    assert set(served) == {"model/tiny@aaaaaaaa", "model/tiny@bbbbbbbb"}
    assert served.index("model/tiny@bbbbbbbb") > 0 and served[-1] == "model/tiny@bbbbbbbb"
    assert (second.port, endpoint.observe()) == (first.port, second)
    assert [event for event, _ in told][3:] == ["starting", "answering", "switched", "stopped"]
    assert len(pids_of(endpoint)) == 3
    assert sorted(read_json(endpoint.folder / "endpoint.json")) == [
        "colour",
        "folder",
        "model_ref",
        "name",
        "port",
        "previous",
        "settings",
        "since",
        "url",
    ]
    running = pids_of(endpoint)
    endpoint.stop()
    assert endpoint.observe() is None
    assert [pid for pid in running if process.process_started(pid)] == []
    port_free(second.port)


def test_a_new_server_has_the_time_that_reading_its_model_takes(endpoint, model, monkeypatch):
    monkeypatch.setattr(servers, "READ_BYTES_PER_SECOND", sum(file["size"] for file in files_of(model)) / 60)
    golden = read_json(model / "golden.json")
    assert endpoint.start(model, "model/tiny@aaaaaaaa", files=files_of(model), golden=golden, timeout=0.01)


def wrong_golden(model, copy):
    golden = read_json(model / "golden.json")
    golden["prompts"][3]["completion"] += "!"
    return model, golden, r"answered the golden prompt 'for i in range\(' with .*; expected .*!"


def damaged_model(model, copy):
    damage(copy)
    return copy, read_json(model / "golden.json"), "will not get ready: the golden prompt 'def ' was answered"


def no_model(model, copy):
    (copy / "model.onnx.data").unlink()
    return copy, read_json(model / "golden.json"), r"will not get ready: model\.onnx reads data"


def test_a_server_that_does_not_prove_itself_leaves_the_old_one_alone(served, model, copy):
    endpoint, before = served
    running = pids_of(endpoint)
    for case in (wrong_golden, damaged_model, no_model):
        folder, golden, said = case(model, shutil.copytree(copy, copy.parent / case.__name__))
        with pytest.raises(JobFailed, match=said) as failed:
            endpoint.start(folder, "model/tiny@bbbbbbbb", files=files_of(folder), golden=golden, timeout=limit(30))
        assert Path(failed.value.folder).parent == endpoint.folder / "servers"
        assert (endpoint.observe(), pids_of(endpoint)) == (before, running)


DEPLOY = """
import json, os, signal, sys
from pathlib import Path
from tasks.serving import open_endpoint
from tasks.storage.manifest import describe
root, model, event = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def journal(said, details):
    if said == event:
        os.kill(os.getpid(), signal.SIGKILL)
endpoint = open_endpoint(root, "local")
golden = json.loads((model / "golden.json").read_text())
files = [file.model_dump() for file in describe(model)]
candidate = endpoint.start(model, "model/killed@cccccccc", files=files, golden=golden, timeout=60, journal=journal)
endpoint.switch(candidate, journal=journal)
"""


@pytest.mark.parametrize(
    "event", ["answering", *(pytest.param(at, marks=pytest.mark.long) for at in ("switched", "stopped"))]
)
def test_a_deploy_that_was_killed_is_healed_by_the_next(endpoint, model, event):
    """With real servers; kills at every other place, with plain ones, are tests/integration/tasks/serving/test_rollout.py."""
    before = deploy(endpoint, model, "model/tiny@aaaaaaaa")
    root = endpoint.folder.parent
    killed = subprocess.run(
        [sys.executable, "-c", DEPLOY, str(root), str(model), event], timeout=limit(60), check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(pids_of(endpoint)) == 6
    assert complete(before.url, "def ", Sampling(2))["model"].startswith("model/")
    after = deploy(endpoint, model, "model/tiny@bbbbbbbb")
    assert (after.port, after.model_ref, endpoint.observe()) == (before.port, "model/tiny@bbbbbbbb", after)
    assert len(pids_of(endpoint)) == 3


def test_a_port_that_somebody_else_listens_on_is_refused_before_anything_starts(endpoint, model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .*deployment.port"):
            deploy(endpoint, model, "model/tiny@aaaaaaaa", port=port)
    assert not endpoint.folder.exists()
    assert deploy(endpoint, model, "model/tiny@aaaaaaaa", port=port).port == port
