"""A Megatron checkpoint as the Hugging Face folder that every later stage reads: written by Megatron's converter, checked here.

For llama networks of Megatron-LM that is Megatron-Bridge (bridge_export.py, a process of its own). For others it is what
`execution.megatron.converter` says. Whoever wrote it: names and shapes of all tensors are those of our own network.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tasks.common.errors import IntegrityError, Missing
from tasks.config.training import TrainingConfig
from tasks.jobs.training.network import build_network

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
