"""On machines with GPUs the stage's plan is the prediction: it closes the gate for what does not fit, and names what would."""

import pytest

from tasks.artifacts import Cluster
from tasks.config.base import Settings
from tasks.config.cluster import ClusterConfig
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage_context import Work, working
from tasks.plan import judge, mean_seconds_between_failures, reckon, seconds_between_failures

H100 = "Standard_ND96isr_H100_v5"
LLAMA_8B = {
    "layers": 32,
    "hidden_size": 4096,
    "heads": 32,
    "kv_heads": 8,
    "intermediate_size": 14336,
    "tie_embeddings": False,
}
LLAMA_70B = {**LLAMA_8B, "layers": 80, "hidden_size": 8192, "heads": 64, "intermediate_size": 28672}
VOCAB = 128_256
LIMITS = PlanningConfig(max_minutes=1e9)


def cluster(nodes=2, sku=H100, gpus=8, **more):
    config = ClusterConfig(name="nd", backend="slurm", nodes=nodes, ranks_per_node=8, gpus_per_node=gpus)
    told = {
        "matmul_gflops_per_rank": 50_000.0,
        "allreduce_gigabytes_per_second": 360.0,
        "memory_bytes_per_node": 1 << 41,
        "sku": sku,
        "config": config,
    }
    return Cluster(
        name="nd", backend="slurm", nodes=nodes, threads_per_rank=12, **{"ranks_per_node": 8, **told, **more}
    )


def training(network=LLAMA_8B, **more):
    told = {
        "precision": "bf16",
        "sequence_length": 4096,
        "global_batch_size": 128,
        "micro_batch_size": 1,
        "steps": 1000,
    }
    return TrainingConfig(network=network, **{**told, **more})


def planned(tmp_path, on, how, **more):
    asked = training(**more)
    numbers = reckon(asked, LIMITS, how, on, vocab_size=VOCAB, train_tokens=10**9, home=tmp_path)
    return numbers.rank, numbers


