"""`headway seeds`: which trainings are one recipe, and how much the noise is worth that few of them tell."""

import numpy as np
import pytest

from tasks.config.base import digest
from tasks.report.scaling import noise, recipes
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


def trained(store, folder, seed, bits, *, model="a", tokens="one", created="2026-01-01", **changed):
    """A training and its evaluation, as the stages publish them."""
    config = {"training": {"seed": seed, "model": model, "steps": 10, **changed}, "evaluation": {"confidence": 0.95}}
    text = folder / digest([seed, bits, model, tokens, created, changed])
    text.mkdir()
    (text / "weights").write_text(text.name)
    corpus = f"tokens/corpus@{digest(tokens)}"
    told = Provenance(name=model, created=created, inputs=(corpus,), stage="train", config=config)
    checkpoint = store.publish(text, kind="checkpoint", inputs=(digest(tokens),), provenance=told)
    (text / "weights").write_text(f"{text.name} measured")
    told = Provenance(
        name=model,
        created=created,
        inputs=(checkpoint.ref, corpus),
        stage="evaluate",
        config=config,
        metrics={"bits_per_byte": bits},
    )
    return store.publish(text, kind="evaluation", inputs=(checkpoint.version, digest(tokens)), provenance=told)


def test_a_recipe_is_what_differs_in_seed_and_name_alone(store, tmp_path):
    for seed, bits in ((3, 1.66), (1, 1.7), (2, 1.74)):
        trained(store, tmp_path, seed, bits, model="a" if seed == 1 else "b")
    trained(store, tmp_path, 4, 1.2, steps=20)
    trained(store, tmp_path, 5, 1.3, tokens="two")
    first, *others = recipes(store)
    assert first.models == ("a", "b") and [run.seed for run in first.runs] == [1, 2, 3]
    assert first.mean == pytest.approx(1.7) and first.deviation == pytest.approx(0.04 / 1.7)
    assert first.seed_noise == pytest.approx(2.195 * first.deviation, rel=1e-3)
    assert [len(other.runs) for other in others] == [1, 1]
    assert all(other.deviation is other.seed_noise is None for other in others)
    assert [run.seed for recipe in recipes(store, "b") for run in recipe.runs] == [2, 3]


def test_of_a_seed_that_was_trained_twice_the_newest_counts(store, tmp_path):
    trained(store, tmp_path, 1, 1.8, created="2026-01-02")
    trained(store, tmp_path, 1, 1.7, created="2026-01-01")
    trained(store, tmp_path, 2, 1.9)
    (recipe,) = recipes(store)
    assert [run.bits_per_byte for run in recipe.runs] == [1.8, 1.9]


@pytest.mark.parametrize("seeds", [2, *(pytest.param(seeds, marks=pytest.mark.long) for seeds in (3, 5))])
def test_two_further_models_lie_within_what_few_seeds_tell(seeds):
    """The interval of the difference of two models, by seeds alone, misses in 5 %; with the bare deviation in 11 to 30 %."""
    chance = np.random.default_rng(seeds)
    drawn = chance.normal(2.0, 0.04, (4000, seeds + 2))
    apart = np.abs(drawn[:, 0] / drawn[:, 1] - 1)
    told = np.array([noise(row[2:].tolist(), confidence=0.95) for row in drawn])
    assert 0.035 < np.mean(apart > 1.96 * np.sqrt(2) * told) < 0.065
    bare = drawn[:, 2:].std(axis=1, ddof=1) / drawn[:, 2:].mean(axis=1)
    assert np.mean(apart > 1.96 * np.sqrt(2) * bare) > 0.1


def test_a_deviation_needs_two_seeds():
    with pytest.raises(ValueError, match="at least two seeds"):
        noise([1.7], confidence=0.95)
