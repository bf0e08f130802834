"""Checkpoints: bytes and times against published ones, intervals against worked examples, goodput against sums by hand."""

import math

import pytest

from tasks.hardware.machines import Machine
from tasks.planning.checkpointing import (
    Recovery,
    Saving,
    availability_interval,
    checkpoint_bytes,
    chosen_interval,
    expected_goodput,
    goodput_range,
    plan_checkpoints,
    snapshot_seconds,
    write_seconds,
)
from tasks.planning.failures import Range, failure_rates
from tasks.planning.storages import CHOICES, STORAGES, Need, capacity_for, choose_storage, storage_named

pytestmark = pytest.mark.unit

H100 = Machine(
    name="ND H100 v5",
    gpu="H100",
    gpus=8,
    memory_bytes=80 << 30,
    usable_memory_bytes=78 << 30,
    peak_flops={"bf16": 989e12},
    achievable_flops={"bf16": 794e12},
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    ethernet_bandwidth=10e9,
    host_bandwidth=50e9,
    host_memory_bytes=1900 << 30,
    nvme_write_bandwidth=33.9e9,
    vcpus=96,
)
NOBODY = Recovery(0, 0)


def plan(parameters, gpus, machine=H100, *, storage="", **more):
    rates = failure_rates(machine.gpu, gpus, per_machine=machine.gpus, **more)
    return plan_checkpoints(checkpoint_bytes(int(parameters)), machine, rates, storage=storage)


@pytest.mark.parametrize(
    ("parameters", "precision", "gib"),
    [
        (176_247_271_424, "bf16", 2.3 * 1024),  # BLOOM, bigscience.notion.site: 2.3 TB as printed
        (175e9, "bf16", 2.3 * 1024),  # Azure's GPT-3 175B: about 2.3 TiB
        (29_975_214_080, "fp32", 336),  # llm-foundry, mpt-30b
        (1_557_611_200, "bf16", 20.6e9 / 2**30),  # GPT2-XL, Nebula: 20.6 GB
    ],
)
def test_sizes_of_published_checkpoints(parameters, precision, gib):
    assert checkpoint_bytes(int(parameters), precision=precision) / 2**30 == pytest.approx(gib, rel=0.07)


def test_our_own_engine_keeps_float32_weights_only():
    assert checkpoint_bytes(10, engine="torch") == 120 and checkpoint_bytes(10, precision="fp16") == 140


@pytest.mark.parametrize(
    ("tier", "tib", "minutes"), [(40, 480, 2.04), (125, 512, 0.61), (250, 512, 0.31), (500, 512, 0.15)]
)
def test_azures_table_of_writing_gpt_3_to_managed_lustre(tier, tib, minutes):
    """ai-infrastructure-on-azure, GPT3-175B: 2.35 TB; from machines enough that the network does not hold it up."""
    seconds = write_seconds(2.35e12, STORAGES[f"lustre-{tier}"], H100, 128, tib=tib)
    assert seconds == pytest.approx(minutes * 60, rel=0.03)


def test_a_shard_to_managed_disk_takes_eight_minutes():
    """288 GB of one node at 612 MB/s."""
    assert write_seconds(288e9, STORAGES["managed-disk"], H100, 1) == pytest.approx(8 * 60, rel=0.03)


def test_the_network_of_few_machines_holds_a_file_system_up():
    lustre = STORAGES["lustre-500"]
    assert write_seconds(1e12, lustre, H100, 1, tib=128) == 1e12 / 10e9
    assert write_seconds(1e12, lustre, H100, 1000, tib=128) == 1e12 / 64e9
    assert write_seconds(1e12, STORAGES["blob-hot"], H100, 1000) == 320
    assert write_seconds(1e12, STORAGES["local-nvme"], H100, 10) == pytest.approx(1e12 / 339e9)


def test_file_systems_are_ordered_in_their_steps():
    assert capacity_for(STORAGES["lustre-500"], 1) == 4 and capacity_for(STORAGES["lustre-500"], 4.1) == 8
    assert capacity_for(STORAGES["lustre-40"], 1, 4e9) == 144
    assert capacity_for(STORAGES["lustre-500"], 129) is None
    assert capacity_for(STORAGES["blob-hot"], 50, 4e9) is None
    assert storage_named("Lustre-250").per_tib == 250e6
    with pytest.raises(ValueError, match="lustre-125"):
        storage_named("lustre")


def test_only_the_snapshot_stalls_where_writing_goes_on_beside():
    found = plan(70e9, 512)
    assert found.cost == Saving(snapshot_seconds(found.bytes, H100, 512), found.write_seconds)
    # 14 B a parameter of 70 G over 512 GPUs at 50 GB/s, beside the overhead
    assert snapshot_seconds(980e9, H100, 512, overhead=0) == pytest.approx(0.0383, rel=0.01)


