"""Splits by content: the rule is a contract, for a document must never change sides."""

import hashlib

import pytest

from tasks.data.tokenizing.splits import Splits, parse_splits, split_of

TEXTS = [f"document {i} é" for i in range(4000)]


@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.2])
def test_held_out_is_what_has_a_hash_below_the_share(fraction):
    for text in TEXTS:
        first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        assert split_of(text, (1 - fraction, fraction)) == (first < fraction * 2**64)


def test_three_shares_hold_about_what_they_say():
    splits = parse_splits("0.8,0.15,0.05")
    counts = [0, 0, 0]
    for text in TEXTS:
        counts[splits.of(text)] += 1
    assert splits.names == ("train", "valid", "test")
    assert counts == pytest.approx([3200, 600, 200], rel=0.15)


def test_the_same_text_is_always_on_the_same_side():
    splits = parse_splits("0.5,0.5")
    assert splits.names == ("train", "heldout")
    assert {splits.of("twice") for _ in range(10)} == {splits.of("twice")}


def test_no_shares_are_one_split_without_a_name():
    assert parse_splits("") == Splits()
    assert (parse_splits("").names, parse_splits("").of("x")) == (("",), 0)


@pytest.mark.parametrize("text", ["0.9,0.2", "1,0", "a,b", "0.5", "0.25,0.25,0.25,0.25", "-0.5,1.5", "nan,0.5"])
def test_what_are_no_shares_of_a_whole_is_refused(text):
    with pytest.raises(ValueError, match="--split"):
        parse_splits(text)
