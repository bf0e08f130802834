"""The profile of a corpus and its judgement by the real Great Expectations suite."""

import json
import math

import pytest

from tasks.data_config import ValidationConfig
from tasks.formats.documents import Document
from tasks.validate import CLASSES, _summary, judge, profile

NAMES = ["documents", "too short", "too long", "control characters", "replacement characters", "exact duplicates"]
GOOD = [f"def function_{number}():\n\treturn {number}\r\n" for number in range(20)]


def profiled(*texts):
    return profile(Document(text, "a.jsonl", number) for number, text in enumerate(texts, 1))


def verdict(texts, **limits):
    """Names of the failed checks, and all checks by name."""
    checks = judge(profiled(*texts)[0], ValidationConfig(**limits))
    assert sorted(check.name for check in checks) == sorted(NAMES)
    return [check.name for check in checks if not check.passed], {check.name: check for check in checks}


def test_a_profile_counts_characters_bytes_shares_and_repetitions():
    rows, classes = profiled("ab1 \n", "äö", "", "ab1 \n", "\x00\x01ab\x7f", "\ufffdabc")
    assert rows["characters"] == [5, 2, 0, 5, 5, 4]
    assert rows["bytes"] == [5, 4, 0, 5, 5, 6]
    assert rows["control"] == [0, 0, 0, 0, 3 / 5, 0]
    assert rows["replacement"] == [0, 0, 0, 0, 0, 1 / 4]
    assert rows["duplicate"] == [False, False, False, True, False, False]
    assert dict(zip(CLASSES, classes.tolist(), strict=True)) == {
        "letters": 9, "digits": 2, "space": 4, "punctuation": 0, "other": 10,
    }  # fmt: skip
    assert classes.sum() == sum(rows["bytes"])


def test_good_text_passes_every_check():
    failed, checks = verdict(GOOD)
    assert failed == []
    assert checks["documents"].measured == 20
    assert checks["documents"].limit == ">= 10"
    assert all(check.remedy for check in checks.values())


def test_what_looks_like_a_binary_is_refused():
    failed, checks = verdict([*GOOD, "\x7fELF\x02\x01\x01\x00\x00\x00" * 9, "caf\ufffd na\ufffdve"])
    assert failed == ["control characters", "replacement characters"]
    assert checks["control characters"].measured == pytest.approx(1 / 22)
    assert checks["control characters"].limit == "<= 1.00% of documents"
    assert "UTF-8" in checks["replacement characters"].remedy


def test_repeated_documents_are_refused_from_the_limit_on():
    assert verdict([*GOOD, *GOOD[:5]])[0] == []  # 5 of 25: the limit itself passes
    failed, checks = verdict([*GOOD, *GOOD[:6]])
    assert failed == ["exact duplicates"]
    assert checks["exact duplicates"].measured == pytest.approx(6 / 26)


def test_short_and_long_documents_are_counted_against_their_shares():
    assert verdict([*GOOD[:19], ""])[0] == []  # 1 of 20: the limit itself passes
    failed, checks = verdict([*GOOD[:17], "", "a", "b" * 200], min_characters=2, max_characters=100)
    assert failed == ["too short", "too long"]
    assert checks["too short"].measured == pytest.approx(2 / 20)
    assert checks["too long"].measured == pytest.approx(1 / 20)
    assert verdict([*GOOD[:17], "", "a", "b" * 200], max_short_share=0.1, max_long_share=0.05)[0] == []


def test_too_few_documents_and_none_at_all_are_refused():
    failed, checks = verdict(GOOD[:9])
    assert failed == ["documents"]
    assert checks["documents"].measured == 9
    failed, checks = verdict([])
    assert "documents" in failed
    assert not any(math.isnan(check.measured) for check in checks.values())


def test_the_summary_is_json_of_the_whole_corpus():
    rows, classes = profiled(*GOOD, "x" * 5000, GOOD[0], "")
    summary = json.loads(json.dumps(_summary(rows, classes, ()), allow_nan=False))
    assert summary["documents"] == 23
    assert summary["characters"] == sum(len(text) for text in GOOD) + 5000 + len(GOOD[0])
    assert summary["duplicates"] == 1
    assert sum(summary["lengths"]["counts"]) == 23
    assert len(summary["lengths"]["edges"]) == len(summary["lengths"]["counts"]) + 1
    assert sum(summary["classes"].values()) == pytest.approx(1)
    empty = json.loads(json.dumps(_summary(*profiled(), ()), allow_nan=False))
    assert (empty["documents"], empty["bytes"]) == (0, 0)
