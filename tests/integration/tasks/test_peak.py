"""What MFU is measured against: the peak of a GPU by the hardware's file, or what a CPU's matrix product was measured at."""

from tasks.artifacts import unqualified
from tasks.benchmark import _peaks
from tasks.config.cluster import ClusterConfig
from tasks.hardware.sku import load_sku
from tasks.train import peak_of


def cluster(gpus=0, **measured):
    return unqualified(ClusterConfig(backend="slurm", gpus_per_node=gpus)).model_copy(update=measured)


def test_a_gpus_peak_is_that_of_its_file_without_sparsity():
    peaks = _peaks(load_sku("Standard_ND96isr_H200_v5"))
    assert peaks == {"fp32": 67.0, "bf16": 989.0}
    gpus = cluster(8, peak_tflops=peaks, matmul_gflops_per_rank=50_000.0)
    assert [peak_of(gpus, precision)["tflops"] for precision in ("fp32", "bf16")] == [67.0, 989.0]
    assert _peaks(load_sku("nd40rs_v2")).keys() == {"fp32"}, "it has no bf16"


def test_a_cpus_is_measured_and_an_unknown_one_is_none():
    assert _peaks(load_sku("local-cpu")) == {}
    measured = peak_of(cluster(matmul_gflops_per_rank=86.0), "fp32")
    assert measured["tflops"] == 0.086 and "measured" in measured["of"]
    assert peak_of(cluster(), "fp32") is None
    assert peak_of(cluster(8, matmul_gflops_per_rank=50_000.0), "bf16") is None
