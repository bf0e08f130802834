"""Steps that are no good, reasons to stop, slow and wrong machines: on real ranks, most faults are in a batch that they read."""

import json
import os
import shutil
import signal
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from training_runs import (
    CONFIG,
    EVERY,
    STEPS,
    all_lines,
    content,
    error,
    last_lines,
    numbers,
    result,
    safe,
    said_by,
    steps_of_checkpoints,
    write_job,
)
from waiting import limit

from tasks.common.process import write_json
from tasks.config.training import ExecutionConfig, LimitsConfig
from tasks.jobs.data.samples import open_samples
from tasks.jobs.node.elastic import SAVED_AND_STOPPED, process_age
from tasks.jobs.training.stops import Guard, Held, Reaction, next_position, reached
from tasks.jobs.training.watch import WINDOW, Stragglers, bits

BAD_STEP = 14
BATCH = CONFIG.global_batch_size
SPOILT = """
import zlib, tasks.jobs.training.torch_engine as engine
plain = engine.TorchEngine.gradients
def gradients(self, batches, meter):
    loss = plain(self, batches, meter)
    if zlib.crc32(batches[0].inputs.contiguous().numpy().tobytes()) in {batches}:
        for parameter in self.network.parameters():
            parameter.grad.mul_({factor})
        loss = loss * {factor}
    return loss
engine.TorchEngine.gradients = gradients
"""
NAN, SPIKE = 'float("nan")', "100.0"
SLOW = """
import time, tasks.jobs.training.torch_engine as engine_
plain_ = engine_.TorchEngine.clip
engine_.TorchEngine.clip = lambda self: (time.sleep(0.1), plain_(self))[1]
"""
"""Steps that take their time, so that a run is not over before what happens to it meanwhile."""


def spoilt(tokens, *steps, factor=NAN, ranks=1):
    """Rank 0's batch of each of these steps, as an unbroken run reads them, gives a gradient that is no good."""
    samples, mine = open_samples(tokens, CONFIG), CONFIG.micro_batch_size
    batches = [samples.batch((step - 1) * BATCH, mine)[:, :-1] for step in steps]
    found = {zlib.crc32(torch.from_numpy(batch).contiguous().numpy().tobytes()) for batch in batches}
    return SPOILT.format(batches=found, factor=factor)


def reactions(job):
    return [json.loads(path.read_text()) for path in sorted((job / "safety").glob("reaction-*"))]


def test_a_batch_that_gives_no_number_is_skipped_once_and_for_all(forks, tokens, tmp_path):
    job = write_job(tmp_path / "job", tokens, safe(not_finite="skip"))
    assert forks(job, ranks=1, fault=spoilt(tokens, BAD_STEP)) == [0], said_by(job)
    line = last_lines(job)[BAD_STEP]
    assert line["skipped"] == 1 and "loss" not in line and "NaN" not in (job / "metrics.jsonl").read_text()
    assert [r["step"] for r in reactions(job)] == [BAD_STEP] == [r["step"] for r in result(job)["reactions"]]
    assert max(steps_of_checkpoints(job)) == STEPS
    logged = [json.loads(line)["step"] for line in (job / "out" / "training_log.jsonl").read_text().splitlines()]
    assert logged == [step for step in range(1, STEPS + 1) if step != BAD_STEP]
    again = write_job(tmp_path / "again", tokens, safe(not_finite="skip"))
    shutil.copytree(job / "safety", again / "safety")
    assert forks(again, ranks=1) == [0], "the batch is fine now, and stays skipped"
    assert last_lines(again)[BAD_STEP]["skipped"] == 1 and len(reactions(again)) == 1
    assert content(again / "out")["model.safetensors"] == content(job / "out")["model.safetensors"]


@pytest.fixture(scope="module")
def rolled_back(forks, tokens, tmp_path_factory):
    """A job of two ranks that went back because of a NaN on rank 0, never interrupted."""
    job = write_job(tmp_path_factory.mktemp("jobs") / "rolled", tokens, safe(not_finite="rollback"), elastic=True)
    assert forks(job, fault=spoilt(tokens, BAD_STEP)) == [0, 0], said_by(job)
    return job


