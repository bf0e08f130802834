"""What is measured of single documents, and what may be told of them."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks.data.drift.columns import Kept
from tasks.data.drift.comparison import may_be_told, tell
from tasks.data.drift.features import FORMAT, measure, open_vocabulary, together

pytestmark = pytest.mark.unit


def measured(*texts, vocabulary=None):
    return measure(list(texts), np.array([len(text) for text in texts]), vocabulary)


@pytest.mark.parametrize(
    ("label", "with_it", "without"),
    [
        ("replacement characters", "a \ufffd b", "a b"),
        ("control characters", "a \x01 b", "a\tb\r\n"),
        ("mojibake", "itâ€™s cafÃ©", "it’s café"),
        ("carriage returns", "a\r\nb\r\n", "a\nb\n"),
        ("mixed line ends", "a\r\nb\n", "a\r\nb\r\n"),
        ("invisible characters", "a\u200bb", "ab"),
        ("escaped characters", "a &amp; b", "a & b"),
        ("mark-up", "<p>a</p>", "a < b / c > d"),
        ("indentation by tabs", "if a:\n\tb\n", "if a:\n    b\n"),
        ("indentation not by four", "if a:\n  b\n", "if a:\n    b\n"),
        ("trailing blanks", "a = 1 \nb\n", "a = 1\nb\n"),
        ("long lines", "a " * 51 + "\n", "a\n" * 51),
        ("camel case", "someName = otherName", "some_name = other_name"),
        ("snake case", "some_name = other_name", "someName = otherName"),
    ],
)
def test_formats_are_seen(label, with_it, without):
    found = measured(with_it, without).format[:, FORMAT.index(label)]
    assert found[0] > 0 and found[1] == 0


def test_documents_are_measured_one_by_one():
    found = measured("One line here is the same\nOne line here is the same\n", "", "x = 1")
    assert found.lengths.tolist() == [52, 0, 5] and found.repeated[0] == pytest.approx(0.5, abs=0.02)
    assert found.words.sum(axis=1).ravel().tolist() == [[12, 0, 2]]
    assert found.lines.sum(axis=1).ravel().tolist() == [[1, 0, 0]]
    assert found.languages[1] == "none" and found.classes.sum(axis=1).tolist() == [52, 0, 5]
    assert found.tokens is None


def test_languages_are_told_apart():
    english = "The quick brown fox jumps over the lazy dog, and nobody in the house has seen it."
    french = "Le renard brun saute par-dessus le chien paresseux, et personne ne l'a vu dans la maison."
    assert measured(english, french).languages.tolist() == ["en", "fr"]


def test_parts_put_together_are_what_was_measured_at_once():
    texts = ["alpha beta", "gamma", "delta alpha", ""]
    whole, parts = measured(*texts), together([measured(*texts[:2]), measured(*texts[2:])])
    assert (whole.words != parts.words).nnz == 0 and (whole.format == parts.format).all()
    chosen = whole.rows([2, 0])
    assert len(chosen) == 2 and (chosen.words != measured(texts[2], texts[0]).words).nnz == 0


@pytest.fixture
def byte_level(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the word the word é é é é"] * 20, trainer)
    return saved(tokenizer, tmp_path / "byte-level")


def saved(tokenizer, folder):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_bytes_of_characters_that_the_tokenizer_has_not_learnt_are_counted(byte_level):
    vocabulary = open_vocabulary(byte_level, ["the word"])
    found = measured("the word", "é", "ж", "中文", vocabulary=vocabulary)
    assert found.fallback.tolist() == [0, 0, 2, 6] and not found.unknown.any()
    assert vocabulary.written(found.tokens[0].indices[0]).strip() != ""


def test_unknown_tokens_are_counted(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "word": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    below = tmp_path / "tokens"
    below.mkdir()
    saved(tokenizer, below / "tokenizer")
    found = measured("the word", "the other words", vocabulary=open_vocabulary(below, ["the word"]))
    assert found.unknown.tolist() == [0, 2] and not found.fallback.any()


def test_what_may_be_a_secret_or_a_persons_is_not_told():
    secret = [
        "AKIAIOSFODNN7EXAMPLE".lower(),
        "ghp_" + "a1b2c3d4e5f6" * 3,
        "4111111111111111",
        "x" * 30,
        "9f86d081884c7d65",
    ]
    assert may_be_told([*secret, "jane@company.org", "42", "a", "return", "été", "utf8"]) == ["return", "été", "utf8"]


def test_words_that_tell_sides_apart_are_named_and_those_of_secrets_are_not():
    old = [f"def function{n}(): return value" for n in range(40)]
    token, address = "ghp_" + "aBcDeFgHiJkL" * 3, "jane.rumpelstiltskin@headway-company.org"
    new = [f"class Thing{n}: attribute = value  # {token} {address}" for n in range(40)]
    both = measured(*old, *new)
    told = tell(Kept.of(both.words), np.arange(80) >= 40, [*old, *new])
    names = {each.feature: each for each in told}
    assert {"class", "attribute", "def", "return"} <= set(names) and "value" not in names
    assert (
        names["class"].new == 1.0
        and names["class"].reference == 0.0
        and names["class"].weight > 0 > names["def"].weight
    )
    assert not {"jane", "rumpelstiltskin", "headway", "company", token.lower()} & set(names)