@pytest.fixture
def memory_check(tmp_path, monkeypatch):
    """The check of memory, judged as in the stage."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))

    def check(numbers):
        opened = lifecycle("retrain", Settings(), subject="m", stages=["plan"], dry=True)
        with opened as run, working(Work("plan", "k", run, "", handed=[], context=[])):
            (found,) = [each for each in judge(numbers, LIMITS) if each.name.startswith("memory")]
        return found

    return check


def test_what_fits_is_planned_with_the_gpus_memory_and_rate(tmp_path, memory_check):
    how = ExecutionConfig(parallel="fsdp", recompute="full")
    gpus, numbers = planned(tmp_path, cluster(), how)
    assert gpus.predicted and gpus.nearest == "" and 70 < gpus.usable / 2**30 < 80
    assert numbers.memory_per_rank == round(gpus.memory) and numbers.step_seconds == gpus.step_seconds
    tflops = numbers.flops / numbers.seconds / 16 / 1e12
    assert 200 < tflops < 794
    check = memory_check(numbers)
    assert check.passed and check.measured == pytest.approx(gpus.memory / 2**30)


def test_what_does_not_fit_closes_the_gate_and_names_the_nearest_that_does(tmp_path, memory_check):
    on, how = cluster(), ExecutionConfig(parallel="ddp")
    gpus, numbers = planned(tmp_path, on, how, network=LLAMA_70B)
    check = memory_check(numbers)
    assert gpus.nearest and gpus.nearest in check.remedy and not check.passed and check.measured > 80
    fits, _ = planned(
        tmp_path, cluster(nodes=16), ExecutionConfig(parallel="fsdp", recompute="full"), network=LLAMA_70B
    )
    assert fits.predicted and fits.nearest == ""


def test_the_network_that_was_measured_counts(tmp_path):
    how = ExecutionConfig(parallel="fsdp", recompute="full")
    slow = planned(tmp_path, cluster(allreduce_gigabytes_per_second=20.0), how)[0]
    assert slow.step_seconds > 1.2 * planned(tmp_path, cluster(), how)[0].step_seconds


@pytest.mark.parametrize(
    "on", [cluster(gpus=0), cluster(sku=""), cluster(sku="local-gpu"), cluster(sku="nobody-knows")]
)
def test_machines_of_which_too_little_is_known_are_reckoned_by_what_was_measured(tmp_path, on):
    assert not planned(tmp_path, on, ExecutionConfig(parallel="fsdp"))[0].predicted


def test_adapters_are_reckoned_and_what_cannot_be_divided_is_named(tmp_path):
    assert not planned(tmp_path, cluster(), ExecutionConfig(), lora={"rank": 8}, base="checkpoint/x")[0].predicted
    with pytest.raises(ValueError, match="heads 30 do not divide by tp 4"):
        odd = {**LLAMA_8B, "hidden_size": 3840, "heads": 30, "kv_heads": 30}
        planned(tmp_path, cluster(), ExecutionConfig(parallel="fsdp", tensor_parallel=4), network=odd)


def test_ranks_that_are_not_the_size_s_gpus_and_precisions_without_a_rate_block_nobody(tmp_path):
    how = ExecutionConfig(parallel="fsdp", recompute="full")
    four = cluster(
        nodes=2, ranks_per_node=4, config=ClusterConfig(backend="slurm", nodes=2, ranks_per_node=4, gpus_per_node=4)
    )
    six = cluster(
        nodes=2, ranks_per_node=6, config=ClusterConfig(backend="slurm", nodes=2, ranks_per_node=6, gpus_per_node=6)
    )
    assert planned(tmp_path, four, how)[0].nearest == ""
    assert planned(tmp_path, six, how, global_batch_size=120)[0].step_seconds > 0
    nvl = cluster(nodes=2, sku="Standard_NC80adis_H100_v5")
    assert not planned(tmp_path, nvl, how, precision="fp32")[0].predicted  # its file has no rate of fp32


def test_goodput_is_that_of_an_asynchronous_save(tmp_path):
    _, numbers = planned(
        tmp_path, cluster(nodes=16), ExecutionConfig(parallel="fsdp", recompute="full"), network=LLAMA_70B
    )
    assert numbers.goodput > 0.9


def test_without_a_word_of_failures_the_rates_of_the_machines_are_taken(tmp_path):
    """31,600 GPU-hours an interruption: 16,384 H100 stop every 1.93 h, and not once a day."""
    large = cluster(nodes=2048)
    assert mean_seconds_between_failures(LIMITS, large) == pytest.approx(31_600 / 16_384 * 3600)
    assert mean_seconds_between_failures(LIMITS, cluster(gpus=0)) == 24 * 3600, "nothing is published of others"
    how = ExecutionConfig(parallel="fsdp", recompute="full")
    _, numbers = planned(tmp_path, large, how, global_batch_size=16_384)
    assert 0.8 < numbers.goodput < 0.93, "0.99 with 24 h between failures"
    assert numbers.mean_seconds_between_failures == seconds_between_failures(LIMITS, large)
    told = PlanningConfig(mean_hours_between_failures=24.0)
    assert mean_seconds_between_failures(told, large) == 24 * 3600


def test_machines_that_may_be_taken_away_are_interrupted_by_evictions_too():
    """7.5 % of 64 machines an hour, the middle of what is taken without a class, are an eviction every 12 minutes."""
    spot = ClusterConfig(name="nd", backend="slurm", nodes=64, ranks_per_node=8, gpus_per_node=8, preemptible=True)
    evictions = 3600 / 64 / 0.07796
    both = 1 / (1 / evictions + 512 / (31_600 * 3600))
    assert mean_seconds_between_failures(LIMITS, cluster(nodes=64, config=spot)) == pytest.approx(both, rel=1e-3)
    priced = PlanningConfig(spending={"price": "spot"})
    assert mean_seconds_between_failures(priced, cluster(nodes=64)) == pytest.approx(both, rel=1e-3)
    without = ClusterConfig(name="cpu", backend="slurm", nodes=64, preemptible=True)
    assert mean_seconds_between_failures(LIMITS, cluster(nodes=64, config=without)) == pytest.approx(
        1 / (1 / evictions + 1 / 86_400), rel=1e-3
    )
