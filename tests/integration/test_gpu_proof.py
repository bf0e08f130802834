"""`make gpu`: its rehearsal on a CPU, whole; what it says without a GPU; and a proof whose steps fail, hang or are skipped."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from fake_megatron import converter, write_checkout
from waiting import limit, until

from benchmarks.gpu import REHEARSAL, TINY
from benchmarks.proof import Failed, Proof, Skipped, Step, command
from tasks.config.training import TrainingConfig
from tasks.jobs.training.network import build_network

ROOT = Path(__file__).parents[2]
NVIDIA_SMI = '#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB"\n'


def run(*words, path="", seconds=120, **environment):
    where = {**os.environ, **environment, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    line = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(line, cwd=ROOT, env=where, capture_output=True, text=True, timeout=limit(seconds))


def verdicts(page):
    """By step: the verdict and what was seen."""
    rows = re.findall(r"^\| ([\w ]+) \| (passed|failed|skipped) \| \d+ s \| (.*) \|$", page, re.MULTILINE)
    return {name: (status, rest) for name, status, rest in rows}


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    ran = run("--to", str(tmp_path / "gpu.md"))
    assert (ran.returncode, ran.stdout) == (6, "") and "--rehearse" in ran.stderr
    assert not (tmp_path / "gpu.md").exists()


def test_a_gpu_that_torch_does_not_see_is_none(tmp_path):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    ran = run("--to", str(tmp_path / "gpu.md"), path=str(tmp_path))
    assert ran.returncode == 6 and f"torch {torch.__version__} sees no GPU" in ran.stderr


def test_a_proof_goes_on_after_a_step_and_its_page_names_what_is_not_proven(capsys):
    def fail(_):
        raise Failed("it is | wrong")

    def skip(_):
        raise Skipped("it is not installed")

    def mistake(_):
        raise KeyError("a mistake of the step")

    proof = Proof(60)
    for name, what in {"a": lambda _: "seen", "b": fail, "c": skip, "d": mistake}.items():
        proof.take(Step(name, f"that {name} holds", what, 1, "about USD 0.01"))
    page = proof.page("A proof", "Of the tests.", {"machine": "this one"})
    assert proof.failed == ["b", "d"] and "- c: it is not installed" in page
    assert {name: status for name, (status, _) in verdicts(page).items()} == {
        "a": "passed",
        "b": "failed",
        "c": "skipped",
        "d": "failed",
    }
    assert "it is / wrong" in page and "| about USD 0.01 |" in page


def test_a_step_has_no_more_time_than_all_have_together():
    given, proof = [], Proof(0.5)
    proof.take(Step("first", "", lambda seconds: given.append(seconds) or time.sleep(0.6) or "", 60))
    late = proof.take(Step("second", "", lambda _: "", 60))
    assert 0 < given[0] <= 0.5 and late.status == "skipped"


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path / 'child'}; echo it hangs; wait"
    with pytest.raises(Failed, match="it hangs"):
        command(["bash", "-c", script], seconds=1, log=tmp_path / "log")
    child = int((tmp_path / "child").read_text())
    # It was sent the signal with its parent, and is waited for by nobody: it may end a moment later.
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 10)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_rehearsal_takes_every_step(tmp_path):
    checkout = write_checkout(tmp_path / "megatron-lm")
    config = TrainingConfig(network=TINY, sequence_length=REHEARSAL.sequence)
    with torch.device("meta"):
        state = build_network(config, vocab_size=REHEARSAL.vocabulary, eod=0).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "lm_head.weight"}
    page = tmp_path / "gpu.md"
    options = ["--megatron", str(checkout), "--converter", *converter(checkout, shapes)]
    (tmp_path / "tmp").mkdir()
    ran = run("--rehearse", "--to", str(page), *options, seconds=1200, FAKE_PACE="1", TMPDIR=str(tmp_path / "tmp"))
    seen = verdicts(page.read_text())
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-4000:]}"
    assert "It proves nothing about GPUs" in page.read_text()
    assert {name for name, (status, _) in seen.items() if status != "passed"} <= {"vllm"}
    assert list(seen) == ["qualify", "nccl", "mfu", "fsdp", "zero", "megatron", "onnx", "vllm"]
    assert "gloo: all_reduce" in seen["nccl"][1] and "within 0.00% of those of the step mfu" in seen["zero"][1]
    assert re.search(r"killed at step \d+, resumed at 10, 20 steps; converted", seen["megatron"][1])
    assert list((tmp_path / "tmp").iterdir()) == []
