"""Training that goes on from another run's checkpoint: real ranks, another learning rate, fresh data, and what is refused.

The command, the refusal before anything is spent and the audit entry: tests/integration/flows/test_continue_from.py.
"""

import json
import os
import shutil
import time

import pytest
from training_runs import (
    CONFIG,
    EVERY,
    Forks,
    content,
    error,
    last_lines,
    numbers,
    result,
    said_by,
    write_job,
    write_tokens,
)

from tasks.common.errors import IntegrityError, Missing
from tasks.config.continue_from import Origin, differing, impossible, of_another_run, position, tokens_until
from tasks.config.engines.deepspeed import ds_config
from tasks.config.training import DeepspeedConfig, ExecutionConfig, LoraConfig, NetworkConfig
from tasks.jobs.checkpoint.files import age, manifests, read_manifest
from tasks.jobs.checkpoint.origins import keep, newest_good
from tasks.jobs.checkpoint.retention import retain

AT, STEPS = 20, 32
BEFORE = CONFIG.model_copy(update={"steps": STEPS})
SLOWER = BEFORE.model_copy(update={"learning_rate": 1e-3})
PATIENT = """
import tasks.jobs.train as module
patient = module.Training._save
module.Training._save = lambda self, tier, *, wait: patient(self, tier, wait=True)
"""
"""Every save that is due is waited for, so that none is left out."""
DEEPSPEED = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed.runtime.zero.muon.muon_optimizer
"""


@pytest.fixture(scope="module")
def other(forks, tokens, tmp_path_factory):
    """A run that trained to its end, with all its checkpoints."""
    job = write_job(tmp_path_factory.mktemp("jobs") / "train-other", tokens, BEFORE, keep_checkpoints=20)
    assert forks(job, fault=PATIENT) == [0, 0], said_by(job)
    return job


def stopped(other, folder, at=AT):
    """The same as if it had been stopped at a step."""
    shutil.copytree(other, folder / other.name)
    for path in manifests(folder / other.name / "checkpoints"):
        if age(path)[0] > at:
            shutil.rmtree(path.parent)
    return folder / other.name


def origin_of(other, wanted, kept_for="test", **more):
    """The settings of a job that goes on from it, as flows/support/continuing.py makes them."""
    seen = newest_good(other / "checkpoints")
    found = seen["found"]
    differences = of_another_run(found["identity"], wanted)
    how = {
        "folder": str(other / "checkpoints"),
        "attempt": found["attempt"],
        "accepted": sorted(
            {each.key.split(".")[0] if each.key.startswith("tokens") else each.key for each in differences}
        ),
        "consumed_samples": position(found["consumed_samples"], differences)[0],
        "tokens": tokens_until(found["identity"], found["step"]),
        "kept_for": kept_for,
    }
    origin = {"job": other.name, "step": found["step"], "sha256": seen["sha256"]}
    return {"continue_from": {"origin": origin, "how": {**how, **more}}}


def wanted_of(other, config):
    """The identity of a run with the other run's tokens."""
    found = read_manifest(manifests(other / "checkpoints")[0]).identity
    return {**found, "training": config.model_dump(mode="json")}


def go_on(launch, folder, tokens, other, config, **more):
    origin = origin_of(other, wanted_of(other, config))
    job = write_job(folder / "train-next", tokens, config, **origin, **more)
    assert launch(job, fault=PATIENT) == [0, 0], said_by(job)
    return job


def changed(**update):
    return BEFORE.model_copy(update=update)


@pytest.mark.parametrize(
    "config, step, words",
    [
        (changed(network=NetworkConfig(layers=3)), 20, "another network: training.network.layers is 1"),
        (changed(lora=LoraConfig(rank=4)), 20, "another network: training.lora.rank is None"),
        (changed(engine="deepspeed"), 20, "another engine, which cannot read its state"),
        (changed(engine="megatron"), 20, "reads only what its own loop wrote"),
        (changed(steps=20), 20, "training.steps 20 leaves nothing to do after the checkpoint's step 20"),
        (changed(steps=10), 20, "training.steps 10 leaves nothing"),
        (SLOWER, 20, ""),
        (changed(global_batch_size=16, weight_decay=0.0, seed=2, precision="bf16"), 20, ""),
        (changed(sequence_length=64), 20, ""),
    ],
)
def test_what_can_never_be_forced(config, step, words):
    there, here = ({"training": each.model_dump(mode="json")} for each in (BEFORE, config))
    said = impossible(differing(there, here), config, step)
    assert (words in "; ".join(said)) if words else not said


@pytest.mark.parametrize(
    "before, after, words",
    [
        (
            {"engine": "deepspeed"},
            {"engine": "deepspeed", "precision": "bf16"},
            "layout of DeepSpeed's optimizer state",
        ),
        (
            {"network": NetworkConfig(architecture="gpt2")},
            {"network": NetworkConfig(architecture="gpt2"), "sequence_length": 64},
            "gpt2 learns each position",
        ),
    ],
)
def test_what_some_engines_and_networks_never_take(before, after, words):
    config = changed(**after)
    there, here = ({"training": each.model_dump(mode="json")} for each in (changed(**before), config))
    assert words in "; ".join(impossible(differing(there, here), config, 20))


