"""Machines for plans: of a GPU's name and of a size, in plain units, each number from a file or named as assumed."""

import pytest

from tasks.hardware.files import known_skus
from tasks.hardware.machines import machine_of_gpu, machine_of_sku, of_qualification

pytestmark = pytest.mark.unit

NAMES = ("V100-32GB", "A100-40GB", "A100-80GB", "A800", "H100", "H800", "H200", "MI300X", "B200")


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_is_found_by_its_name(name):
    made = machine_of_gpu(name)
    assert made.gpus == 8 and made.name == name
    assert made == machine_of_gpu(name.lower()) == machine_of_gpu(name.replace("-", " "))
    for dtype, rate in made.achievable_flops.items():
        assert 0.4 * made.peak_flops[dtype] < rate <= made.peak_flops[dtype]
    assert 0.9 * made.memory_bytes < made.usable_memory_bytes < made.memory_bytes
    assert (
        made.link_bandwidth > made.network_bandwidth > 1e9
        and made.memory_bandwidth > 5e11
        and made.host_bandwidth > 5e9
    )


def test_numbers_are_those_of_the_files_in_plain_units():
    a100 = machine_of_gpu("A100-80GB")
    assert a100.peak_flops["bf16"] == 312e12 and a100.achievable_flops["bf16"] == pytest.approx(271.2e12)
    assert a100.memory_bytes == 80 << 30 and a100.link_bandwidth == pytest.approx(231.58e9) and a100.vcpus == 96
    assert "bf16" not in machine_of_gpu("V100-32GB").peak_flops  # it has no bf16
    assert machine_of_gpu("B200").peak_flops["bf16"] == 2250e12
    assert a100.sources["memory_bandwidth"] and a100.assumed == ()


@pytest.mark.parametrize("sold, like", [("A800", "A100-80GB"), ("H800", "H100")])
def test_what_was_sold_with_slower_links_is_the_same_but_for_them(sold, like):
    slow, fast = machine_of_gpu(sold), machine_of_gpu(like)
    assert slow.achievable_flops == fast.achievable_flops and slow.memory_bytes == fast.memory_bytes
    assert slow.link_bandwidth == pytest.approx(0.77 * 200e9) and slow.link_bandwidth < fast.link_bandwidth


def test_a_gpu_with_less_memory_says_so():
    small = machine_of_gpu("V100-16GB")
    assert small.gpu == "NVIDIA V100 SXM2 16GB" and small.memory_bytes == 16 << 30


def test_a_size_has_what_its_account_is_asked_for_and_a_gpu_by_name_has_not():
    size, gpu = machine_of_sku("nd96isr H100 v5"), machine_of_gpu("H100")
    assert (size.name, size.family, size.tops_out_at) == ("Standard_ND96isr_H100_v5", "standardNDSH100v5Family", 100)
    assert (gpu.family, gpu.tops_out_at) == ("", 0) and gpu.peak_flops == size.peak_flops
    assert machine_of_sku("Standard_NC24ads_A100_v4").network_bandwidth == 0


def test_every_size_with_gpus_makes_a_machine():
    made = 0
    for name in known_skus():
        try:
            machine = machine_of_sku(name)
        except ValueError as error:
            assert "no GPUs" in str(error) and name in ("local-cpu", "f32s_v2", "local-gpu", "nd96asr_mi200_v4")
            continue
        made += 1
        assert machine.gpus >= 1 and all(rate > 0 for rate in machine.achievable_flops.values())
    assert made >= 12


def test_what_is_not_known_is_named():
    with pytest.raises(ValueError, match="gpu 'X9'.*A100-80GB"):
        machine_of_gpu("X9")
    with pytest.raises(ValueError, match="local-cpu describes no GPUs"):
        machine_of_sku("local-cpu")
    with pytest.raises(ValueError, match="nothing is known of it"):
        machine_of_sku("Standard_X9")


def test_what_was_measured_comes_first():
    made = machine_of_gpu("H100")
    assert of_qualification(made, allreduce_bus_bandwidth=0.0, nodes=4) == made
    over = of_qualification(made, allreduce_bus_bandwidth=320e9, nodes=4)
    assert over.network_bandwidth == pytest.approx(40e9) and over.link_bandwidth == made.link_bandwidth
    assert of_qualification(made, allreduce_bus_bandwidth=400e9, nodes=1).link_bandwidth == 400e9
