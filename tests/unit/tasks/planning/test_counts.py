"""Parameters and operations of networks against what was published: logs, model cards, papers."""

from __future__ import annotations

from dataclasses import fields

import pytest
from pydantic import ValidationError

from tasks.planning.case import Experts, Network
from tasks.planning.counts import (
    Parameters,
    active_parameters,
    expert_layers,
    ffn_size,
    flops,
    flops_72,
    flops_96,
    gpu_parameters,
    parameters,
    stage_layers,
)
from tasks.planning.prediction import Division

pytestmark = pytest.mark.unit

A100 = 312e12
"""Dense operations a second in bf16, as the papers divide by."""


def llama(layers: int, hidden: int, heads: int, **more: object) -> Network:
    return Network.model_validate(
        {"layers": layers, "hidden": hidden, "heads": heads, "gated": True, "tied": False, **more}
    )


GPT3 = Network(layers=96, hidden=12288, heads=96, vocab=50257)
LLAMA3_8B = llama(32, 4096, 32, kv_heads=8, ffn=14336, vocab=128256)
MIXTRAL = llama(32, 4096, 32, kv_heads=8, ffn=14336, vocab=32000, experts=Experts(count=8, active=2))
DEEPSEEK_MOE = llama(28, 2048, 16, ffn=10944, vocab=102400, experts=Experts(count=64, active=6, shared=2, ffn=1408))


@pytest.mark.parametrize(
    ("network", "sequence", "published", "within"),
    [
        (GPT3, 2048, 174.6e9, 0.001),
        (llama(32, 4096, 32, vocab=32000), 4096, 6_738_415_616, 0),
        (llama(80, 8192, 64, kv_heads=8, ffn=28672, vocab=32000), 4096, 68_976_648_192, 0),
        (LLAMA3_8B, 8192, 8_030_261_248, 0),
        (llama(80, 8192, 64, kv_heads=8, ffn=28672, vocab=128256), 8192, 70_553_706_496, 0),
        (llama(126, 16384, 128, kv_heads=8, ffn=53248, vocab=128256), 8192, 405_853_388_800, 0),
        (MIXTRAL, 4096, 46_702_792_704, 0),
        (DEEPSEEK_MOE, 4096, 16.4e9, 0.03),
        (Network(layers=12, hidden=768, heads=12, vocab=50257), 1024, 124_439_808, 0),
    ],
)
def test_a_network_has_the_parameters_of_its_model_card(
    network: Network, sequence: int, published: float, within: float
) -> None:
    """DeepSeekMoE's first layer is dense, which a case cannot say: 3 %."""
    assert parameters(network, sequence).total == pytest.approx(published, rel=within or 1e-12)


@pytest.mark.parametrize(("network", "published"), [(MIXTRAL, 12.9e9), (DEEPSEEK_MOE, 2.8e9), (LLAMA3_8B, 8.03e9)])
def test_a_token_meets_the_active_parameters(network: Network, published: float) -> None:
    assert active_parameters(network, 4096) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "hidden", "pp", "engine", "first", "middle", "last"),
    [
        (64, 8192, 16, "megatron", 917757952, 805560320, 909385728),
        (64, 8192, 16, "deepspeed", 917757952, 805560320, 917774336),
        (64, 9216, 16, "megatron", 1145723904, 1019501568, 1136305152),
        (64, 12288, 32, "megatron", 1074456576, 906160128, 1061898240),
        (40, 6144, 4, "megatron", 1217086464, 1132938240, 1210807296),
        (64, 16384, 64, "megatron", 1029828608, 805433344, 1013084160),
        (48, 7168, 8, "megatron", 1023350272, 925177344, 1016024576),
    ],
)
def test_a_gpu_of_each_stage_has_the_parameters_that_megatron_logged(
    layers: int, hidden: int, pp: int, engine: str, first: int, middle: int, last: int
) -> None:
    """BigScience's logs of GPT-2 at TP 4, to the digit (reference_cases/bigscience_v100_memory_and_speed.csv)."""
    network = Network(layers=layers, hidden=hidden, heads=32, vocab=50688)
    division = Division(tp=4, pp=pp, engine="deepspeed" if engine == "deepspeed" else "megatron")
    found = [gpu_parameters(network, division, sequence=1024, stage=stage).total for stage in (0, 1, pp - 1)]
    assert found == [first, middle, last]


