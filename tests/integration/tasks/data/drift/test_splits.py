"""The statistics of all splits at once, against scipy and scikit-learn, which take one at a time."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.spatial.distance import jensenshannon
from scipy.stats import ks_2samp
from sklearn.metrics import roc_auc_score
from sklearn.naive_bayes import BernoulliNB

from tasks.data.drift.comparison import areas, odds
from tasks.data.drift.splits import SMOOTHING, area_under_curve, deviations, divergence, greatest_step, split


@pytest.fixture
def dice():
    return np.random.default_rng(7)


@pytest.fixture
def splits():
    return split(60, 40, splits=25, seed=3)


def sides(splits):
    return [(row == 0, row > 0) for row in splits.new]


def test_row_0_is_the_question_and_every_split_has_its_sizes(splits):
    assert splits.new.shape == (26, 100) and splits.sizes == (60, 40)
    assert not splits.new[0, :60].any() and splits.new[0, 60:].all()
    assert (splits.new.sum(axis=1) == 40).all()
    assert len({row.tobytes() for row in splits.new}) == 26


def test_a_seed_gives_the_same_splits():
    assert (split(30, 20, splits=5, seed=1).new == split(30, 20, splits=5, seed=1).new).all()
    assert (split(30, 20, splits=5, seed=1).new != split(30, 20, splits=5, seed=2).new).any()


def test_every_document_is_on_the_new_side_as_often():
    share = split(60, 40, splits=4000, seed=1).new[1:].mean(axis=0)
    assert abs(share - 0.4).max() < 0.04


@pytest.mark.parametrize("labels", [3, 500])
def test_the_divergence_is_scipys(splits, dice, labels):
    counts = dice.poisson(0.7, (100, labels))
    new = splits.new_sums(csr_matrix(counts))
    old = counts.sum(axis=0)[:, None] - new
    for row, (before, now) in enumerate(sides(splits)):
        wanted = jensenshannon(counts[before].sum(0) + SMOOTHING, counts[now].sum(0) + SMOOTHING, base=2) ** 2
        assert divergence(old, new)[row] == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_the_greatest_step_is_scipys_with_ties_and_without(splits, dice):
    for values in (dice.normal(size=100), dice.integers(0, 5, 100).astype(float), np.zeros(100)):
        found = greatest_step(values, splits)
        for row, (before, now) in enumerate(sides(splits)):
            assert found[row] == pytest.approx(ks_2samp(values[before], values[now]).statistic)


def test_the_area_is_scikit_learns_with_ties_and_without(splits, dice):
    for scores in (dice.normal(size=splits.new.shape), dice.integers(0, 4, splits.new.shape)):
        found = area_under_curve(scores.astype(np.float32), splits)
        for row, side in enumerate(splits.new):
            assert found[row] == pytest.approx(roc_auc_score(side, scores[row]))


def test_deviations_are_in_errors_of_a_random_split(dice):
    values = np.stack([dice.normal(5, 2, 400), np.full(400, 3.0), dice.random(400) < 0.01], axis=1).astype(np.float32)
    many = split(300, 100, splits=3000, seed=1)
    found = deviations(values, many)[:, 1:]
    assert found[0].std() == pytest.approx(1, abs=0.05) and found[2].std() == pytest.approx(1, abs=0.05)
    assert not found[1].any()


def test_the_classifiers_odds_are_those_of_naive_bayes(dice):
    presence = dice.random((50, 30)) < 0.3
    new = np.arange(50) >= 30
    model = BernoulliNB(alpha=SMOOTHING).fit(presence, new)
    wanted = model.feature_log_prob_[1] - model.feature_log_prob_[0]
    found = odds(presence[new].sum(0).astype(np.float32), presence[~new].sum(0).astype(np.float32), 20, 30)
    assert found == pytest.approx(wanted, abs=1e-5)


def test_the_classifier_is_never_scored_on_what_it_was_trained_on(dice):
    """Each document has a word of its own, which says all about it in training, and nothing about others."""
    splits = split(100, 100, splits=50, seed=1)
    own = csr_matrix(np.eye(200, dtype=np.float32))
    assert abs(areas(own, splits, seed=1) - 0.5).max() < 0.15
    told = csr_matrix(np.hstack((np.eye(200), splits.new[:1].T)).astype(np.float32))
    found = areas(told, splits, seed=1)
    assert found[0] > 0.99 and found[1:].max() < 0.7