def test_another_base_is_another_network():
    there, here = {"training": {}, "base": "checkpoint/a@1"}, {"training": {}, "base": "checkpoint/a@2"}
    assert "another network: base is 'checkpoint/a@1'" in impossible(differing(there, here), BEFORE, 20)[0]


@pytest.mark.parametrize(
    "config, tokens, at",
    [
        (SLOWER, 1, 160),
        (changed(global_batch_size=16), 1, 160),
        (changed(seed=2), 1, 0),
        (changed(sequence_length=64), 1, 0),
        (changed(objective="sft", packing=True), 1, 0),
        (BEFORE, 2, 0),
    ],
)
def test_where_the_data_goes_on(config, tokens, at):
    there = {"training": BEFORE.model_dump(mode="json"), "tokens": {"bytes": 1}}
    here = {"training": config.model_dump(mode="json"), "tokens": {"bytes": tokens}}
    assert position(160, differing(there, here))[0] == at


def test_the_same_settings_go_on_bit_for_bit(forks, tokens, other, tmp_path):
    there = stopped(other, tmp_path)
    job = go_on(forks, tmp_path, tokens, there, BEFORE)
    old, new = numbers(other), numbers(job)
    assert sorted(new) == list(range(AT + 1, STEPS + 1))
    assert {step: old[step] for step in new} == new
    assert content(job / "out")["model.safetensors"] == content(other / "out")["model.safetensors"]
    assert result(job)["resumed_from_step"] == AT


@pytest.fixture(scope="module")
def slower(forks, tokens, other, tmp_path_factory):
    """A run that went on from another with another learning rate, and that other run's folder."""
    folder = tmp_path_factory.mktemp("slower")
    there = stopped(other, folder)
    before = content(there)
    job = go_on(forks, folder, tokens, there, SLOWER, keep_checkpoints=20)
    assert content(there) == before, "the other run's folder is as it was"
    return job, there


def test_another_learning_rate_begins_at_the_old_state(other, slower):
    old, new = last_lines(other), last_lines(slower[0])
    first = AT + 1
    assert new[first]["loss"] == old[first]["loss"] and new[first]["grad_norm"] == old[first]["grad_norm"]
    assert new[first]["learning_rate"] == pytest.approx(old[first]["learning_rate"] / 10)
    assert new[first + 1]["loss"] != old[first + 1]["loss"]


def test_its_checkpoints_chain_on_and_its_account_tells_the_origin(slower):
    job, there = slower
    root = job / "checkpoints"
    first, second = (read_manifest(path) for path in reversed(manifests(root)[-2:]))
    assert (first.step, first.previous, second.step) == (AT, None, AT + EVERY)
    assert (second.previous["step"], second.previous["attempt"]) == (AT, first.attempt)
    sha256 = newest_good(there / "checkpoints")["sha256"]
    told = json.loads((job / "out/training.json").read_text())
    origin = {"job": "train-other", "step": AT, "sha256": sha256}
    a_step = BEFORE.global_batch_size * BEFORE.sequence_length
    assert told["continued_from"] == {**origin, "tokens": AT * a_step} and told["tokens"] == STEPS * a_step
    assert f"step {AT} of `train-other`, checkpoint `{sha256[:12]}`" in (job / "out/README.md").read_text()
    assert second.identity["continues"]["sha256"] == sha256
    assert tokens_until(second.identity, second.step) == (AT + EVERY) * a_step


def test_other_data_begins_at_its_first_sample(forks, tokens, other, tmp_path):
    there, fresh = stopped(other, tmp_path), tmp_path / "fresh"
    fresh.mkdir()
    write_tokens(fresh)
    said = json.loads((fresh / "tokens.json").read_text())
    (fresh / "tokens.json").write_text(json.dumps({**said, "version": "another"}))
    wanted = {**wanted_of(there, BEFORE), "tokens": {"tokens.json": "another"}}
    job = write_job(tmp_path / "train-next", fresh, BEFORE, keep_checkpoints=20, **origin_of(there, wanted))
    assert forks(job, fault=PATIENT) == [0, 0], said_by(job)
    found = read_manifest(manifests(job / "checkpoints")[-1])
    assert (found.step, found.consumed_samples) == (AT, 0)
    assert read_manifest(manifests(job / "checkpoints")[0]).consumed_samples == (STEPS - AT) * BEFORE.global_batch_size
    assert last_lines(job)[AT + 1]["loss"] != last_lines(other)[AT + 1]["loss"]


