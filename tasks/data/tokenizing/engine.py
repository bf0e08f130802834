"""What turns texts into token ids: gigatoken where it can, `tokenizers` where it cannot, and the proof that both agree.

Which tokenizer it is: tasks/data/tokenizing/tokenizer.py. The beginning and end of a document are put here, the end-of-document
token by whoever writes (tasks/data/tokenizing/units.py).
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.common.errors import IntegrityError
from tasks.data.tokenizing.tokenizer import OpenedTokenizer, load

AWKWARD = (
    "",
    " ",
    "\n\n \t\r\n",
    "\ufeff",
    "a\x00b",
    "héllo e\u0301 ﬁ 中文字符 ▁lower",
    "😀👩‍👩‍👧 \U0001d518\uffff",
    "don't I'LL we've  two   spaces\r\n\tdef f(x):\n        return 1234567",
    " leading and trailing ",
    "<|endoftext|> </s> <s> <unk> <pad>",
)
SMALL = 2000
"""Mean characters of a document under which many are encoded in one call."""
MANY = 64
"""Documents from which that is worth its imports: awkward takes half a second."""
CHANGED = "\u0295"
"""What is something else since Unicode 17: no lower-case letter."""
SLOW_CHARACTERS = 1 << 20
"""Characters that `tokenizers` encodes at once: what it returns takes about 100 bytes a token."""
SAMPLE_DOCUMENTS = 32
"""On which the engines must agree; of small ones more than MANY, so that both ways of the fast engine are tried."""
SAMPLE_CHARACTERS = 2000


@dataclass(frozen=True)
class Encoded:
    """The tokens of many documents, one after the other."""

    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    """Tokens of each document."""


class Disagreement(IntegrityError):
    """The fast engine gives other tokens than `tokenizers` for a document."""


class Engine(Protocol):
    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The documents' own tokens, with nothing around them."""


class Gigatoken:
    """The fast one: byte-level and SentencePiece-like BPE. `tokenizers` gets the documents with code points of `unsettled`."""

    name = "gigatoken"

    def __init__(self, tokenizer: OpenedTokenizer) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(tokenizer.rules)
        self._reference = Tokenizers(tokenizer)
        self._unsettled = unsettled(nfc="NFC" in repr(load(tokenizer.rules).normalizer))

    def encode(self, texts: Sequence[str]) -> Encoded:
        odd = np.fromiter(map(self._is_unsettled, texts), bool, len(texts))
        if not odd.any():
            return self._encode(texts)
        slow = self._reference.encode(list(compress(texts, odd)))
        fast = self._encode(list(compress(texts, ~odd)))
        lengths = np.empty(len(texts), np.int64)
        lengths[odd], lengths[~odd] = slow.lengths, fast.lengths
        of_odd = np.repeat(odd, lengths)
        tokens = np.empty(len(of_odd), np.uint32)
        tokens[of_odd], tokens[~of_odd] = slow.tokens, fast.tokens
        return Encoded(tokens, lengths)

    def _is_unsettled(self, text: str) -> bool:
        if text.isascii():
            return False
        return bool(self._unsettled.take(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)).any())

    def _encode(self, texts: Sequence[str]) -> Encoded:
        if len(texts) > MANY and _are_small(texts):
            layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
            offsets = np.asarray(layout.offsets.data, np.int64)
            return Encoded(layout.content.data[offsets[0] : offsets[-1]], np.diff(offsets))
        results = [self._tokenizer.encode(text) for text in texts]
        lengths = np.fromiter(map(len, results), np.int64, len(results))
        return Encoded(np.concatenate(results) if results else np.empty(0, np.uint32), lengths)


class Tokenizers:
    """The one that everything else is measured by; slow."""

    name = "tokenizers"

    def __init__(self, tokenizer: OpenedTokenizer) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers use the cores
        self._tokenizer = load(tokenizer.rules)

    def encode(self, texts: Sequence[str]) -> Encoded:
        lengths: list[int] = []
        parts = [np.empty(0, np.uint32)]
        for some in _bounded(texts):
            result = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            lengths += [len(encoding) for encoding in result]
            parts += [np.asarray(encoding.ids, np.uint32) for encoding in result]
        return Encoded(np.concatenate(parts), np.asarray(lengths, np.int64))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