def test_stages_together_hold_the_network_and_a_tied_matrix_twice() -> None:
    whole = parameters(LLAMA3_8B, 8192)
    stages = [gpu_parameters(LLAMA3_8B, Division(pp=4), sequence=8192, stage=stage).total for stage in range(4)]
    assert sum(stages) == whole.total
    tied = LLAMA3_8B.model_copy(update={"tied": True})
    twice = [gpu_parameters(tied, Division(pp=4), sequence=8192, stage=stage).total for stage in range(4)]
    assert sum(twice) == sum(stages)
    assert parameters(tied, 8192).total == whole.total - 128256 * 4096


def test_tensor_parallelism_divides_matrices_and_keeps_norms_whole() -> None:
    one, eight = (gpu_parameters(LLAMA3_8B, Division(tp=tp), sequence=8192) for tp in (1, 8))
    assert eight.feed_forward == one.feed_forward / 8
    assert (eight.embedding, eight.output) == (one.embedding / 8, one.output / 8)
    assert (eight.norms, eight.final_norm) == (one.norms, one.final_norm)


def test_more_gpus_than_key_heads_hold_a_key_head_each() -> None:
    eight, sixteen = (gpu_parameters(LLAMA3_8B, Division(tp=tp), sequence=8192).attention for tp in (8, 16))
    head = 128 * 4096
    assert eight == 32 * (2 * 4 * head + 2 * head)
    assert sixteen == 32 * (2 * 2 * head + 2 * head)


def test_experts_are_divided_by_expert_parallelism_and_the_rest_is_not() -> None:
    one, eight = (gpu_parameters(MIXTRAL, Division(ep=ep, dp=8), sequence=4096) for ep in (1, 8))
    assert eight.experts == one.experts / 8 == 32 * 3 * 4096 * 14336
    assert eight.dense == one.dense


def test_one_layer_in_so_many_has_experts() -> None:
    every_second = MIXTRAL.model_copy(update={"experts": Experts(count=8, active=2, every=2)})
    assert parameters(every_second, 4096).experts == parameters(MIXTRAL, 4096).experts / 2
    assert expert_layers(every_second, Division(pp=4)) == (4, 4, 4, 4)
    assert expert_layers(every_second.model_copy(update={"layers": 6}), Division(pp=2)) == (2, 1)


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        (8, 4, (2, 2, 2, 2)),
        (70, 12, (5, *[6] * 10, 5)),  # BLOOM
        (126, 16, (7, *[8] * 14, 7)),  # Llama 3 405B
        (5, 4, (1, 1, 2, 1)),
        (7, 4, (1, 2, 2, 2)),
        (3, 2, (1, 2)),
        (1, 1, (1,)),
    ],
)
def test_layers_over_stages(layers: int, pp: int, stages: tuple[int, ...]) -> None:
    assert stage_layers(layers, pp) == stages
    assert sum(stages) == layers


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="layers 4 over pp 8 stages"):
        stage_layers(4, 8)
    with pytest.raises(ValueError, match="pp 1000000: no training"):
        stage_layers(10**9, 10**6)
    with pytest.raises(ValueError, match="stage 4 of pp 4"):
        gpu_parameters(LLAMA3_8B, Division(pp=4), sequence=8192, stage=4)


def test_a_gated_width_that_is_left_out_is_llamas() -> None:
    assert [ffn_size(llama(1, hidden, 8, vocab=10)) for hidden in (4096, 5120, 8192)] == [11008, 13824, 22016]
    assert ffn_size(GPT3) == 4 * 12288


