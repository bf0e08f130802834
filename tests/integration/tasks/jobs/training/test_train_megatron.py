"""The program of the engine `megatron` on two real ranks, with a pretrain_gpt.py that trains nothing (fake_megatron.py).

What the real one takes and writes was tried by hand: docs/megatron.md.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fake_megatron import converter, write_checkout
from safetensors import safe_open
from support import python_path
from training_runs import all_lines, content, error, last_lines, result, said_by, steps_of_checkpoints
from waiting import limit

from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.jobs.checkpoint.files import manifests
from tasks.jobs.node.elastic import SAVED_AND_STOPPED
from tasks.jobs.training.network import build_network

ROOT = Path(__file__).parents[5]
CONFIG = TrainingConfig(
    engine="megatron",
    network=NetworkConfig(layers=1, hidden_size=32, heads=2, kv_heads=1, intermediate_size=64),
    sequence_length=32,
    global_batch_size=8,
    micro_batch_size=2,
    steps=10,
    warmup_steps=2,
)
SERVER = """# fork: jobs
import json, os, sys
from torch.distributed import TCPStore
from tasks.jobs.node.runtime import main
from tasks.jobs.train_megatron import run
for line in sys.stdin:
    environments, children = json.loads(line), []
    store = TCPStore("127.0.0.1", int(environments[0]["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    for environment in environments:
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            try:
                code = main(run)
            except SystemExit as ended:
                code = ended.code
            os._exit(code)
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


@pytest.fixture(scope="module")
def launch():
    """A function that runs a job to its end, with the store that torchrun would hold; returns the exit codes of its ranks."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment, start_new_session=True, text=True, **pipes
    )

    def begin(job, *, attempt=1, ranks=2, **more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"HEADWAY_JOB": str(job), "HEADWAY_ATTEMPT": str(attempt), "WORLD_SIZE": str(ranks), **more}
        torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **torchrun}
        server.stdin.write(json.dumps([{**common, **there, "RANK": str(rank)} for rank in range(ranks)]) + "\n")
        server.stdin.flush()

    def run(job, *, beside=None, **how):
        begin(job, **how)
        if beside:
            beside()
        assert select.select([server.stdout], [], [], limit(120))[0], said_by(job)
        return json.loads(server.stdout.readline())

    yield run
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return write_checkout(tmp_path_factory.mktemp("opt") / "megatron-lm")


@pytest.fixture(scope="module")
def shapes():
    with torch.device("meta"):
        state = build_network(CONFIG, vocab_size=64, eod=63).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != "lm_head.weight"}


@pytest.fixture(scope="module")
def written(tokens, checkout, shapes):
    """A function that writes a job's folder."""
    command = converter(checkout, shapes)

    def write(job, limits=None, **megatron):
        local = {} if "flavour" in megatron else {"transformer_impl": "local"}
        own = {"checkout": str(checkout), "converter": command, **local, **megatron}
        execution = {"megatron": own, "limits": limits or {}}
        settings = {"training": CONFIG.model_dump(mode="json"), "execution": execution, "checkpoint_every_steps": 4}
        job.mkdir()
        spec = {"settings": {**settings, "keep_checkpoints": 2}, "inputs": {"tokens": str(tokens)}}
        (job / "config.json").write_text(json.dumps(spec))
        return job

    return write


@pytest.fixture(scope="module")
def unbroken(launch, written, tmp_path_factory):
    job = written(tmp_path_factory.mktemp("jobs") / "unbroken")
    assert launch(job) == [0, 0], said_by(job)
    return job


def newest(job):
    return manifests(job / "checkpoints")[0]


def test_its_log_becomes_our_metrics_while_it_runs(unbroken):
    records = all_lines(unbroken)
    assert [record["step"] for record in records] == list(range(1, 11))
    assert records[3]["loss"] == 1.0 and records[3]["grad_norm"] == 0.25 and records[3]["learning_rate"] == 1e-3
    assert records[3]["tokens_per_second"] == 8 * 32 / 0.05 and records[3]["tflops_per_rank"] == 400
    assert json.loads((unbroken / "progress.json").read_text())["done"] == 10


def test_what_it_saved_is_committed_in_our_protocol(unbroken):
    assert steps_of_checkpoints(unbroken) == [10, 8]
    manifest = json.loads(newest(unbroken).read_text())
    paths = [entry["path"] for entry in manifest["files"]]
    assert sorted(paths) == [
        f"own/iter_0000010/{name}" for name in ("common.pt", "model/__0_0.distcp", "model/__1_0.distcp")
    ]
    assert all(entry["size"] and len(entry["sha256"]) == 64 for entry in manifest["files"])
    assert manifest["consumed_samples"] == 80


def test_it_publishes_a_hugging_face_folder_with_the_tokenizer(unbroken, shapes, tokens):
    out = content(unbroken / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json", "training_log.jsonl", "training.json"} <= out.keys()
    with safe_open(unbroken / "out" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(shapes)
    config = json.loads(out["config.json"])
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 64
    assert out["training_log.jsonl"].count(b"\n") == 10
    assert result(unbroken)["metrics"]["loss"] == 0.4 and result(unbroken)["resumed_from_step"] is None


def test_a_killed_run_goes_on_from_the_newest_verified_checkpoint(unbroken, launch, written, tmp_path):
    job = written(tmp_path / "job")
    assert launch(job, FAKE_DIE_AT="7") == [1, 1]
    assert error(job)["class"] == "out_of_memory" and "CUDA out of memory" in error(job)["message"]
    assert launch(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 4
    assert {step: line["loss"] for step, line in last_lines(job).items()} == {
        step: line["loss"] for step, line in last_lines(unbroken).items()
    }
    assert content(job / "out") == content(unbroken / "out")


def test_a_step_whose_record_a_kill_took_away_is_recorded_by_the_next_attempt(unbroken, launch, written, tmp_path):
    job = written(tmp_path / "job")
    assert launch(job, FAKE_DIE_AT="7") == [1, 1]
    metrics = job / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(True) if int(json.loads(line)["step"]) < 4]
    metrics.write_text("".join(lines))  # as when the process ends after the checkpoint of step 4 and before its record
    assert launch(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 4
    losses = [{step: line["loss"] for step, line in last_lines(each).items()} for each in (job, unbroken)]
    assert losses[0] == losses[1] and sorted(losses[0]) == list(range(1, 11))


@pytest.fixture
def half_done(unbroken, tmp_path):
    """A job whose last two checkpoints are of step 8 and 10, to be started again."""
    job = tmp_path / "job"
    shutil.copytree(unbroken, job, symlinks=True)
    (job / "result.json").unlink()
    return job


def test_a_flipped_byte_in_its_own_file_is_refused_and_the_one_before_is_taken(half_done, launch):
    file = newest(half_done).parent / "own" / "iter_0000010" / "model" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[77] ^= 1
    file.write_bytes(data)
    assert launch(half_done, attempt=2) == [0, 0], said_by(half_done)
    assert result(half_done)["resumed_from_step"] == 8
    assert "__1_0.distcp" in (file.parents[3] / "quarantined.json").read_text()


def test_a_file_that_the_manifest_does_not_name_never_reaches_megatron(half_done, launch):
    shutil.rmtree(newest(half_done).parent)
    folder = newest(half_done).parent / "own" / "iter_0000008"
    (folder / "model" / "__2_0.distcp").write_bytes(b"x")  # the stand-in refuses to load a file too many
    assert launch(half_done, attempt=2) == [0, 0], said_by(half_done)


def test_a_change_of_the_data_is_refused_with_what_differs(half_done, launch, tokens, tmp_path):
    other = tmp_path / "tokens"
    shutil.copytree(tokens, other)
    said = json.loads((other / "tokens.json").read_text())
    (other / "tokens.json").write_text(json.dumps({**said, "extra": 1}))
    spec = json.loads((half_done / "config.json").read_text())
    (half_done / "config.json").write_text(json.dumps({**spec, "inputs": {"tokens": str(other)}}))
    assert 1 in launch(half_done, attempt=2, ranks=1)
    assert error(half_done)["class"] == "user" and "tokens.json" in error(half_done)["message"]


def test_asked_to_stop_it_saves_first_and_goes_on_from_there(launch, written, tmp_path):
    job = written(tmp_path / "job")

    def ask():
        while not last_lines(job):
            time.sleep(0.01)
        for rank in range(2):
            os.kill(json.loads((job / "ranks" / f"{rank}.json").read_text())["pid"], signal.SIGTERM)

    assert launch(job, FAKE_PACE="0.3", beside=ask) == [SAVED_AND_STOPPED] * 2, said_by(job)
    stopped = steps_of_checkpoints(job)[0]
    assert 0 < stopped < 10
    assert launch(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == stopped


def test_a_budget_that_is_used_up_is_saved_and_ends_the_job_and_more_of_it_goes_on(launch, written, tmp_path):
    job = written(tmp_path / "job", limits={"max_cost": 3.0, "cost_per_hour": 3600.0})  # three seconds
    assert launch(job, FAKE_PACE="0.5")[0] == 1
    assert error(job)["class"] == "limit" and "max_cost 3 is reached" in error(job)["message"]
    stopped = steps_of_checkpoints(job)[0]
    assert 0 < stopped < 10
    assert launch(job, attempt=2, FAKE_PACE="0.5")[0] == 1, "nothing is left to spend, but for a rounded step"
    stopped = steps_of_checkpoints(job)[0]
    spec = json.loads((job / "config.json").read_text())
    spec["settings"]["execution"]["limits"]["max_cost"] = 300.0
    (job / "config.json").write_text(json.dumps(spec))
    assert launch(job, attempt=3) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == stopped


def test_a_loss_that_is_no_number_ends_the_job_for_good(launch, written, tmp_path):
    job = written(tmp_path / "job")
    assert launch(job, ranks=1, FAKE_NAN_AT="3") == [1]
    assert error(job)["class"] == "diverged" and "step 3" in error(job)["message"]


def test_megatron_deepspeed_writes_under_its_own_names_and_resumes(launch, written, tmp_path):
    job = written(tmp_path / "job", flavour="megatron-deepspeed")
    assert launch(job, FAKE_DIE_AT="7") == [1, 1]
    assert launch(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 4
    start = json.loads(next((job / "megatron").glob("attempt-*/start.json")).read_text())
    of_deepspeed = json.loads(Path(start["arguments"][start["arguments"].index("--deepspeed_config") + 1]).read_text())
    assert of_deepspeed["zero_optimization"]["stage"] == 2 and of_deepspeed["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("megatron", "kind", "words"),
    [
        ({"checkout": "/nowhere/megatron"}, "missing", "there is no pretrain_gpt.py in /nowhere/megatron"),
        ({"converter": []}, "missing", "Megatron-Bridge is not installed"),
        ({"transformer_impl": "transformer_engine"}, "missing", "Transformer Engine, which is not installed"),
        ({"arguments": ["--no-such-argument"]}, "infrastructure", "--no-such-argument"),
    ],
)
def test_what_is_missing_is_said_with_how_to_get_it(launch, written, tmp_path, megatron, kind, words):
    job = written(tmp_path / "job", **megatron)
    assert launch(job, ranks=1) == [1]
    assert error(job)["class"] == kind and words in error(job)["message"]
    assert kind != "missing" or "image" in error(job)["remedy"]


def test_a_converter_that_writes_another_network_is_refused(launch, written, checkout, shapes, tmp_path):
    other = write_checkout(tmp_path / "other")
    job = written(tmp_path / "job", converter=converter(other, {**shapes, "model.norm.weight": (7,)}))
    assert launch(job, ranks=1) == [1]
    assert error(job)["class"] == "integrity" and "model.norm.weight is [7], not [32]" in error(job)["message"]
