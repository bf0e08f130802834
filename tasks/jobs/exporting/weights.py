"""A Hugging Face checkpoint as what vLLM serves: its own weights, file by file, with the tokenizer and the context that it is
served with; and the proof that what lies there answers as the checkpoint does.

No tensor is converted: the shards are copied, and compared by hash. What may go wrong is beside them, so both folders are loaded
by PyTorch, one after the other, and must give the same logits and tokens. golden.json holds, beside the answers, their tokens'
log probabilities, by which a server proves what it loaded (tasks/serving/vllm.py).
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.serving import ExportConfig
from tasks.formats.model_folder import INDEX, declared_context, declared_positions, open_model_folder, require_positions
from tasks.jobs.evaluation.heldout import open_documents, opening_of
from tasks.jobs.exporting.comparison import Original, largest
from tasks.jobs.exporting.graph import copy_settings
from tasks.jobs.serving.generation import Completion
from tasks.serving.vllm import require_architecture
from tasks.storage.manifest import hash_file

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
"""Files of a tokenizer that go along where the checkpoint has them."""
DECIMALS = 6


@dataclass(frozen=True)
class Side:
    """One folder's answer to a golden prompt."""

    prompt: list[int]
    logits: NDArray[np.float32]
    """Of the prompt's positions, shape [tokens, vocabulary]."""
    tokens: list[int]
    logprobs: list[float]
    """Of each of `tokens`, in nats."""


class Plain:
    """A folder in PyTorch, called as the server's `Generation` is: for the statistics of its answers."""

    def __init__(self, original: Original, folder: Path, *, context: int) -> None:
        self._original, self._ends = original, _ends(folder)
        self.context_length, self.opening = context, list(opening_of(folder))

    def encode(self, prompt: str) -> list[int]:
        return self._original.encode(prompt)

    def complete(self, prompt: list[int], max_tokens: int, *, measure: bool = False) -> Completion:
        """Greedily. Entropies are not measured: vLLM tells none to compare with them."""
        tokens = self._original.greedy(prompt, max_tokens, ends=self._ends)
        reason = "stop" if tokens and tokens[-1] in self._ends else "length"
        return Completion(tokens, self._original.tokenizer.decode(tokens, skip_special_tokens=True), reason)


def copy_weights(checkpoint: Path, output: Path, *, context: int | None) -> tuple[int, int]:
    """Write the folder that vLLM loads. Returns the tokens that it declares, and how many files of weights it has.

    Raises ValueError for a checkpoint that vLLM is not given, or whose positions end before `context`.
    """
    source = open_model_folder(checkpoint)
    require_architecture(source.config, named=str(checkpoint))
    require_positions(checkpoint, context)
    declared = context or declared_context(checkpoint)
    if not declared:
        raise ValueError(f"{checkpoint / 'config.json'} declares no context: set export.context_length")
    output.mkdir(parents=True, exist_ok=True)
    index = (INDEX,) if (checkpoint / INDEX).is_file() else ()
    for name in (*source.shards, *index, *(name for name in TOKENIZER if (checkpoint / name).is_file())):
        shutil.copyfile(checkpoint / name, output / name)
    copy_settings(checkpoint, output)
    if declared > (
        declared_positions(checkpoint) or declared
    ):  # rotations have no table: only the number must be there
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
        (output / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": declared}, indent=2) + "\n", encoding="utf-8"
        )
    open_documents(checkpoint, output)
    return declared, len(source.shards)


def weights_equal(checkpoint: Path, output: Path) -> int:
    """How many files of weights are the checkpoint's, byte for byte."""
    return sum(hash_file(checkpoint / path.name) == hash_file(path) for path in output.glob("*.safetensors"))


def prove(
    checkpoint: Path, output: Path, config: ExportConfig, *, context: int
) -> tuple[dict[str, float], dict[str, Any], Original]:
    """The proof, golden.json, and the exported folder as it is loaded: one network at a time is in memory."""
    original = Original(checkpoint)
    expected = [_answered(original, checkpoint, prompt, config, context=context) for prompt in config.golden_prompts]
    del original
    gc.collect()
    exported = Original(output)
    ours = [_answered(exported, output, prompt, config, context=context) for prompt in config.golden_prompts]
    pairs = list(zip(expected, ours, strict=True))
    words = _as_vllm_encodes(output)
    equal = [
        left.tokens == right.tokens and left.prompt == right.prompt == words(prompt)
        for (left, right), prompt in zip(pairs, config.golden_prompts, strict=True)
    ]
    proof = {
        "max_logit_error": largest(float(np.abs(right.logits - left.logits).max()) for left, right in pairs),
        "logit_scale": largest(float(np.abs(left.logits).max()) for left in expected),
        "greedy_equal": sum(equal),
        "greedy_total": len(equal),
    }
    decode = exported.tokenizer.decode
    prompts = [
        {
            "prompt": prompt,
            "completion": decode(side.tokens, skip_special_tokens=True),
            "tokens": side.tokens,
            "prompt_tokens": side.prompt,
            "logprobs": side.logprobs,
        }
        for prompt, side in zip(config.golden_prompts, ours, strict=True)
    ]
    return proof, {"context_length": context, "prompts": prompts}, exported


def _answered(original: Original, folder: Path, prompt: str, config: ExportConfig, *, context: int) -> Side:
    known = original.encode(prompt)
    limit = min(config.golden_tokens, context - len(known))
    if limit < 1:
        raise ValueError(
            f"the golden prompt {prompt!r} has {len(known)} tokens, and the model is to take {context}: shorten it in "
            "export.golden_prompts, or raise export.context_length"
        )
    tokens = original.greedy(known, limit, ends=_ends(folder))
    logits = original.logits([*known, *tokens])[0].astype(np.float64)
    rows = logits[len(known) - 1 : -1]
    totals = np.logaddexp.reduce(rows, axis=-1)
    logprobs = [
        round(float(row[token] - total), DECIMALS) for row, total, token in zip(rows, totals, tokens, strict=True)
    ]
    return Side(known, logits[: len(known)].astype(np.float32), tokens, logprobs)


def _ends(folder: Path) -> list[int]:
    """Tokens that end an answer, as transformers and vLLM take them. Raises ValueError where a folder names none."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ends = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if ends is not None:
                return [int(end) for end in (ends if isinstance(ends, Sequence) else [ends])]
    raise ValueError(f"{folder} names no eos_token_id in config.json: add the token that ends a document")


def _as_vllm_encodes(folder: Path) -> Any:
    """A prompt's tokens as vLLM's API makes them: by the folder's own tokenizer, what it puts before a text included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return lambda prompt: [int(token) for token in tokenizer(prompt)["input_ids"]]
