"""The same training however it is divided: whole weights, FSDP2, shared matrices, recomputation, bf16; and the schedule."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from training_runs import CONFIG, all_lines, error, said_by, write_job
from transformers import AutoModelForCausalLM

from tasks.config.engines.registry import ENGINES
from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.jobs.training.network import build_network, next_token_loss
from tasks.jobs.training.parallel import Parallel, data_place, recompute
from tasks.jobs.training.schedule import learning_rate

STEPS = 8
TOLERANCE = {"rel": 2e-5}
"""Of losses and norms: float32 sums in another order, eight steps of it."""
LLAMA = NetworkConfig(layers=2, hidden_size=32, heads=4, kv_heads=2, intermediate_size=64)
GPT2 = NetworkConfig(architecture="gpt2", layers=1, hidden_size=32, heads=2, kv_heads=2, intermediate_size=64)
DIVIDED = {"parallel": "fsdp"}
SHARED = {"parallel": "fsdp", "tensor_parallel": 2}


def training(network=LLAMA, **changed):
    return CONFIG.model_copy(update={"network": network, "steps": STEPS, "micro_batch_size": 2, **changed})


@pytest.fixture(scope="module")
def runs(forks, tokens, tmp_path_factory):
    """A function that trains on two ranks, once for each question, and returns the job's folder."""
    folder, done = tmp_path_factory.mktemp("jobs"), {}

    def run(name, execution, config=None):
        if name not in done:
            job = write_job(folder / name, tokens, config or training(), every=100, execution=execution)
            assert forks(job) == [0, 0], said_by(job)
            done[name] = job
        return done[name]

    return run


def told(job):
    """Losses and norms of all steps."""
    return [number for line in all_lines(job) for number in (line["loss"], line["grad_norm"])]


@pytest.mark.parametrize(("name", "execution"), [("fsdp", DIVIDED), ("tensor", SHARED)])
def test_divided_weights_learn_what_whole_ones_learn(runs, name, execution):
    whole, divided = runs("ddp", {}), runs(name, execution)
    assert len(told(whole)) == 2 * STEPS
    assert told(divided) == pytest.approx(told(whole), **TOLERANCE)


@pytest.mark.parametrize(("name", "execution"), [("fsdp", DIVIDED), ("tensor", SHARED)])
def test_what_divided_weights_are_written_as_is_whole_and_tied(runs, name, execution):
    whole, divided = runs("ddp", {}) / "out", runs(name, execution) / "out"
    theirs, ours = load_file(whole / "model.safetensors"), load_file(divided / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert "lm_head.weight" not in ours
    for key, tensor in theirs.items():
        assert torch.allclose(ours[key], tensor, atol=1e-4), key
    assert json.loads((divided / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(divided)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_gpt2_in_bf16_over_two_ranks(runs):
    config = training(GPT2, precision="bf16")
    whole, divided = runs("gpt2", {}, config), runs("gpt2-fsdp", DIVIDED, config)
    assert told(divided) == pytest.approx(told(whole), rel=5e-3)
    assert AutoModelForCausalLM.from_pretrained(divided / "out").config.model_type == "gpt2"
    assert load_file(divided / "out" / "model.safetensors")["transformer.wpe.weight"].dtype == torch.float32


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(network, *, half=False):
    inputs = torch.arange(2 * 32).view(2, 32) % 64
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        next_token_loss(network, inputs, inputs.roll(-1, 1)).backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def kept(network):
    """Bytes that are kept for the backward pass."""
    found = {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = torch.arange(2 * 32).view(2, 32) % 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        next_token_loss(network, inputs, inputs)
    return sum(found.values())


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_recomputed_activations_give_the_same_gradients(shape):
    built = {}
    for what in ("none", "selective", "full"):
        built[what] = build_network(training(shape), vocab_size=64, eod=63)
        recompute(built[what], what)
    found = {what: gradients(network) for what, network in built.items()}
    for what in ("selective", "full"):
        assert all(torch.equal(found[what][name], gradient) for name, gradient in found["none"].items()), what
    assert kept(built["full"]) < kept(built["none"])


def test_bf16_computes_low_and_keeps_weights_and_gradients_high(alone):
    config = training(precision="bf16")
    network = build_network(config, vocab_size=64, eod=63)
    parallel = Parallel(network, config, ExecutionConfig(), device=torch.device("cpu"), group=None)
    with parallel.lower():
        assert parallel.called(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.dtype == torch.bfloat16
    low, high = gradients(network, half=True), gradients(build_network(config, vocab_size=64, eod=63))
    for name, gradient in low.items():
        assert gradient.dtype == torch.float32
        assert nn.functional.cosine_similarity(gradient.flatten(), high[name].flatten(), dim=0) > 0.99, name


def test_wsd_is_stable_and_then_goes_down_in_a_line():
    config = TrainingConfig(schedule="wsd", steps=100, warmup_steps=10, decay_share=0.2, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[4] == 0.5
    assert set(rates[9:80]) == {1.0}
    assert rates[89] == pytest.approx(0.55) and rates[99] == pytest.approx(0.1)


def test_wsd_that_decays_all_the_time_begins_after_the_warm_up():
    config = TrainingConfig(schedule="wsd", steps=100, warmup_steps=10, decay_share=1.0, learning_rate=1.0)
    assert learning_rate(config, 10) == 1.0 and learning_rate(config, 55) == pytest.approx(0.55)


def test_ranks_that_share_matrices_see_the_same_samples():
    places = [data_place(rank, 6, ExecutionConfig(**SHARED)) for rank in range(6)]
    assert places == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    with pytest.raises(ValueError, match="5 ranks do not divide into groups of execution.tensor_parallel 2"):
        data_place(0, 5, ExecutionConfig(**SHARED))


@pytest.mark.parametrize(
    ("config", "execution", "said"),
    [
        (training(), {"tensor_parallel": 2}, "needs execution.parallel fsdp"),
        (training(GPT2), SHARED, "a plan for llama only, not for gpt2"),
    ],
)
def test_what_cannot_share_matrices_is_refused(config, execution, said):
    with pytest.raises(ValueError, match=said):
        ENGINES[config.engine].require_fits(config, ExecutionConfig(**execution))


def test_heads_that_do_not_divide_are_refused_by_the_job(forks, tokens, tmp_path):
    config = training(NetworkConfig(layers=1, hidden_size=32, heads=4, kv_heads=1, intermediate_size=64))
    job = write_job(tmp_path / "job", tokens, config, execution=SHARED)
    assert forks(job) == [1, 1]
    assert "num_key_value_heads 1 does not divide by execution.tensor_parallel 2" in error(job)["message"]
