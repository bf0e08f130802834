"""An exported model folder, loaded: encode a prompt, complete it, decode what it said.

The export proves a model with this code and the server answers with it, so what was proven is what is served. No torch
and no transformers: it runs in the serving image. Several answers at once are tasks/jobs/serving/batch.py, over the same graph;
HTTP and queues live in tasks/jobs/serve.py.
"""

from __future__ import annotations

import codecs
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai

from tasks.formats.chat_template import template_of
from tasks.formats.model_folder import opening_of
from tasks.jobs.serving.decoder import Decoder, entropy
from tasks.jobs.serving.runtime import Ask, Contents, Ending, Unfit, read_contents, require_text

# Tokens into text as they come: whole characters only, held back while a stop text may still begin in them.
#
# Encoding is onnxruntime-genai's; the answer's end is decided in batch.py.


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
        # The printable letter that stands for each byte in byte-level BPE vocabularies (openai/gpt-2,
        # src/encoder.py).
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(byte): byte for byte in printable} | {
            chr(256 + place): byte for place, byte in enumerate(others)
        }
        self._bytes: dict[int, bytes] = {
            number: bytes(letters[letter] for letter in token)
            for token, number in tokenizer["model"]["vocab"].items()
            if all(letter in letters for letter in token)
        }
        self._special: dict[int, str] = {}
        for added in tokenizer["added_tokens"]:
            self._bytes[added["id"]] = b"" if added["special"] else added["content"].encode()
            if added["special"]:
                self._special[added["id"]] = added["content"]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; none for a special token, or one that the vocabulary lacks."""
        return self._bytes.get(token, b"")

    def name_of(self, token: int) -> str:
        """A token by itself, as it is shown beside its probability: a special one by its name, half a character as U+FFFD."""
        return self._special.get(token) or self.decode([token])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no valid UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")


class TextStream:
    """The text of one answer as its tokens come. State: the bytes of a character begun, and text that is held back."""

    def __init__(self, text: ByteLevelText, stop: Sequence[str] = ()) -> None:
        self._text, self._stop = text, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """Whether a stop text came; nothing is told after it."""

    def add(self, token: int) -> str:
        """The text that is certain now: whole characters, none that may belong to a stop text."""
        return self._tell(self._decoder.decode(self._text.bytes_of(token)))

    def end(self) -> str:
        """What was held back; of a character that never came whole, U+FFFD."""
        text = self._tell(self._decoder.decode(b"", True))
        rest, self._held = self._held, ""
        return text + rest

    def _tell(self, more: str) -> str:
        if self.stopped:
            return ""
        self._held += more
        places = [place for word in self._stop if (place := self._held.find(word)) >= 0]
        if places:
            self.stopped = True
            payload, self._held = self._held[: min(places)], ""
            return payload
        keep = max((_begun(self._held, word) for word in self._stop), default=0)
        payload, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return payload


def _begun(text: str, word: str) -> int:
    """Characters at the end of a text with which a word may begin."""
    longest = min(len(text), len(word) - 1)
    return next((count for count in range(longest, 0, -1) if word.startswith(text[len(text) - count :])), 0)


genai.disable_telemetry_events()
PROBE = "a"
__all__ = ["ByteLevelText", "Completion", "Generation", "entropy"]
TOKENIZER_BYTES = 256 << 20
"""Files above this size are no part of a tokenizer."""


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
    """A loaded model: its tokenizer, and the graph in `decoder`. One caller at a time."""

    def __init__(self, model: Path | Contents, threads: int, *, rows: int = 1) -> None:
        """Of a folder, or of files that were read and verified. Raises ValueError for a model that cannot be served."""
        contents = model if isinstance(model, Mapping) else read_contents(model, None)
        settings = json.loads(contents["genai_config.json"])["model"]
        self._tokenizer = _tokenizer(contents)
        rules = json.loads(contents["tokenizer.json"])
        self.text = ByteLevelText(rules)
        self.opening = list(opening_of(rules))
        """Tokens that stand before every prompt, as before every document that was measured; none where the model stores none."""
        self._template = template_of(contents)
        self._opens_itself = self._words(PROBE)[: len(self.opening)] == self.opening
        self.decoder = Decoder(contents, settings, threads=threads, rows=rows)
        self.context_length = int(settings["context_length"])
        """Tokens of prompt and completion together."""
        ends = settings["eos_token_id"]
        self.end_tokens: list[int] = ends if isinstance(ends, list) else [ends]

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt behind those that open a document, which one that begins with them does not get twice.

        Raises ValueError when there is nothing to complete or no room left for an answer.
        """
        tokens = self._inside(prompt)
        if tokens[: len(self.opening)] != self.opening:
            tokens = [*self.opening, *tokens]
        return self._fitting(tokens)

    def encode_conversation(self, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """Tokens of a conversation, by the model's chat template, which also writes what opens a document. Raises Unfit."""
        if self._template is None:
            raise Unfit("this model has no chat template: ask POST /v1/completions")
        if tools and not self._template.takes_tools:
            raise Unfit("`tools`: the chat template of this model has no place for them: leave them out")
        try:
            text = self._template.render(messages, tools=tools).text
        except ValueError as error:
            raise Unfit(str(error)) from error
        return self._fitting(self._inside(text))

    def _inside(self, text: str) -> list[int]:
        """Tokens of a text, without those that the tokenizer puts before each by itself."""
        require_text(text)
        tokens = self._words(text)[len(self.opening) if self._opens_itself else 0 :]
        if not tokens:
            raise Unfit("the prompt has no token that this model knows")
        return tokens

    def _fitting(self, tokens: list[int]) -> list[int]:
        if len(tokens) >= self.context_length:
            raise Unfit(
                f"the prompt has {len(tokens)} tokens; prompt and answer may have {self.context_length}, which the model "
                "declares: shorten it, or export the model with a longer export.context_length"
            )
        return tokens

    def _words(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def complete(
        self, prompt: list[int], max_tokens: int, *, temperature: float = 0.0, measure: bool = False
    ) -> Completion:
        """Up to `max_tokens` tokens; temperature 0 is greedy, else the whole distribution is sampled.

        With `measure`, the entropy of the first tokens is told as well, before the temperature.
        """
        from tasks.jobs.serving.batch import Batch

        batch, text = Batch(self), ""
        batch.add(0, Ask("", max_tokens, temperature=temperature, measure=measure), prompt=prompt)
        while True:
            for _, value in batch.step():
                if isinstance(value, Ending):
                    return Completion(list(value.tokens), text, value.finish_reason, value.entropy)
                text += value.text


def _tokenizer(contents: Contents) -> Any:
    """genai's, which reads a folder: a private one of these bytes, which is gone when it has been read."""
    with tempfile.TemporaryDirectory(prefix="headway-tokenizer-") as folder:
        for name, value in contents.items():
            if name.endswith((".json", ".txt", ".model", ".jinja")) and len(value) < TOKENIZER_BYTES:
                (Path(folder) / name).write_bytes(value)
        return genai.Tokenizer(genai.Config(folder))
