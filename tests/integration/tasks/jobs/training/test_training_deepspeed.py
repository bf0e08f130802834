"""The engine `deepspeed` on two real ranks with gloo: the losses of torch, a kill, a flipped byte, a file that runs code."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import CONFIG, Forks, error, numbers, result, said_by, write_job

from tasks.config.engines.deepspeed import ds_config
from tasks.config.training import DeepspeedConfig, ExecutionConfig
from tasks.jobs.checkpoint.files import Manifest, digest, manifests
from tasks.jobs.training.deepspeed_engine import _filled, _whole_of_stage_3, files_of

STEPS, EVERY, KILLED_AT = 24, 6, 20
TOLERANCE = 1e-5
"""In nats a token: float32 sums in another order. Measured over 100 steps: 2.4e-7."""
IMPORTS = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed.runtime.zero.muon.muon_optimizer  # DeepSpeed does when it starts: 5 s of CPU
"""
TRAINED = CONFIG.model_copy(update={"steps": STEPS, "micro_batch_size": 2})
KILL = f"""
import os, signal
import tasks.jobs.train as train
import tasks.jobs.training.deepspeed_engine as module
patient = train.Training._save
train.Training._save = lambda self, tier, *, wait: patient(self, tier, wait=True)
plain, done = module.DeepspeedEngine.update, []
def update(self, learning_rate):
    plain(self, learning_rate)
    done.append(learning_rate)
    if len(done) == {KILLED_AT} and self.setting.rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
module.DeepspeedEngine.update = update
"""
ABSENT = 'import sys\nsys.modules["deepspeed"] = None'


@pytest.fixture(scope="module")
def launch():
    forks = Forks(IMPORTS)
    yield forks
    forks.close()


def deepspeed_job(folder, tokens, stage, **zero):
    execution = ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=stage, **zero))
    config = TRAINED.model_copy(update={"engine": "deepspeed"})
    settings = {"execution": execution.model_dump(mode="json"), "deepspeed": ds_config(config, execution)}
    return write_job(folder, tokens, config, EVERY, **settings)


@pytest.fixture(scope="module")
def with_torch(launch, tokens, tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("jobs") / "torch", tokens, TRAINED, STEPS)
    assert launch(job) == [0, 0], said_by(job)
    return job


@pytest.fixture(scope="module")
def killed(launch, tokens, tmp_path_factory):
    """By stage: a job whose rank 1 was killed between two checkpoints."""
    jobs = {}

    def of(stage):
        if stage not in jobs:
            jobs[stage] = deepspeed_job(tmp_path_factory.mktemp("jobs") / "killed", tokens, stage)
            assert -9 in launch(jobs[stage], fault=KILL), said_by(jobs[stage])
        return jobs[stage]

    return of


@pytest.fixture
def left_over(killed, tmp_path):
    """A copy of what a killed job left behind."""
    return lambda stage: Path(shutil.copytree(killed(stage), tmp_path / "job"))


def own_files(job):
    """DeepSpeed's files in the newest checkpoint."""
    return sorted((manifests(job / "checkpoints")[0].parent / "own").rglob("*.pt"))


def differences(job, other):
    ours, theirs = numbers(job), numbers(other)
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    return [abs(ours[step][0] - theirs[step][0]) for step in ours]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_killed_and_resumed_it_has_the_losses_of_torch_and_writes_its_network(stage, launch, left_over, with_torch):
    job = left_over(stage)
    assert launch(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 18
    assert max(differences(job, with_torch)) < TOLERANCE
    ours, theirs = (load_file(each / "out" / "model.safetensors") for each in (job, with_torch))
    assert ours.keys() == theirs.keys() and all(value.dtype == torch.float32 for value in ours.values())
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in ours)
    shown = json.loads((job / "ds_config.json").read_text())
    assert shown["train_batch_size"] == TRAINED.global_batch_size and shown["train_micro_batch_size_per_gpu"] == 2


