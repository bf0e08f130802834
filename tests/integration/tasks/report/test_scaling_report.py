"""Trainings are compared with what they may be compared with: a straight line by ranks, the plan, and the runs before them."""

import pytest

from tasks.report.pictures import size
from tasks.report.scaling import FELL_BY, Trained, curves, draw_scaling, trained
from tasks.storage.manifest import Content, Manifest, Provenance


def run(ranks, tflops, **changed):
    made = {
        "checkpoint": "checkpoint/a@1", "created": "2026-01-01", "model": "a", "parameters": 10**9, "hardware": "nd",
        "ranks": ranks, "engine": "torch", "precision": "bf16", "sequence_length": 2048, "divided": "fsdp", "tflops": tflops,
        "tokens_per_second": 1.0, "mfu": 0.4, "planned_tflops": tflops * 1.1,
    }  # fmt: skip
    return Trained(**{**made, **changed})


def test_efficiency_is_against_the_fewest_ranks_of_the_same_curve():
    (curve,) = curves([run(8, 200.0), run(16, 190.0), run(64, 150.0)])
    assert [point.efficiency for point in curve.points] == [None, pytest.approx(0.95), pytest.approx(0.75)]
    made = curves(
        [run(8, 200.0), run(16, 100.0, hardware="nc"), run(16, 90.0, parameters=10**8), run(16, 1, engine="x")]
    )
    assert len(made) == 4 and all(point.efficiency is None for curve in made for point in curve.points)
    assert [curve.parameters for curve in made] == [10**9, 10**9, 10**9, 10**8]


def test_a_run_below_the_median_before_it_is_a_regression_unless_it_was_divided_otherwise():
    def fell(*runs):
        return curves(runs)[0].points[0].fell

    before = [run(8, tflops) for tflops in (100.0, 104.0, 96.0)]
    assert fell(*before, run(8, 90.0)) == pytest.approx(0.10)
    assert fell(*before, run(8, 100 * (1 - FELL_BY) + 0.1)) is None and fell(run(8, 1.0)) is None
    assert fell(*before, run(8, 50.0, divided="ddp")) is None
    assert fell(*before, run(8, 200.0)) is None


def manifest(stage="train", **metrics):
    told = {
        "tflops_per_rank": 100.0, "tokens_per_second": 800.0, "tokens_per_second_per_rank": 100.0, "parameters": 5e8,
        "steps": 10.0, "plan_error": -0.2,
    }  # fmt: skip
    how = {
        "parallel": "ddp",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "deepspeed": {"zero_stage": 2},
    }
    config = {
        "training": {"engine": "deepspeed", "precision": "bf16", "sequence_length": 128},
        "execution": how,
        "benchmark": {"sku": ""},
        "cluster": {"name": "c", "slurm": {"sku": ""}, "azureml": {"size": "Standard_ND96isr_H100_v5"}},
    }
    said = Provenance(name="a", created="2026-01-01", stage=stage, config=config, metrics={**told, **metrics})
    return Manifest(content=Content(kind="checkpoint", files=()), provenance=said)


def test_a_manifest_tells_of_its_training():
    found = trained(manifest())
    assert (found.ranks, found.parameters, found.hardware) == (8, 500_000_000, "Standard_ND96isr_H100_v5")
    assert found.divided == "zero 2, tensor 2" and found.mfu is None
    assert found.planned_tflops == pytest.approx(80.0)  # it took a fifth less time than planned
    assert trained(manifest(stage="import")) is None
    assert trained(manifest(tokens_per_second=0.0)) is None


def test_a_picture_is_drawn_of_one_run_and_of_many(tmp_path):
    for name, runs in (
        ("one", [run(8, 200.0)]),
        ("many", [run(8, 200.0), run(16, 150.0), run(8, 90.0, parameters=2 * 10**12)]),
    ):
        draw_scaling(curves(runs), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert [size(n) for n in (12, 870_000, 125e6, 175e9, 2e12)] == ["12", "870K", "125M", "175B", "2T"]
