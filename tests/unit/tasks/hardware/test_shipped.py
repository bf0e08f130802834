"""The shipped files of hardware: every number has a source, and what is known of Azure's sizes is in them as it was published."""

import re
from datetime import date

import pytest

from tasks.hardware.files import FOLDER, find_sku, known_skus, read_sku
from tasks.hardware.sku import load_sku

pytestmark = pytest.mark.unit

SKUS = {name: read_sku(path) for name, path in known_skus().items()}
GPUS = {name: sku for name, sku in SKUS.items() if not name.startswith("local-") and sku.vendor != "cpu"}
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
SIZES = {
    "Standard_NC24ads_A100_v4", "Standard_NC48ads_A100_v4", "Standard_NC96ads_A100_v4", "Standard_NC40ads_H100_v5",
    "Standard_NC80adis_H100_v5", "Standard_ND40rs_v2", "Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4",
    "Standard_ND96isr_H100_v5", "Standard_ND96is_H100_v5", "Standard_ND96isr_H200_v5", "Standard_ND96is_H200_v5",
    "Standard_ND96asr_MI200_v4", "Standard_ND96isrf_H200_v5", "Standard_ND96isr_MI300X_v5",
    "Standard_ND128isr_NDR_GB200_v6", "Standard_ND128isr_GB300_v6",
}  # fmt: skip
RULES = {
    "aznhc_warns": lambda norm, fail, best: (1.05 * fail, fail),
    "halfway": lambda norm, fail, best: ((norm + fail) / 2, fail),
    "margin": lambda norm, fail, best: (0.95 * norm, 0.90 * norm),
    "other_kernel": lambda norm, fail, best: (0.80 * norm, 0.70 * norm),
    "ceiling": lambda norm, fail, best: (0.75 * best, 0.65 * best),
}


def spec(size, name):
    return SKUS[size].specs[name].value


def test_all_sizes_are_there_and_resolve_in_every_spelling():
    assert {sku.name for sku in GPUS.values()} == SIZES
    for name in SIZES:
        for spelt in (name, name.upper(), name.lower(), name.removeprefix("Standard_"), f" {name.replace('_', ' ')} "):
            assert find_sku(spelt).stem == name.lower().removeprefix("standard_")
        assert SKUS[name.lower().removeprefix("standard_")].name == name
    assert load_sku("ND96amsr_v4").name == "Standard_ND96amsr_A100_v4"
    assert load_sku("Standard_ND128isrG5_GB300_v6").name == "Standard_ND128isr_GB300_v6"


@pytest.mark.parametrize("name", SKUS)
def test_everything_has_a_source_with_a_date(name):
    sku = SKUS[name]
    for key in sku.named_sources:
        source = sku.sources[key]
        assert len(source.what) > 15 and date(2024, 1, 1) <= source.date <= date(2026, 11, 22), key
    sections = {"family", "topology", "environment", "transports"}
    said = {section for section in sections if getattr(sku, section)}
    assert said <= set(sku.section_sources)


@pytest.mark.parametrize("name", GPUS)
def test_a_source_of_its_own_is_used_and_is_of_this_size(name):
    sku = GPUS[name]
    text = find_sku(name).read_text()
    own = set(re.findall(r"^  (\w+):\n    what:", text, re.M))
    assert own <= sku.named_sources
    aznhc = sku.sources.get("aznhc")
    assert aznhc is None or f"conf/{name}.conf" in aznhc.what


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_above_what_is_achievable_and_that_above_every_limit(name):
    sku = GPUS[name]
    for dtype in DTYPES:
        peak, best = sku.specs.get(f"peak_{dtype}_tflops"), sku.specs.get(f"achievable_{dtype}_tflops")
        limit = sku.limits.get(f"matmul_{dtype}")
        ceiling = best or peak
        assert best is None or best.value < peak.value
        assert limit is None or max(limit.norm or 0, limit.warn, limit.fail) <= ceiling.value
    memory = sku.limits.get("memory_bandwidth")
    assert memory is None or memory.norm < sku.specs["gpu_memory_bandwidth_gb_s"].value


@pytest.mark.parametrize("name", SKUS)
def test_warn_levels_follow_the_rule_that_they_name(name):
    sku = SKUS[name]
    best = sku.specs["achievable_bf16_tflops"].value if "achievable_bf16_tflops" in sku.specs else None
    for level in (*sku.limits.values(), *sku.collectives):
        rule = level.warn_source or level.source
        if rule in RULES and level.warn is not None:
            wanted = RULES[rule](level.norm, level.fail, best)
            assert (level.warn, level.fail) == pytest.approx(wanted, rel=2e-3), level