def test_a_torn_newest_checkpoint_is_passed_over_and_left_alone(other, tmp_path):
    there = stopped(other, tmp_path)
    shard = manifests(there / "checkpoints")[0].parent / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = content(there)
    seen = newest_good(there / "checkpoints")
    assert seen["found"]["step"] == AT - EVERY
    assert len(seen["passed_over"]) == 1 and "shard-1.safetensors has" in seen["passed_over"][0]
    assert content(there) == before


def keep_newest(root, **said):
    seen = newest_good(root)
    origin = Origin(**{"job": "train-other", "step": seen["found"]["step"], "sha256": seen["sha256"], **said})
    keep(root, origin, attempt=1, name="test")


def test_what_is_about_to_be_taken_over_is_not_deleted_for_seven_days(other, tmp_path):
    root = stopped(other, tmp_path) / "checkpoints"
    keep_newest(root)
    [mark] = root.glob("*/*/kept-for-*")
    shutil.copytree(other / "checkpoints", root, dirs_exist_ok=True)
    retain(root, 2, attempt=1)
    assert [age(path)[0] for path in manifests(root)] == [STEPS, STEPS - EVERY, AT]
    os.utime(mark, (time.time() - 8 * 86400,) * 2)
    retain(root, 2, attempt=1)
    assert [age(path)[0] for path in manifests(root)] == [STEPS, STEPS - EVERY]


@pytest.mark.parametrize("said, kind", [({"sha256": "0" * 64}, IntegrityError), ({"step": 999}, Missing)])
def test_what_is_gone_or_another_one_by_now_is_not_kept(other, tmp_path, said, kind):
    root = stopped(other, tmp_path) / "checkpoints"
    with pytest.raises(kind):
        keep_newest(root, **said)


def test_what_fails_beside_a_job_fails_the_test(forks, tokens, tmp_path):
    def fail():
        raise LookupError("no such rank")

    job = write_job(tmp_path / "train-beside", tokens, changed(steps=8))
    with pytest.raises(LookupError, match="no such rank"):
        forks.beside(job, fail, ranks=1)
    assert result(job)["metrics"]


@pytest.mark.parametrize("case", ["not accepted", "gone", "another one"])
def test_a_job_refuses_what_was_not_chosen(forks, tokens, other, tmp_path, case):
    there = stopped(other, tmp_path)
    origin = origin_of(there, wanted_of(there, SLOWER), **({"accepted": []} if case == "not accepted" else {}))
    path = manifests(there / "checkpoints")[0]
    if case == "gone":
        shutil.rmtree(path.parent)
    if case == "another one":
        path.write_text(path.read_text() + " ")
    job = write_job(tmp_path / "train-next", tokens, SLOWER, **origin)
    assert forks(job, ranks=1) != [0]
    kind, words = {
        "not accepted": ("user", "training.learning_rate is 0.01 in the checkpoint, 0.001 now"),
        "gone": ("missing", "is not there any more"),
        "another one": ("integrity", "is not the manifest that was chosen"),
    }[case]
    assert error(job)["class"] == kind and words in error(job)["message"]
    assert not manifests(job / "checkpoints")


def test_a_killed_continuation_goes_on_in_its_own_folder(forks, tokens, other, slower, tmp_path):
    there = stopped(other, tmp_path)
    job = write_job(tmp_path / "train-killed", tokens, SLOWER, **origin_of(there, wanted_of(there, SLOWER)))
    kill = (
        PATIENT
        + "import os\nimport tasks.jobs.train as t\nplain = t.Training._save\n"
        + (
            "def save(self, *a, **k):\n    plain(self, *a, **k)\n    if self.step == 28: os._exit(9)\nt.Training._save = save"
        )
    )
    assert forks(job, fault=kill) != [0, 0]
    shutil.rmtree(there)
    assert forks(job, attempt=2) == [0, 0], said_by(job)
    assert numbers(job) == numbers(slower[0])


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_goes_on_with_other_settings_of_its_optimizer(tokens, tmp_path, stage):
    launch = Forks(DEEPSPEED)
    try:
        execution = ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=stage))
        config = changed(engine="deepspeed", micro_batch_size=2)
        more = {"execution": execution.model_dump(mode="json"), "deepspeed": ds_config(config, execution)}
        whole = write_job(tmp_path / "train-whole", tokens, config, **{**more, "keep_checkpoints": 20})
        assert launch(whole, fault=PATIENT) == [0, 0], said_by(whole)
        there = stopped(whole, tmp_path / "there")
        same = go_on(launch, tmp_path, tokens, there, config, **more)
        assert {step: numbers(whole)[step] for step in numbers(same)} == numbers(same)
        stronger = config.model_copy(update={"weight_decay": 10.0})
        (tmp_path / "decay").mkdir()
        job = go_on(launch, tmp_path / "decay", tokens, there, stronger, **more)
        first = AT + 1
        assert last_lines(job)[first]["loss"] == last_lines(whole)[first]["loss"]
        assert last_lines(job)[first + 1]["loss"] != last_lines(whole)[first + 1]["loss"], "its own decay counts"
    finally:
        launch.close()