def test_a_rollback_goes_one_checkpoint_back_and_leaves_the_batches_out(rolled_back, tokens):
    (reaction,) = reactions(rolled_back)
    back = reaction["begin"] // BATCH
    assert reaction["kind"] == "rollback" and back % EVERY == 0 and 0 < back < BAD_STEP
    assert reaction["end"] == BAD_STEP * BATCH
    consumed = [line["consumed"] for _, line in sorted(last_lines(rolled_back).items())]
    left_out = BAD_STEP - back
    assert consumed == [BATCH * (step if step <= back else step + left_out) for step in range(1, STEPS + 1)]
    samples, length = open_samples(tokens, CONFIG), len(consumed)
    wanted = [sum(zlib.crc32(row[:-1].tobytes()) for row in samples.batch(c - BATCH, BATCH)) for c in consumed]
    assert [line["samples_crc32"] for _, line in sorted(last_lines(rolled_back).items())] == wanted and length == STEPS
    assert all(abs(line["loss"]) < 10 for line in last_lines(rolled_back).values())


@pytest.mark.parametrize("what", ["checkpoints lost", "killed after the reaction was written"])
def test_a_kill_does_not_undo_a_rollback(rolled_back, forks, tokens, tmp_path, what):
    """From any earlier state the ledger alone leads to the same order: also when the checkpoint that it went back to is gone."""
    job = write_job(tmp_path / "job", tokens, safe(not_finite="rollback"), elastic=True)
    shutil.copytree(rolled_back / "safety", job / "safety")
    if what != "checkpoints lost":
        stop_at(forks, job, BAD_STEP - EVERY - 1)
    assert forks(job, attempt=5, fault=spoilt(tokens, BAD_STEP)) == [0, 0], said_by(job)
    assert len(reactions(job)) == 1
    assert numbers(job) == numbers(rolled_back)
    assert content(job / "out") == content(rolled_back / "out")


def stop_at(forks, job, step):
    def ask():
        while max(last_lines(job), default=0) < step:
            time.sleep(0.001)
        os.kill(json.loads((job / "ranks" / "0.json").read_text())["pid"], signal.SIGKILL)

    assert 0 not in forks.beside(job, ask, fault=SLOW)


def test_a_spike_is_seen_against_the_last_steps_also_after_a_restart(forks, tokens, tmp_path):
    config = safe(spike="skip", spike_factor=3.0, spike_window=8)
    job = write_job(tmp_path / "job", tokens, config)
    fault = spoilt(tokens, 2, BAD_STEP, factor=SPIKE)
    assert forks(job, ranks=1, fault=fault) == [0], said_by(job)
    assert [r["step"] for r in reactions(job)] == [BAD_STEP], "before there is a window nothing is a spike"
    assert last_lines(job)[BAD_STEP]["loss"] > 100
    broken = write_job(tmp_path / "broken", tokens, config)

    def ask():
        while max(last_lines(broken), default=0) < BAD_STEP - 5:
            time.sleep(0.001)
        os.kill(json.loads((broken / "ranks" / "0.json").read_text())["pid"], signal.SIGTERM)

    forks.beside(broken, ask, ranks=1, fault=fault)
    assert forks(broken, attempt=2, ranks=1, fault=fault) == [0], said_by(broken)
    assert numbers(broken) == numbers(job)


def test_reactions_are_bounded_over_restarts(forks, tokens, tmp_path):
    job = write_job(tmp_path / "job", tokens, safe(not_finite="skip", at_most=2))
    fault = spoilt(tokens, 6, 9, BAD_STEP)
    for attempt in (1, 2):
        assert forks(job, attempt=attempt, ranks=1, fault=fault) == [1]
        said = error(job)
        assert said["class"] == "diverged" and f"step {BAD_STEP}" in said["message"] and "at_most" in said["message"]
    assert [r["step"] for r in reactions(job)] == [6, 9]
    assert max(steps_of_checkpoints(job)) < BAD_STEP


