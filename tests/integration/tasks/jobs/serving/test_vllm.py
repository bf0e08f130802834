"""vLLM behind Headway's server: verified before it starts, proven before it is asked, restarted, and its API passed on."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from api_stand import serving
from serving_stand import REF, flip, until, whole
from vllm_stand import REAL, Program, export_for_vllm, prompts_of
from waiting import limit

from tasks.common.errors import IntegrityError
from tasks.common.process import descendants
from tasks.config.serving import VllmConfig
from tasks.jobs.serving.fallback_models import Ladder, Rung
from tasks.jobs.serving.runtime import Ask, Gone, Unfit
from tasks.serving.vllm import command
from tasks.storage.manifest import describe


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_for_vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "model")


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.fixture
def prompts(exported):
    return prompts_of(exported)


@pytest.fixture
def ladder_of(run):
    """Makes ladders that are closed at the end."""
    made = []

    def make(folder, config, *, files=None, hang_seconds=60.0):
        rung = Rung("full", REF, folder, tuple(describe(folder)) if files is None else files, vllm=config)
        made.append(Ladder([rung], threads=1, hang_seconds=hang_seconds))
        run(made[-1].start())
        return made[-1]

    yield make
    for each in made:
        run(each.close())


def asked(entry, **more):
    return Ask(entry["prompt"], len(entry["tokens"]), **more)


def test_it_answers_as_the_export_says_and_tells_of_tokens(run, ladder_of, folder, program, prompts):
    ladder = ladder_of(folder, program.config(arguments=("--max-num-seqs", "8")))
    assert ladder.ready and ladder.context_length == 256
    taken = ladder.take()
    for entry in prompts:
        output = run(whole(taken.runtime, asked(entry)))
        assert output.text == entry["completion"] and list(output.ending.tokens) == entry["tokens"]
        assert output.ending.prompt_tokens == len(entry["prompt_tokens"])
        assert (
            output.ending.completion_tokens == len(entry["tokens"]) >= sum(piece.tokens for piece in output.pieces) > 1
        )
    with pytest.raises(Unfit, match="max_tokens=300 cannot be greater than max_model_len=256"):
        run(whole(taken.runtime, Ask("def ", 300)))
    with pytest.raises(Unfit, match="maximum context length is 256 tokens"):
        run(whole(taken.runtime, Ask("def " * 300, 1)))
    ended = run(whole(taken.runtime, Ask("def " * 20, 256))).ending  # at the end of the context, if not before
    assert ended.prompt_tokens + ended.completion_tokens <= 256
    seeded = [run(whole(taken.runtime, Ask("def ", 8, temperature=1.0, seed=seed))).text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    (line,) = program.calls
    assert "--max-num-seqs 8" in line and "--load-format safetensors" in line and f"--served-model-name {REF}" in line
    assert "--tensor-parallel-size 1 --gpu-memory-utilization 0.45" in line


def test_a_changed_byte_is_found_before_anything_starts(ladder_of, folder, program):
    files = tuple(describe(folder))
    flip(folder / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"model.safetensors \(sha256\)"):
        ladder_of(folder, program.config(), files=files)
    assert program.calls == []


def test_a_file_that_is_changed_while_it_is_loaded_is_found(run, folder, program):
    program.behave(start_seconds=2.0)
    rung = Rung("full", REF, folder, tuple(describe(folder)), vllm=program.config())
    ladder = Ladder([rung], threads=1)

    async def spoil():
        starting = asyncio.create_task(ladder.start())
        await until(lambda: program.calls)
        flip(folder / "model.safetensors")  # size and times are as before; the time of the change is the kernel's
        with pytest.raises(IntegrityError, match="were changed while vLLM loaded them"):
            await starting
        await ladder.close()

    run(spoil())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"noise": 0.05}, "nats from PyTorch's on average"),
        ({"deaf": True}, "said no log probabilities.*EngineCore encountered"),
    ],
)
def test_a_model_that_computes_otherwise_is_healthy_and_does_not_serve(ladder_of, folder, program, how, reason):
    program.behave(**how)
    ladder = ladder_of(folder, program.config())
    assert not ladder.ready and ladder.take() is None
    assert re.search(reason, ladder.reason), ladder.reason


def test_one_that_does_not_start_says_why(ladder_of, folder, program):
    assert "with exit code 2" in ladder_of(folder, program.config(arguments=("--no-such-option",))).reason
    assert "No such file" in ladder_of(folder, VllmConfig(command="/nowhere/vllm")).reason
    program.behave(start_seconds=60.0)
    assert "not ready within 0.5 s" in ladder_of(folder, program.config(start_seconds=0.5)).reason


def test_a_model_of_onnx_runtime_is_refused(ladder_of, folder, program):
    (folder / "model.safetensors").unlink()
    ladder = ladder_of(folder, program.config())
    assert "was exported for ONNX Runtime, and deployment.runtime is vllm" in ladder.reason and program.calls == []


def test_one_that_dies_is_started_again_and_proven_again(run, ladder_of, folder, program, prompts):
    program.behave(die="segfault")
    ladder = ladder_of(folder, program.config())
    taken = ladder.take()
    with pytest.raises(Gone) as gone:
        run(whole(taken.runtime, Ask("a segfault", 4)))
    assert gone.value.taken and "exit code 1" in str(gone.value)
    run(until(lambda: ladder.ready))
    assert len(program.calls) == 2 and run(whole(taken.runtime, asked(prompts[0]))).text == prompts[0]["completion"]
    os.kill(taken.runtime.pid, signal.SIGKILL)
    run(until(lambda: len(program.calls) == 3 and ladder.ready))


def test_one_that_hangs_is_killed_and_started_again(run, ladder_of, folder, program):
    program.behave(hang="forever")
    ladder = ladder_of(folder, program.config(), hang_seconds=2.0)
    with pytest.raises(Gone, match="said nothing for 2 s and was killed"):
        run(whole(ladder.take().runtime, Ask("forever", 4)))
    run(until(lambda: ladder.ready))


def test_one_that_takes_long_for_an_answer_in_one_piece_is_not_taken_for_hung(run, ladder_of, folder, program):
    program.behave(token_seconds=0.5)
    ladder = ladder_of(folder, program.config(), hang_seconds=2.0)

    async def slow():
        body = {"model": REF, "prompt": "def ", "max_tokens": 12, "temperature": 0}
        async with ladder.vllm().forward("/v1/completions", body) as reply:
            return json.loads(await reply.aread())

    assert run(slow())["usage"]["completion_tokens"] == 12 and len(program.calls) == 1


def test_no_process_of_it_is_left_when_it_is_closed(run, folder, program):
    ladder = Ladder([Rung("full", REF, folder, None, vllm=program.config())], threads=1)
    run(ladder.start())
    pid = ladder.take().runtime.pid
    below = [pid, *descendants(pid)]
    run(ladder.close())
    assert [one for one in below if Path(f"/proc/{one}").exists()] == []


@pytest.fixture(scope="module")
def server(exported, tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    config = Program(place).config().model_dump(mode="json")
    with serving(place / "server", shutil.copytree(exported, place / "model"), vllm=config) as made:
        yield made


def test_its_api_is_passed_on_behind_the_same_edge(server, prompts):
    entry = prompts[0]
    count, greedy = len(entry["tokens"]), {"max_tokens": len(entry["tokens"])}
    plain = server.complete(entry["prompt"], **greedy)
    assert (
        plain.json()["choices"][0]["text"] == entry["completion"]
        and plain.json()["usage"]["completion_tokens"] == count
    )
    passed = server.complete(entry["prompt"], temperature=0, n=2, model=REF.partition("@")[0], **greedy)
    assert [one["text"] for one in passed.json()["choices"]] == [entry["completion"]] * 2
    assert passed.json()["model"] == passed.headers["x-headway-model"] and "x-headway-tokens" not in passed.headers
    body = {"prompt": entry["prompt"], "temperature": 0, "logprobs": 1, "stream": True, **greedy}
    text = server.client.post("/v1/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in events) == entry["completion"]
    assert text.endswith(f": tokens {len(entry['prompt_tokens']) + count}\n\ndata: [DONE]\n\n")
    chat = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.status_code == 400 and "chat template" in chat.json()["error"]["message"]
    figures = server.client.get("/metrics").text
    assert 'vllm:request_success_total{engine="0"}' in figures
    assert 'headway_endpoint_requests_total{route="/v1/chat/completions",status="400"} 1.0' in figures


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "guided_grammar": "x"}, "`guided_grammar` is not passed on to vLLM"),
        ({"prompt": "a", "n": 400}, "n: 400 is no number from 1 to the 16"),
        ({"prompt": "a", "n": 2, "max_tokens": 100_000}, "max_tokens: 100000 is no number"),
        ({"prompt": "a", "prompt_logprobs": 5000}, "prompt_logprobs: 5000 is no number from 0 to the 20"),
        ({"prompt": "a", "n": 2, "model": "other"}, "the model 'other' is not served here"),
    ],
)
def test_what_is_not_passed_on_is_refused_by_name(server, body, message):
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code in (400, 404) and message in reply.json()["error"]["message"]


@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="HEADWAY_VLLM names no vLLM")
def test_the_real_one_takes_the_command_line_and_answers_as_the_export_says(
    run, ladder_of, folder, prompts, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    config = VllmConfig(command=REAL, dtype="float32", arguments=("--enforce-eager", "--max-num-seqs", "8"))
    ladder = ladder_of(folder, config)
    assert ladder.ready, ladder.reason
    taken = ladder.take()
    for entry in prompts:
        output = run(whole(taken.runtime, asked(entry)))
        assert output.text == entry["completion"] and list(output.ending.tokens) == entry["tokens"]
    assert "vllm:" in run(ladder.figures())
    with pytest.raises(Unfit, match="max_tokens=300 cannot be greater than max_model_len=256"):
        run(whole(taken.runtime, Ask("def ", 300)))
    with pytest.raises(Unfit, match="maximum context length is 256 tokens"):
        run(whole(taken.runtime, Ask("def " * 300, 1)))
    ended = run(whole(taken.runtime, Ask("def " * 20, 256))).ending  # at the end of the context, if not before
    assert ended.prompt_tokens + ended.completion_tokens <= 256


@pytest.mark.skipif(not REAL, reason="HEADWAY_VLLM names no vLLM")
def test_the_real_parser_takes_what_is_rendered(tmp_path):
    argv = command(VllmConfig(), tmp_path, REF, context=256, socket=tmp_path / "s")
    text = "import sys\nfrom vllm.entrypoints.launchers.cli_args import make_arg_parser\nfrom vllm.utils.argparse_utils import "
    text += "FlexibleArgumentParser\nprint(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:]).served_model_name)"
    done = subprocess.run(
        [str(Path(REAL).with_name("python")), "-c", text, *argv[1:]],
        capture_output=True,
        text=True,
        timeout=limit(240),
        check=False,
    )
    assert done.returncode == 0 and REF in done.stdout, done.stderr[-2000:]
