"""The search: what is given is kept, what fits comes first, the goal decides, and nothing impossible is proposed."""

import math
import time
from dataclasses import replace

import pytest
from waiting import limit

from tasks.hardware.machines import machine_of_gpu
from tasks.planning.case import Case
from tasks.planning.predict import predict, require_possible
from tasks.planning.prediction import Divided
from tasks.planning.search import DEEPER, divisions, divisors, layouts, paid_gpus, search

pytestmark = pytest.mark.unit

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200}
LLAMA_8B = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "gated": True,
    "vocab": 128256,
    "tied": False,
}


def case(network=LLAMA_8B, gpu="H100", gpus=64, global_=512, **more):
    told = {"network": network, "sequence": 4096, "cluster": {"gpu": gpu, "gpus": gpus}, "batch": {"global": global_}}
    return Case.model_validate({**told, **more})


def found(one, **more):
    return search(one, machine_of_gpu(one.cluster.gpu), gpus=one.cluster.gpus, **more)


def test_what_fits_only_with_an_option_of_the_engine_comes_last():
    whole = {"tp": 1, "pp": 1, "zero": 3}
    one = case(LLAMA_8B, sequence=8192, gpus=16, global_=64, engine="torch", parallel=whole, recompute="none")
    machine = machine_of_gpu("H100")
    fits = search(one, machine, gpus=16).plans
    assert all(not plan.needs for plan in fits)
    for share in (0.97, 0.9, 0.8, 0.7, 0.6):
        plans = search(one, replace(machine, usable_memory_bytes=round(share * fits[0].memory.total)), gpus=16).plans
        asked = [bool(plan.needs) for plan in plans]
        assert asked == sorted(asked)
    micro = one.model_copy(update={"batch": one.batch.model_copy(update={"micro": 2})})
    taken = search(micro, replace(machine, usable_memory_bytes=10**12), gpus=16).plans[0].memory
    (only,) = search(micro, replace(machine, usable_memory_bytes=round(taken.total - taken.loose) - 1), gpus=16).plans
    assert only.needs and only.fit == "tight" and "fits only with" in only.warnings[0]


def test_every_division_is_whole_and_can_be_run():
    for one in (
        case(),
        case(GPT3, "A100-80GB", 96, 1536),
        case(engine="deepspeed"),
        case(engine="torch"),
        case(sequence=32768),
    ):
        machine, seen = machine_of_gpu(one.cluster.gpu), set()
        for division in divisions(one, machine, one.cluster.gpus):
            assert division.gpus == one.cluster.gpus and division not in seen
            assert Divided.of_case(one, division).micro_batches * division.dp * division.micro == one.batch.global_
            seen.add(division)
        able = [each for each in seen if runs(one, each, machine)]
        assert len(able) > 0.5 * len(seen) > 5


def runs(one, division, machine):
    try:
        require_possible(one, division, machine, gpus=division.gpus)
    except ValueError:
        return False
    return True


def test_what_the_case_gives_is_kept():
    given = {"tp": 4, "pp": 2, "dp": 8, "virtual": 2, "zero": 0, "cp": 1, "sequence_parallel": False}
    one = case(parallel=given, batch={"global": 512, "micro": 2}, recompute="full")
    for plan in found(one).plans:
        way = plan.division
        assert {name: getattr(way, name) for name in given} == given and (way.micro, way.recompute) == (2, "full")


def test_the_best_fits_and_is_the_fastest_of_those_that_do():
    plans = found(case()).plans
    assert plans[0].fit == "fits" and len(plans) > 1
    fits = [plan.step_seconds for plan in plans if plan.fit == "fits"]
    assert fits == sorted(fits)
    ways = [(p.division.tp, p.division.pp, p.division.zero) for p in plans]
    assert len(set(ways)) == len(ways)


def test_only_as_much_is_computed_again_as_memory_asks_for():
    deepened = 0
    for one in (case(gpu="H200"), case(GPT3, "A100-40GB", 128, 1024, sequence=2048)):
        for plan in found(one).plans:
            deeper = DEEPER[: DEEPER.index(plan.division.recompute)]
            deepened += len(deeper)
            machine = machine_of_gpu(one.cluster.gpu)
            for less in (replace(plan.division, recompute=recompute) for recompute in deeper):
                assert predict(one, less, machine, gpus=one.cluster.gpus).fit == "does not fit"
    assert deepened


