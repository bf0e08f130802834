"""The loss since promotion: its interval, documents that are the same, slices, and the checks made of it. Seeds are fixed."""

import numpy as np
import pytest

from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.revalidation import PerformanceConfig
from tasks.evaluation.performance import (
    Measured,
    bigram_checks,
    by_kind,
    by_length,
    compared,
    judge_slices,
    kind_of,
    loss_checks,
    loss_since,
    loss_status,
    measured,
    pairs,
    plain,
)

DRAWN = {"samples": 400, "confidence": 0.95, "seed": 7}


def documents(generator, count, *, rate=2.0, kinds=("latin",), names="d"):
    """Documents of about `rate` bits a byte, as hard as documents are: 20 % apart."""
    sizes = generator.lognormal(6.5, 1.0, count).round() + 1
    rates = rate * generator.normal(1.0, 0.2, count).clip(0.2)
    return Measured(
        rates * sizes,
        sizes,
        tuple(f"{names}{number}" for number in range(count)),
        tuple(kinds[number % len(kinds)] for number in range(count)),
    )


def evaluated(side):
    told = {"model_bits": side.bits.tolist(), "bytes": side.sizes.tolist()}
    return {
        "documents": {**told, "hashes": list(side.hashes), "kinds": list(side.kinds)},
        "evaluation": {"perplexity": 9.5},
    }


@pytest.mark.parametrize(
    "text, kind",
    [
        ("def f(x):\n    return x + 1\n", "latin"),
        ("Größe, façade, naïve", "latin"),
        ("съешь ещё этих мягких булок (x)", "cyrillic"),
        ("3.14 2.71, 1.41\n" * 3, "digits"),
        ("漢字とかな kana", "cjk"),
        (" \n...!", "none"),
    ],
)
def test_the_kind_of_a_document_is_the_script_of_most_of_its_letters(text, kind):
    assert kind_of(text) == kind


def test_the_same_documents_have_no_loss_and_no_doubt():
    side = documents(np.random.default_rng(1), 60)
    loss = loss_since(side, side, **DRAWN)
    assert (loss.estimate, loss.low, loss.high) == (0.0, 0.0, 0.0)


def test_documents_in_both_make_the_interval_narrower_and_are_paired_once_each():
    generator = np.random.default_rng(2)
    before, more = documents(generator, 100), documents(generator, 20, names="n")
    new = Measured(
        np.concatenate((before.bits, more.bits)),
        np.concatenate((before.sizes, more.sizes)),
        before.hashes + more.hashes,
    )
    blind = loss_since(Measured(new.bits, new.sizes), before, **DRAWN)
    seen = loss_since(new, before, **DRAWN)
    assert seen.estimate == pytest.approx(blind.estimate)
    assert seen.high - seen.low < 0.7 * (blind.high - blind.low)
    twice = Measured(before.bits, before.sizes, ("same",) * 100)
    assert len(pairs(twice, Measured(before.bits[:3], before.sizes[:3], ("same",) * 3))) == 3


def test_the_interval_holds_what_it_promises_where_nothing_changed():
    """A right 95 % interval misses 5 of 100 on average, and more than 11 of 100 in 1 % of such tests."""
    generator = np.random.default_rng(3)
    missed = 0
    for _ in range(100):
        loss = loss_since(documents(generator, 150, names="a"), documents(generator, 150, names="b"), **DRAWN)
        missed += not loss.low <= 0 <= loss.high
    assert missed <= 11


def test_a_side_without_documents_is_refused():
    side = documents(np.random.default_rng(4), 5)
    with pytest.raises(ValueError, match="0 new documents against 5"):
        loss_since(side.part(np.zeros(5, bool)), side, **DRAWN)


def test_slices_of_length_are_cut_where_the_promotion_was_and_hold_every_document_once():
    generator = np.random.default_rng(5)
    new, before = documents(generator, 300), documents(generator, 200)
    found = list(by_length(new, before))
    assert len(found) == 4 and [len(each.before) for each in found] == [50, 50, 50, 50]
    assert sum(len(each.new) for each in found) == 300
    assert found[0].name.startswith("length up to") and found[-1].name.startswith("length over")
    same = Measured(np.ones(9), np.full(9, 80.0))
    assert [(len(each.new), each.name) for each in by_length(same, same)] == [
        (9, "length up to 80 B"),
        (0, "length over 80 B"),
    ]


def test_slices_of_kind_need_kinds_on_both_sides_and_more_than_one():
    generator = np.random.default_rng(6)
    mixed, plain = documents(generator, 40, kinds=("latin", "cyrillic")), documents(generator, 40)
    assert [(each.name, len(each.new), len(each.before)) for each in by_kind(mixed, plain)] == [
        ("script cyrillic", 20, 0),
        ("script latin", 20, 40),
    ]
    assert list(by_kind(plain, plain)) == []
    old = measured({"model_bits": [1.0, 2.0], "bytes": [3, 4]})
    assert list(by_kind(mixed, old)) == [] and pairs(mixed, old) == []