def test_a_flipped_byte_in_its_own_file_is_refused_and_the_checkpoint_before_is_used(launch, left_over, with_torch):
    job = left_over(2)
    path = own_files(job)[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert launch(job, attempt=2) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 12
    assert "quarantined" in said_by(job) and path.name in said_by(job)
    assert max(differences(job, with_torch)) < TOLERANCE


class Marks:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_that_runs_code_is_not_loaded_whatever_its_manifest_says(launch, left_over, tmp_path):
    job = left_over(2)
    path, marker = own_files(job)[0], tmp_path / "ran"
    torch.save({"module": Marks(marker)}, path, pickle_module=pickle)
    forge(manifests(job / "checkpoints")[0], path)
    assert launch(job, attempt=2) != [0, 0]
    assert not marker.exists()
    said = error(job)
    assert said["class"] == "integrity" and "holds more than tensors and plain values" in said["message"]


def forge(manifest, path):
    """Have a manifest say that a changed file is as it was written."""
    import hashlib

    value = json.loads(manifest.read_text())
    del value["sha256"]
    for entry in value["files"]:
        if entry["path"].endswith(path.name):
            data = path.read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest.write_text(json.dumps({**value, "sha256": digest(value)}))


@pytest.mark.parametrize(("stage", "then", "ranks"), [(2, 3, 1), pytest.param(3, 1, 4, marks=pytest.mark.soak)])
def test_another_number_of_ranks_or_another_stage_goes_on(stage, then, ranks, launch, left_over, tokens, with_torch):
    job = left_over(stage)
    deepspeed_job(job, tokens, then)
    assert launch(job, attempt=2, ranks=ranks) == [0] * ranks, said_by(job)
    assert result(job)["resumed_from_step"] == 18
    assert max(differences(job, with_torch)) < TOLERANCE


def test_a_rank_reads_the_files_with_its_number_and_those_with_none():
    """Names as DeepSpeed 0.19 writes them, of bf16 and of state on an NVMe disk too: rank 1's are not rank 11's."""
    weights = "own/deepspeed/mp_rank_00_model_states.pt"
    each = ["own/deepspeed/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", "own/generator-{}.safetensors"]
    of_stage_3 = ["own/deepspeed/zero_pp_rank_{}_mp_rank_00_model_states.pt"]
    on_disk = "own/deepspeed/offloaded_tensors/rank{:02d}/optimizer/7.tensor.swp"
    two = written([weights], each, ranks=12)
    three = written([], [*each, *of_stage_3, on_disk], ranks=12)
    for rank in (0, 1, 11):
        assert names(two, rank, 2) == names(two, rank, 1) == {weights, *(name.format(rank) for name in each)}
        assert names(three, rank, 3) == {name.format(rank) for name in [*each, *of_stage_3, on_disk]}
        assert names(two, rank, 3) == names(three, rank, 2) == set(), "all of them are read, whosever they are"


def written(once, each, *, ranks):
    """A manifest of files that are written once, and by each rank."""
    paths = [*once, *(name.format(rank) for rank in range(ranks) for name in each)]
    return Manifest(8, 1, 96, {}, "", [{"path": path} for path in paths], ranks)


def names(manifest, rank, stage):
    return {entry["path"] for entry in files_of(manifest, rank=rank, stage=stage)}


def test_parts_of_stage_3_are_put_together_without_what_fills_them_up():
    parts = [torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([4.0, 5.0, 0.0, 20.0])]
    states = [
        {"fp32_flat_groups": [part], "optimizer_state_dict": {"state": {0: {"exp_avg": -part, "exp_avg_sq": part**2}}}}
        for part in parts
    ]
    whole = _whole_of_stage_3(states, {"five": (5, 1), "two": (2,)})
    assert whole["five"]["weight"].tolist() == [1, 2, 3, 4, 5] and whole["two"]["exp_avg"].tolist() == [-10, -20]
    assert [_filled(whole["five"]["weight"], begin, 2).tolist() for begin in (0, 2, 4)] == [[1, 2], [3, 4], [5, 0]]


def test_without_the_package_it_says_what_to_install(launch, tokens, tmp_path):
    job = deepspeed_job(tmp_path / "job", tokens, 2)
    assert launch(job, fault=ABSENT) == [1, 1]
    said = error(job)
    assert said["class"] == "missing" and "pip install 'headway[deepspeed]'" in said["remedy"]