def test_where_nothing_fits_the_nearest_plan_is_named_and_it_does_fit():
    one = case(GPT3, "A100-80GB", 8, 64)
    made = found(one)
    assert made.plans == () and "nothing fits" in made.reason and made.closest.fit == "does not fit"
    gpus = int(made.nearest.split(" GPUs")[0])
    assert gpus > 8 and search(one, machine_of_gpu("A100-80GB"), gpus=gpus).plans
    assert not search(one, machine_of_gpu("A100-80GB"), gpus=gpus // 2).plans


LLAMA_405B = LLAMA_8B | {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248}


def test_stages_may_be_uneven_and_context_is_divided_from_8192_tokens_on():
    one = case(LLAMA_405B, sequence=8192, gpus=16384, global_=2048)
    pipelines = {layout.pp for layout in layouts(one, machine_of_gpu("H100"), 16384)}
    assert {8, 16, 32} <= pipelines and 126 % 8 and not any(-(-126 // pp) * pp > 1.15 * 126 for pp in pipelines)
    began = time.process_time()
    best = found(one).plans[0]
    assert best.fit == "fits" and best.division.pp > 2 and time.process_time() - began < limit(2)
    contexts = {layout.cp for layout in layouts(one, machine_of_gpu("H100"), 16384)}
    assert contexts == {1, 2} and {each.cp for each in layouts(case(), machine_of_gpu("H100"), 64)} == {1}
    eight = replace(best.division, pp=16, virtual=8, dp=128, cp=1, micro=1)  # embedding and loss are pieces too
    require_possible(one, eight, machine_of_gpu("H100"), gpus=16384)


def test_offloading_comes_where_nothing_else_fits_and_for_the_smallest():
    one = case(gpu="V100-16GB", gpus=4, global_=64, engine="deepspeed", precision="fp16")
    assert {plan.division.offload for plan in found(one).plans} == {"cpu"}
    roomy = one.model_copy(update={"cluster": one.cluster.model_copy(update={"gpu": "A100-80GB", "gpus": 16})})
    assert {plan.division.offload for plan in found(roomy).plans} == {"none"}
    smallest = found(roomy.model_copy(update={"goal": "smallest"})).plans[0].division
    assert smallest.offload == "cpu" and smallest.gpus < 4
    never = one.model_copy(update={"parallel": one.parallel.model_copy(update={"offload": "none"})})
    assert found(never).plans == ()


@pytest.mark.parametrize("given", [{"dp": 8, "zero": 0}, {"tp": 1, "zero": 0}])
def test_a_division_that_is_given_is_answered_as_given_and_what_would_fit_is_said_beside_it(given):
    """Plain data parallelism of 8 B parameters does not fit an H100; nobody asked for an optimizer on the CPU, 5 times slower."""
    one = case(gpus=8, global_=64, engine="torch", parallel=given, recompute="full", tokens=10**9)
    made = found(one)
    assert made.plans == () and made.reason.startswith("the division that was given does not fit")
    way = made.closest.division
    assert {name: getattr(way, name) for name in given} == given and way.offload == "none"
    zero, offloaded = made.nearest.split("; or ")
    assert zero.startswith("another zero: ") and "zero 3" in zero
    assert offloaded.startswith("offload cpu: ") and "offload cpu" in offloaded
    seconds = [float(said.rpartition(", ")[2].removesuffix(" s a step")) for said in (zero, offloaded)]
    assert seconds[1] > 3 * seconds[0]
    asked = one.model_copy(update={"parallel": one.parallel.model_copy(update={"offload": "cpu"})})
    assert found(asked).plans[0].division.offload == "cpu", "who asks for it gets it"
    roomy = found(case(gpu="H200", gpus=8, global_=64, engine="torch", parallel={"zero": 3}, recompute="full"))
    assert roomy.plans and all(plan.division.zero == 3 for plan in roomy.plans)


def test_what_makes_a_given_division_fit_is_what_changes_least():
    said = {"engine": "torch", "parallel": {"tp": 1, "zero": 3}, "sequence": 8192, "gpus": 8, "global_": 64}
    made = found(case(**said, recompute="none", batch={"global": 64, "micro": 1}, gpu="A100-40GB"))
    assert made.plans == () and made.nearest.startswith("more recomputation: ")
    large = found(case(**said, recompute="full", batch={"global": 64, "micro": 8}, gpu="A100-40GB"))
    assert large.plans == () and large.nearest.startswith("a smaller batch.micro: ")


def test_offloading_that_nobody_asked_for_is_said_with_its_share_of_a_step():
    one = case(gpu="V100-16GB", gpus=4, global_=64, engine="deepspeed", precision="fp16")
    (said,) = {plan.warnings[0].partition(" of a step")[0] for plan in found(one).plans[:1]}
    assert "offload cpu" in said and "nobody asked for" in said and said.endswith("%")
    asked = one.model_copy(update={"parallel": one.parallel.model_copy(update={"offload": "cpu"})})
    assert not any("nobody" in warning for warning in found(asked).plans[0].warnings)


def test_smallest_and_cheapest_choose_the_gpus():
    smallest = found(case(gpus=None, cluster={"gpu": "H100"}, goal="smallest"))
    fewest = smallest.plans[0].division.gpus
    assert fewest <= 8 and all(plan.division.gpus == fewest for plan in smallest.plans)
    cheapest = found(case(cluster={"gpu": "H100", "gpus": 256}, goal="cheapest"))
    machine = machine_of_gpu("H100")
    cost = [plan.step_seconds * paid_gpus(plan, machine) for plan in cheapest.plans if plan.fit == "fits"]
    assert cost == sorted(cost) and cheapest.plans[0].division.gpus <= 256
    with pytest.raises(ValueError, match="the goal fastest needs cluster.nodes or cluster.gpus"):
        found(case(cluster={"gpu": "H100"}))


def test_a_part_of_a_machine_costs_as_much_as_all_of_it():
    small = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 51200}
    one = case(small, tokens=10**10, cluster={"gpu": "H100", "gpus": 8}, goal="cheapest")
    best = found(one).plans[0]
    alone = found(case(small, tokens=10**10, gpus=1)).plans[0]
    assert best.division.gpus == 8 and alone.step_seconds < 8 * best.step_seconds, "a GPU alone takes fewer GPU-hours"
    of_machines = alone.days * 24 * 8
    poor = case(small, tokens=10**10, gpus=1, max_cost=of_machines * 0.99)
    assert found(poor, per_gpu_hour=1.0).plans == ()
    assert found(poor.model_copy(update={"max_cost": of_machines * 1.01}), per_gpu_hour=1.0).plans


def test_a_date_and_a_budget_are_kept_to():
    free = found(case(tokens=10**12, gpus=None, cluster={"gpu": "H100"}, goal="smallest")).plans[0]
    hurry = found(case(tokens=10**12, max_days=free.days / 8, cluster={"gpu": "H100"}, goal="smallest")).plans[0]
    assert hurry.days <= free.days / 8 and hurry.division.gpus >= 8 * free.division.gpus / 2
    poor = found(case(tokens=10**12, max_cost=10.0), per_gpu_hour=5.0)
    assert poor.plans == () and "it fits, and nothing keeps to" in poor.reason
    late = found(case(tokens=10**15, max_days=0.5, cluster={"gpu": "H100", "gpus": 64}, goal="smallest"))
    assert late.plans == () and "it fits, and nothing keeps to" in late.reason
    assert late.closest.fit != "does not fit" and late.closest.days > 0.5, "what it would take is told all the same"


def test_the_largest_search_is_bounded():
    network = {"layers": 160, "hidden": 32768, "heads": 128, "vocab": 51200}
    began = time.process_time()
    made = found(case(network, "H100", 16384, 4096, sequence=2048))
    assert made.plans and time.process_time() - began < limit(20)
    wide = {"layers": 96, "hidden": 49_152, "heads": 96, "vocab": 51_200}
    none = found(case(wide, "A100-40GB", 1024, 1024, sequence=32_768, goal="cheapest"))
    assert none.plans == () and "nothing fits" in none.reason and time.process_time() - began < limit(20)
    with pytest.raises(ValueError, match="more than 262144"):
        found(case(gpus=1 << 20, cluster={"gpu": "H100", "gpus": 1 << 20}))
    moe = {**LLAMA_8B, "experts": {"count": 64, "active": 8, "ffn": 1408}}
    assert found(case(moe, gpus=128)).plans


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parallel": {"tp": 3}}, "tp 3"),
        ({"parallel": {"pp": 7}}, "do not divide 64 GPUs"),
        ({"parallel": {"dp": 5}}, "GPUs"),
        ({"batch": {"global": 7}, "parallel": {"tp": 1, "pp": 1}}, "batch.global 7"),
        ({"batch": {"global": 512, "micro": 1000}}, "micro|batch"),
        ({"precision": "fp8", "cluster": {"gpu": "A100", "gpus": 64}}, "precision fp8"),
    ],
)
def test_what_cannot_be_divided_is_named(changed, said):
    with pytest.raises(ValueError, match=said):
        found(case(**changed))


def test_divisors_and_layouts():
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12]
    one = case(gpus=48, cluster={"gpu": "H100", "gpus": 48}, batch={"global": 48})
    assert all(math.prod(layout) == 48 for layout in layouts(one, machine_of_gpu("H100"), 48))
