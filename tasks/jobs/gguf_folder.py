"""Program `tasks.jobs.gguf_folder FILE FOLDER`: a model's .gguf file to a Hugging Face folder in float32 with tokenizer, card.

transformers reads the weights. Its tokenizer leaves out how GGUF says that text is cut before it is encoded
(`tokenizer.ggml.pre`), so that is set here, for those that are known; others are refused. See docs/fine-tuning.md.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

BEFORE: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
"""How text is cut, by `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp: `smollm` cuts at every digit)."""
CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: {license}
---

# {name}

Made from a GGUF file.
"""


def main(file: Path, folder: Path) -> None:
    """Write the folder. Raises ValueError for a tokenizer that cannot be rebuilt exactly."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    payload = read_fields(file, "general.name", "general.license", "tokenizer.ggml.pre", "tokenizer.ggml.model")
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file, folder, payload)
    write_weights(file, folder)
    named = {"license": payload["general.license"] or "unknown", "name": payload["general.name"] or file.stem}
    (folder / "README.md").write_text(CARD.format(**named), encoding="utf-8")


def read_fields(file: Path, *names: str) -> dict[str, str]:
    """Texts of the file's header; empty where it has none."""
    fields = GGUFReader(file).fields
    return {name: str(fields[name].contents()) if name in fields else "" for name in names}


def write_tokenizer(file: Path, folder: Path, payload: dict[str, str]) -> None:
    """Byte-level BPE with the file's vocabulary, merges and special tokens, as a tokenizer.json that stands for itself."""
    kind, cut = payload["tokenizer.ggml.model"], payload["tokenizer.ggml.pre"]
    if kind != "gpt2" or cut not in BEFORE:
        raise ValueError(
            f"its tokenizer is of the kind {kind!r} and cuts text by {cut!r}; known are the kind 'gpt2' with "
            f"{', '.join(map(repr, BEFORE))}: publish the model's Hugging Face folder instead"
        )
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(BEFORE[cut])
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    output = json.loads(path.read_text(encoding="utf-8"))
    output["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(output, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")


def write_weights(file: Path, folder: Path) -> None:
    """The weights in float32, in a network that knows nothing of GGUF, so that it can be saved."""
    read: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
    )
    config = AutoConfig.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.load_state_dict(read.state_dict())
    network.generation_config.pad_token_id = config.pad_token_id
    network.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
