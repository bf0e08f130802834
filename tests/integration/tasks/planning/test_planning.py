"""Sizes against real networks and published counts; times and intervals against published tables."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.jobs.training.network import build_network
from tasks.planning import checkpointing
from tasks.planning.case import Network
from tasks.planning.checkpointing import resumable_bytes
from tasks.planning.counts import model_flops_per_token, parameter_count
from tasks.planning.memory import memory_of_cpu_rank
from tasks.planning.prediction import Divided, Division
from tasks.planning.steps import step_time_measured

SHAPES = [
    (NetworkConfig(), 512),
    (NetworkConfig(tie_embeddings=False), 512),
    (NetworkConfig(layers=2, hidden_size=64, heads=8, kv_heads=2, intermediate_size=96), 301),
    (NetworkConfig(layers=3, hidden_size=96, heads=6, kv_heads=1, intermediate_size=200, tie_embeddings=False), 1000),
]
GPT2 = [
    NetworkConfig(architecture="gpt2", layers=2, hidden_size=64, heads=4, kv_heads=4, intermediate_size=256),
    NetworkConfig(
        architecture="gpt2", layers=3, hidden_size=96, heads=6, kv_heads=6, intermediate_size=200, tie_embeddings=False
    ),
]
# transformers' count of the published checkpoints.
PUBLISHED = {
    "Llama-2-7b": (32, 4096, 32, 32, 11008, False, 32000, 6_738_415_616),
    "Meta-Llama-3-8B": (32, 4096, 32, 8, 14336, False, 128256, 8_030_261_248),
    "TinyLlama-1.1B": (22, 2048, 32, 4, 5632, False, 32000, 1_100_048_384),
    "SmolLM2-135M": (30, 576, 9, 3, 1536, True, 49152, 134_515_008),
}
# Korthikanti et al. 2022, Table 5: heads, hidden, layers, GPUs, global batch, seconds an iteration, MFU in percent.
KORTHIKANTI = [
    (64, 6144, 48, 8, 4, 1.10, 41.5),
    (96, 12288, 96, 64, 64, 13.75, 51.4),
    (128, 20480, 105, 280, 280, 37.83, 56.0),
    (160, 25600, 128, 512, 512, 71.49, 56.3),
]
# Narayanan et al. 2021, section 5.1: parameters, tokens, GPUs, TFLOP/s a GPU, days.
NARAYANAN = [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)]


def llama(network, vocab_size):
    """The real network, with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            num_hidden_layers=network.layers,
            hidden_size=network.hidden_size,
            num_attention_heads=network.heads,
            num_key_value_heads=network.kv_heads,
            intermediate_size=network.intermediate_size,
            tie_word_embeddings=network.tie_embeddings,
        )
    )


def gpt2(network, vocab_size, sequence_length):
    return build_network(TrainingConfig(network=network, sequence_length=sequence_length), vocab_size=vocab_size, eod=0)


def of(network, vocab_size, *, sequence_length=64, micro_batch_size=2):
    division = Division(engine="torch", precision="fp32", micro=micro_batch_size)
    return Divided(Network.of_config(network, vocab_size), division, sequence_length)


def activations(network, vocab_size, **batch):
    """Bytes of a rank that are no state."""
    return memory_of_cpu_rank(of(network, vocab_size, **batch), trained=0, frozen=0, share=1.0)


