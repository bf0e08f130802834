"""A checkpoint that verifies and that starts die of is given up after the second one, and never the last good one."""

import shutil

import pytest
from training_runs import all_lines, error, numbers, result, said_by, steps_of_checkpoints, write_job

from tasks.jobs.checkpoint.files import quarantined

KILLED = """
import os, pathlib, signal, time, tasks.jobs.training.torch_engine as engine
plain, checkpoints = engine.TorchEngine.clip, pathlib.Path(os.environ["HEADWAY_JOB"]) / "checkpoints"
def clip(self):
    time.sleep(0.05)
    if len(list(checkpoints.glob("*/*/manifest.json"))) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self)
engine.TorchEngine.clip = clip
"""
"""Once there are two checkpoints, however slow their writers are."""
BREAKS = """
import tasks.jobs.training.torch_engine as engine
def restore(self, root, found):
    raise RuntimeError(f"step {found.step} cannot be taken over{WHY}")
engine.TorchEngine.restore = restore
"""


@pytest.fixture(scope="module")
def left(forks, tokens, tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("jobs") / "left", tokens)
    assert 0 not in forks(job, fault=KILLED)
    return job


@pytest.fixture
def killed(left, tmp_path):
    """A copy of what a killed job left behind."""
    return shutil.copytree(left, tmp_path / "job")


def breaking(why=""):
    return f"WHY = {why!r}\n{BREAKS}"


def given_up(job):
    return {path.parts[-2]: quarantined(path) for path in (job / "checkpoints").glob("step-*/*") if quarantined(path)}


def test_the_second_start_that_dies_of_a_checkpoint_is_the_last(forks, killed, tokens, tmp_path):
    newest = max(steps_of_checkpoints(killed))
    for attempt in (2, 3):
        assert 0 not in forks(killed, attempt=attempt, fault=breaking())
        assert not given_up(killed)
    assert error(killed)["message"] == f"step {newest} cannot be taken over"
    assert forks(killed, attempt=4) == [0, 0], said_by(killed)
    [reason] = given_up(killed).values()
    assert "2 starts died of" in reason and f"step {newest} cannot be taken over" in reason
    assert result(killed)["resumed_from_step"] < newest
    unbroken = write_job(tmp_path / "unbroken", tokens)
    assert forks(unbroken) == [0, 0]
    assert numbers(killed) == numbers(unbroken)


def test_a_neighbour_that_is_gone_is_no_reason(forks, killed):
    for attempt in (2, 3):
        assert 0 not in forks(killed, attempt=attempt, fault=breaking(": Connection closed by peer"))
    assert forks(killed, attempt=4) == [0, 0], said_by(killed)
    assert not given_up(killed)


def test_the_last_good_one_stays(forks, killed):
    folders = sorted((killed / "checkpoints").glob("step-*"))
    for folder in folders[:-1]:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()
    for attempt in (2, 3):
        assert 0 not in forks(killed, attempt=attempt, fault=breaking())
    assert forks(killed, attempt=4) == [0, 0], said_by(killed)
    assert not given_up(killed) and max(line["attempt"] for line in all_lines(killed)) >= 4
