"""Every code point is split by gigatoken as by `tokenizers`, or its documents are given to `tokenizers`.

The tokenizers here show where a text is split: they merge the first and the last byte of a character with what stands beside it.
"""

from pathlib import Path

import numpy as np
import pytest

from tasks.data.tokenizing.engine import Gigatoken, Tokenizers, choose, unsettled
from tasks.data.tokenizing.tokenizer import OpenedTokenizer

pytestmark = pytest.mark.unit

CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of o200k: it looks at letters' case, marks and numbers."""
MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Qwen 3.5."""
NEW = "\ua7f1\u088f\U00011de0\U000323b0\u0295"
"""Of Unicode 17: letters, and a digit; the last one is old, and a lower-case letter no longer."""
PROBE = "a{0}b1{0}2 {0}!{0}A{0}B\n"
PATTERNS = {"gpt2": "", "o200k": CASED, "qwen": MARKED}
POINTS = [*range(0x80, 0xD800), *range(0xE000, 0xF0000), 0xF0000, 0x10FFFD]
"""Of the private planes the ends: 131,000 are alike."""


def revealing(pattern="", normalizer=None):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    byte = _letters()
    vocabulary = {letter: number for number, letter in enumerate(byte)}
    pairs = [(x, y) for x in b"aAbB12 !" for y in range(0x80, 0x100)]
    merges = [(byte[x], byte[y]) for pair in pairs for x, y in (pair, pair[::-1])]
    vocabulary |= {x + y: 256 + number for number, (x, y) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_]) if split else bytes_
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    return OpenedTokenizer(Path("revealing"), made.to_str(), len(vocabulary), None, (), ())


def _letters():
    """GPT-2's letter of each byte."""
    shown = [*range(ord("!"), 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def different(tokenizer, points, probe=PROBE):
    """The code points whose probes are encoded differently."""
    texts = [probe.format(chr(point)) for point in points]
    a, b = (engine.encode(texts) for engine in (Gigatoken(tokenizer), Tokenizers(tokenizer)))
    if np.array_equal(a.tokens, b.tokens) and np.array_equal(a.lengths, b.lengths):
        return []
    each = [np.split(found.tokens, np.cumsum(found.lengths)[:-1]) for found in (a, b)]
    return [f"{point:X}" for point, x, y in zip(points, *each, strict=True) if not np.array_equal(x, y)]


def settled_points(*, nfc=False):
    doubts = unsettled(nfc=nfc)
    return [point for point in POINTS if not doubts[point]]


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_code_point_that_is_not_in_doubt_is_split_alike(pattern):
    tokenizer = revealing(PATTERNS[pattern])
    assert different(tokenizer, settled_points()) == []


def test_the_code_points_that_are_not_in_doubt_are_split_alike():
    """All letters and marks but for ideographs, syllables and private use, of which it looks at some."""
    tokenizer = revealing(CASED)
    settled = settled_points()
    assert 150_000 < len(settled) < 170_000
    assert different(tokenizer, [point for point in settled if point % 32 == 0 or not _alike(point)]) == []


def _alike(point):
    return 0x3400 <= point < 0xA000 or 0xAC00 <= point < 0xF900 or 0x13000 <= point < 0x19000 or point >= 0x20000


def test_marks_are_ordered_and_composed_alike_where_they_are_not_in_doubt():
    from tokenizers import normalizers

    tokenizer = revealing(MARKED, normalizers.NFC())
    settled = [point for point in settled_points(nfc=True) if not _alike(point)]
    assert different(tokenizer, settled, "a{0}\u0323\u0301{0}") == []


@pytest.mark.parametrize("pattern", PATTERNS)
def test_documents_with_newer_characters_are_encoded_as_tokenizers_does(pattern):
    tokenizer = revealing(PATTERNS[pattern])
    texts = ["plain", f"a{NEW}b", "déjà vu ’", *(PROBE.format(each) for each in NEW), "", "the last one"]
    choice = choose(tokenizer, texts)
    assert choice.engine.name == "gigatoken"
    for some in (texts, texts[1:2], texts * 20):
        found, wanted = choice.engine.encode(some), Tokenizers(tokenizer).encode(some)
        assert np.array_equal(found.tokens, wanted.tokens) and np.array_equal(found.lengths, wanted.lengths)


def test_newer_marks_are_ordered_as_tokenizers_does():
    from tokenizers import normalizers

    tokenizer = revealing(MARKED, normalizers.NFC())
    assert different(tokenizer, [0x8CA, 0x1DF6, 0x11938, 0xA7F1], "a{0}\u0323\u0301{0}\n\U00011935\U00011930") == []


def test_common_text_of_many_scripts_is_not_in_doubt():
    doubts = unsettled(nfc=False)
    assert not doubts[[ord(each) for each in "é’中ഺർৎမ်ẞ😀🩷₿️‍"]].any()
