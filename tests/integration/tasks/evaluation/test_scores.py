"""Bits per byte and bootstrap intervals: exact estimates, honest coverage, paired draws, speed."""

import time

import numpy as np
import pytest
from waiting import limit

from tasks.evaluation.scores import (
    add_certainty,
    bits_per_byte,
    bits_per_byte_interval,
    calibration_error,
    no_certainty,
    ratio,
    relative_gain,
    relative_loss,
    reliability,
    wilson,
)

SAMPLING = {"samples": 1000, "confidence": 0.95, "seed": 7}


def documents(count, *, seed=0):
    """Bytes of documents, and the bits that a model of 2 bits a byte needs for them."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(100, 5000, count)
    return sizes, 2.0 * sizes * generator.normal(1.0, 0.2, count)


def test_bits_per_byte_is_a_ratio_of_sums_and_not_a_mean_of_ratios():
    assert bits_per_byte([10.0, 300.0], [10, 100]) == pytest.approx(310 / 110)


def test_interval_has_the_width_of_the_delta_method():
    sizes, bits = documents(4000)
    found = bits_per_byte_interval(bits, sizes, **SAMPLING)
    residuals = bits - found.estimate * sizes
    error = residuals.std() * np.sqrt(len(sizes)) / sizes.sum()
    assert found.estimate == pytest.approx(bits.sum() / sizes.sum())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert found.low < found.estimate < found.high


def test_interval_covers_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(200):
        sizes, bits = documents(150, seed=seed)
        found = bits_per_byte_interval(bits, sizes, samples=300, confidence=0.9, seed=seed)
        hits += found.low <= 2.0 <= found.high
    assert 0.84 <= hits / 200 <= 0.96


def test_gain_is_paired_so_hard_documents_do_not_widen_it():
    _, model = documents(300)
    other = model / 0.8
    paired = relative_gain(model, other, **SAMPLING)
    shuffled = relative_gain(model, np.roll(other, 1), **SAMPLING)
    assert paired.estimate == pytest.approx(0.2)
    assert paired.high - paired.low < 1e-9
    assert shuffled.high - shuffled.low > 0.05


def test_loss_is_the_gain_turned_round():
    _, champion = documents(300)
    candidate = champion * np.random.default_rng(3).normal(1.05, 0.1, 300)
    loss = relative_loss(candidate, champion, **SAMPLING)
    gain = relative_gain(candidate, champion, **SAMPLING)
    assert loss.estimate == pytest.approx(candidate.sum() / champion.sum() - 1)
    assert (loss.low, loss.high) == (-gain.high, -gain.low)
    assert 0 < loss.low < loss.estimate < loss.high
    assert loss.high - loss.low < 0.04  # the documents differ by 20 percent, the pairs by 10


def test_the_seed_decides_the_draws():
    sizes, bits = documents(50)
    first = bits_per_byte_interval(bits, sizes, **SAMPLING)
    assert first == bits_per_byte_interval(bits, sizes, **SAMPLING)
    assert first.low != bits_per_byte_interval(bits, sizes, **{**SAMPLING, "seed": 8}).low


def test_a_thousand_samples_of_four_thousand_documents_are_quick():
    sizes, bits = documents(4000)
    durations = []
    for _ in range(3):
        began = time.process_time()
        bits_per_byte_interval(bits, sizes, **SAMPLING)
        durations.append(time.process_time() - began)
    assert min(durations) < limit(0.3)


@pytest.mark.parametrize(
    ("bits", "sizes"), [([1.0, 2.0], [1]), ([float("nan")], [1]), ([1.0], [0]), ([], []), ([[1.0]], [[1]])]
)
def test_what_cannot_be_scored_is_refused(bits, sizes):
    with pytest.raises(ValueError, match="documents"):
        bits_per_byte(bits, sizes)


def test_calibration_is_counted_by_bins():
    """Four tokens in two bins, by hand: |1 - (0.6 + 0.62)| and |1 - (0.95 + 0.94)| right less sure, over four tokens."""
    table = no_certainty(2)
    add_certainty(table, np.array([0, 0, 1, 1]), [0.60, 0.62, 0.95, 0.94], [True, False, True, False])
    assert calibration_error(table) == pytest.approx((0.22 + 0.89) / 4)
    assert calibration_error(table[0]) == pytest.approx(0.22 / 2)
    first, second = reliability(table)
    assert (first["from"], first["to"], first["tokens"]) == (9 / 15, 10 / 15, 2)
    assert (second["probability"], second["accuracy"]) == (pytest.approx(0.945), 0.5)
    add_certainty(table, np.array([0]), [1.0], [True])
    assert reliability(table)[-1]["to"] == 1.0


def test_a_model_that_is_right_as_often_as_it_says_has_no_error():
    generator, table = np.random.default_rng(4), no_certainty(1)
    sure = generator.random(200_000)
    add_certainty(table, np.zeros(len(sure), np.int64), sure, generator.random(len(sure)) < sure)
    assert calibration_error(table) < 0.01


def test_wilsons_interval_holds_for_none_of_few():
    none, all_of = wilson(0, 16, confidence=0.95), wilson(16, 16, confidence=0.95)
    assert (none.estimate, none.low) == (0.0, 0.0) and none.high == pytest.approx(0.1936, abs=1e-4)
    assert all_of.low == pytest.approx(1 - none.high) and all_of.high == pytest.approx(1.0)
    half = wilson(8, 16, confidence=0.95)
    assert (half.low, half.high) == (pytest.approx(0.2800, abs=1e-4), pytest.approx(0.7200, abs=1e-4))
    with pytest.raises(ValueError, match="0 of 0"):
        wilson(0, 0, confidence=0.95)


def test_every_ratio_is_drawn_from_the_same_documents():
    sizes, bits = documents(60)
    assert ratio(bits, sizes, **SAMPLING) == bits_per_byte_interval(bits, sizes, **SAMPLING)
    doubled = ratio(2 * bits, sizes, **SAMPLING)
    assert doubled.low == pytest.approx(2 * ratio(bits, sizes, **SAMPLING).low)


@pytest.mark.parametrize(("count", "most"), [(5, 0.055), (12, 0.05)])
def test_a_model_that_is_worse_by_the_margin_rarely_passes_with_few_documents(count, most):
    """Plain percentiles let 9 % pass with 5 documents, where 2.5 % are meant."""
    passed, trials, margin = 0, 1000, 0.02
    for trial in range(trials):
        drawn = np.random.default_rng(trial)
        champion = 1.7 * drawn.lognormal(7.0, 1.0, count)
        candidate = champion * (1 + margin) * drawn.normal(1.0, 0.02, count)
        passed += relative_loss(candidate, champion, **SAMPLING).high <= margin
    assert passed / trials <= most
