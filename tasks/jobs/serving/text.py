"""Tokens into text as they come: whole characters only, held back while a stop text may still begin in them.

Encoding is onnxruntime-genai's; the answer's end is decided in batch.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any


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
        for added in tokenizer["added_tokens"]:
            self._bytes[added["id"]] = b"" if added["special"] else added["content"].encode()

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; none for a special token, or one that the vocabulary lacks."""
        return self._bytes.get(token, b"")

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
        payload = self._tell(self._decoder.decode(b"", True))
        rest, self._held = self._held, ""
        return payload + rest

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
