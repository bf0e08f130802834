"""A Hugging Face folder of a causal language model, read without loading it: its settings, its tensors, its shape. Pure.

Weights are safetensors: pickles run code when they are opened, so they are refused. What loads such a folder into memory is
tasks/jobs/training/starting.py; what makes a checkpoint version of one is `headway checkpoint publish`. See docs/fine-tuning.md.

The tokens that open a document are those of the post-processor of its tokenizer.json, where that says any. What first tokens
are predicted from decides what a model makes of them, so evaluation, golden prompts and servers take the same. An export stores
it where transformers, vLLM and the conversion to GGUF look for it as well. Which tokens a checkpoint is measured with is
tasks/jobs/evaluation/heldout.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.config.training import NetworkConfig


# Smaller variants that lie in an exported model's folder, as what a server may fall back on. Pure.
#
# What makes them is tasks/jobs/exporting/variants.py, what answers with them tasks/jobs/serving/fallback_models.py.


FOLDER = "variants"


def smaller_rungs(
    model_folder: Path, model_ref: str, files: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The variants that an export put beside the model, as rungs of serve.json; the largest first.

    `files` are the model's, as its manifest has them. None: nobody says what they must be, of the variants neither.
    """
    results = []
    for folder in (model_folder / FOLDER).glob("*/"):
        prefix = f"{FOLDER}/{folder.name}/"
        rung: dict[str, Any] = {"name": "smaller", "model_ref": f"{model_ref}/{prefix[:-1]}", "folder": str(folder)}
        if files is None:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            results.append((size, {**rung, "files": None}))
            continue
        own = [
            {**file, "path": str(file["path"]).removeprefix(prefix)}
            for file in files
            if str(file["path"]).startswith(prefix)
        ]
        results.append((sum(int(file["size"]) for file in own), {**rung, "files": own}))
    return [rung for _, rung in sorted(results, key=lambda one: -one[0])]


# What a model's answers looked like when it was exported: `reference.json` of a model, for whoever watches its answers
# later.
#
# The export writes it (tasks/jobs/exporting/comparison.py); the judge of a rollout and the watch compare an endpoint's
# answers with it. `measures` holds those of tasks/formats/answers.py, by name: `count` of them, their `mean`, and
# `quantiles`, LEVELS values from the smallest to the largest at even distances. Numbers only, and no text. Pure; the
# standard library only.


VERSION = 1
FILE = "reference.json"
LEVELS = 21
FEWEST = 20
"""Answers; fewer say too little for a model to be sent back by."""
MEASURES = ("length", "entropy", "repetition", "odd")
"""Tokens of an answer; the others as in tasks/formats/answers.py."""


def summary(values: Mapping[str, Sequence[float]], *, prompts: int, max_tokens: int) -> dict[str, Any]:
    """What is written: of each measure of `prompts` answers, of at most `max_tokens` tokens each, taken greedily."""
    payload: dict[str, Any] = {}
    for name in MEASURES:
        if values.get(name):
            ordered = sorted(values[name])
            levels = [step / (LEVELS - 1) * (len(ordered) - 1) for step in range(LEVELS)]
            quantiles = [round(_between(ordered, level), 6) for level in levels]
            mean = round(sum(ordered) / len(ordered), 6)
            payload[name] = {"count": len(ordered), "mean": mean, "quantiles": quantiles}
    return {"version": VERSION, "count": prompts, "max_tokens": max_tokens, "greedy": True, "measures": payload}


def quantiles_of(payload: Any) -> dict[str, list[float]]:
    """The quantiles of each measure that enough answers were measured for; nothing of what is no such file."""
    measures = payload.get("measures") if isinstance(payload, Mapping) and payload.get("version") == VERSION else None
    if not isinstance(measures, Mapping):
        return {}
    enough = {str(name): text["quantiles"] for name, text in measures.items() if text["count"] >= FEWEST}
    return {name: [float(value) for value in quantiles] for name, quantiles in enough.items()}


def _between(ordered: list[float], place: float) -> float:
    """The value at a place between two, on the line through both."""
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


INDEX = "model.safetensors.index.json"
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
    require_trainable(config, str(folder / "config.json"))
    shards = _shards(folder)
    tensors: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        tensors |= _header(folder / shard)
    return ModelFolder(config, tensors, shards)


def require_trainable(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a config.json of no causal language model, or of one that needs code of its own, or is quantised.

    `where` is the file's name in messages.
    """
    architecture = str((config.get("architectures") or [""])[0])
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(f"{where} names the architecture {architecture!r}: only causal language models are trained")
    if "auto_map" in config:
        raise ValueError(
            f"{where} needs Python code of its own (auto_map), and no code of a model is run: "
            "use a model whose architecture is part of transformers"
        )
    if "quantization_config" in config:
        raise ValueError(f"{where} is of quantised weights: publish the model in float32, bfloat16 or float16")


DESCRIPTION = ("config.json", "training.json")
"""Files of a model that say what it is, and how it was trained."""


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
            f"export.context_length is {context}, and the model has learned positions for {known} tokens: lower it, or leave "
            "it empty"
        )


def shape_of(config: dict[str, Any]) -> NetworkConfig:
    """The shape of a model by its config.json, for sizes and rates: as a `gpt2`, or as the nearest `llama`.

    Raises ValueError when it does not say how many layers and heads it has.
    """
    from tasks.config.training import NetworkConfig  # a server, which needs no configuration, imports this file too

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
    """Shapes in a safetensors file; nothing of the tensors is read. Raises ValueError for one that is not whole."""
    from safetensors import SafetensorError, safe_open  # an endpoint's image has no safetensors

    try:
        with safe_open(path, "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file, was cut off, or was tampered with: {error}; copy it again"
        ) from None


def _positions(config: dict[str, Any]) -> int | None:
    result = _first(config, "max_position_embeddings", "n_positions")
    return int(result) if result else None


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: dict[str, Any], *names: str) -> int:
    result = _first(config, *names)
    if not isinstance(result, int):
        raise ValueError(f"config.json of the model has no {names[0]}, which its size depends on: add it")
    return result


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; copy it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object; copy it again")
    return value


RULES = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


def opening_of(rules: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that a tokenizer.json, given as its content, puts before a text; empty where it puts none."""
    processor = rules.get("post_processor") or {}
    opening: tuple[int, ...] = ()
    for each in processor.get("processors", [processor]):
        opening = (*_before(each), *opening)
    return opening


def store_opening(folder: Path, token: str, number: int) -> None:
    """Have a folder's tokenizer put a token before every text: its rules do so, and its settings name it `bos_token`."""
    rules = json.loads((folder / RULES).read_text(encoding="utf-8"))
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    before = rules.get("post_processor")
    rules["post_processor"] = {"type": "Sequence", "processors": [before, template]} if before else template
    (folder / RULES).write_text(json.dumps(rules, ensure_ascii=False, indent=2), encoding="utf-8")
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings |= {"bos_token": token, "add_bos_token": True}
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _before(processor: Mapping[str, Any]) -> tuple[int, ...]:
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        return (int(processor["cls"][1]),)
    results: list[int] = []
    for piece in processor.get("single", ()):
        if "SpecialToken" not in piece:
            break
        results += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(results)