def test_weights_that_are_no_numbers_are_never_saved(forks, tokens, tmp_path):
    """One update too large makes infinite weights of a finite loss and a finite gradient."""
    huge = """
import tasks.jobs.training.torch_engine as engine
plain = engine.TorchEngine.update
def update(self, rate):
    plain(self, rate)
    if int(self.optimizer.state[next(self.network.parameters())]["step"]) == 8:
        next(self.network.parameters()).data[0] = float("inf")
engine.TorchEngine.update = update
"""
    job = write_job(tmp_path / "job", tokens, every=8)  # the first one: none is in flight, which would put it off
    assert forks(job, ranks=1, fault=huge) == [1]
    assert error(job)["class"] == "diverged" and "weights are NaN or infinite" in error(job)["message"]
    assert steps_of_checkpoints(job) == [] and not (job / "result.json").exists()


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(forks, tokens, tmp_path):
    job = write_job(tmp_path / "job", tokens, safe(not_finite="rollback"))
    assert forks(job, ranks=1, fault=spoilt(tokens, 2)) == [1]
    assert error(job)["class"] == "diverged" and "no checkpoint yet" in error(job)["message"]


def test_the_order_after_several_rollbacks():
    def back(begin, end):
        return Reaction(1, 0, "rollback", "", begin, end)

    assert next_position(5, []) == 5
    assert [next_position(p, [back(8, 16)]) for p in (0, 8, 15, 16)] == [0, 16, 16, 16]
    assert next_position(8, [back(8, 16), back(8, 24)]) == 24
    assert next_position(8, [back(16, 24), back(8, 16)]) == 24
    assert next_position(8, [Reaction(1, 8, "skip", "")]) == 8


def test_the_guard_judges_alike_whatever_it_was_told_before():
    guard = Guard(safe(spike="skip", spike_factor=2.0, spike_window=3))
    assert [guard.judge(step, step, 1.0, 1.0) for step in (1, 2, 3)] == [None] * 3
    found = guard.judge(4, 4, 2.5, 1.0)
    assert found and found.kind == "skip" and "2.5" in found.why
    assert list(guard.losses) == [1, 2, 3], "a spike is not what others are compared with"
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        guard.judge(5, 5, float("nan"), 1.0)
    with pytest.raises(FloatingPointError, match="norm inf"):
        guard.judge(5, 5, 1.0, float("inf"))


# --- stops ---------------------------------------------------------------------------------------------------------------------


def test_a_limit_of_hours_saves_and_says_why_and_is_gone_on_with(forks, tokens, tmp_path):
    limits = {"limits": {"max_hours": 1.0 / 3600}}  # many steps on any machine: the first one's time does not count
    job = write_job(tmp_path / "job", tokens, every=STEPS, execution=limits)
    assert forks(job, fault=SLOW) == [1, 1]
    said = error(job)
    done = max(last_lines(job))
    assert said["class"] == "limit" and f"step {done} is saved" in said["message"] and "max_hours" in said["message"]
    assert steps_of_checkpoints(job) == [done] and 1 <= done < STEPS
    before = (job / "metrics.jsonl").read_bytes()
    write_job(job, tokens, every=STEPS, execution={"limits": {"max_hours": 1e-9}})
    assert forks(job, attempt=2) == [1, 1] and error(job)["class"] == "limit"
    assert (job / "metrics.jsonl").read_bytes() == before, "no step without room for it"
    write_job(job, tokens, every=STEPS, execution={"limits": {"max_hours": 1.0}})
    assert forks(job, attempt=3) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == done