def test_thresholds_of_aznhc_are_those_of_its_files():
    published = {
        "nd96asr_v4": (21, 235, 228, 8), "nd96amsr_a100_v4": (21, 238, 228, 16), "nd96isr_h100_v5": (48, 335, 460, 16),
        "nd96is_h100_v5": (48, 335, 460, 16), "nd96isr_h200_v5": (48, 335, 431, 16), "nd96is_h200_v5": (48, 335, 432, 16),
        "nd96isrf_h200_v5": (48, 335, 432, 16), "nd96isr_mi300x_v5": (48, 44, 314, 16), "nd96asr_mi200_v4": (12, 38, None, 0),
        "nc24ads_a100_v4": (21, None, None, 0), "nc48ads_a100_v4": (21, 238, 193, 16), "nc96ads_a100_v4": (21, None, 25, 8),
        "nc40ads_h100_v5": (48, None, None, 0), "nc80adis_h100_v5": (48, 335, 208, 16), "nd40rs_v2": (9, None, 110, 8),
    }  # fmt: skip
    for name, (host, peer, busbw, gib) in published.items():
        limits = SKUS[name].limits
        assert (limits["host_to_device"].fail, limits["device_to_host"].fail) == (host, host), name
        assert (limits["peer_to_peer"].fail if "peer_to_peer" in limits else None) == peer, name
        aznhc = [c for c in SKUS[name].collectives if c.source == "aznhc"]
        assert [(c.scope, c.fail, c.bytes) for c in aznhc] == [("node", busbw, gib * 2**30)] * bool(busbw), name


def test_memory_of_a_gpu_is_not_that_of_the_machine():
    for name, sku in GPUS.items():
        if "gpu_memory_gb" in sku.specs:
            each, all_ = spec(name, "gpu_memory_gb"), spec(name, "vm_gpu_memory_gb")
            assert all_ == pytest.approx(each * spec(name, "gpus"), rel=0.001), name
    assert (spec("nd96asr_v4", "gpu_memory_gb"), spec("nd96amsr_a100_v4", "gpu_memory_gb")) == (40, 80)
    assert spec("nd96isr_h100_v5", "gpus") == 8


def test_a_size_without_gpus_has_what_a_plan_of_it_needs():
    sizes = [sku for name, sku in SKUS.items() if sku.vendor == "cpu" and not name.startswith("local-")]
    assert [sku.name for sku in sizes] == ["Standard_F32s_v2"]
    for sku in sizes:
        assert {
            "vcpus",
            "memory_gib",
            "ethernet_gbit_s",
            "peak_fp32_tflops",
        } <= sku.specs.keys() and "gpus" not in sku.specs
        assert (
            sku.specs["peak_fp32_tflops"].value * 1000 < sku.specs["vcpus"].value / 2 * 64 * 4
        )  # 64 a cycle, below 4 GHz


def test_h100_nvl_is_neither_the_sxm_module_nor_80_gb():
    assert (spec("nc40ads_h100_v5", "peak_bf16_tflops"), spec("nc40ads_h100_v5", "gpu_memory_gb")) == (835, 94)
    assert spec("nd96isr_h100_v5", "peak_bf16_tflops") == 989  # 1979 is with sparsity


def test_memory_is_gib_of_kibibytes_less_its_margin():
    kib = {"nd96asr_v4": (928858388, 3), "nd96isr_h200_v5": (1909409116, 3), "nd40rs_v2": (693505424, 3)}
    mib = {"nd96isr_h100_v5": (1915071, 5), "nd96isr_mi300x_v5": (1915059, 7), "nc24ads_a100_v4": (221450, 10)}
    sizes = {name: (size / 2**20, margin) for name, (size, margin) in kib.items()}
    sizes |= {name: (size / 2**10, margin) for name, (size, margin) in mib.items()}
    for name, (gib, margin) in sizes.items():
        limit = SKUS[name].limits["memory_gib"]
        assert (limit.norm, limit.fail) == pytest.approx((gib, gib * (1 - margin / 100)), abs=0.06)
        assert limit.fail < spec(name, "memory_gib")


def test_ports_have_gbit_and_bus_bandwidth_bytes():
    for name, sku in GPUS.items():
        ports = sku.specs["infiniband_ports"].value
        assert bool(ports) == ("ib_rate" in sku.limits) == ("infiniband_gbit_s" in sku.specs), name
        if ports:
            line = ports * sku.specs["infiniband_gbit_s"].value / 8
            assert sku.limits["ib_rate"].fail == sku.specs["infiniband_gbit_s"].value
            assert sku.limits["ib_ports_active"].fail == ports
            assert all(c.fail < line for c in sku.collectives if c.scope == "all" and c.nodes is None), name


def test_what_talks_over_infiniband_must_use_it():
    for name, sku in GPUS.items():
        over = "infiniband_gbit_s" in sku.specs and "gb" not in sku.specs["gpu"].value.lower().split()[-1][:2]
        assert (sku.transports.get("all"), sku.transports.get("pair")) == (
            (("NET/IB",),) * 2 if over else (None, None)
        ), name
        assert not over or "P2P" in sku.transports["node"]


def test_limits_of_azure_ml():
    for name, sku in GPUS.items():
        said = {key: number.value for key, number in sku.azureml.items()}
        assert (said["job_days"], said["low_priority_job_days"], said["default_cores"]) == (21, 7, 0)
        assert (said["mpi_nodes"], said["cluster_nodes"]) == (100, 100 if spec(name, "infiniband_ports") else 300), name


def test_images_are_named_by_their_urn():
    for sku in GPUS.values():
        for image in sku.images:
            assert re.fullmatch(r"microsoft-dsvm:ubuntu-hpc:2[24]04[\w-]*:(latest|2[24]\.04\.\d{10})", image.urn)
            assert image.release in sku.sources[image.source].what
            assert set(image.versions) <= {"driver", "cuda", "nccl", "rocm", "rccl", "mpi", "ofed", "doca"}


def test_files_are_called_as_what_they_describe():
    assert all(path.parent == FOLDER for path in known_skus().values())
    assert not any(name.startswith("_") for name in SKUS)