def test_the_worked_example():
    """changlan.org: 6,000 s between failures, 600 s to repair, a save of 10 s, steps of 15 s: about 24 steps."""
    found = chosen_interval(Saving(10), Recovery(0, 600), 6000)
    assert found.all["young"] / 15 == pytest.approx(23.1, abs=0.05)
    assert found.all["availability"] / 15 == pytest.approx(24.2, abs=0.1)
    assert found.all["daly"] / 15 == pytest.approx(22.7, abs=0.2)
    assert found.formula == "daly" and "Young" in found.reason


def test_the_availability_form_makes_its_own_measure_largest():
    """(1 - Ts / Tc) Tf / (Tf + Tr + Tc / 2), tried on a grid."""
    save, mean, recovery = 40.0, 20_000.0, 900.0

    def availability(cycle):
        return (1 - save / cycle) * mean / (mean + recovery + cycle / 2)

    best = max((save + step for step in range(1, 6000)), key=availability)
    assert availability_interval(save, mean, recovery_seconds=recovery) == pytest.approx(best - save, abs=1)


@pytest.mark.parametrize(("stall", "mean"), [(10, 6000), (120, 3600), (5, 700), (600, 1200)])
def test_dalys_interval_is_where_the_goodput_is_highest(stall, mean):
    cost, recovery = Saving(stall), Recovery(100, 500)
    seconds = chosen_interval(cost, recovery, mean).seconds
    grid = [expected_goodput(seconds * 1.01**step, cost, recovery, mean) for step in range(-200, 201)]
    assert expected_goodput(seconds, cost, recovery, mean) >= max(grid) * 0.9995


def test_the_writer_is_given_twice_its_time_where_that_costs_hardly_anything():
    found = chosen_interval(Saving(0.001, 60), NOBODY, 86_400)
    assert (found.seconds, found.formula) == (120, "writer") and found.reason.startswith("twice the 60 s")
    assert chosen_interval(Saving(0, 10), NOBODY, 3600).seconds == 20


@pytest.mark.parametrize(("stall", "lag", "mean"), [(6, 89, 1138), (1, 600, 3600), (0, 300, 1800), (6, 89, 719)])
def test_an_interval_is_as_short_as_one_write_where_twice_that_costs_goodput(stall, lag, mean):
    """100,000 GPUs are interrupted every 19 minutes: of intervals that can be written, none has 0.5 % more goodput."""
    cost = Saving(stall, lag)
    found = chosen_interval(cost, NOBODY, mean).seconds
    writable = [expected_goodput(lag * 1.02**step, cost, NOBODY, mean) for step in range(200)]
    assert lag <= found < 2 * lag and expected_goodput(found, cost, NOBODY, mean) >= max(writable) - 0.005
    assert expected_goodput(found, cost, NOBODY, mean) > expected_goodput(2 * lag, cost, NOBODY, mean) + 0.003


def test_goodput_without_failures_is_what_saving_leaves():
    assert expected_goodput(95, Saving(5), Recovery(), 1e15) == pytest.approx(0.95, abs=1e-9)
    assert expected_goodput(1e6, Saving(0), NOBODY, 1e15) == pytest.approx(1.0, abs=1e-6)


def test_goodput_to_first_order_is_the_model_of_rsc():
    """ETTR of arXiv 2410.21680: (1 - N r (u + dt / 2)) / (1 + w / dt), where failures are rare."""
    mean, interval, write, restart = 7.9 * 3600, 3600.0, 60.0, 300.0
    paper = (1 - (restart + interval / 2) / mean) / (1 + write / interval)
    assert expected_goodput(interval, Saving(write), Recovery(0, restart), mean) == pytest.approx(paper, abs=0.005)


def test_llama_3_is_above_ninety_percent_as_published():
    """3.09 h between interruptions, with what a plan takes when nothing else is known."""
    cost, recovery = Saving(6), Recovery()
    seconds = chosen_interval(cost, recovery, 3.09 * 3600).seconds
    assert 0.90 < expected_goodput(seconds, cost, recovery, 3.09 * 3600) < 0.95


def test_more_of_anything_bad_is_never_better():
    base = expected_goodput(600, Saving(10, 60), Recovery(60, 300), 7200)
    worse = [
        expected_goodput(600, Saving(20, 60), Recovery(60, 300), 7200),
        expected_goodput(600, Saving(10, 120), Recovery(60, 300), 7200),
        expected_goodput(600, Saving(10, 60), Recovery(120, 300), 7200),
        expected_goodput(600, Saving(10, 60), Recovery(60, 600), 7200),
        expected_goodput(600, Saving(10, 60), Recovery(60, 300), 3600),
    ]
    assert all(0 < one < base for one in worse)
    assert expected_goodput(1e9, Saving(1e9), Recovery(1e9, 1e9), 1) == 0.0
    found = goodput_range(600, Saving(10), Recovery(), Range(3600, 7200, 36000))
    assert found.low < found.mid < found.high


