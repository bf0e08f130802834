"""Arguments for pretrain_gpt.py: golden, all of them known to the real parsers, and what does not fit refused."""

import json
import math
from pathlib import Path

import pytest
from fake_megatron import FLAGS, VALUES

from tasks.config.engines.registry import ENGINES
from tasks.config.flows import RetrainConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.megatron_arguments import Places, megatron_arguments, megatron_ds_config
from tasks.jobs.training.schedule import learning_rate

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).with_name("megatron_arguments.golden.json")
NETWORK = {"layers": 4, "hidden_size": 128, "heads": 4, "kv_heads": 2, "intermediate_size": 352}
GPT2 = {**NETWORK, "architecture": "gpt2", "kv_heads": 4}
TRAINING = {
    "engine": "megatron",
    "network": NETWORK,
    "sequence_length": 128,
    "global_batch_size": 16,
    "micro_batch_size": 1,
}
PLACES = {"tokens": ("/t/train_text_document",), "tokenizer": "/t/tokenizer", "save": "/j/save", "cache": "/j/cache"}
DEEPSPEED = {"flavour": "megatron-deepspeed", "converter": ("convert",)}
CASES = {
    "plain": ({}, {}, {}),
    "resumed_3d_wsd": (
        {"precision": "bf16", "schedule": "wsd"},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2, "recompute": "selective"},
        {"sequence_parallel": True, "arguments": ("--overlap-grad-reduce",)},
    ),
    "recomputed": (
        {"precision": "bf16"},
        {"tensor_parallel": 2, "recompute": "full"},
        {"distributed_optimizer": False},
    ),
    "gpt2": ({"network": GPT2}, {}, {"converter": ("convert",)}),
    "local": ({"precision": "bf16"}, {"tensor_parallel": 2}, {"transformer_impl": "local"}),
    "deepspeed_3d": (
        {"precision": "bf16"},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "full", "deepspeed": {"zero_stage": 1}},
        DEEPSPEED,
    ),
    "deepspeed_gpt2": ({"network": GPT2}, {}, DEEPSPEED),
}


def settings(training, execution, megatron):
    return (
        TrainingConfig(**{**TRAINING, **training}),
        ExecutionConfig(**execution, megatron={"checkout": "/opt/megatron-lm", **megatron}),
    )


def rendered(name):
    training, execution = settings(*CASES[name])
    resumed = {"load": "/j/load"} if name.startswith("resumed") else {}
    other = {"ds_config": "/j/ds_config.json"} if name.startswith("deepspeed") else {}
    return megatron_arguments(training, execution, Places(**PLACES, **resumed, **other), save_every=50, micro_batch=1)


