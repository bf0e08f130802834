"""What other runtimes make of a trained network, for gpu.py, in a process of its own: its last line is a JSON object.

    python -m benchmarks.gpu_models onnx CHECKPOINT PROVIDER
    python -m benchmarks.gpu_models vllm CHECKPOINT GOLDEN

CHECKPOINT is the Hugging Face folder that a training wrote, GOLDEN the golden.json of its export.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, CONTEXT = 16, 128
"""Of an answer, and of prompt and answer."""


def by_onnx(checkpoint: Path, provider: str) -> dict[str, Any]:
    """Logits of the graph in float16 on a provider of ONNX Runtime, beside those of the same graph on the CPU."""
    import onnxruntime

    from tasks.jobs.exporting.comparison import OnnxNetwork
    from tasks.jobs.exporting.graph import build

    if provider not in onnxruntime.get_available_providers():
        return {"skipped": f"onnxruntime {onnxruntime.__version__} has no {provider}: pip install onnxruntime-gpu"}
    tokens = np.random.default_rng(0).integers(0, 300, size=(2, 32))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build(checkpoint, model, precision="fp16", context=CONTEXT)
        wanted, plain = OnnxNetwork(model, threads=2, provider=provider), OnnxNetwork(model, threads=2)
        ours, right = wanted.logits(tokens), plain.logits(tokens)
    apart, largest = float(np.abs(ours - right).max()), float(np.abs(right).max())
    return {"provider": wanted.provider, "error": apart, "scale": largest}


def by_vllm(checkpoint: Path, golden: Path) -> dict[str, Any]:
    """vLLM's greedy answers to the golden prompts, token by token beside the exported model's."""
    import vllm

    from tasks.jobs.exporting.comparison import Original

    prompts = json.loads(golden.read_text(encoding="utf-8"))["prompts"]
    encode = Original(checkpoint).encode  # with the tokens that open a document
    given = [{"prompt_token_ids": encode(one["prompt"])} for one in prompts]
    limits = {"max_model_len": CONTEXT, "gpu_memory_utilization": 0.3, "enforce_eager": True, "dtype": "bfloat16"}
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS)
    answers = [one.outputs[0].token_ids for one in vllm.LLM(model=str(checkpoint), **limits).generate(given, greedy)]
    pairs = [list(zip(ours, one["tokens"], strict=False)) for ours, one in zip(answers, prompts, strict=True)]
    same = sum(left == right for pair in pairs for left, right in pair)
    first = sum(pair[0][0] == pair[0][1] for pair in pairs if pair)
    return {"same": same, "tokens": sum(map(len, pairs)), "first": first, "version": vllm.__version__}


def main() -> int:
    what, checkpoint, given = sys.argv[1:]
    output = by_onnx(Path(checkpoint), given) if what == "onnx" else by_vllm(Path(checkpoint), Path(given))
    print(f"\n{json.dumps(output)}", flush=True)
    return 0


if __name__ == "__main__":  # vLLM starts processes that import this module
    sys.exit(main())
