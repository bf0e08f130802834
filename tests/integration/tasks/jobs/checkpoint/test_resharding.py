"""Training goes on with another number of ranks, divided otherwise, and from the machines' own disks: ranks that are killed."""

import json
import os
import shutil
import stat

import pytest
from safetensors.torch import load_file
from training_runs import CONFIG, all_lines, error, last_lines, numbers, result, said_by, write_job

from tasks.common.process import own_folder
from tasks.jobs.checkpoint.files import manifests, place_of

BATCH = CONFIG.model_copy(update={"global_batch_size": 12, "micro_batch_size": 2, "steps": 24})
PAIR = CONFIG.model_copy(update={"steps": 24})
"""For two ranks alone, which compute their part of a batch at once."""
DIES = """
import os
from tasks.jobs.train import Training
advance = Training._advance
def until(self):
    self.saves.room(wait=True)  # no save is left out for being slow: what is on the disks is known
    if self.step == {step}:
        os._exit(9)
    return advance(self)
Training._advance = until
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand a folder to another user")
def test_a_folder_of_the_machines_disk_that_somebody_else_laid_there_is_not_gone_on_from(tmp_path):
    """Its weights would be trained on, and signed. What is ours, nobody else reads."""
    theirs, link, ours = (tmp_path / name for name in ("theirs", "link", "ours"))
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    link.symlink_to(tmp_path)
    for folder in (theirs, link):
        with pytest.raises(ValueError, match="somebody else's"):
            own_folder(folder, remedy="leave it")
    ours.mkdir(mode=0o755)
    for folder in (ours, tmp_path / "new"):
        assert stat.S_IMODE(own_folder(folder, remedy="leave it").stat().st_mode) == 0o700


@pytest.fixture(scope="module")
def unbroken(forks, tokens, tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("jobs") / "unbroken", tokens, BATCH, elastic=True)
    assert forks(job) == [0, 0], said_by(job)
    return job


def go_on(forks, job, tokens, *, attempt, ranks, dies=None, elastic=True, **execution):
    write_job(job, tokens, BATCH, execution=execution, elastic=elastic)
    fault = DIES.format(step=dies) if dies else ""
    assert forks(job, attempt=attempt, ranks=ranks, fault=fault) == [9 if dies else 0] * ranks, said_by(job)


def samples(job):
    return {line["step"]: (line["consumed"], line["samples_crc32"]) for line in all_lines(job)}


def test_two_ranks_then_one_then_three_then_two_whole_and_divided(forks, tokens, unbroken, tmp_path):
    job = tmp_path / "job"
    go_on(forks, job, tokens, attempt=1, ranks=2, dies=6, parallel="ddp")
    go_on(forks, job, tokens, attempt=2, ranks=1, dies=12, parallel="ddp")
    go_on(forks, job, tokens, attempt=3, ranks=3, dies=18, parallel="fsdp")
    shards = [load_file(place_of(job / "checkpoints", 16, 3) / f"shard-{rank}.safetensors") for rank in range(3)]
    assert sum(len(shard["weight.model.embed_tokens.weight"]) for shard in shards) == 64, "each rank has its part only"
    go_on(forks, job, tokens, attempt=4, ranks=2, parallel="fsdp")
    assert result(job)["resumed_from_step"] == 16
    assert samples(job) == samples(unbroken), "the same samples in the same order"
    found, wanted = numbers(job), numbers(unbroken)
    assert list(found) == list(wanted)
    for step in wanted:
        assert found[step][:3] == pytest.approx(wanted[step][:3], rel=1e-3), step
    worlds = {line["attempt"]: line["world_size"] for line in all_lines(job)}
    assert worlds == {1: 2, 2: 1, 3: 3, 4: 2}


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.long)])
def test_the_machines_own_disks_have_what_the_store_does_not(forks, tokens, tmp_path, parallel):
    job = tmp_path / "job"
    disk = {"HEADWAY_SCRATCH": str(tmp_path / "disk")}
    fault = f"import os; os.environ.update({disk!r})\n"
    execution = {"parallel": parallel, "local_every_steps": 3}
    write_job(job, tokens, PAIR, every=8, execution=execution)
    assert forks(job, attempt=1, fault=fault + DIES.format(step=16)) == [9, 9], said_by(job)
    store = manifests(job / "checkpoints")[0].parent
    shutil.rmtree(store)  # the store is behind: its newest is of step 8
    local = sorted((tmp_path / "disk").glob("headway-checkpoints-*/*/rank-*/checkpoints/step-*/attempt-1"))
    assert {path.parent.name for path in local} == {"step-00000012", "step-00000015"}
    assert forks(job, attempt=2, fault=fault + DIES.format(step=-1)) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 15 and result(job)["checkpoints_local"] == 2
    whole = write_job(tmp_path / "whole", tokens, PAIR, every=24, execution={"parallel": parallel})
    assert forks(whole) == [0, 0], said_by(whole)
    assert numbers(job) == numbers(whole)


@pytest.mark.long
def test_an_own_disk_that_one_rank_has_lost_does_not_count(forks, tokens, tmp_path):
    job = tmp_path / "job"
    fault = f"import os; os.environ['HEADWAY_SCRATCH'] = {str(tmp_path / 'disk')!r}\n"
    write_job(job, tokens, PAIR, every=8, execution={"local_every_steps": 3})
    assert forks(job, attempt=1, fault=fault + DIES.format(step=12)) == [9, 9], said_by(job)
    (lost,) = (tmp_path / "disk").glob("headway-checkpoints-*/*/rank-1")
    shutil.rmtree(lost)
    assert forks(job, attempt=2, fault=fault) == [0, 0], said_by(job)
    assert result(job)["resumed_from_step"] == 8


FULL = """
import resource, sys
from tasks.jobs.training.checkpoints import Saves
save, room = Saves.save, Saves.room
# A save that is due while the one before is still written, on a slow machine, would be left out.
Saves.room = lambda self, *, wait=False: room(self, wait=True)
def limited(self, tier, *, step, consumed_samples):
    full = {full}
    limit = 2000 if full else resource.RLIM_INFINITY
    if self.saver.writing.rank == 1:
        resource.prlimit(self.saver._process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    save(self, tier, step=step, consumed_samples=consumed_samples)
    self.saver.wait() if self.saver.writing.rank == 1 else None
Saves.save = limited
"""


def test_a_disk_that_is_full_on_one_rank_costs_checkpoints_and_no_step(forks, tokens, unbroken, tmp_path):
    job = write_job(tmp_path / "job", tokens, BATCH)
    assert forks(job, fault=FULL.format(full="step in (8, 12)")) == [0, 0], said_by(job)
    assert result(job)["checkpoints_failed"] == 2
    assert {step: line[:3] for step, line in numbers(job).items()} == {
        step: line[:3] for step, line in numbers(unbroken).items()
    }
    assert "training continues" in said_by(job)
    assert not {8, 12} & {int(path.parts[-3][-8:]) for path in (job / "checkpoints").glob("step-*/attempt-1/*")}


@pytest.mark.long
def test_a_disk_that_stays_full_ends_the_run_with_a_reason(forks, tokens, tmp_path):
    job = write_job(tmp_path / "job", tokens, BATCH, every=2)
    assert 0 not in forks(job, fault=FULL.format(full="step > 2"))
    message = error(job, 1)["message"]
    assert "3 checkpoints in a row failed" in message and "File too large" in message
    assert error(job, 0)["message"] == message, "whichever rank reports first knows why"
    assert max(last_lines(job)) < BATCH.steps
    assert json.loads((job / "checkpoints" / "LATEST").read_text())["step"] == 2