def test_bad_networks_are_refused_by_name() -> None:
    for wrong in ({"layers": 0}, {"hidden": -1}, {"heads": 7}, {"kv_heads": 5}, {"ffn": 0}, {"hiden": 1}):
        with pytest.raises(ValidationError):
            Network.model_validate({"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, **wrong})


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "gpus", "tflops", "seconds"),
    [
        (24, 2304, 24, 512, 32, 137, 3.53),
        (48, 8192, 64, 1536, 512, 138, 14.45),
        (80, 12288, 96, 2304, 1536, 148, 24.82),
        (128, 25600, 160, 3072, 3072, 163, 102.63),
    ],
)
def test_operations_of_narayanan(
    layers: int, hidden: int, heads: int, batch: int, gpus: int, tflops: float, seconds: float
) -> None:
    """cluster.md F1: seconds an iteration, recomputed from the published TFLOPs a GPU."""
    network = Network(layers=layers, hidden=hidden, heads=heads, vocab=51200)
    found = flops(network, 2048, batch, recompute="full", flash_attention=False)
    assert found.published_96 / (gpus * tflops * 1e12) == pytest.approx(seconds, rel=0.002)
    assert found.hardware == pytest.approx(found.published_96, rel=1e-9), "the formula is what is computed"


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "gpus", "seconds", "mfu", "hfu"),
    [
        (48, 6144, 64, 4, 8, 1.10, 41.5, 43.7),
        (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
        (105, 20480, 128, 280, 280, 37.83, 56.0, 57.0),
        (128, 25600, 160, 512, 512, 71.49, 56.3, 57.0),
    ],
)
def test_operations_of_korthikanti(
    layers: int, hidden: int, heads: int, batch: int, gpus: int, seconds: float, mfu: float, hfu: float
) -> None:
    """Table 5: model and hardware FLOPs over seconds and peak are the published shares; seconds have two digits."""
    network = Network(layers=layers, hidden=hidden, heads=heads, vocab=51200)
    peak = gpus * seconds * A100 / 100
    assert flops_72(network, 2048, batch) / peak == pytest.approx(mfu, rel=0.01)
    assert flops_72(network, 2048, batch, selective=True) / peak == pytest.approx(hfu, rel=0.01)


def test_full_recomputation_is_another_forward_pass_of_the_layers() -> None:
    network = Network(layers=96, hidden=12288, heads=96, vocab=51200)
    kept, again = (
        flops(network, 2048, 1, recompute=recompute, flash_attention=False) for recompute in ("none", "full")
    )
    assert kept.hardware == pytest.approx(flops_72(network, 2048, 1), rel=1e-9)
    assert again.hardware == pytest.approx(flops_96(network, 2048, 1), rel=1e-9)
    assert again.model == kept.model
    selective = flops(network, 2048, 1, recompute="selective", flash_attention=False)
    assert kept.hardware < selective.hardware < again.hardware


def test_model_operations_halve_attention_as_megatron_does_today() -> None:
    """Llama 3 8B at 8,192: 6 x (7.50 B parameters in matrices and output) + 6 x 4096 x 32 x 8192 a token."""
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    found = flops(LLAMA3_8B, 8192, 1)
    assert found.model == pytest.approx(8192 * (6 * matrices + 6 * 4096 * 32 * 8192), rel=1e-12)
    assert found.six_n == pytest.approx(8192 * 6 * 8_030_261_248)


def test_operations_of_experts_are_those_of_the_active_ones() -> None:
    dense = llama(32, 4096, 32, kv_heads=8, ffn=2 * 14336, vocab=32000)
    sparse, twice = flops(MIXTRAL, 4096, 1), flops(dense, 4096, 1)
    assert sparse.model == pytest.approx(twice.model, rel=1e-3), (
        "two experts of eight: as if they were one of twice the width"
    )
    assert sparse.six_n == pytest.approx(6 * 4096 * 12.88e9, rel=0.001)


def test_operations_are_proportional_to_the_batch() -> None:
    one, many = flops(LLAMA3_8B, 8192, 1), flops(LLAMA3_8B, 8192, 1024)
    assert [getattr(many, field.name) for field in fields(many)] == pytest.approx(
        [1024 * getattr(one, field.name) for field in fields(one)]
    )


def test_parts_sum_to_the_total() -> None:
    found = parameters(MIXTRAL, 4096)
    assert found.layers + found.embedding + found.positions + found.output + found.final_norm == found.total
    assert found.dense + found.experts == found.total
    assert Parameters().total == 0
