"""A model that crashes, hangs or was changed ends no server and answers nothing wrong. Rows 53 and 63 of the table of faults."""

import asyncio
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
from api_stand import serving
from api_stand import start as start_server
from serving_stand import BEFORE, REF, asked, flip, until, whole
from waiting import limit

from tasks.common.errors import IntegrityError
from tasks.common.process import descendants, process_started
from tasks.jobs.serving import fallback_models as rungs
from tasks.jobs.serving.fallback_models import Ladder, Rung
from tasks.jobs.serving.model_process import ProcessRuntime
from tasks.jobs.serving.runtime import Ask, Golden, Gone, available
from tasks.storage.manifest import describe


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def rung(name, folder, ref=REF):
    return Rung(name, ref, folder, describe(folder))


def start(run, runtime, folder):
    run(runtime.start(folder, threads=1))
    return runtime


@pytest.fixture
def runtime(run, model):
    made = ProcessRuntime(files=describe(model), named=REF, hang_seconds=60.0)
    yield made
    run(made.close())


@pytest.fixture
def ladder_of(run):
    """Makes ladders that are closed at the end."""
    made = []

    def make(*all_rungs, **settings):
        made.append(Ladder(all_rungs, threads=1, **settings))
        run(made[-1].start())
        return made[-1]

    yield make
    for each in made:
        run(each.close())


async def gone(runtime, ask):
    with pytest.raises(Gone) as caught:
        await whole(runtime, ask)
    return str(caught.value)


async def asks_until_gone(runtime, seed):
    """An answer takes a fraction of a second, so one after the other, until the model is gone."""
    while True:
        try:
            await whole(runtime, Ask("def ", 240, temperature=1.0, seed=seed))
        except Gone as gone:
            return str(gone)


def test_a_segfault_in_a_request_is_told_at_once_and_the_model_comes_back(run, runtime, model, golden, monkeypatch):
    monkeypatch.setenv("HEADWAY_MODEL_FAULT", "segfault:crash me")
    start(run, runtime, model)

    async def crash():
        others = [asyncio.create_task(asks_until_gone(runtime, seed)) for seed in range(3)]
        await until(lambda: runtime.under_way == 3)
        began = time.monotonic()
        said = await gone(runtime, Ask("crash me", 4))
        assert not runtime.up and time.monotonic() - began < limit(5)
        assert {said, *await asyncio.gather(*others)} == {"the model's process ended: by SIGSEGV"}
        await until(lambda: runtime.up)
        return await whole(runtime, asked(golden[0]))

    assert run(crash()).ending.tokens == golden[0].tokens


@pytest.mark.parametrize("busy", [True, False], ids=["in a request", "with nothing to do"])
def test_a_model_that_hangs_is_killed_and_comes_back(run, runtime, model, golden, monkeypatch, busy):
    monkeypatch.setenv("HEADWAY_MODEL_FAULT", "hang:sleep well")
    runtime._hang_seconds = silent = round(limit(2.0))
    start(run, runtime, model)
    first = runtime.pid

    async def hang():
        if busy:
            assert f"said nothing for {silent} s and was killed" in await gone(runtime, Ask("sleep well", 4))
        else:
            os.kill(first, signal.SIGSTOP)
            await until(lambda: not runtime.up)
        await until(lambda: runtime.up)
        return await whole(runtime, asked(golden[0]))

    assert run(hang()).ending.tokens == golden[0].tokens
    assert runtime.pid != first and process_started(first) is None


