"""Megatron-Bridge, called to write a Hugging Face folder: `python -m tasks.jobs.megatron.bridge_export CHECKPOINT CONFIG OUTPUT`.

It runs on the CPU in a process of its own, in an image that has Megatron-Bridge (NVIDIA-NeMo/Megatron-Bridge @067f987). A
checkpoint of pretrain_gpt.py names no model, so this says that it is a GPT, which the Bridge's own script cannot.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from tasks.jobs.megatron.commits import SAVED


def main(checkpoint: str, config: str, output: str) -> int:
    """Read a Megatron-LM checkpoint and write its weights; 6 where Megatron-Bridge is not installed."""
    try:
        bridges = import_module("megatron.bridge")
        loading = import_module("megatron.bridge.training.model_load_save")
    except ImportError as error:
        print(f"Megatron-Bridge cannot be imported: {error}", file=sys.stderr)
        return 6
    from transformers import AutoConfig

    saved = next(path for path in Path(checkpoint).iterdir() if SAVED.fullmatch(path.name))
    bridge = bridges.AutoBridge.from_hf_config(AutoConfig.from_pretrained(config, trust_remote_code=False))
    with loading.temporary_distributed_context(backend="gloo"):
        network = loading.load_megatron_model(
            str(saved), model_type="gpt", use_cpu_init=True, skip_temp_dist_context=True
        )
        bridge.save_hf_pretrained(network if isinstance(network, list) else [network], output)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
