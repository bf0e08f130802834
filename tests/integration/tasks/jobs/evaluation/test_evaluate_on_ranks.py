"""Several ranks measure what one measures, byte for byte: each the whole model, or all of them together one model."""

import json

import pytest
from evaluation_material import everything, measure, write_material

from tasks.config.cluster import ClusterConfig


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material") / "inputs")


def on(ranks, **evaluation):
    return ClusterConfig.model_validate(
        {"ranks_per_node": ranks, "evaluation": {"ranks_per_node": ranks, **evaluation}}
    )


def metrics_of(folder):
    return json.loads((folder / "result.json").read_text())["metrics"]


def test_two_ranks_that_share_the_model_measure_what_one_rank_measures(material, tmp_path):
    config = everything(material, lm_eval={}, probe_samples=40)
    _, alone = measure(config, on(1), material, tmp_path / "alone")
    _, together = measure(config, on(2, shard="always"), material, tmp_path / "together")
    assert together == alone
    metrics = metrics_of(tmp_path / "together")
    assert (metrics["ranks"], metrics["sharded"]) == (2, 1)
    assert "ranks" not in metrics_of(tmp_path / "alone") and not (tmp_path / "together" / "parts").exists()


@pytest.mark.long
@pytest.mark.parametrize("shard", ["never", "always"])
def test_ranks_measure_every_suite_as_one_rank_does(material, tmp_path, shard):
    config = everything(material)
    _, alone = measure(config, on(1), material, tmp_path / "alone")
    _, together = measure(config, on(3, shard=shard), material, tmp_path / "together")
    assert together == alone
