"""Megatron's own programs: one rank's `pretrain_gpt.py`, and the converter of its checkpoints. Each dies with this process.

`pretrain_gpt.py` is started by path, and is asked to stop like this process; what it is told is
tasks/formats/megatron_arguments.py.

The converter writes the Hugging Face folder that every later stage reads, and it is checked here. For llama networks of
Megatron-LM that is Megatron-Bridge (bridge_export.py, a process of its own). For others it is what
`execution.megatron.converter` says. Whoever wrote it: names and shapes of all tensors are those of our own network.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import die_with_parent, process_started, read_json
from tasks.config.training import MegatronConfig, TrainingConfig
from tasks.formats.training_logs import Iteration, iterations_of
from tasks.jobs.node.elastic import process_age
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.network import build_network

# Megatron's log, read while it grows, as records of `metrics.jsonl` under the names that our own loop uses.
#
# The line itself is read by tasks/formats/training_logs.py. Megatron prints it on the last rank; rank 0 follows that
# rank's log.


class Following:
    """State: how far the log was read."""

    def __init__(self, rank: Rank, config: TrainingConfig, *, offset: int, steps: range | None = None) -> None:
        """With `steps`, of those alone: what an earlier attempt printed and did not record."""
        self._steps = steps
        self._rank, self._config, self._offset = rank, config, offset
        self._log = rank.folder / "logs" / f"rank-{rank.world_size - 1}.log"
        self._peak = rank.settings.get("peak") or {}
        self._first = steps is None

    def look(self) -> None:
        """Tell of every step that is new in the log; raises FloatingPointError for a loss that is no number."""
        for one in self._new():
            if one.loss is None or not one.seconds or (self._steps is not None and one.number not in self._steps):
                continue
            if not math.isfinite(one.loss):
                raise FloatingPointError(f"the loss is {one.loss} at step {one.number}: lower training.learning_rate")
            left = one.seconds * (one.total - one.number)
            first, self._first = self._first, False
            speed = self._config.global_batch_size * self._config.sequence_length / one.seconds
            known = {
                "learning_rate": one.learning_rate,
                "grad_norm": one.grad_norm,
                "tokens_per_second": speed,
                "tokens_per_second_per_rank": speed / self._rank.world_size,
                # As Megatron counts them (training.py, num_floating_point_operations).
                "tflops_per_rank": one.tflops or None,
                "mfu": one.tflops / self._peak["tflops"] if one.tflops and self._peak else None,
                "start_seconds": max(0.0, process_age() - one.seconds) if first else None,
            }
            values = {"loss": one.loss, **{name: value for name, value in known.items() if value is not None}}
            self._rank.metrics(step=one.number, **values, step_seconds=one.seconds, seconds_left=left)
            text = f"loss {one.loss:.3f}, {speed:,.0f} tokens/s"
            self._rank.progress(one.number, one.total, text, seconds_left=left)

    def _new(self) -> Iterator[Iteration]:
        if not self._log.exists():
            return
        with open(self._log, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            yield from iterations_of(line)


PROGRAM = "pretrain_gpt.py"
LOST_SECONDS = 5.0
"""How long a rank that was asked to stop waits for its process when another rank of the machine is gone: the others' collectives
wait for that one in vain, and the launcher would wait 30 s before it kills."""
TAIL_BYTES = 16_384
_NO_NUMBER = re.compile(r"found NaN in|Unexpected result nan|found Inf in|Unexpected result inf", re.IGNORECASE)
_NO_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate")


def require_megatron(megatron: MegatronConfig) -> None:
    """Raises Missing when Megatron is not where the settings say, or what it builds its layers from is not installed."""
    checkout = Path(megatron.checkout)
    if not (checkout / PROGRAM).is_file():
        raise Missing(
            f"there is no {PROGRAM} in {checkout} (execution.megatron.checkout) on this machine",
            remedy="Use an image that has it (cluster.image), or clone https://github.com/NVIDIA/Megatron-LM there; "
            "for execution.megatron.flavour megatron-deepspeed, https://github.com/microsoft/Megatron-DeepSpeed.",
        )
    needed = megatron.flavour == "megatron-lm" and megatron.transformer_impl == "transformer_engine"
    if (
        needed
        and not {"--transformer-impl", "--spec"} & set(megatron.arguments)
        and not find_spec("transformer_engine")
    ):
        raise Missing(
            "Megatron-LM builds its layers with Transformer Engine, which is not installed on this machine",
            remedy="Use an image that has it (cluster.image), or set execution.megatron.transformer_impl to local: slower, and "
            "without context and sequence parallelism.",
        )


class Neighbours:
    """The ranks of this job on this machine. State: since when one of them is gone."""

    def __init__(self, ranks: Path) -> None:
        """`ranks` is the job's folder where all of them have said who they are."""
        self._ranks, self._since = ranks, math.inf

    def lost(self) -> bool:
        """Whether one of them has been gone for LOST_SECONDS."""
        messages = [read_json(path) or {} for path in self._ranks.glob("*.json")]
        mine = [one for one in messages if one.get("host") == socket.gethostname()]
        if all(process_started(one["pid"]) == one["started"] for one in mine):
            self._since = math.inf
        else:
            self._since = min(self._since, time.monotonic())
        return time.monotonic() - self._since > LOST_SECONDS


