"""onnxruntime-genai: load an exported model folder, encode a prompt, complete it, decode what it said.

The export proves a model with this code and the server answers with it, so what was proven is what is served. No torch
and no transformers: it runs in the serving image. HTTP and queues live in serve.py. See the docs of onnxruntime-genai.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai

genai.disable_telemetry_events()
ENTROPY_TOKENS = 32
"""First tokens of an answer whose entropy is measured: 0.6 ms each with 150,000 words, so it stays below a share of the whole."""


@dataclass(frozen=True)
class Completion:
    """What a model said. `tokens` may end with the end-of-text token; `text` is without it."""

    tokens: list[int]
    text: str
    finish_reason: str
    """`stop`: the model ended it; `length`: the limit or the model's context did."""
    entropy: float | None = None
    """Mean entropy of the next token, in nats, over the first tokens; None where it was not asked for."""


class Generation:
    """A loaded model. One completion at a time; the caller holds the lock."""

    def __init__(self, folder: Path, threads: int) -> None:
        settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
        config = genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = genai.Model(config)
        self._tokenizer = genai.Tokenizer(self._model)
        self._text = ByteLevelText(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        self.context_length = int(settings["context_length"])
        """Tokens of prompt and completion together."""
        ends = settings["eos_token_id"]
        self.end_tokens: list[int] = ends if isinstance(ends, list) else [ends]

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt; raises ValueError when there is nothing to complete or no room left for an answer."""
        if not prompt or "\x00" in prompt:
            raise ValueError("the prompt is empty" if not prompt else "the prompt holds a NUL character: leave it out")
        tokens = [int(token) for token in self._tokenizer.encode(prompt)]
        if len(tokens) >= self.context_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; prompt and answer may have {self.context_length}: shorten it"
            )
        return tokens

    def complete(
        self, prompt: list[int], max_tokens: int, *, temperature: float = 0.0, measure: bool = False
    ) -> Completion:
        """Up to `max_tokens` tokens; temperature 0 is greedy, else the whole distribution is sampled.

        With `measure`, the entropy of the first tokens is told as well, before the temperature.
        """
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(
            max_length=min(len(prompt) + max_tokens, self.context_length),
            min_length=0,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,
            top_p=1.0,
        )
        generator = genai.Generator(self._model, parameters)
        generator.append_tokens(np.asarray(prompt, dtype=np.int32))
        tokens: list[int] = []
        entropies: list[float] = []
        while not generator.is_done():
            if measure and len(tokens) < ENTROPY_TOKENS:
                entropies.append(entropy(generator.get_logits()))
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        ended = bool(tokens) and tokens[-1] in self.end_tokens
        text = self._text.decode(tokens[:-1] if ended else tokens)
        mean = sum(entropies) / len(entropies) if entropies else None
        return Completion(tokens=tokens, text=text, finish_reason="stop" if ended else "length", entropy=mean)


def entropy(logits: np.ndarray[Any, Any]) -> float:
    """Entropy, in nats, of the distribution that logits stand for; those of the last place of `logits` [1, places, words]."""
    last = logits.reshape(-1, logits.shape[-1])[-1].astype(np.float32)
    shifted = last - last.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    return float(np.log(total) - float((shifted * weights).sum()) / total)


class ByteLevelText:
    """Decodes byte-level BPE tokens as Hugging Face does, special tokens left out.

    Not by genai's own tokenizer: version 0.18.0 drops everything behind the first byte that is no valid UTF-8.
    """

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        kind = (tokenizer.get("decoder") or {}).get("type")
        if kind != "ByteLevel":
            raise ValueError(
                f"tokenizer.json has the decoder {kind!r}; this release serves byte-level BPE (`ByteLevel`)"
            )
        letters = _byte_letters()
        self._bytes: dict[int, bytes] = {
            number: bytes(letters[letter] for letter in token)
            for token, number in tokenizer["model"]["vocab"].items()
            if all(letter in letters for letter in token)
        }
        for added in tokenizer["added_tokens"]:
            self._bytes[added["id"]] = b"" if added["special"] else added["content"].encode()

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; bytes that are no valid UTF-8 become U+FFFD."""
        return b"".join(self._bytes.get(token, b"") for token in tokens).decode("utf-8", "replace")


def _byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in byte-level BPE vocabularies (openai/gpt-2, src/encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
