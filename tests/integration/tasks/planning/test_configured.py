"""A configuration as a case, and a plan as settings: what the engine's own arguments say is not lost on the way."""

import pytest

from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.planning.configured import case_of_training, settings_of
from tasks.planning.memory import FUSED_LOSS, HALF_GRADIENTS
from tasks.planning.prediction import Division

NETWORK = {"layers": 32, "hidden_size": 4096, "heads": 32}


def case(*arguments, **megatron):
    training = TrainingConfig(network=NETWORK, engine="megatron", global_batch_size=64)
    how = ExecutionConfig(pipeline_parallel=4, megatron={"arguments": arguments, **megatron})
    return case_of_training(training, how, PlanningConfig(), sku="Standard_ND96isr_H100_v5", gpus=16, vocab_size=1000)


@pytest.mark.parametrize(
    "arguments, pieces",
    [
        ((), 1),
        (("--num-virtual-stages-per-pipeline-rank", "4"), 4),
        (("--num-layers-per-virtual-pipeline-stage", "1"), 8),
        (("--num-layers-per-virtual-pipeline-stage", "8"), 1),
        (("--num-virtual-stages-per-pipeline-rank",), 1),
        (("--num-virtual-stages-per-pipeline-rank", "x"), 1),
        (("--lr", "1"), 1),
    ],
)
def test_interleaving_is_read_from_megatrons_arguments(arguments, pieces):
    assert case(*arguments).parallel.virtual == pieces


def test_a_plan_is_read_back_as_it_was_written():
    way = Division(tp=1, pp=4, dp=4, virtual=8, zero=1, engine="megatron", micro=2, recompute="selective")
    execution = settings_of(way)["execution"]
    assert case(*execution["megatron"]["arguments"]).parallel.virtual == 8


def test_an_option_that_a_plan_needs_is_written_or_named():
    way = Division(tp=1, pp=4, dp=4, zero=1, engine="megatron")
    assert settings_of(way, [HALF_GRADIENTS])["execution"]["megatron"]["arguments"] == ["--grad-reduce-in-bf16"]
    with pytest.raises(ValueError, match="a fused loss, which engine torch has no setting for: lower batch.micro"):
        settings_of(Division(dp=8, zero=3, engine="torch"), [FUSED_LOSS])


@pytest.mark.parametrize("zero, parallel", [(0, "ddp"), (3, "fsdp")])
def test_torch_divides_nothing_or_all(zero, parallel):
    assert settings_of(Division(dp=8, zero=zero, engine="torch"))["execution"]["parallel"] == parallel


def test_torch_has_no_half_of_it():
    with pytest.raises(ValueError, match="zero 1: engine torch"):
        settings_of(Division(dp=8, zero=1, engine="torch"))
