"""vLLM as values: its command line, the models that it is given, and how its answers are held to PyTorch's. Starts nothing.

The process is tasks/jobs/serving/vllm.py, the settings are VllmConfig of tasks/config/serving.py. Options and fields are those of
https://docs.vllm.ai/en/stable/cli/serve/ and https://docs.vllm.ai/en/stable/serving/openai_compatible_server/.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.common.errors import Missing
from tasks.config.serving import DeploymentConfig, VllmConfig
from tasks.hardware.sku import gpus_of

ARCHITECTURES = ("LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Of config.json: what Headway trains, and relatives that it continues, each in vLLM's own list of models
(vllm/model_executor/models/registry.py)."""
SHARE_HERE, SHARE_ALONE = 0.45, 0.9
"""Of a GPU's memory: where two servers stand on it during a rollout, and where one has it to itself."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Environment of vLLM: it reads the folder that it is given, and calls nobody."""


def command(config: VllmConfig, folder: Path, model_ref: str, *, context: int, socket: Path) -> list[str]:
    """The command line that serves a folder on a Unix socket. `context`: tokens that the model declares."""
    return [
        config.command,
        "serve",
        str(folder),
        *("--uds", str(socket)),
        *("--served-model-name", model_ref),
        *("--load-format", "safetensors"),
        *("--generation-config", "vllm"),  # what a request does not say is OpenAI's default, and not the folder's
        *("--max-model-len", str(config.max_model_len or context)),
        *("--dtype", config.dtype),
        *("--tensor-parallel-size", str(config.tensor_parallel_size)),
        *("--gpu-memory-utilization", f"{config.gpu_memory_utilization or SHARE_HERE:g}"),
        "--disable-uvicorn-access-log",
        *config.arguments,
    ]


def require_servable(config: DeploymentConfig) -> None:
    """Raise what is missing of the place where vLLM is to serve, before anything is spent; looks, and starts nothing.

    Raises Missing where this machine has no such program, ValueError for a size of Azure without the GPUs.
    """
    if config.runtime != "vllm":
        return
    if config.backend == "azureml":
        require_gpus(config)
    elif shutil.which(config.vllm.command) is None:
        raise Missing(
            f"deployment.runtime is vllm, and this machine has no program {config.vllm.command!r}",
            remedy="Install vLLM in an environment of its own (https://docs.vllm.ai/en/stable/getting_started/installation/), "
            "and set deployment.vllm.command to its path, such as /opt/vllm/bin/vllm; or set deployment.runtime to onnxruntime.",
        )


def require_gpus(config: DeploymentConfig) -> None:
    """Raise ValueError unless the size of a deployment's machines is named, known, and has the GPUs for one copy of the model."""
    size, wanted = config.azureml.instance_type, config.vllm.tensor_parallel_size
    known = gpus_of(size) if size else None
    if not known:
        raise ValueError(
            f"deployment.runtime is vllm, and deployment.azureml.instance_type {size!r} is no size with GPUs that is known: name "
            "one, such as Standard_NC24ads_A100_v4 (headway hardware lists them)"
        )
    if wanted > known:
        raise ValueError(
            f"deployment.vllm.tensor_parallel_size is {wanted}, and deployment.azureml.instance_type {size} has {known} GPUs: "
            "lower it, or name a larger size"
        )


def settings_of(config: DeploymentConfig) -> dict[str, Any] | None:
    """What a server is started with for vLLM; None: ONNX Runtime serves."""
    if config.runtime != "vllm":
        return None
    share = SHARE_HERE if config.backend == "local" else SHARE_ALONE
    own = config.vllm.gpu_memory_utilization
    return config.vllm.model_dump(mode="json") | {"gpu_memory_utilization": own or share}


def require_architecture(description: Mapping[str, Any], *, named: str) -> None:
    """Raise ValueError for the config.json of a model that vLLM is not given."""
    known = (description.get("architectures") or ["nothing"])[0]
    if known not in ARCHITECTURES:
        raise ValueError(
            f"{named} has the architecture {known}, and deployment.runtime vllm serves {', '.join(ARCHITECTURES)}: train one of "
            "these, or set deployment.runtime to onnxruntime"
        )


def require_folder(folder: Path, *, named: str) -> None:
    """Raise ValueError for an exported model that was not exported for vLLM."""
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{named} was exported for ONNX Runtime, and deployment.runtime is vllm: export it again (headway retrain --from "
            "export), or set deployment.runtime to onnxruntime"
        )


# How vLLM is held to what was exported: by the log probabilities of the golden answers' tokens.
#
# It computes in another type and another order than PyTorch did, so where two tokens are nearly as likely its greedy answer may
# be another one and still be right. The same tokens are given to it as a prompt instead, and it says how likely each was.


def golden_question(entry: Mapping[str, Any], model_ref: str) -> dict[str, Any]:
    """The request that asks how likely a golden answer's tokens are."""
    prompt = [*entry["prompt_tokens"], *entry["tokens"]]
    return {"model": model_ref, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}


def logprob_error(entry: Mapping[str, Any], reply: Mapping[str, Any]) -> float:
    """Mean absolute difference, in nats, of what was asked and what the export wrote down; infinite for no such answer."""
    try:
        rows = reply["choices"][0]["prompt_logprobs"][len(entry["prompt_tokens"]) :]
        ours = [float(row[str(token)]["logprob"]) for row, token in zip(rows, entry["tokens"], strict=True)]
        apart = [abs(left - right) for left, right in zip(ours, entry["logprobs"], strict=True)]
        error = sum(apart) / len(apart)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return math.inf
    return error if math.isfinite(error) else math.inf


def wrong_golden(entry: Mapping[str, Any], reply: Mapping[str, Any], *, most: float) -> str:
    """How an answer to `golden_question` is not the exported model's; empty when it is."""
    error = logprob_error(entry, reply)
    if error <= most:
        return ""
    if math.isinf(error):
        return f"said no log probabilities of the golden prompt {entry['prompt']!r}"
    return (
        f"gives the tokens of the golden prompt {entry['prompt']!r} log probabilities that are {error:.3g} nats from PyTorch's "
        f"on average; deployment.vllm.max_logprob_error is {most:g}"
    )


def has_logprobs(golden: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a golden.json, by its prompts, was written for vLLM."""
    return bool(golden) and all("logprobs" in entry and "prompt_tokens" in entry for entry in golden)
