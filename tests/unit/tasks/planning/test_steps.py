"""A step's seconds: sums by hand with every disturbance off, closed forms, and what must hold whatever the numbers are."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from plan_machines import A100, H100, V100

from tasks.hardware.machines import Machine
from tasks.planning.case import Experts, Network
from tasks.planning.counts import flops
from tasks.planning.prediction import DEFAULT, Constants, Divided, Division, StepTime
from tasks.planning.steps import step_time

pytestmark = pytest.mark.unit

PERFECT = Constants(
    sustained=1.0,
    matmul_ridge=0.0,
    memory_efficiency=1.0,
    flash_efficiency=1.0,
    tensor_exposed=1.0,
    overlap=0.0,
    contention=0.0,
    straggling=0.0,
    launch=0.0,
    step=0.0,
    link_latency=0.0,
    network_latency=0.0,
    hop_latency=0.0,
    bus_share=1.0,
)
"""Every part at its data sheet's rate, and nothing hidden."""
GPT = Network(layers=24, hidden=4096, heads=32, vocab=51200)
LLAMA = Network(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, gated=True, tied=False)
MIXTURE = Network(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32000,
    gated=True,
    experts=Experts(count=8, active=2),
)


def step(
    division: Division,
    *,
    network: Network = GPT,
    batch: int = 64,
    sequence: int = 2048,
    machine: Machine = A100,
    flash: bool = True,
    constants: Constants = DEFAULT,
) -> StepTime:
    return step_time(Divided(network, division, sequence, batch, flash), machine, constants)


def test_matmuls_at_the_achievable_rate_are_the_operations_counted_by_hand() -> None:
    """2,048 tokens x 6 operations x (24 x 12 h^2 + 51,200 h) = 6.187e13 + 2.577e12 operations; over 271.2e12 a second."""
    time = step(Division(), batch=1, constants=PERFECT)
    by_hand = 6 * 2048 * (24 * 12 * 4096**2 + 51200 * 4096) / 271.2e12
    assert time.matmul == pytest.approx(by_hand, rel=1e-9)
    assert by_hand == pytest.approx(0.2285, rel=1e-3)


def test_attention_is_the_whole_square_without_flash_and_half_of_it_with() -> None:
    """4 s^2 h a layer forward, twice that backward; flash: half, and five matmuls backward for two forward."""
    square = 4 * 2048**2 * 4096 * 24 / 271.2e12
    assert step(Division(), batch=1, flash=False, constants=PERFECT).attention == pytest.approx(3 * square)
    assert step(Division(), batch=1, flash=True, constants=PERFECT).attention == pytest.approx(3.5 / 2 * square)


def test_full_recomputation_is_four_thirds_of_the_layers_matmuls() -> None:
    """The output over the vocabulary is not computed again."""
    none = step(Division(), batch=1, constants=PERFECT).matmul
    full = step(Division(recompute="full"), batch=1, constants=PERFECT).matmul
    output = 6 * 2048 * 51200 * 4096 / 271.2e12
    assert (full - output) / (none - output) == pytest.approx(4 / 3)


def test_selective_recomputation_repeats_attention_and_not_the_matrices() -> None:
    none, selective = (
        step(Division(recompute=again), batch=1, flash=False, constants=PERFECT) for again in ("none", "selective")
    )
    assert selective.matmul == none.matmul
    assert selective.attention / none.attention == pytest.approx(4 / 3)


@pytest.mark.parametrize(("pp", "virtual", "batch"), [(4, 1, 16), (8, 1, 32), (8, 3, 64), (2, 6, 8)])
def test_the_bubble_is_the_closed_form(pp: int, virtual: int, batch: int) -> None:
    """(p - 1) / (m v) of the ideal time, with equal stages (Narayanan et al. 2021, section 2.2)."""
    even = GPT.model_copy(update={"vocab": 1})
    still = dataclasses.replace(PERFECT, bus_share=1e12)
    time = step(Division(pp=pp, virtual=virtual), network=even, batch=batch, constants=still)
    ideal = time.matmul + time.attention
    memory = dataclasses.replace(still, memory_efficiency=1e9)
    exact = step(Division(pp=pp, virtual=virtual), network=even, batch=batch, constants=memory)
    assert exact.bubble / ideal == pytest.approx((pp - 1) / (batch * virtual), rel=1e-4)
    assert time.bubble > exact.bubble


def test_tensor_parallel_traffic_by_hand() -> None:
    """Two all-reduces forward, two backward, a layer: 4 x 24 x 2 x 7/8 x (2,048 x 4,096 x 2 bytes) / 230e9."""
    time = step(Division(tp=8), batch=1, constants=PERFECT)
    assert time.tensor_parallel == pytest.approx(4 * 24 * 2 * 7 / 8 * 2048 * 4096 * 2 / 230e9)
    again = step(Division(tp=8, recompute="full"), batch=1, constants=PERFECT)
    assert again.tensor_parallel / time.tensor_parallel == pytest.approx(6 / 4)


def test_gradients_by_hand() -> None:
    """bf16 weights, float32 gradients, ring over 64 GPUs of eight machines: 2 x 63/64 x 4 bytes / 184e9 a parameter."""
    parameters = 12 * 24 * 4096**2 + 13 * 24 * 4096 + 51200 * 4096 + 2048 * 4096 + 2 * 4096
    time = step(Division(dp=64), batch=64, constants=PERFECT)
    assert time.data_parallel == pytest.approx(2 * 63 / 64 * 4 * parameters / (8 * 23e9), rel=1e-6)


