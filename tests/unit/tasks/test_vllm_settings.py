"""What is refused of vLLM's settings before anything is spent, by name; and how its answers are judged."""

import json
import math

import pytest

from tasks.common.errors import Missing
from tasks.config.base import config_digest
from tasks.config.flows import RetrainConfig
from tasks.config.serving import DeploymentConfig, ExportConfig
from tasks.serving.vllm import logprob_error, require_architecture, require_servable, settings_of, wrong_golden

pytestmark = pytest.mark.unit

ENTRY = {"prompt": "a", "prompt_tokens": [1, 2], "tokens": [5, 6], "logprobs": [-1.0, -2.0]}


def config(**deployment):
    return RetrainConfig.model_validate({"deployment": {"runtime": "vllm", **deployment}})


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (
            {"vllm": {"arguments": ["--trust-remote-code"]}},
            "'--trust-remote-code': Headway sets it itself, or keeps it off",
        ),
        ({"vllm": {"arguments": ["--trust"]}}, "arguments has '--trust'"),
        ({"vllm": {"arguments": ["--served_model_name=x"]}}, "arguments has '--served_model_name=x'"),
        ({"vllm": {"arguments": ["--dtype", "half"]}}, r"set deployment\.vllm\.dtype"),
        ({"vllm": {"command": "vllm serve"}}, "command"),
        ({"replicas": {"most": 3}}, "replicas are 1 to 3"),
    ],
)
def test_what_is_refused(deployment, message):
    with pytest.raises(ValueError, match=message):
        config(**deployment)


def test_the_export_is_what_the_runtime_serves_and_old_keys_stay():
    assert config().exported.format == "safetensors" and config().exported.variants == ()
    assert RetrainConfig().exported == RetrainConfig().export
    with pytest.raises(
        ValueError, match="export.format is safetensors, and deployment.runtime onnxruntime serves onnx"
    ):
        RetrainConfig.model_validate({"export": {"format": "safetensors"}})
    plain = json.loads(DeploymentConfig().model_dump_json())
    assert not {"runtime", "vllm"} & plain.keys() and "format" not in ExportConfig().model_dump()
    assert config_digest(DeploymentConfig(runtime="vllm")) != config_digest(DeploymentConfig())


def test_a_missing_program_and_a_size_without_the_gpus_are_refused_by_name():
    require_servable(DeploymentConfig())
    with pytest.raises(Missing, match="no program '/nowhere/vllm'") as missing:
        require_servable(config(vllm={"command": "/nowhere/vllm"}).deployment)
    assert "deployment.vllm.command" in missing.value.remedy
    azure = {"backend": "azureml", "runtime": "vllm", "vllm": {"tensor_parallel_size": 4}}
    for size, message in (
        ("", "instance_type '' is no size with GPUs"),
        ("Standard_DS3_v2", "no size with GPUs"),
        ("Standard_NC48ads_A100_v4", "tensor_parallel_size is 4.*has 2 GPUs"),
    ):
        with pytest.raises(ValueError, match=message):
            require_servable(DeploymentConfig.model_validate({**azure, "azureml": {"instance_type": size}}))
    one = DeploymentConfig.model_validate({**azure, "azureml": {"instance_type": "Standard_NC96ads_A100_v4"}})
    require_servable(one)
    assert settings_of(one)["gpu_memory_utilization"] == 0.9 and settings_of(DeploymentConfig()) is None
    assert settings_of(config().deployment)["gpu_memory_utilization"] == 0.45


def test_an_architecture_that_vllm_is_not_given_is_refused_by_name():
    require_architecture({"architectures": ["GPT2LMHeadModel"]}, named="a")
    with pytest.raises(
        ValueError, match="a has the architecture OddForCausalLM, and deployment.runtime vllm serves Llama"
    ):
        require_architecture({"architectures": ["OddForCausalLM"]}, named="a")


def reply(*logprobs, tokens=(2, 5, 6)):
    rows = [None] + [{str(token): {"logprob": value}} for token, value in zip(tokens, logprobs, strict=True)]
    return {"choices": [{"prompt_logprobs": rows}]}


def test_answers_are_judged_by_log_probabilities_and_nothing_is_no_proof():
    assert logprob_error(ENTRY, reply(-9.0, -1.1, -1.8)) == pytest.approx(0.15)
    assert not wrong_golden(ENTRY, reply(-9.0, -1.1, -1.8), most=0.2)
    assert "0.15 nats from PyTorch's on average" in wrong_golden(ENTRY, reply(-9.0, -1.1, -1.8), most=0.1)
    for other in ({}, {"choices": []}, reply(-9.0, -1.0, -2.0, tokens=(2, 5, 7)), reply(0, 0, math.nan), {"error": {}}):
        assert logprob_error(ENTRY, other) == math.inf
    assert logprob_error({**ENTRY, "tokens": [], "logprobs": []}, reply(0, 0, 0)) == math.inf
