"""A Hugging Face folder of a causal language model, read without loading it: its settings, its tensors, its shape. Pure.

Weights are safetensors: pickles run code when they are opened, so they are refused. What loads such a folder into memory is
tasks/jobs/training/starting.py; what makes a checkpoint version of one is `headway checkpoint publish`. See docs/fine-tuning.md.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config.training import NetworkConfig

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class ModelFolder:
    """What a folder says of its model."""

    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of each tensor of the weights, by name."""
    shards: tuple[str, ...]
    """Files of the weights."""

    @property
    def parameters(self) -> int:
        """Numbers in the weights; tied embeddings are stored, and counted, once."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])

    @property
    def positions(self) -> int | None:
        """Longest sequence that the model declares; None: it declares none."""
        return _positions(self.config)


def open_model_folder(folder: Path) -> ModelFolder:
    """Read a folder's settings and the headers of its weights.

    Raises ValueError for what is no causal language model with whole safetensors weights, needs code of its own, or is quantised.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: name a Hugging Face folder, as save_pretrained writes it")
    config = _json(folder / "config.json")
    _require_plain(folder, config)
    shards = _shards(folder)
    tensors: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        tensors |= _header(folder / shard)
    return ModelFolder(config, tensors, shards)


def declared_context(folder: Path) -> int | None:
    """Tokens that a model is to take at once: what its training says, else what its config.json declares; None: it declares none.

    A training of an earlier release says its sequence length alone, and its config.json four times that.
    """
    path = folder / "training.json"
    trained = _json(path) if path.is_file() else {}
    result = _first(trained, "context", "sequence_length") or declared_positions(folder)
    return int(result) if result else None


def declared_positions(folder: Path) -> int | None:
    """Longest sequence that a folder's config.json declares; None: it declares none."""
    return _positions(_json(folder / "config.json"))


def require_positions(folder: Path, context: int | None) -> None:
    """Raise ValueError for a context that the learnt positions of a folder's model do not reach."""
    known = declared_positions(folder)
    if context and known and context > known and _json(folder / "config.json").get("model_type") == "gpt2":
        raise ValueError(
            f"export.context_length is {context}, and the model has learnt positions for {known} tokens: lower it, or leave "
            "it empty"
        )


def shape_of(config: dict[str, Any]) -> NetworkConfig:
    """The shape of a model by its config.json, for sizes and rates: as a `gpt2`, or as the nearest `llama`.

    Raises ValueError when it does not say how many layers and heads it has.
    """
    hidden = _number(config, "hidden_size", "n_embd")
    heads = _number(config, "num_attention_heads", "n_head")
    gpt2 = config.get("model_type") == "gpt2"
    return NetworkConfig(
        architecture="gpt2" if gpt2 else "llama",
        layers=_number(config, "num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(_first(config, "num_key_value_heads") or heads),
        intermediate_size=int(_first(config, "intermediate_size", "n_inner") or 4 * hidden),
        tie_embeddings=bool(config.get("tie_word_embeddings", gpt2)),
    )


def _require_plain(folder: Path, config: dict[str, Any]) -> None:
    messages = config.get("architectures") or [""]
    if not str(messages[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {messages[0]!r}: only causal language models are trained"
        )
    if "auto_map" in config:
        raise ValueError(
            f"{folder} needs Python code of its own (auto_map in config.json), and no code of a model is run: "
            "use a model whose architecture is part of transformers"
        )
    if "quantization_config" in config:
        raise ValueError(f"{folder} holds quantised weights: publish the model in float32, bfloat16 or float16")


def _shards(folder: Path) -> tuple[str, ...]:
    if (folder / INDEX).is_file():
        named = tuple(sorted(set(_json(folder / INDEX)["weight_map"].values())))
        lost = [name for name in named if Path(name).name != name or not (folder / name).is_file()]
        if lost:
            raise ValueError(f"{folder / INDEX} names {lost[0]}, and it is not beside it: give the whole folder")
        return named
    if (folder / "model.safetensors").is_file():
        return ("model.safetensors",)
    pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
    if pickles:
        raise ValueError(
            f"the weights of {folder} are a pickle ({pickles[0]}), which runs code when it is opened: "
            "save the model as safetensors, as save_pretrained does"
        )
    raise ValueError(f"{folder} has no model.safetensors and no {INDEX}: give a folder with weights")


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in a safetensors file, by its format: 8 bytes length, a JSON header, then the tensors without gaps."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > min(size - 8, LARGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file, or was cut off: copy it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    ends = _end_of_tensors(path, tensors)
    if 8 + length + ends != size:
        raise ValueError(
            f"{path} has {size} bytes, its header speaks of {8 + length + ends}: it was cut off, copy it again"
        )
    return {name: tuple(value["shape"]) for name, value in tensors.items()}


def _end_of_tensors(path: Path, tensors: dict[str, Any]) -> int:
    """Where the last tensor ends. Raises ValueError for tensors that overlap, leave gaps, or have no numbers to lie at."""
    try:
        places = sorted((int(value["data_offsets"][0]), int(value["data_offsets"][1])) for value in tensors.values())
    except (TypeError, KeyError, IndexError, ValueError):
        raise ValueError(f"{path} is no safetensors file: a tensor has no place in it; copy it again") from None
    ends = 0
    for begin, end in places:
        if begin != ends or end < begin:
            raise ValueError(
                f"{path} has tensors that overlap or leave a gap at byte {begin}: it was tampered with or damaged, copy it again"
            )
        ends = end
    return ends


def _positions(config: dict[str, Any]) -> int | None:
    result = _first(config, "max_position_embeddings", "n_positions")
    return int(result) if result else None


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: dict[str, Any], *names: str) -> int:
    result = _first(config, *names)
    if not isinstance(result, int):
        raise ValueError(f"config.json of the model has no {names[0]}: its size cannot be told")
    return result


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; copy it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object; copy it again")
    return value
