"""Megatron-LM in the built image of a node, as far as a CPU takes it; what only a GPU shows is `make gpu`'s (benchmarks/gpu.py).

That is: kernels of Transformer Engine and Triton, NCCL, mixed precision, memory, and the training loop of pretrain_gpt.py.
"""

import json
import math
import os
from pathlib import Path

import pytest
from built_images import Built, require_builder

from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.formats.megatron_arguments import Places, megatron_arguments
from tasks.planning.case import Network
from tasks.planning.counts import parameter_count

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
"""That docker/cluster.Dockerfile has."""
VOCABULARY, LENGTH = 320, 64


@pytest.fixture(scope="module")
def checkout():
    named = os.environ.get("MEGATRON_LM", "")
    if not named or not (Path(named) / "pretrain_gpt.py").is_file():
        pytest.skip(f"set MEGATRON_LM to a folder with NVIDIA/Megatron-LM at {COMMIT[:8]}")
    return Path(named)


@pytest.fixture(scope="module")
def image():
    require_builder()
    built = Built("cluster-cpu")
    yield built
    built.close()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_its_own_parser_and_model_builder_take_a_jobs_arguments_and_count_what_the_plan_counts(
    checkout, image, architecture
):
    llama = architecture == "llama"
    network = NetworkConfig(
        architecture=architecture, layers=2, hidden_size=64, heads=4, kv_heads=2 if llama else 4, intermediate_size=128
    )
    training = TrainingConfig(
        engine="megatron",
        network=network,
        sequence_length=LENGTH,
        global_batch_size=4,
        micro_batch_size=2,
        steps=10,
        warmup_steps=2,
    )
    execution = ExecutionConfig.model_validate({"megatron": {"transformer_impl": "local", "checkout": "/megatron"}})
    places = Places(tokens=("/t/train_text_document",), tokenizer="/t/tokenizer", save="/tmp/save", cache="/tmp/cache")
    arguments = megatron_arguments(training, execution, places, save_every=5, micro_batch=2)
    program = Path(__file__).parents[2] / "support" / "megatron_on_cpu.py"
    read_only = {"/megatron": checkout, "/probe/megatron_on_cpu.py": program}
    command = ("python", "/probe/megatron_on_cpu.py", "/megatron", VOCABULARY, *arguments)
    # Nothing is compiled: the base that stands in for Azure's has no headers of Python.
    ran = image.run(*command, seconds=300, read_only=read_only, TORCHDYNAMO_DISABLE="1")
    assert ran.returncode == 0, ran.stderr[-3000:]
    output = json.loads(ran.stdout.splitlines()[-1])
    shape = Network(layers=2, hidden=64, heads=4, kv_heads=2 if llama else 4, ffn=128, gated=llama, vocab=VOCABULARY)
    assert output["implementation"] == "local" and output["gradients"]
    assert output["parameters"] == parameter_count(shape, LENGTH)
    assert abs(output["loss"] - math.log(VOCABULARY)) < 1, "untrained, every token is about as likely as any other"
