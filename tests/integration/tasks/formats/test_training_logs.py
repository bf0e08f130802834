"""`headway train-log`, and the lines of DeepSpeed's engine. Lines of Megatron: qualification/test_judging_logs.py."""

import gzip
import json
from pathlib import Path

from typer.testing import CliRunner

from deployments.cli.main import app
from tasks.formats.training_logs import read_deepspeed

LOGS = Path(__file__).parents[3] / "support" / "logs"
DEEPSPEED = """\
[2026-08-22 10:00:01,000] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=1, lr=[0.001, 0.001], mom=[[0.9, 0.95]]
[2026-08-22 10:00:01,001] [INFO] [timer.py:264:stop] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=41.2, \
CurrSamplesPerSec=40.7, MemAllocated=0.5GB, MaxMemAllocated=0.6GB
[2026-08-22 10:00:02,000] [INFO] [logging.py:107:log_dist] [Rank 0] step=20, skipped=1, lr=[5e-04], mom=[[0.9, 0.95]]
"""
PIPELINE = "steps: 20 loss: 2.3456 iter time (s): 0.500 samples/sec: 16.000\n"


def said(*words):
    return CliRunner().invoke(app, ["train-log", *map(str, words)], standalone_mode=False)


def test_a_megatron_log_gives_the_names_of_our_own_metrics():
    fields = json.loads(said(LOGS / "megatron.log", "--json").stdout)
    assert fields["exit_code"] == 0 and fields["tool"] == "megatron"
    last = fields["steps"][-1]
    assert {"step", "loss", "learning_rate", "step_seconds", "samples_per_second"} <= last.keys()
    assert fields["summary"]["step"] == last["step"] and fields["summary"]["loss"] == last["loss"]


def test_a_run_that_was_killed_says_by_what():
    fields = json.loads(said(LOGS / "deepspeed_killed.log", "--json").stdout)
    assert fields["tool"] == "megatron-deepspeed" and fields["ended_by"]


def test_people_see_the_last_steps_and_gzip_is_read(tmp_path):
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress((LOGS / "megatron.log").read_bytes()))
    words = said(packed).stdout
    assert words.startswith("megatron: step ") and "learning_rate" in words


def test_deepspeeds_own_lines_are_joined_by_their_step(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(DEEPSPEED + PIPELINE)
    fields = json.loads(said(log, "--json").stdout)
    assert fields["tool"] == "deepspeed"
    assert fields["steps"] == [
        {"step": 10, "learning_rate": 0.001, "samples_per_second": 40.7, "skipped": 1.0},
        {
            "step": 20,
            "loss": 2.3456,
            "learning_rate": 0.0005,
            "step_seconds": 0.5,
            "samples_per_second": 16.0,
            "skipped": 1.0,
        },
    ]


def test_what_is_no_training_log_is_the_users_mistake(tmp_path):
    (tmp_path / "other.log").write_text("hello\n")
    assert "no line of a training" in str(said(tmp_path / "other.log").exception)
    assert "there is no file" in str(said(tmp_path / "none.log").exception)
    assert read_deepspeed("step=, skipped=x, lr=[]") == ()