@lru_cache(maxsize=2)
def unsettled(*, nfc: bool) -> NDArray[np.bool_]:
    """By code point, whether the engines may take it for different things, shape [0x110000].

    Their Unicode tables are of different years: in doubt is what `tokenizers` knows nothing of, and CHANGED. Its NFC is older;
    with `nfc`, the normalizer, the marks and compositions that it orders otherwise than Python, and what Python knows nothing of.
    """
    from tokenizers import Regex, normalizers

    points = (*range(0xD800), *range(0xE000, 0x110000))
    result = np.ones(0x110000, bool)
    known = normalizers.Replace(Regex(r"\p{Cn}+"), "").normalize_str("".join(map(chr, points)))
    result[np.frombuffer(known.encode("utf-32-le"), np.uint32)] = False
    result[list(map(ord, CHANGED))] = True
    if nfc:
        normalize = normalizers.NFC().normalize_str
        for character in map(chr, range(0x300, 0x40000)):
            result[ord(character)] |= unicodedata.category(character) == "Cn"
            parts = unicodedata.normalize("NFD", character)
            if parts != character or unicodedata.category(character)[0] == "M":
                # a mark that is none there keeps those around it apart
                tried = (parts, f"a{character}\u0323\u0301{character}")
                if any(normalize(text) != unicodedata.normalize("NFC", text) for text in tried):
                    result[[ord(part) for part in (character, *parts)]] = True
    return result


@dataclass(frozen=True)
class Choice:
    """The engine that a corpus is encoded with, and why it is not the fast one."""

    engine: Engine
    reason: str = ""


def choose(tokenizer: OpenedTokenizer, texts: Sequence[str]) -> Choice:
    """gigatoken when it gives the same tokens as `tokenizers` for awkward strings and a sample of the documents."""
    reference = Tokenizers(tokenizer)
    try:
        fast = Gigatoken(tokenizer)
    except ModuleNotFoundError:
        return Choice(reference, "gigatoken is not installed")
    except Exception as error:  # noqa: BLE001 - what it does not support it says in many types
        return Choice(reference, f"gigatoken does not support this tokenizer: {str(error).splitlines()[0]}")
    some = texts[: 2 * MANY if _are_small(texts) else SAMPLE_DOCUMENTS]
    sample = [*AWKWARD, *(text[:SAMPLE_CHARACTERS] for text in some)]
    if (text := disagreement(fast, reference, sample)) is not None:
        return Choice(reference, f"gigatoken and tokenizers disagree on {text[:40]!r}")
    return Choice(fast)


def disagreement(one: Engine, other: Engine, texts: Sequence[str]) -> str | None:
    """The first text that two engines encode differently."""
    a, b = one.encode(texts), other.encode(texts)
    if np.array_equal(a.lengths, b.lengths) and np.array_equal(a.tokens, b.tokens):
        return None
    for text in texts:
        if not np.array_equal(one.encode([text]).tokens, other.encode([text]).tokens):
            return text
    return texts[0]


def require_agreement(engine: Engine, tokenizer: OpenedTokenizer, texts: Sequence[str]) -> None:
    """Raise Disagreement when the first or the last of some texts is encoded otherwise by `tokenizers`."""
    if engine.name == Tokenizers.name or not texts:
        return
    sample = [text[:SAMPLE_CHARACTERS] for text in (texts[0], texts[-1])]
    if (text := disagreement(engine, Tokenizers(tokenizer), sample)) is not None:
        raise Disagreement(f"{engine.name} and tokenizers disagree on {text[:40]!r}")


def frame(
    encoded: Encoded, tokenizer: OpenedTokenizer, eod: int | None
) -> tuple[NDArray[np.number], NDArray[np.int32]]:
    """Tokens in the type of the file, and lengths, with what stands around a document and `eod` after it.

    A document without any token stays without: Megatron writes a mark for it and no sequence.
    """
    before, after = tokenizer.prefix, tokenizer.suffix
    lengths = encoded.lengths + (len(before) + len(after))
    if eod is not None:
        after = (*after, eod)
        lengths = lengths + (lengths > 0)
    tokens = np.empty(int(lengths.sum()), tokenizer.dtype)
    own = np.ones(len(tokens), bool)
    ends = np.cumsum(lengths)[lengths > 0]
    starts = ends - lengths[lengths > 0]
    for places, values in ((starts, before), (ends - len(after), after)):
        for offset, value in enumerate(values):
            tokens[places + offset] = value
            own[places + offset] = False
    tokens[own] = encoded.tokens
    return tokens, lengths.astype(np.int32)


def _are_small(texts: Sequence[str]) -> bool:
    return sum(map(len, texts)) < SMALL * len(texts)


def _bounded(texts: Sequence[str]) -> Any:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= SLOW_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some