def test_a_run_is_counted_from_the_first_process_of_each_submission_also_where_no_step_was_made(tmp_path, monkeypatch):
    began = time.time()
    monkeypatch.setenv("HEADWAY_SUBMISSION", "3")
    for number, first, latest in ((1, 900.0, 840.0), (2, 700.0, 670.0), (3, 100.0, 95.0)):  # seconds ago
        write_json(tmp_path / "safety" / f"held-{number:04d}.json", {"began": began - first, "latest": began - latest})
    held, age = Held(tmp_path), process_age()
    assert held.before == pytest.approx(60 + 30 + max(100 - age, 0), abs=0.5), "with the standstill of this submission"
    assert held.seconds() == pytest.approx(60 + 30 + max(100, age), abs=0.5)
    monkeypatch.setenv("HEADWAY_SUBMISSION", "4")
    other = Held(tmp_path)
    assert other.before == pytest.approx(60 + 30 + 5), "none between submissions, and none of another machine's clock"
    other.note()
    assert Held(tmp_path).before == pytest.approx(60 + 30 + 5, abs=0.1), "this very process is not counted twice"


def test_limits_are_of_hours_and_of_money():
    assert reached(LimitsConfig(max_hours=1), 3599) == ""
    assert "max_hours 1 is reached" in reached(LimitsConfig(max_hours=1), 3600)
    assert "max_cost 50 is reached" in reached(LimitsConfig(max_cost=50, cost_per_hour=100), 1800)
    with pytest.raises(ValueError, match="cost_per_hour"):
        LimitsConfig(max_cost=50)


class Endpoint(BaseHTTPRequestHandler):
    """Azure's metadata service, as far as it is asked."""

    events: ClassVar[list] = []
    asked: ClassVar[list] = []

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("Metadata")))
        named = "/instance/" in self.path
        body = b"vm-7" if named else json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    Endpoint.events, Endpoint.asked = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Endpoint, f"http://127.0.0.1:{server.server_port}/metadata/scheduledevents?api-version=2020-07-01"
    server.shutdown()


def event(number, kind, *machines):
    return {"EventId": str(number), "EventType": kind, "Resources": list(machines), "EventStatus": "Scheduled"}


def test_an_eviction_notice_is_a_committed_checkpoint_in_time(forks, tokens, endpoint, tmp_path):
    """Azure gives 30 s. Events of other machines, and those that only pause this one, are left alone."""
    service, address = endpoint
    service.events = [event(1, "Preempt", "vm-8"), event(2, "Freeze", "vm-7")]
    notices = {"ask": True, "address": address, "every_seconds": 0.05}
    job = write_job(tmp_path / "job", tokens, every=STEPS, execution={"notices": notices})
    told = []

    def evict():
        while max(last_lines(job), default=0) < 5 or len(service.asked) < 5:
            time.sleep(0.001)
        told.append(time.time())
        service.events = [*service.events, event(3, "Preempt", "vm-7")]

    codes = forks.beside(job, evict, fault=SLOW)
    assert codes == [1, 1] and error(job)["class"] == "preempted", said_by(job)
    assert all(metadata == "true" for _, metadata in service.asked)
    (done,) = steps_of_checkpoints(job)
    manifest = next((job / "checkpoints").glob("*/*/manifest.json"))
    assert 5 <= done == max(last_lines(job)) < STEPS
    assert manifest.stat().st_mtime - told[0] <= 20, "30 s is the notice"
    assert forks(job, attempt=2) == [0, 0], "the same event does not stop it again"
    assert result(job)["resumed_from_step"] == done


def test_a_job_of_fixed_size_saves_when_it_is_asked_to_end(forks, tokens, tmp_path):
    job = write_job(tmp_path / "job", tokens, every=STEPS)

    def ask():
        while max(last_lines(job), default=0) < 5:
            time.sleep(0.001)
        os.kill(json.loads((job / "ranks" / "1.json").read_text())["pid"], signal.SIGTERM)

    assert forks.beside(job, ask, fault=SLOW) == [SAVED_AND_STOPPED] * 2
    assert steps_of_checkpoints(job) == [max(last_lines(job))]


# --- machines ------------------------------------------------------------------------------------------------------------------