class Child:
    """State: the process, and whether this rank was asked to stop."""

    def __init__(self, checkout: Path, arguments: Sequence[str], *, log: Path) -> None:
        """Start it; what it prints goes where this process prints, into the rank's own log."""
        self.asked = False
        self._log, self._before = log, log.stat().st_size if log.exists() else 0
        path = os.pathsep.join(part for part in (str(checkout), os.environ.get("PYTHONPATH", "")) if part)
        defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # which Megatron demands for tensor and context parallel
        environment = {**defaults, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONSAFEPATH", None)
        self._process = subprocess.Popen(
            [sys.executable, str(checkout / PROGRAM), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # torchrun signals a rank's whole group; one request to stop is enough
            preexec_fn=die_with_parent,
        )
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_: object) -> None:
        """Megatron saves after the step that it is in, and ends (--exit-signal-handler)."""
        self.asked = True
        self._process.terminate()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; returns whether it is over."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, when this rank cannot go on."""
        self._process.kill()
        self._process.wait()

    @property
    def ended_well(self) -> bool:
        """Whether it is over by itself, or because it was asked."""
        code = self._process.returncode
        return code == 0 or (self.asked and code == -signal.SIGTERM)

    def require_success(self) -> None:
        """Raises FloatingPointError, MemoryError or RuntimeError by its last words, unless it ended well or as asked."""
        if self.ended_well:
            return
        code = self._process.returncode
        with open(self._log, "rb") as file:
            file.seek(max(self._before, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        last = " | ".join(line.strip() for line in text.splitlines()[-3:])[:500]
        message = f"{PROGRAM} ended with code {code}: {last or 'it said nothing'}"
        if _NO_NUMBER.search(text):
            raise FloatingPointError(message)
        raise MemoryError(message) if _NO_MEMORY.search(text) else RuntimeError(message)


BRIDGE = ("{python}", "-m", "tasks.jobs.megatron.bridge_export", "{checkpoint}", "{config}", "{output}")
NO_BRIDGE = 6
"""Exit code of bridge_export.py where Megatron-Bridge is not installed: that of everything that is missing."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")
"""Variables of the launcher: the converter is one process, and must not wait for the others."""


def convert(
    config: TrainingConfig,
    checkpoint: Path,
    output: Path,
    *,
    vocab: tuple[int, int],
    tokenizer: Path,
    command: Sequence[str],
) -> None:
    """Write the network's configuration, have the weights written, check them, and put the tokenizer beside them.

    `checkpoint` is a folder that Megatron can load; `vocab` the size of the vocabulary and the end-of-document token. Raises
    Missing without a converter, RuntimeError when it fails, IntegrityError when what it wrote is not this network.
    """
    with torch.device("meta"):
        network = build_network(config, vocab_size=vocab[0], eod=vocab[1])
    network.generation_config.pad_token_id = network.config.eos_token_id
    network.config.architectures = [type(network).__name__]
    shape = checkpoint.parent / "hf_config"
    shutil.rmtree(shape, ignore_errors=True)
    network.config.save_pretrained(shape)
    _run(command or BRIDGE, checkpoint=checkpoint, config=shape, output=output)
    tied = set(network._tied_weights_keys or ()) if config.network.tie_embeddings else set()
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items() if name not in tied}
    require_same_shapes(output, expected, maybe=tied)
    network.config.save_pretrained(output)
    network.generation_config.save_pretrained(output)
    for path in sorted(tokenizer.iterdir()):
        shutil.copyfile(path, output / path.name)


def _run(command: Sequence[str], *, checkpoint: Path, config: Path, output: Path) -> None:
    places = {"python": sys.executable, "checkpoint": checkpoint, "config": config, "output": output}
    words = [word.format_map(places) for word in command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == NO_BRIDGE and tuple(command) == BRIDGE:
        raise Missing(
            "Megatron-Bridge is not installed, which writes a Hugging Face folder from Megatron's checkpoint",
            remedy="Use an image that has it (nvcr.io/nvidia/nemo), or name another converter in execution.megatron.converter. "
            "The last checkpoint is kept: started again, the job only converts.",
        )
    if done.returncode:
        raise RuntimeError(f"the converter {words[0]} ended with code {done.returncode}: see the log of rank 0")


def require_same_shapes(folder: Path, expected: dict[str, tuple[int, ...]], *, maybe: set[str]) -> None:
    """Whether a folder's safetensors are these tensors; those in `maybe` may be there too. Raises IntegrityError."""
    result = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _shapes(path).items()}
    differing = [
        f"{name} is {list(result[name]) if name in result else 'missing'}, not {list(expected.get(name, ()))}"
        for name in sorted(result.keys() | expected.keys())
        if result.get(name) != expected.get(name) and not (name in maybe and name not in expected)
    ]
    if differing:
        raise IntegrityError(
            f"the converter did not write this network into {folder}: {'; '.join(differing[:5])}",
            remedy="Check execution.megatron.converter and the version of Megatron-Bridge.",
        )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a safetensors file, from its header: 8 bytes little-endian length, then JSON."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
