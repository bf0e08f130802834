"""Runs of the training job for tests: real ranks, forked from one process that has imported torch and transformers already."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from support import python_path

from tasks.common.process import descendants
from tasks.config.training import NetworkConfig, SafetyConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter
from tasks.jobs.checkpoint.files import manifests

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 24, 4
CONFIG = TrainingConfig(
    network=NetworkConfig(layers=1, hidden_size=32, heads=2, kv_heads=1, intermediate_size=64),
    sequence_length=32,
    global_batch_size=8,
    micro_batch_size=4,
    steps=STEPS,
    warmup_steps=4,
    learning_rate=1e-2,
)
SERVER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
from tasks.jobs.node.runtime import main
from tasks.jobs.train import run
import tasks.jobs.training.torch_engine
print(os.getpid(), file=answers, flush=True)
for line in sys.stdin:
    children = []
    for environment in json.loads(line):
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            exec(environment.get("FAULT", ""), {})
            os._exit(main(run))
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), file=answers, flush=True)
"""


class Forks:
    """One job at a time."""

    def __init__(self, more=""):
        """`more` is Python that runs once, before the first job: imports that its jobs need."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen(
            [sys.executable, "-c", f"# fork: jobs\n{more}{SERVER}"],
            env=environment,
            start_new_session=True,
            text=True,
            **pipes,
        )
        self.pid = int(self.server.stdout.readline())

    def __call__(self, job, *, attempt=1, ranks=2, fault=""):
        """Run a job to its end: the exit codes of its ranks. `fault` is Python that each rank runs first."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"HEADWAY_JOB": str(job), "HEADWAY_ATTEMPT": str(attempt), "WORLD_SIZE": str(ranks), "FAULT": fault}
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        each = [{**common, **there, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        self.server.stdin.write(json.dumps(each) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def beside(self, job, act, **how):
        """The same, while `act` happens in a thread; what it raises is raised here, after the job's end."""
        with ThreadPoolExecutor(1) as threads:
            acting = threads.submit(act)
            codes = self(job, **how)
            acting.result()
        return codes

    def close(self):
        for pid in (self.pid, *descendants(self.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.communicate()


def write_tokens(folder):
    """Documents that a network can learn: each token follows from the one before, but for one in ten."""
    generator = np.random.default_rng(0)
    writer = TokenWriter(folder / "train_text_document", 64)
    for _ in range(100):
        document = [int(generator.integers(63))]
        for noise in generator.random(200):
            document.append((document[-1] * 5 + 3) % 63 if noise > 0.1 else int(generator.integers(63)))
        writer.add_document([*document, 63])
    documents, count = writer.close()
    splits = {"train": {"documents": documents, "tokens": count, "bytes": count}}
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 64, "eod_id": 63, "splits": splits}))
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_text(json.dumps({"file": name}))
    return folder


def write_job(job, tokens, config=CONFIG, every=EVERY, **more):
    job.mkdir(exist_ok=True)
    settings = {"training": config.model_dump(mode="json"), "checkpoint_every_steps": every, "keep_checkpoints": 2}
    spec = {"program": "tasks.jobs.train", "settings": {**settings, **more}, "inputs": {"tokens": str(tokens)}}
    (job / "config.json").write_text(json.dumps(spec))
    return job


def safe(**safety):
    return CONFIG.model_copy(update={"safety": SafetyConfig(**safety)})


def all_lines(job):
    log = job / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def last_lines(job):
    """Of every step, the record of its last attempt."""
    return {line["step"]: line for line in all_lines(job)}


def numbers(job):
    """What must not depend on interruptions."""
    names = ("loss", "learning_rate", "grad_norm", "skipped")
    return {step: [line.get(name) for name in names] for step, line in last_lines(job).items()}


def result(job):
    return json.loads((job / "result.json").read_text())


def error(job, rank=0):
    return json.loads((job / "errors" / f"rank-{rank}.json").read_text())


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def said_by(job):
    return "".join(path.read_text() for path in sorted((job / "logs").glob("*.log")))


def steps_of_checkpoints(job):
    return [int(path.parts[-3].removeprefix("step-")) for path in manifests(job / "checkpoints")]