@pytest.mark.parametrize("name", CASES)
def test_the_arguments_are_those_that_the_real_parser_took(name):
    golden = json.loads(GOLDEN.read_text())
    assert " ".join(rendered(name)) == golden[name], (
        f"they changed; when that is wanted, run the real parser, and {GOLDEN}"
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_rendered_fits_and_its_names_are_known(name):
    ENGINES["megatron"].require_fits(*settings(*CASES[name]))
    known = {f"--{word}" for word in (FLAGS + VALUES).split()}
    assert {word for word in rendered(name) if word.startswith("--")} <= known


def test_megatron_deepspeed_gets_the_zero_of_the_engine_deepspeed():
    training, execution = settings(*CASES["deepspeed_3d"])
    said = megatron_ds_config(training, execution, micro_batch=1)
    assert (
        said["zero_optimization"]["stage"] == 1
        and said["bf16"]["enabled"]
        and said["train_micro_batch_size_per_gpu"] == 1
    )


@pytest.mark.parametrize(
    ("training", "execution", "megatron", "words"),
    [
        ({"safety": {"not_finite": "skip"}}, {}, {}, "no training.safety.not_finite"),
        ({"safety": {"spike_factor": 2.0}}, {}, {}, "no training.safety.spike_factor"),
        ({}, {"parallel": "fsdp"}, {}, "no execution.parallel"),
        ({}, {"compile": True}, {}, "no execution.compile"),
        ({}, {"pipeline_parallel": 3}, {}, "layers 4 does not divide into execution.pipeline_parallel 3"),
        ({}, {"tensor_parallel": 4}, {}, "kv_heads 2 does not divide into execution.tensor_parallel 4"),
        ({"sequence_length": 130}, {"context_parallel": 2}, {}, "no multiple of 2 x execution.context_parallel = 4"),
        ({}, {}, {"sequence_parallel": True}, "needs execution.tensor_parallel"),
        ({"network": GPT2}, {}, {}, "reads no gpt2 of megatron-lm"),
        ({}, {}, {"flavour": "megatron-deepspeed"}, "reads no llama of megatron-deepspeed"),
        ({}, {"pipeline_parallel": 2}, DEEPSPEED, "ZeRO 1 only"),
        ({"schedule": "wsd"}, {}, DEEPSPEED, "no schedule wsd"),
        (
            {},
            {"context_parallel": 2},
            {"transformer_impl": "local"},
            "execution.context_parallel needs Transformer Engine",
        ),
        (
            {},
            {"tensor_parallel": 2},
            {"transformer_impl": "local", "sequence_parallel": True},
            "execution.megatron.sequence_parallel needs Transformer Engine",
        ),
        ({}, {}, {**DEEPSPEED, "transformer_impl": "local"}, "of the flavour megatron-lm"),
        ({}, {"recompute": "selective"}, DEEPSPEED, "all or nothing"),
    ],
)
def test_what_megatron_has_not_is_refused_with_a_remedy(training, execution, megatron, words):
    with pytest.raises(ValueError, match="execution|cosine") as refused:
        ENGINES["megatron"].require_fits(*settings(training, execution, megatron))
    assert words in str(refused.value)


def test_it_is_refused_when_the_configuration_is_read():
    with pytest.raises(ValueError, match=r"needs execution\.megatron\.checkout"):
        RetrainConfig(training={**TRAINING, "steps": 100})


def test_ranks_that_share_a_network_read_the_same_samples():
    parts = {"tensor_parallel": 2, "pipeline_parallel": 2, "megatron": {"checkout": "/opt/megatron-lm"}}
    cluster = {"nodes": 1, "ranks_per_node": 8}
    tree = {"training": {**TRAINING, "global_batch_size": 2, "steps": 100}, "cluster": cluster}
    assert RetrainConfig(**tree, execution=parts).execution.ranks_a_copy == 4
    with pytest.raises(ValueError, match="8 ranks do not divide by"):
        RetrainConfig(**tree, execution={**parts, "context_parallel": 4})


def rate_of_megatron(said, step):
    """Megatron-LM's rule (megatron/core/optimizer_param_scheduler.py @d98e8a64): a step has the rate of the steps before it."""
    done, warm, decay = step - 1, int(said["lr-warmup-iters"]), int(said["lr-decay-iters"])
    most, least = float(said["lr"]), float(said["min-lr"])
    if warm > 0 and done <= warm:
        first = float(said["lr-warmup-init"])
        return first + (most - first) * done / warm
    if done > decay:
        return least
    if said["lr-decay-style"] == "cosine":
        share = 0.5 * (math.cos(math.pi * (done - warm) / (decay - warm)) + 1)
    else:
        last = int(said["lr-wsd-decay-iters"])
        share = 1 - max(0, done - (decay - last)) / last
    return least + share * (most - least)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [1, 2, 10, 35])
def test_every_step_has_the_learning_rate_of_the_engine_torch(schedule, warmup):
    more = {"schedule": schedule, "steps": 40, "warmup_steps": warmup, "min_learning_rate_ratio": 0.1}
    training, execution = settings(more, {}, {})
    words = megatron_arguments(training, execution, Places(**PLACES), save_every=50, micro_batch=1)
    said = {word[2:]: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    for step in range(1, training.steps + 1):
        assert rate_of_megatron(said, step) == pytest.approx(learning_rate(training, step), rel=1e-9), step