def test_a_straggler_is_named_and_not_killed(forks, tokens, tmp_path):
    slow = "import os, time, tasks.jobs.data.samples as d\np = d.Samples.batch\n"
    slow += f"d.Samples.batch = lambda *a: (time.sleep({limit(0.15)} * int(os.environ['RANK'])), p(*a))[1]"
    job = write_job(tmp_path / "job", tokens, every=STEPS)
    assert forks(job, fault=slow) == [0, 0], said_by(job)
    (named,) = result(job)["stragglers"]
    assert named["rank"] == 1 and named["times"] > 1.5 and named["host"]
    assert {line.get("straggler") for line in all_lines(job)} == {None, 1}


def test_who_is_slow_is_judged_by_the_median_of_many_steps():
    watch = Stragglers(1.5)
    for step in range(WINDOW - 1):
        assert watch.take(step, (0.1, 0.1, 0.5 if step == 3 else 0.1)) == {}
    assert watch.take(WINDOW, (0.1, 0.1, 0.1)) == {}
    for step in range(WINDOW):
        found = watch.take(100 + step, (0.1, 0.3, 0.1))
    assert found["straggler"] == 1 and found["straggler_times"] == pytest.approx(3.0)
    assert not Stragglers(1.5).take(1, (1.0,))


FLIPPED = """
import os, torch, tasks.jobs.training.watch as repeat
plain, calls = repeat._gradient, []
def gradient(network, batch):
    found = plain(network, batch)
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 4:
        found[next(iter(found))] ^= 1
    return found
repeat._gradient = gradient
"""


def test_the_probe_finds_a_machine_that_computes_wrongly_and_costs_no_bit(forks, tokens, tmp_path):
    plain, probed = (
        write_job(tmp_path / "plain", tokens),
        write_job(tmp_path / "probed", tokens, safe(repeat_every_steps=5)),
    )
    for job in (plain, probed):
        assert forks(job) == [0, 0], said_by(job)
    assert numbers(plain) == numbers(probed)
    assert content(plain / "out")["model.safetensors"] == content(probed / "out")["model.safetensors"]
    job = write_job(tmp_path / "job", tokens, safe(repeat_every_steps=5))
    assert 0 not in forks(job, fault=FLIPPED)
    said = error(job, rank=1)
    assert said["class"] == "node" and said["nodes"] and "step 10" in said["message"]
    assert max(steps_of_checkpoints(job), default=0) <= 8


def test_replicas_that_differ_are_found(forks, tokens, tmp_path):
    flipped = """
import os, tasks.jobs.training.torch_engine as engine
plain = engine.TorchEngine.update
def update(self, rate):
    plain(self, rate)
    if os.environ["RANK"] == "2":
        next(self.network.parameters()).data.view(-1)[7] += 1e-3
engine.TorchEngine.update = update
"""
    config = safe(repeat_every_steps=5).model_copy(update={"micro_batch_size": 1, "global_batch_size": 3})
    job = write_job(tmp_path / "job", tokens, config)
    assert 0 not in forks(job, ranks=3, fault=flipped)
    assert error(job, rank=2)["class"] == "node" and "ranks [2]" in error(job, rank=2)["message"]


def test_the_sum_of_bits_sees_every_flip():
    generator = torch.Generator().manual_seed(0)
    for kind in (torch.float32, torch.bfloat16):
        tensor = torch.randn(64, generator=generator).to(kind)
        before, raw = bits([tensor]), tensor.view(torch.uint8)
        for byte in range(len(raw)):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                assert bits([tensor]) != before
                raw[byte] ^= 1 << bit
        assert bits([tensor]) == before


def test_the_probe_is_refused_where_it_cannot_be(tmp_path):
    from tasks.config.engines.registry import ENGINES

    for training, execution in (
        (safe(repeat_every_steps=5).model_copy(update={"engine": "deepspeed"}), ExecutionConfig()),
        (safe(repeat_every_steps=5), ExecutionConfig(parallel="fsdp")),
    ):
        with pytest.raises(ValueError, match="repeat_every_steps"):
            ENGINES[training.engine].require_fits(training, execution)