def test_a_plan_orders_bandwidth_where_failures_are_frequent():
    """70 B on 512 GPUs does with Blob; Llama 3's 405 B on 16,384, hit every two hours, needs a fast file system."""
    small, large = (plan(n, gpus) for n, gpus in ((70e9, 512), (405e9, 16384)))
    assert small.storage.name == "blob-hot" and small.gib == pytest.approx(913, abs=1) and small.goodput.low > 0.97
    assert large.storage.name.startswith("lustre") and large.write_seconds < 120
    assert 0.75 < large.goodput.low < large.goodput.mid < large.goodput.high < 0.95
    slow = plan(405e9, 16384, storage="blob-hot")
    assert slow.goodput.mid < large.goodput.mid - 0.1 and slow.interval.formula == "writer"
    assert large.rates.together.low < large.rates.together.mid


def test_a_plan_warns_of_what_goes_with_its_machines():
    spot = plan(70e9, 64, storage="local-nvme", spot=True, spot_class="0-5")
    assert any("goes with its machine" in warning for warning in spot.warnings)
    diskless = Machine(**{**H100.__dict__, "nvme_write_bandwidth": 0.0})
    with pytest.raises(ValueError, match="local-nvme.*cannot write"):
        plan(70e9, 64, diskless, storage="local-nvme")
    with pytest.raises(ValueError, match="not available"):
        plan(1e15, 64, storage="lustre-500")


PRICES = {"blob-hot": 0.018, "lustre-40": 0.083, "lustre-500": 0.34, "netapp-ultra": 0.39}


def test_storage_by_need_and_price():
    data = choose_storage(Need("data", 20e12, 1e9), H100, 16, gb_month=PRICES, local_bytes=28e12)
    scratch = choose_storage(Need("scratch", 20e12, 100e9), H100, 16, gb_month=PRICES, local_bytes=28e12)
    fast = choose_storage(Need("checkpoints", 7e12, 20e9), H100, 16, gb_month=PRICES, local_bytes=28e12)
    assert data and data.storage.name == "blob-hot" and data.month == pytest.approx(360)
    assert scratch and scratch.storage.name == "local-nvme" and "comes with the machines" in scratch.reason
    assert fast and fast.storage.name == "lustre-500" and fast.tib == 40
    assert fast.month == pytest.approx(40 * 1.0995e3 * 0.34, rel=1e-3)  # less TiB than the slower tiers would need
    assert fast.rejected["local-nvme"] == "goes with its machines" and fast.rejected["blob-hot"] == "is too slow"


def test_measured_bandwidth_comes_before_what_is_known():
    need = Need("data", 1e12, 3e9)
    known = choose_storage(need, H100, 16, gb_month=PRICES)
    slow = choose_storage(need, H100, 16, gb_month=PRICES, measured={"blob-hot": 1e9})
    assert known and slow and known.storage.name == "blob-hot" != slow.storage.name


def test_no_storage_is_enough_for_everything():
    assert choose_storage(Need("data", 1e18, 1e9), H100, 2, gb_month=PRICES) is not None  # Blob has no end
    assert choose_storage(Need("data", 1e18, 1e12), H100, 2) is None
    assert "no price is known" in choose_storage(Need("data", 1e12), H100, 2).reason


def test_every_storage_says_where_its_figures_are_from():
    assert all(one.source and one.date and one.said for one in CHOICES) and len(STORAGES) == len(CHOICES)


@pytest.mark.parametrize(
    "call",
    [
        lambda: checkpoint_bytes(0),
        lambda: Saving(-1),
        lambda: Saving(math.nan),
        lambda: Recovery(math.inf, 0),
        lambda: expected_goodput(0, Saving(1), NOBODY, 100),
        lambda: expected_goodput(100, Saving(1), NOBODY, math.nan),
        lambda: chosen_interval(Saving(1), NOBODY, 0),
        lambda: chosen_interval(Saving(0), NOBODY, 100),
        lambda: snapshot_seconds(1, H100, 0),
        lambda: Need("data", -1),
        lambda: Need("data", 1, math.nan),
        lambda: choose_storage(Need("data", 1), H100, 0),
    ],
)
def test_what_cannot_be(call):
    with pytest.raises(ValueError):
        call()
