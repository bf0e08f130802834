"""A model that was exported for vLLM, and programs that serve it: the fake beside this file, and what HEADWAY_VLLM names."""

import json
import os
import shutil
import sys
from pathlib import Path

from tiny_model import PROMPTS, make_checkpoint

from tasks.common.process import locked, write_json
from tasks.config.serving import ExportConfig, VllmConfig

FAKE = Path(__file__).with_name("fake_vllm.py")
REAL = os.environ.get("HEADWAY_VLLM", "")
CONFIG = ExportConfig(format="safetensors", variants=(), golden_prompts=tuple(PROMPTS[:2]), golden_tokens=12)


def prompts_of(folder):
    """The golden prompts of an export, answered as vLLM does: it holds back a character whose bytes are not all there."""
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    return [{**entry, "completion": entry["completion"].rstrip("\ufffd")} for entry in prompts]


def export_for_vllm(folder):
    """The real export, in this process, of a model whose heads are as wide as kernels for CPUs take; a copy of the one
    that the first test of a run makes."""
    made = Path(os.environ["HEADWAY_HOME"]).parent / "tiny-for-vllm"
    with locked(made.with_suffix(".lock")):
        if not made.exists():
            from tasks.jobs.exporting.weights import copy_weights, prove

            (folder / "checkpoint").mkdir(parents=True)
            checkpoint, output = make_checkpoint(folder / "checkpoint", heads=2), folder / "made"
            context, _ = copy_weights(checkpoint, output, context=None)
            _, golden, _ = prove(checkpoint, output, CONFIG, context=context)
            write_json(output / "golden.json", golden)
            shutil.copytree(output, f"{made}.new")
            Path(f"{made}.new").rename(made)
    return Path(shutil.copytree(made, folder / "model"))


class Program:
    """The fake as a program of its own. State: how it behaves, and what it was called with."""

    def __init__(self, folder):
        self.path, self._calls, self._behaviour = folder / "vllm", folder / "calls", folder / "behaviour.json"
        python = f"HEADWAY_FAKE_VLLM={self._behaviour} exec {sys.executable} {FAKE}"
        self.path.write_text(f'#!/bin/sh\necho "$*" >> {self._calls}\n{python} "$@"\n')
        self.path.chmod(0o755)

    @property
    def calls(self):
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def behave(self, **how):
        self._behaviour.write_text(json.dumps(how))

    def config(self, **settings):
        return VllmConfig(command=str(self.path), dtype="float32", **{"start_seconds": 120.0, **settings})
