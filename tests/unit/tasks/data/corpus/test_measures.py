"""The cheap measures of a batch beside the same ones taken character by character."""

import random

import numpy as np
import pytest

from tasks.data.corpus import measures
from tasks.data.corpus.measures import (
    CLASSES,
    Texts,
    classes,
    content_hashes,
    control_shares,
    heldout,
    repeated_share,
    replacement_shares,
)
from tasks.data.corpus.tokens import CHUNK, ngrams, read_words
from tasks.data.tokenizing.splits import split_of

pytestmark = pytest.mark.unit

ALPHABET = "abcXYZ 019_\t\n\r\x00\x1b\x7fäßéλжшאم\u0e01中文かな한글😀\ufffd“—€\u1ea1"


def drawn(seed, count=200):
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(0, 80))) for _ in range(count)]


def test_measures_of_a_batch_are_those_of_each_character():
    found = drawn(1)
    texts = Texts.of(found)
    bad = [sum((c < " " and c not in "\t\n\r") or c == "\x7f" for c in text) / max(len(text), 1) for text in found]
    assert control_shares(texts) == pytest.approx(bad)
    assert replacement_shares(texts) == pytest.approx([t.count("\ufffd") / max(len(t), 1) for t in found])
    assert classes(texts.histogram).sum() == sum(map(len, found))
    assert texts.histogram.sum() == sum(len(text.encode()) for text in found)
    assert heldout(texts, 0.3).tolist() == [split_of(text, (0.7, 0.3)) == 1 for text in found]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("letters", "aZ"), ("digits", "09"), ("space", " \t\n\r"), ("punctuation", "!~_«“—→€"), ("control", "\x00\x0b\x1f\x7f"),
        ("latin", "äßéłŞ"), ("greek", "λΩ"), ("cyrillic", "жЯ"), ("arabic_hebrew", "אم"), ("indic_thai", "กहத"),
        ("cjk", "中文かなカ"), ("hangul", "한글"), ("emoji_other", "😀𝒳"), ("other", "\ufffdաა\ue000"),
    ],
)  # fmt: skip
def test_every_class_has_its_characters(name, text):
    assert dict(zip(CLASSES, classes(Texts.of([text]).histogram).tolist(), strict=True)) == {
        each: len(text) if each == name else 0 for each in CLASSES
    }


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0), ("\n\n\n", 0), ("one line", 0), ("a\nb\nc", 0), ("ab\nab", 0.5), ("ab\nab\n", 0.5), ("a\n\na\n\na", 2 / 3),
        ("   \n   \nab", 0), ("é\né\nx", 1 / 3), ("ab\r\nab\r\n", 0.5), (" a\na", 0),
    ],
)  # fmt: skip
def test_repeated_lines_are_counted_by_characters(text, share):
    assert repeated_share(text) == pytest.approx(share)


def test_a_batch_larger_than_a_window_is_measured_whole():
    texts = Texts.of(["a\x00" * 700_000, "b" * 3, "\ufffd" * 500_001])
    assert control_shares(texts).tolist() == [0.5, 0, 0]
    assert replacement_shares(texts).tolist() == [0, 0, 1]
    assert texts.histogram[ord("a")] == 700_000


def test_hashes_tell_documents_apart():
    found = sorted(set(drawn(2, 500)))
    hashes = content_hashes(Texts.of(found + found))
    assert (hashes[: len(found)] == hashes[len(found) :]).all()
    assert len({tuple(row) for row in hashes.tolist()}) == len(found)


def words(*texts):
    made = Texts.of(list(texts))
    return read_words(made.buffer, made.starts)


def test_words_are_runs_of_letters_whatever_their_case_and_what_is_between():
    found = words("Hello, big_World 42!", "  hello -- BIG_WORLD\n42", "", "héllo big_world 42")
    assert found.bounds.tolist() == [0, 3, 6, 6, 9]
    assert (found.hashes[:3] == found.hashes[3:6]).all()
    assert found.hashes[6] != found.hashes[0] and (found.hashes[7:] == found.hashes[1:3]).all()


def test_chinese_characters_are_words_of_their_own():
    found = words("中文 字", "中 文字", "ab中c")
    assert found.bounds.tolist() == [0, 3, 6, 8]
    assert (found.hashes[:3] == found.hashes[3:6]).all()


def test_a_words_hash_does_not_depend_on_where_it_stands():
    rng = random.Random(3)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randrange(1, 20))) for _ in range(300)]
    chosen = rng.choices(vocabulary, k=4 * CHUNK // 10)
    found = words(" ".join(chosen)).hashes
    assert len(found) == len(chosen)
    known = {}
    for word, value in zip(chosen, found.tolist(), strict=True):
        assert known.setdefault(word, value) == value
    assert len(set(known.values())) == len(set(chosen))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_runs_of_words_do_not_cross_documents(n):
    texts = [" ".join(f"w{number % 7}x{number}" for number in range(size)) for size in (0, 1, 4, 5, 12, 13, 14, 40, 2)]
    found = ngrams(words(*texts), n)
    assert np.diff(found.bounds).tolist() == [max(size - n + 1, 0) for size in (0, 1, 4, 5, 12, 13, 14, 40, 2)]
    alone = np.concatenate([ngrams(words(text), n).hashes for text in texts])
    assert (found.hashes == alone).all()
    longest = found.hashes[found.bounds[7] : found.bounds[8]]
    assert len(np.unique(longest)) == len(longest)


def test_bins_hold_their_lower_edge():
    assert measures.count(np.array([-1.0, 0, 0.5, 1, 2, 9]), (0, 1, 2)).tolist() == [3, 1, 2]
    for edges in measures.EDGES.values():
        assert list(edges) == sorted(set(edges)) and edges[0] in (0, 1)
