"""Before money is spent, a person at a terminal sees the plan and is asked; whoever is no person is not."""

import os
import pty
import subprocess
import time
from importlib.metadata import version

import pytest
import yaml
from support import HEADWAY, publish_tiny
from waiting import limit

SETTINGS = {
    "dataset": "tiny",
    "cluster": {"name": "nd", "backend": "slurm", "nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8},
    "benchmark": {"sku": "Standard_ND96isr_H100_v5"},
    "training": {"model": "m", "precision": "bf16", "global_batch_size": 64, "steps": 10_000_000},
    "planning": {"max_minutes": 1e9},
}


@pytest.fixture
def asked(fresh, tmp_path):
    """What a command says at a terminal where somebody types an answer, and its exit code."""
    publish_tiny(fresh)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(SETTINGS))

    def run(answer, *words):
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [HEADWAY, "retrain", "-c", str(tmp_path / "c.yaml"), *words],
            env=fresh.environment(), cwd=tmp_path, stdin=follower, stderr=follower, stdout=follower,
        )  # fmt: skip
        os.close(follower)
        os.write(leader, answer)
        said = b""
        began = time.monotonic()
        while time.monotonic() - began < limit(100):
            try:
                said += os.read(leader, 4096)
            except OSError:  # its end
                break
        return said.decode(), process.wait(timeout=limit(60))

    return run


def test_a_no_starts_nothing(asked, fresh):
    said, code = asked(b"n\n")
    assert "Train for about" in said and "B parameters on 16 x NVIDIA H100" in said and "costs" in said
    assert code == 130 and "nothing was started" in said
    assert not (fresh.path / "jobs").exists() and not (fresh.path / "prefect").exists()


def test_nobody_is_asked_who_said_yes_or_whose_run_is_cheap_or_who_does_not_train(asked):
    for words in (("--yes",), ("--set", "planning.spending.ask_above=1e15"), ("--to", "validate", "--dry-run")):
        said, code = asked(b"n\n", *words, *(() if "--dry-run" in words else ("--set", "benchmark.sku=/no/such.yaml")))
        assert "Train for about" not in said and (code == 0) == ("--dry-run" in words)


def test_without_a_terminal_nobody_is_asked(asked, fresh, tmp_path):
    ran = subprocess.run(
        [HEADWAY, "retrain", "-c", str(tmp_path / "c.yaml"), "--set", "benchmark.sku=/no/such.yaml"],
        env=fresh.environment(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit(100),
    )  # fmt: skip
    assert ran.returncode != 0 and "Train for about" not in ran.stderr + ran.stdout


def test_the_command_says_its_version_whatever_the_home_is(tmp_path):
    (tmp_path / "home").write_text("no folder")
    ran = subprocess.run(
        [HEADWAY, "--version"], env={**os.environ, "HEADWAY_HOME": str(tmp_path / "home")},
        cwd=tmp_path, capture_output=True, text=True, timeout=limit(60),
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, f"headway {version('headway')}\n"), ran.stderr