def test_a_slice_that_got_worse_fails_and_one_without_documents_is_insufficient():
    generator = np.random.default_rng(8)
    before = documents(generator, 200, kinds=("latin", "digits"), names="b")
    good = documents(generator, 100, names="g")
    bad = documents(generator, 100, rate=3.2, kinds=("digits",), names="w")
    rare = documents(generator, 3, kinds=("cjk",), names="r")
    new = Measured(*(np.concatenate((good.bits, bad.bits, rare.bits)), np.concatenate((good.sizes, bad.sizes, rare.sizes))),
                   good.hashes + bad.hashes + rare.hashes, good.kinds + bad.kinds + rare.kinds)  # fmt: skip
    told = {each["slice"]: each for each in judge_slices(new, before, PerformanceConfig(), **DRAWN)}
    assert told["script digits"]["status"] == "failed" and told["script digits"]["loss"]["low"] > 0.25
    assert told["script latin"]["status"] == "passed"
    assert (told["script cjk"]["status"], told["script cjk"]["loss"]) == ("insufficient", None)
    assert told["script cjk"]["promotion"] is None and told["script cjk"]["documents"] == 3


@pytest.mark.long
def test_many_slices_of_unchanged_data_fail_no_more_often_than_one_may():
    """With a limit of 0, a slice fails when its interval lies above it: 2.5 % of revalidations, for all slices together."""
    generator = np.random.default_rng(9)
    config, kinds = PerformanceConfig(max_slice_loss=0.0), ("latin", "cyrillic", "cjk", "digits")
    alarms = 0
    for _ in range(60):
        sides = [documents(generator, 400, kinds=kinds, names=name) for name in "ab"]
        told = judge_slices(*sides, config, **DRAWN)
        assert all(each["status"] != "insufficient" for each in told) and len(told) == 8
        alarms += any(each["status"] == "failed" for each in told)
    assert alarms <= 6  # more in 0.1 % of such tests


def test_the_whole_is_judged_by_the_estimate_and_tells_its_interval():
    generator = np.random.default_rng(10)
    before = documents(generator, 30, names="b")
    new = Measured(before.bits * 1.2, before.sizes, tuple(f"n{number}" for number in range(30)))
    drawn = EvaluationConfig(bootstrap_samples=200)
    told = compared(evaluated(new), evaluated(before), PerformanceConfig(), drawn, scored_by="checkpoint/tiny@1")
    assert told["loss"]["estimate"] == pytest.approx(0.2)
    assert told["loss"]["low"] < 0.2 < told["loss"]["high"]
    assert told["new"]["low"] < told["new"]["bits_per_byte"] < told["new"]["high"]
    assert (told["paired"], told["scored_by"], told["new"]["perplexity"]) == (0, "checkpoint/tiny@1", 9.5)
    [since, *_] = loss_checks(told, PerformanceConfig(), ComparisonConfig())
    assert not since.passed and since.measured == pytest.approx(0.2) and "95%" in since.remedy
    assert loss_checks(told, PerformanceConfig(), ComparisonConfig(max_loss_since_promotion=0.3))[0].passed


def unchanged(count, *, trials, seed):
    """How the loss of a champion on unchanged data of so many documents on either side is judged."""
    generator, statuses = np.random.default_rng(seed), []
    for _ in range(trials):
        sides = [documents(generator, count, names=name) for name in "ab"]
        loss = plain(loss_since(*sides, **DRAWN))
        statuses.append(loss_status(loss, PerformanceConfig(), ComparisonConfig()))
    return statuses


def test_few_documents_of_unchanged_data_are_insufficient_and_no_loss():
    few = unchanged(15, trials=60, seed=12)
    assert few.count("failed") <= 5  # 2.5 % of intervals lie above a loss of 0; wider ones miss more
    assert few.count("insufficient") >= 30
    assert unchanged(300, trials=20, seed=13) == ["passed"] * 20


@pytest.mark.parametrize(
    "loss, status",
    [
        ((0.12, -0.10, 0.40), "insufficient"),
        ((0.12, 0.01, 0.24), "failed"),
        ((0.09, 0.07, 0.11), "passed"),
        ((0.02, -0.15, 0.21), "insufficient"),
        ((0.11, -0.01, 0.19), "insufficient"),
        ((0.50, 0.20, 0.90), "failed"),
    ],
)
def test_a_loss_is_judged_by_estimate_and_interval_and_insufficient_is_not_passed(loss, status):
    told = {
        "loss": dict(zip(("estimate", "low", "high"), loss, strict=True)), "new": {"bits_per_byte": 2.2},
        "promotion": {"bits_per_byte": 2.0}, "confidence": 0.95, "slices": [],
    }  # fmt: skip
    [check] = loss_checks(told, PerformanceConfig(), ComparisonConfig())
    assert (check.outcome, check.passed) == (status, status == "passed")
    assert ("max_loss_interval" in check.remedy) is (status == "insufficient")


def test_a_slice_without_enough_documents_makes_no_check():
    generator = np.random.default_rng(11)
    few = evaluated(documents(generator, 12))
    told = compared(few, few, PerformanceConfig(), EvaluationConfig(bootstrap_samples=50), scored_by="x")
    assert {each["status"] for each in told["slices"]} == {"insufficient"}
    assert len(loss_checks(told, PerformanceConfig(), ComparisonConfig())) == 1


def test_the_bigram_must_be_beaten_for_sure():
    checks = bigram_checks({"gain_over_bigram": 0.2, "gain_low": -0.1}, EvaluationConfig(), ComparisonConfig())
    assert [check.passed for check in checks] == [True, False]