def test_a_file_changed_between_verification_and_load_is_not_loaded_and_found_at_the_next_start(
    run, copy, golden, tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADWAY_MODEL_FAULT", f"verified:{tmp_path}")
    runtime = ProcessRuntime(files=describe(copy), named=REF)

    async def load():
        loading = asyncio.create_task(runtime.start(copy, threads=1))
        await until(lambda: (tmp_path / "verified").exists())
        for name in ("model.onnx", "model.onnx.data", "tokenizer.json", "genai_config.json", "golden.json"):
            flip(copy / name)
        (tmp_path / "go").touch()
        await loading
        said = [await whole(runtime, asked(each)) for each in golden]
        assert [each.ending.tokens for each in said] == [each.tokens for each in golden]
        os.kill(runtime.pid, signal.SIGKILL)
        await until(lambda: runtime.refused)
        assert "model.onnx.data (sha256)" in str(runtime.refused) and not runtime.up
        assert runtime.refused.problems[0]["problem"] == "sha256"
        await runtime.close()

    run(load())


def test_a_changed_file_is_found_before_anything_is_loaded(run, copy):
    runtime = ProcessRuntime(files=describe(copy), named=REF)
    flip(copy / "model.onnx")
    with pytest.raises(
        IntegrityError, match=r"files of model/tiny@a+ are not what was deployed: model.onnx \(sha256\)"
    ):
        start(run, runtime, copy)
    assert not runtime.up and runtime.pid is None


def test_a_wrong_answer_to_a_golden_prompt_makes_no_model_ready(run, copy):
    told = (copy / "golden.json").read_text()
    (copy / "golden.json").write_text(told.replace('"tokens": [', '"tokens": [7, ', 1))
    runtime = ProcessRuntime(files=describe(copy))
    with pytest.raises(Gone, match="the golden prompt 'def ' was answered"):
        start(run, runtime, copy)
    assert not runtime.up
    run(runtime.close())


def test_a_process_that_cannot_be_started_is_tried_again_until_it_can(
    run, ladder_of, model, golden, tmp_path, monkeypatch
):
    python, program = sys.executable, tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    ladder = ladder_of(rung("full", model))
    assert not ladder.ready and "could not be started: FileNotFoundError" in ladder.reason

    async def mended():
        (tmp_path / "whole").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (tmp_path / "whole").chmod(0o700)
        (tmp_path / "whole").rename(program)
        await until(lambda: ladder.ready)
        return await whole(ladder.take().runtime, asked(golden[0]))

    assert run(mended()).ending.tokens == golden[0].tokens and ladder.reason == ""


def test_a_golden_prompt_that_is_unfit_ends_no_restarts(run, model):
    runtime = ProcessRuntime(files=describe(model), golden=[Golden("x = 1\n" * 300, (1,))])
    with pytest.raises(Gone, match="could not be started: Unfit"):
        start(run, runtime, model)
    assert not runtime._keeper.done()
    run(runtime.close())


def test_no_process_of_a_model_outlives_its_server(run, model):
    runtime = start(run, ProcessRuntime(files=describe(model)), model)
    pid = runtime.pid
    run(runtime.close())
    assert process_started(pid) is None and not runtime.up


def test_the_previous_model_answers_until_the_full_one_is_proven_again_and_longer_after_each_crash(
    run, ladder_of, model, golden
):
    ladder = ladder_of(rung("full", model), rung("previous", model, BEFORE))
    assert ladder.ready and ladder.reason == "" and ladder.take().rung == "full"

    async def crash():
        await until(lambda: ladder.up[BEFORE])  # held ready: there is memory for it
        os.kill(ladder.take().runtime.pid, signal.SIGKILL)
        await until(lambda: not ladder.ready)
        taken = ladder.take()
        assert (taken.rung, taken.model_ref) == ("previous", BEFORE) and ladder.reason
        assert (await whole(taken.runtime, asked(golden[0]))).ending.tokens == golden[0].tokens
        await until(lambda: ladder.ready)
        assert ladder.take().rung == "full" and ladder.reason == "" and ladder.up == {REF: True, BEFORE: True}
        os.kill(ladder.take().runtime.pid, signal.SIGKILL)
        await until(lambda: not ladder.ready)
        await until(lambda: ladder.ready)
        began = time.monotonic()
        assert ladder.take().rung == "previous" and ladder.retry_seconds == 4
        await until(lambda: ladder.take().rung == "full")
        assert time.monotonic() - began > 2.0

    run(crash())


def test_a_previous_model_that_is_barred_answers_for_nobody_and_answers_again_when_it_is_not(
    run, ladder_of, model, tmp_path
):
    barred = tmp_path / "barred"
    barred.touch()
    ladder = ladder_of(rung("full", model), replace(rung("previous", model, BEFORE), unless=barred))

    async def crash():
        os.kill(ladder.take().runtime.pid, signal.SIGKILL)
        await until(lambda: not ladder.ready)
        assert ladder.take() is None and not ladder.answers and ladder._lower[0].runtime is None
        await until(lambda: ladder.ready)
        barred.unlink()
        full = ladder._full.runtime
        os.kill(full.pid, signal.SIGKILL)
        await until(lambda: not ladder.ready)
        assert ladder.take() is None  # this has the previous one loaded, while the full one starts again
        await until(lambda: ladder.up[BEFORE] and ladder.ready)
        os.kill(full.pid, signal.SIGKILL)
        await until(lambda: not ladder.ready)
        assert ladder.take().rung == "previous"
        barred.touch()
        assert ladder.take() is None or ladder.take().rung == "full"

    run(crash())


def test_a_rung_loaded_in_need_is_left_again(run, ladder_of, model, monkeypatch):
    monkeypatch.setattr(rungs, "SPARE", 1e9)  # as on a machine without memory to hold anything ready
    monkeypatch.setattr(rungs, "LEAVE_SECONDS", 1e9)
    ladder = ladder_of(rung("full", model), rung("previous", model, BEFORE))

    async def crash():
        full = ladder.take().runtime
        assert ladder.up == {REF: True, BEFORE: False}
        os.kill(full.pid, signal.SIGKILL)
        await until(lambda: not ladder.ready)
        assert ladder.take() is None and ladder.retry_seconds == 2
        await until(lambda: ladder.up[BEFORE])
        previous = ladder._lower[0].runtime.pid
        monkeypatch.setattr(rungs, "LEAVE_SECONDS", 0.5)  # only now: the full one may be back before this one was seen
        await until(lambda: ladder.ready and not ladder.up[BEFORE])
        await until(lambda: process_started(previous) is None)
        assert ladder.take().rung == "full"

    run(crash())


def test_a_variant_answers_when_the_other_models_were_changed(run, ladder_of, copy, tmp_path):
    before = shutil.copytree(copy, tmp_path / "before")
    shutil.copytree(before, copy / "variants" / "int8", ignore=shutil.ignore_patterns("golden.json"))
    ref = f"{REF}/variants/int8"
    below = [rung("previous", before, BEFORE), rung("smaller", copy / "variants" / "int8", ref)]
    flip(before / "model.onnx.data")
    ladder = ladder_of(rung("full", copy), *below)

    async def refused():
        flip(copy / "model.onnx.data")
        os.kill(ladder.take().runtime.pid, signal.SIGKILL)
        await until(lambda: (taken := ladder.take()) and taken.rung == "smaller")
        assert not ladder.ready and "model.onnx.data (sha256)" in str(ladder.refused) and ladder.retry_seconds == 60
        taken = ladder.take()
        assert taken.model_ref == ref
        return (await whole(taken.runtime, Ask("def ", 8))).text

    assert run(refused())
    assert ladder.up == {REF: False, BEFORE: False, ref: True}


def test_a_first_rung_that_was_changed_is_never_loaded(run, copy):
    full = rung("full", copy)
    flip(copy / "model.onnx.data")
    ladder = Ladder([full], threads=1)
    with pytest.raises(IntegrityError, match="sha256"):
        run(ladder.start())
    assert ladder.take() is None and not ladder.ready
    run(ladder.close())


def test_a_container_has_the_memory_that_its_limit_leaves(tmp_path):
    for name, said in (
        ("memory.max", "1000"),
        ("memory.current", "700"),
        ("memory.stat", "anon 500\ninactive_file 200\n"),
    ):
        (tmp_path / name).write_text(said)
    assert available(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max")
    assert available(tmp_path) > 1 << 20


@pytest.mark.long
def test_a_server_whose_model_segfaults_stays_answers_degraded_and_is_ready_again(model, tmp_path):
    below = [{"name": "previous", "model_ref": BEFORE, "folder": str(model)}]
    fault = {"HEADWAY_MODEL_FAULT": "segfault:crash me"}
    with serving(tmp_path / "server", model, environment=fault, ladder=below, model_ref="model/tiny") as server:
        assert server.complete(max_tokens=2).headers["X-Headway-Model"] == "model/tiny"
        run_until(lambda: "previous" in rungs_after_a_crash(server))
        run_until(lambda: server.complete(max_tokens=2).headers["X-Headway-Model"] == "model/tiny")
        assert server.client.get("/readyz").status_code == 200 and server.process.poll() is None
        models = descendants(server.process.pid)
        assert models
        server.process.kill()
        run_until(lambda: not any(map(process_started, models)))


def test_a_crash_is_counted_from_the_moment_on_in_which_the_model_does_not_answer(run, ladder_of, model):
    ladder = ladder_of(rung("full", model))

    async def crash():
        os.kill(ladder.take().runtime.pid, signal.SIGKILL)
        while ladder.ready:
            await asyncio.sleep(0)
        assert ladder.retry_seconds == 2 and ladder.loading and not ladder.answers
        await until(lambda: ladder.ready)
        assert ladder.retry_seconds == 2 and ladder.answers and not ladder.loading

    run(crash())


def test_a_server_says_that_it_is_loading_and_marks_what_no_model_had(model, tmp_path):
    fault = {"HEADWAY_MODEL_FAULT": f"verified:{tmp_path}"}
    server = start_server(tmp_path / "server", model, environment=fault)
    try:
        run_until((tmp_path / "verified").exists)
        said = server.client.get("/readyz")
        assert said.status_code == 503 and (said.json()["answers"], said.json()["loading"]) == (False, True)
        refused = server.complete(max_tokens=2)
        assert refused.status_code == 503 and refused.headers["X-Headway-Loading"] == "1"
        assert "X-Headway-Gone" not in refused.headers
        (tmp_path / "go").touch()
        state = server.wait().client.get("/readyz").json()
        assert (state["answers"], state["loading"]) == (True, False)
    finally:
        server.process.kill()
        server.process.wait()


def test_a_server_whose_model_was_changed_ends_when_no_other_may_answer(copy, tmp_path):
    files = [file.model_dump() for file in describe(copy)]
    with serving(tmp_path / "server", copy, files=files) as server:
        flip(copy / "model.onnx.data")
        os.kill(descendants(server.process.pid)[-1], signal.SIGKILL)
        assert server.process.wait(limit(60)) == IntegrityError.exit_code
        assert "model.onnx.data (sha256)" in server.log


def rungs_after_a_crash(server):
    """Crash the full model, and ask until it is back: which rungs answered, or with which status."""
    crashed = server.complete("crash me", max_tokens=2)
    assert crashed.status_code == 503 and int(crashed.headers["Retry-After"]) >= 1 and "SIGSEGV" in crashed.text
    assert crashed.headers["X-Headway-Gone"] == "1"  # whoever stands before it sends it to nobody else
    assert server.client.get("/livez").status_code == 200
    seen, deadline = set(), time.monotonic() + limit(60)
    while "full" not in seen and time.monotonic() < deadline:
        said = server.complete(max_tokens=2)
        seen.add(said.headers.get("X-Headway-Degraded", "full") if said.status_code == 200 else said.status_code)
    return seen


def run_until(said, *, seconds=90.0):
    asyncio.run(until(said, seconds=seconds))