def test_fsdp_gathers_twice_and_reduces_once_with_every_micro_batch() -> None:
    one, two = (step(Division(dp=64, zero=3), batch=64 * times, constants=PERFECT) for times in (1, 2))
    assert two.data_parallel == pytest.approx(2 * one.data_parallel)
    reduced = step(Division(dp=64, zero=1), batch=64, constants=PERFECT).data_parallel
    assert one.data_parallel / reduced == pytest.approx((2 + 2 + 4) / (2 + 4), rel=0.01)


def test_offloaded_state_passes_the_host_link_and_its_processors() -> None:
    plain, host, disks = (step(Division(dp=8, zero=2, offload=where), batch=8) for where in ("none", "cpu", "nvme"))
    assert plain.offload == 0 < host.offload < disks.offload
    assert host.memory_bound < plain.memory_bound


def test_the_disks_of_a_machine_without_any_cannot_hold_state() -> None:
    with pytest.raises(ValueError, match=r"no local disks.*take cpu"):
        step(Division(dp=8, zero=3, offload="nvme"), batch=8, machine=dataclasses.replace(A100, nvme_write_bandwidth=0))


@pytest.mark.parametrize("field", ["memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth"])
def test_more_bandwidth_is_never_slower(field: str) -> None:
    wider = dataclasses.replace(A100, **{field: 2 * getattr(A100, field)})
    for division in (Division(tp=4, pp=2, dp=4), Division(dp=32, zero=3, offload="cpu"), Division(tp=2, cp=2, dp=8)):
        assert step(division, machine=wider).total <= step(division).total


def test_a_faster_gpu_is_never_slower() -> None:
    for division in (Division(tp=8, dp=4), Division(dp=32, zero=3)):
        assert (
            step(division, machine=H100).total < step(division, machine=A100).total < step(division, machine=V100).total
        )


def test_twice_the_ranks_with_the_same_batch_each_take_a_little_longer() -> None:
    times = [step(Division(tp=8, dp=dp, zero=1), batch=16 * dp).total for dp in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times)
    assert times[-1] < 1.25 * times[0]


def test_twice_the_ranks_of_the_same_batch_are_faster_but_not_twice() -> None:
    small, large = (step(Division(tp=8, dp=dp), batch=512).total for dp in (8, 16))
    assert small / 2 < large < small


def test_uneven_layers_wait_for_the_fullest_stage() -> None:
    """25 layers over 4 stages take as long as 28: one stage holds seven."""
    uneven, full = (
        step(Division(pp=4), network=GPT.model_copy(update={"layers": layers, "vocab": 1}), batch=64, constants=PERFECT)
        for layers in (25, 28)
    )
    assert uneven.matmul == pytest.approx(full.matmul, rel=1e-3)


def test_a_token_pays_for_its_active_experts_alone() -> None:
    """Two of eight experts: the matrices of a dense network with twice the width."""
    dense = Network(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=28672, vocab=32000, gated=True)
    sparse_time = step(Division(), network=MIXTURE, batch=1, constants=PERFECT)
    assert sparse_time.matmul == pytest.approx(step(Division(), network=dense, batch=1, constants=PERFECT).matmul)


def test_experts_apart_exchange_tokens() -> None:
    """Each token goes to two experts and back, forward and backward: 4 x 2 x 7/8 x its bytes, over NVLink."""
    assert step(Division(dp=8), network=MIXTURE, batch=8).expert_parallel == 0
    apart = step(Division(dp=8, ep=8), network=MIXTURE, batch=8, constants=PERFECT)
    assert apart.expert_parallel == pytest.approx(32 * 4 * 2 * 7 / 8 * 2048 * 4096 * 2 / 230e9)


def test_context_parallelism_divides_the_work_of_a_long_sequence() -> None:
    whole, divided = (step(Division(cp=cp), network=LLAMA, batch=1, sequence=65536) for cp in (1, 8))
    assert divided.attention == pytest.approx(whole.attention / 8)
    assert divided.context_parallel > 0 == whole.context_parallel


def test_eight_bits_are_faster_only_in_matmuls() -> None:
    sixteen, eight = (step(Division(precision=bits), machine=H100) for bits in ("bf16", "fp8"))
    assert eight.matmul < sixteen.matmul
    assert eight.attention == sixteen.attention


def test_a_gpu_without_the_precision_is_a_clear_mistake() -> None:
    with pytest.raises(ValueError, match=r"precision fp8: A100-80GB has no rate for it; it computes in bf16, fp16"):
        step(Division(precision="fp8"))


ENGINES = ("megatron", "deepspeed", "torch")
DIVISIONS = [
    Division(tp=tp, pp=pp, virtual=virtual, dp=8, zero=zero, micro=micro, recompute=recompute, engine=engine)
    for tp, (pp, virtual), zero, micro, recompute, engine in itertools.product(
        (1, 8), ((1, 1), (4, 1), (4, 2)), (0, 3), (1, 16), ("none", "full"), ENGINES
    )
]


@pytest.mark.parametrize("machine", [V100, A100, H100], ids=lambda machine: machine.gpu)
@pytest.mark.parametrize("hidden", [512, 4096, 32768])
def test_no_plan_is_above_what_the_gpu_achieves(machine: Machine, hidden: int) -> None:
    network = Network(layers=32, hidden=hidden, heads=hidden // 64, vocab=51200)
    for division, flash in itertools.product(DIVISIONS, (True, False)):
        for precision in ("fp16", "fp8") if machine.achievable_flops["fp8"] else ("fp16",):
            one = dataclasses.replace(division, precision=precision)
            time = step(one, network=network, batch=2048, machine=machine, flash=flash)
            done = flops(network, 2048, 2048, recompute=one.recompute, flash_attention=flash).hardware
            assert done / time.total / one.gpus < machine.achievable_flops[precision]
            assert all(part >= 0 for part in vars(time).values())
