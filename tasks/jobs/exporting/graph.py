"""A Hugging Face folder as an ONNX graph: the folder that a server loads, of one precision. That both say the same is proven
elsewhere (comparison.py); GPT-2's own graph is tasks/jobs/exporting/gpt2_graph.py, encoders are encoder.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime_genai as genai

from tasks.formats.model_folder import declared_positions, require_positions
from tasks.formats.onnx_data import require_plain_folder
from tasks.jobs.evaluation.heldout import open_documents

MODEL = "model.onnx"
DATA = "model.onnx.data"
GPT2 = "GPT2LMHeadModel"
"""Built by tasks/jobs/exporting/gpt2_graph.py."""
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"accuracy_level": 4},
    "int4": {"accuracy_level": 4, "algo_config": "k_quant_mixed", "block_size": 32},
}
"""Of the builder's quantiser. 4: activations are int8 too, which is what is fast on a CPU. `k_quant_mixed` keeps in int8 what
hurts most (the last matrix, and some layers). What it costs is in docs/export.md."""


def build(checkpoint: Path, output: Path, *, precision: str, context: int | None = None) -> None:
    """Write the ONNX model, its data, genai_config.json, the tokenizer, config.json and generation_config.json.

    `context` are the tokens that it declares, by default as many as config.json says. Raises ValueError for a checkpoint that
    cannot be exported; IntegrityError when the graph's data is not all beside it.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"the checkpoint {checkpoint} has no {name}: name a Hugging Face folder with tokenizer")
    if architecture(checkpoint) is None:
        raise ValueError(f"{checkpoint / 'config.json'} names no architecture: save the model with `save_pretrained`")
    require_positions(checkpoint, context)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, _with_room(checkpoint, context) as folder:
        if architecture(checkpoint) == GPT2:
            # Imported here, as in _build: it takes seconds, and it reads HF_HUB_OFFLINE.
            from tasks.jobs.exporting.gpt2_graph import build_gpt2

            build_gpt2(folder, output, precision=precision, cache=cache, more=OPTIONS.get(precision, {}))
        else:
            _build(folder, output, precision=precision, cache=cache)
    copy_settings(checkpoint, output)
    settle(checkpoint, output, context)
    forget_where_it_was_built(output / MODEL, genai.__version__)
    require_plain_folder(output)


def architecture(checkpoint: Path) -> str | None:
    """The class that config.json names."""
    named = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("architectures") or [None]
    return named[0]


def copy_settings(checkpoint: Path, output: Path) -> None:
    """config.json, and how a completion ends: generation_config.json, by config.json when the checkpoint has none."""
    from transformers import AutoConfig, GenerationConfig

    shutil.copyfile(checkpoint / "config.json", output / "config.json")
    if (checkpoint / "generation_config.json").is_file():
        shutil.copyfile(checkpoint / "generation_config.json", output / "generation_config.json")
    else:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        GenerationConfig.from_model_config(config).to_json_file(output / "generation_config.json")


@contextmanager
def _with_room(checkpoint: Path, context: int | None) -> Iterator[Path]:
    """The checkpoint; where it declares fewer positions, a folder of its files whose config.json declares `context` of them: the
    builder writes a table of so many rotations.
    """
    if not context or context <= (declared_positions(checkpoint) or context):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for path in checkpoint.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}), encoding="utf-8")
        yield folder


def settle(checkpoint: Path, output: Path, context: int | None) -> None:
    """Write what the builder does not know: the tokens that the checkpoint's documents open with, and how many a model takes."""
    opening = open_documents(checkpoint, output)
    path = output / "genai_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if opening:
        settings["model"]["bos_token_id"] = opening[0]  # where config.json names none, the builder writes 1
    if context:
        settings["model"]["context_length"] = settings["search"]["max_length"] = context
    path.write_text(json.dumps(settings, indent=4), encoding="utf-8")


def forget_where_it_was_built(path: Path, producer: str) -> None:
    """The builder stamps the git commit of whatever repository its package lies in (ours, for a .venv inside it)."""
    model = onnx.load(path, load_external_data=False)
    model.producer_version = producer
    path.write_bytes(model.SerializeToString(deterministic=True))


def _build(checkpoint: Path, output: Path, *, precision: str, cache: str) -> None:
    """By onnxruntime-genai's own builder. It puts its own folder on sys.path."""
    from onnxruntime_genai.models import builder

    messages = ["hf_token=false", *(f"{name}={value}" for name, value in OPTIONS.get(precision, {}).items())]
    options: dict[str, Any] = builder.parse_extra_options(
        "", str(checkpoint), str(output), precision, "cpu", cache, messages
    )
    try:
        builder.create_model("", str(checkpoint), str(output), precision, "cpu", cache, **options)
    except NotImplementedError as error:
        raise ValueError(
            f"the checkpoint's architecture {architecture(checkpoint)} cannot be exported: onnxruntime-genai "
            f"{genai.__version__} does not build it. Use one that it builds, such as LlamaForCausalLM."
        ) from error