def saved_bytes(model, vocab_size, *, sequence_length, micro_batch_size):
    """Bytes of the distinct storages that autograd keeps for backward, parameters left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    sample = torch.randint(0, vocab_size, (micro_batch_size, sequence_length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=sample, labels=sample, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def measured(flops, gradient_bytes=1, **more):
    """Two ranks of 10 GFLOP/s, unless said otherwise."""
    rates = {"ranks": 2, "gflops_per_rank": 10, "bus_gigabytes_per_second": 1.0}
    return step_time_measured(flops, gradient_bytes, **{**rates, **more})


@pytest.mark.parametrize(("network", "vocab_size"), SHAPES)
def test_parameters_equal_the_real_network(network, vocab_size):
    assert parameter_count(Network.of_config(network, vocab_size), 1) == sum(
        p.numel() for p in llama(network, vocab_size).parameters()
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_published_counts(name):
    layers, hidden, heads, kv_heads, intermediate, tied, vocab_size, parameters = PUBLISHED[name]
    network = NetworkConfig(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=intermediate,
        tie_embeddings=tied,
    )
    assert parameter_count(Network.of_config(network, vocab_size), 1) == parameters


def test_training_memory_of_the_zero_paper():
    whole = memory_of_cpu_rank(of(*SHAPES[0]), trained=7_500_000_000, frozen=0, share=1.0)
    assert whole - activations(*SHAPES[0]) == 120e9  # Rajbhandari et al. 2020, figure 1: 7.5 B, baseline


@pytest.mark.parametrize(("network", "vocab_size"), SHAPES)
def test_activations_are_what_autograd_keeps_and_three_copies_of_the_logits(network, vocab_size):
    batch = {"sequence_length": 64, "micro_batch_size": 2}
    logits = 4 * 64 * 2 * vocab_size
    kept = saved_bytes(
        llama(network, vocab_size), vocab_size, **batch
    )  # one of the four copies, the log-softmax, is here
    assert activations(network, vocab_size, **batch) - 3 * logits == pytest.approx(kept, rel=0.04)


@pytest.mark.parametrize("network", GPT2)
def test_a_gpt2_is_as_large_as_the_real_one(network):
    batch = {"sequence_length": 64, "micro_batch_size": 2}
    real = gpt2(network, 301, 64)
    assert parameter_count(Network.of_config(network, 301), 64) == sum(p.numel() for p in real.parameters())
    kept = saved_bytes(real, 301, **batch)
    assert activations(network, 301, **batch) - 3 * 4 * 64 * 2 * 301 == pytest.approx(kept, rel=0.04)


def test_the_published_gpt2_has_124_million_parameters():
    network = NetworkConfig(
        architecture="gpt2", layers=12, hidden_size=768, heads=12, kv_heads=12, intermediate_size=3072
    )
    assert parameter_count(Network.of_config(network, 50257), 1024) == 124_439_808


def test_checkpoint_holds_weights_and_two_moments():
    network = llama(*SHAPES[0])
    optimizer = torch.optim.AdamW(network.parameters())
    network(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = sum(s[name].nbytes for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    tensors = moments + sum(p.nbytes for p in network.parameters())
    estimate = resumable_bytes(parameter_count(Network.of_config(*SHAPES[0]), 1))
    assert tensors < estimate < tensors + 2_000_000


@pytest.mark.parametrize(("heads", "hidden", "layers", "gpus", "batch", "seconds", "mfu"), KORTHIKANTI)
def test_operations_reproduce_published_utilisation(heads, hidden, layers, gpus, batch, seconds, mfu):
    # Their GELU layer of width 4h has the matrices of a SwiGLU layer of 8h/3; they count the full attention square.
    network = NetworkConfig(
        layers=layers, hidden_size=hidden, heads=heads, kv_heads=heads, intermediate_size=round(8 * hidden / 3)
    )
    causal = model_flops_per_token(Network.of_config(network, 51200), 2048)
    token = causal + 6 * layers * hidden * 2048
    assert 100 * token * batch * 2048 / (seconds * gpus * 312e12) == pytest.approx(mfu, abs=0.3)


def test_both_conventions_agree_where_attention_is_small():
    config = NetworkConfig(layers=8, hidden_size=512, heads=8, kv_heads=8, intermediate_size=1408)
    network = Network.of_config(config, 1024)
    simple = 6 * parameter_count(network, 1)
    assert model_flops_per_token(network, 1) == pytest.approx(simple, rel=0.001)
    long = model_flops_per_token(network, 4096)
    assert long - simple == pytest.approx(6 * 8 * 512 * 4096, rel=0.001)


@pytest.mark.parametrize(("parameters", "tokens", "gpus", "teraflops", "days"), NARAYANAN)
def test_days_of_training_as_published(parameters, tokens, gpus, teraflops, days):
    flops = 6 * parameters * tokens * 4 / 3  # they compute every forward pass twice
    seconds = measured(flops, ranks=gpus, gflops_per_rank=teraflops * 1000, efficiency=1.0).matmul
    assert seconds / 86400 == pytest.approx(days, abs=0.5)


def test_allreduce_inverts_bus_bandwidth():
    # Eight H100 with NVLS: bus bandwidth about 480, algorithm bandwidth about 275 GB/s (nccl-tests, issue 212).
    seconds = measured(1, 8 * 2**30, ranks=8, bus_gigabytes_per_second=480).data_parallel
    assert 8 * 2**30 / seconds / 1e9 == pytest.approx(275, rel=0.01)
    assert measured(1, 1e9, ranks=1, bus_gigabytes_per_second=0.0).data_parallel == 0.0


def test_a_step_is_the_slowest_rank_and_one_allreduce():
    step = measured(4e9, 2e6, bus_gigabytes_per_second=0.5, efficiency=0.4)
    assert step.total == pytest.approx(2e9 / 4e9 + 2e6 / 0.5e9)


@pytest.mark.parametrize(("gflops", "efficiency"), [(0.0, 0.5), (10.0, 0.0), (10.0, 1.5)])
def test_impossible_rates_are_refused(gflops, efficiency):
    with pytest.raises(ValueError, match="GFLOP/s"):
        measured(1e9, gflops_per_rank=gflops, efficiency=efficiency)


def test_no_bandwidth_between_ranks_is_refused():
    with pytest.raises(ValueError, match="GB/s over 2 ranks"):
        measured(1e9, 1e6, bus_gigabytes_per_second=0.0)


def test_young_as_in_the_worked_example():
    found = checkpointing.young_interval(10, 6000)
    assert found == pytest.approx(346, abs=0.5)
    assert found / 15 == pytest.approx(23.1, abs=0.05)


@pytest.mark.parametrize(("save", "failures"), [(1, 100_000), (10, 6000), (300, 3600), (600, 3600)])
def test_daly_minimises_the_expected_time(save, failures):
    computing = np.linspace(1, 3 * failures, 200_000)
    expected = failures * np.expm1((computing + save) / failures) / computing  # Daly 2006, equation 20, per second
    best = expected.min()
    at_daly = np.interp(checkpointing.daly_interval(save, failures), computing, expected)
    assert at_daly == pytest.approx(best, rel=1e-4)


def test_a_save_longer_than_two_failures_apart_takes_the_failure_time():
    assert checkpointing.daly_interval(250, 100) == 100


@pytest.mark.parametrize(
    ("steps", "step_seconds", "every"),
    [(100_000, 15, 23), (100, 15, 10), (5, 15, 1), (1000, 10_000, 1), (1, 0.1, 1)],
)
def test_steps_between_checkpoints_stay_in_bounds(steps, step_seconds, every):
    found = checkpointing.checkpoint_every_steps(
        steps, step_seconds, save_seconds=10, mean_seconds_between_failures=6000
    )
    assert found == every


@pytest.mark.parametrize(("save", "failures"), [(0, 10), (10, 0)])
def test_intervals_need_positive_times(save, failures):
    with pytest.raises(ValueError, match="above 0"):
        checkpointing.daly_interval(save, failures)
