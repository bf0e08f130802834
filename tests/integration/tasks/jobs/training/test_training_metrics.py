"""What training tells of itself: where its time goes, how fast it is, held-out text, a profile. Telling changes nothing."""

import gzip
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from training_runs import CONFIG, STEPS, all_lines, content, last_lines, result, said_by, write_job, write_tokens
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tasks.config.training import LoraConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter, open_tokens
from tasks.jobs.data.samples import Shares
from tasks.jobs.train import Heldout
from tasks.jobs.training import metrics_logger
from tasks.jobs.training.metrics_logger import MachineUse, Meter, flops_of
from tasks.planning.case import Network
from tasks.planning.counts import model_flops_per_token

CPU = torch.device("cpu")
SAMPLES, EVERY = 5, 10
TELLING = {"heldout_every_steps": EVERY, "heldout_samples": SAMPLES, "profile_from": 3, "profile_steps": 2}
PEAK = {"tflops": 0.05, "of": "a test"}
KILLED_AFTER_6 = """
import os
from tasks.jobs.node.runtime import Rank
told = Rank.metrics
def metrics(self, **values):
    told(self, **values)
    if self.rank == 0 and values["step"] == 6:
        os._exit(9)
Rank.metrics = metrics
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Those of training_runs, and a held-out split of three bytes a token."""
    folder = write_tokens(tmp_path_factory.mktemp("tokens"))
    writer = TokenWriter(folder / "heldout_text_document", 64)
    generator = np.random.default_rng(1)
    for _ in range(10):
        start = int(generator.integers(63))
        document = [start]
        for _ in range(60):
            document.append((document[-1] * 5 + 3) % 63)
        writer.add_document([*document, 63])
    documents, count = writer.close()
    said = json.loads((folder / "tokens.json").read_text())
    said["splits"]["heldout"] = {"documents": documents, "tokens": count, "bytes": 3 * count}
    (folder / "tokens.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def told(forks, tokens, tmp_path_factory):
    """A run that tells everything."""
    job = write_job(tmp_path_factory.mktemp("jobs") / "told", tokens, execution=TELLING, peak=PEAK)
    assert forks(job) == [0, 0], said_by(job)
    return job


@pytest.fixture
def clock(monkeypatch):
    """A clock of metrics_logger.py that is moved by hand."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(metrics_logger, "time", SimpleNamespace(monotonic=lambda: now.time))
    return now


def test_parts_exclude_each_other_and_the_rest_is_in_none(clock):
    found = Meter()
    found.start()
    with found.part("compute"):
        clock.time += 3
        with found.part("communication"):
            clock.time += 2
        clock.time += 1
    clock.time += 5
    with found.part("checkpoint"):
        clock.time += 7
    assert found.seconds == {"compute": 4, "communication": 2, "checkpoint": 7}
    done = found.end()
    assert (done.all, done.own) == (18, 11)
    assert found.seconds == {} and found.end().all == 0


def test_what_is_left_of_a_part_can_be_another_one(clock):
    found = Meter()
    with found.part("compute"), found.part("compute"):
        clock.time += 3
        found.turn("communication")
        clock.time += 2
    assert found.seconds == {"compute": 3, "communication": 2}


def test_every_second_of_every_step_is_told(told):
    lines = all_lines(told)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines[1:]:
        parts = sum(value for name, value in line.items() if name.endswith("_seconds") and name != "step_seconds")
        assert parts <= line["step_seconds"] + 1e-4
    whole = sum(line["step_seconds"] for line in lines[1:])
    assert whole == pytest.approx(lines[-1]["time"] - lines[0]["time"], rel=0.2)
    assert {"data_seconds", "compute_seconds", "communication_seconds", "checkpoint_seconds"} <= lines[-1].keys()
    assert [line["step"] for line in lines if "start_seconds" in line] == [1]


def test_rates_are_of_a_step_without_its_standstills_and_of_one_rank(told):
    for line in all_lines(told):
        still = sum(line.get(f"{part}_seconds", 0.0) for part in ("checkpoint", "heldout", "profile"))
        own = line["step_seconds"] - still
        assert line["tokens_per_second"] == pytest.approx(8 * 32 / own, rel=0.01)
        assert line["tokens_per_second_per_rank"] == line["tokens_per_second"] / 2
        flops = model_flops_per_token(Network.of_config(CONFIG.network, 64), 32)
        assert line["tflops_per_rank"] == pytest.approx(line["tokens_per_second"] * flops / 2e12)
        assert line["mfu"] == pytest.approx(line["tflops_per_rank"] / PEAK["tflops"])
    said = result(told)
    assert said["time"]["flops_convention"] == "megatron" and said["time"]["peak"] == PEAK
    assert said["metrics"]["mfu"] == pytest.approx(said["metrics"]["tflops_per_rank"] / PEAK["tflops"])
    assert 0 < said["metrics"]["data_share"] < 1 and said["time"]["memory_gib"] > 0
    assert sum(said["time"]["causes"].values()) == pytest.approx(1.0)
    assert said["metrics"]["goodput"] == pytest.approx(said["time"]["causes"]["useful"])


def test_held_out_text_is_measured_on_the_same_samples_every_so_often_and_at_the_end(told, tokens):
    found = {
        step: line["heldout_bits_per_byte"] for step, line in last_lines(told).items() if "heldout_seconds" in line
    }
    assert list(found) == [10, 20, 24]
    assert found[24] < found[10] < math.log2(64) / 3
    assert result(told)["metrics"]["heldout_bits_per_byte"] == found[24]
    stream = open_tokens(tokens / "heldout_text_document").tokens.astype(np.int64)
    there = (len(stream) - 1) // 32
    starts = [32 * int(place) for place in np.linspace(0, there - 1, SAMPLES).round()]
    rows = torch.from_numpy(np.stack([stream[start : start + 33] for start in starts]))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(told / "out")(input_ids=rows[:, :-1]).logits
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert found[24] == pytest.approx(float(nats) / math.log(2) / 3, rel=1e-5)


def test_held_out_text_does_not_depend_on_the_number_of_ranks(told, forks, tokens, tmp_path):
    alone = write_job(tmp_path / "alone", tokens, CONFIG.model_copy(update={"steps": 5}), execution=TELLING)
    pair = write_job(tmp_path / "pair", tokens, CONFIG.model_copy(update={"steps": 5}), execution=TELLING)
    assert (forks(alone, ranks=1), forks(pair)) == ([0], [0, 0]), said_by(alone) + said_by(pair)
    one, two = (last_lines(job)[5]["heldout_bits_per_byte"] for job in (alone, pair))
    assert one == pytest.approx(two, rel=1e-5)


def test_divided_weights_are_saved_after_a_measurement(forks, tokens, tmp_path):
    execution = {**TELLING, "parallel": "fsdp", "profile_from": None}
    config = CONFIG.model_copy(update={"steps": 2 * EVERY})
    job = write_job(tmp_path / "divided", tokens, config, every=EVERY, execution=execution)
    assert forks(job) == [0, 0], said_by(job)
    assert result(job)["checkpoints"] == 2


def test_ranks_save_at_the_same_steps_whatever_their_clocks_say(forks, tokens, tmp_path):
    """The interval is corrected by what saving takes, which differs between ranks by much."""
    job = write_job(tmp_path / "clocks", tokens, every=2, seconds_between_failures=1000.0)
    own = (
        "import os, tasks.jobs.training.checkpoints as s\n"
        "s.corrected_every_steps = lambda *a, **k: 7 + 4 * int(os.environ['RANK'])"
    )
    assert forks(job, fault=own) == [0, 0], said_by(job)
    assert result(job)["checkpoint_every_steps"] == 7


def test_a_profile_is_of_the_steps_that_were_asked_for(told):
    assert sorted(path.name for path in (told / "profile").iterdir()) == ["steps-3-4.json.gz", "steps-3-4.txt"]
    trace = json.loads(gzip.decompress((told / "profile" / "steps-3-4.json.gz").read_bytes()))
    assert len(trace["traceEvents"]) > 100
    assert "aten::mm" in (told / "profile" / "steps-3-4.txt").read_text()
    assert "profile_seconds" in all_lines(told)[3]


def test_telling_changes_no_bit_and_a_kill_is_told_by_cause(told, forks, tokens, tmp_path):
    job = write_job(tmp_path / "killed", tokens)
    assert 0 not in forks(job, fault=KILLED_AFTER_6)
    killed = all_lines(job)
    assert killed[-1]["step"] == 6
    assert forks(job, attempt=2) == [0, 0], said_by(job)
    assert content(job / "out") == content(told / "out")
    resumed = result(job)["resumed_from_step"]
    spent = result(job)["time"]
    assert resumed in (0, 4, None)
    lost = sum(line["step_seconds"] for line in killed if line["step"] > (resumed or 0))
    assert spent["seconds"]["lost"] == pytest.approx(lost, abs=1e-6)
    starts = [line["start_seconds"] for line in all_lines(job) if "start_seconds" in line]
    assert len(starts) == 2 and spent["seconds"]["starting"] == pytest.approx(starts[0], abs=1e-6)
    assert 0 < spent["seconds"]["restarting"] <= starts[1] + 1e-6
    first = all_lines(job)[0]
    began = first["time"] - first["step_seconds"] - first["start_seconds"]
    until = all_lines(job)[-1]["time"]
    assert sum(spent["seconds"].values()) >= until - began - 0.2, "no second is missing"
    assert spent["causes"]["lost_to_restart"] > 0


def test_too_little_held_out_text_is_refused(tokens):
    with pytest.raises(ValueError, match="the held-out split has 620 tokens, one sample needs 701: raise preproc"):
        Heldout(tokens, TrainingConfig(sequence_length=700), samples=2, shares=Shares(0, 1, 8, 4), eod=None)


def llama(**more):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=64, vocab_size=64, **more))


def test_flops_name_their_convention():
    found = flops_of(llama(tie_word_embeddings=True), CONFIG, 1000)
    assert found == (model_flops_per_token(Network.of_config(CONFIG.network, 64), 32), "megatron")
    adapted = CONFIG.model_copy(update={"base": "checkpoint/base", "lora": LoraConfig(rank=4)})
    assert flops_of(llama(), adapted, 1000) == (found.per_token * 2 / 3, "megatron, frozen base")
    assert flops_of(nn.Linear(2, 2), CONFIG, 1000) == (6000, "6n")
    gpt2 = flops_of(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)), CONFIG, 1000)
    assert gpt2.convention == "megatron" and gpt2.per_token > 6 * (12 * 32 * 32 + 32 * 64)


def test_the_machine_is_looked_at_every_ten_seconds():
    now = SimpleNamespace(time=0.0)
    use = MachineUse(CPU, clock=lambda: now.time)
    now.time = 9.9
    assert use.look() == {}
    now.time = 10.0
    found = use.look()
    assert 0 <= found["system/cpu_utilization_percentage"] <= 100
    assert 0 < found["system/system_memory_usage_percentage"] < 100
    assert found["cores_used"] >= 0 and use.look() == {}
