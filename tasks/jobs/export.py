"""Program `tasks.jobs.export`: a Hugging Face checkpoint to ONNX with a KV cache, and the proof that both say the same.

settings {"export": ExportConfig, "threads": int}, inputs {"checkpoint": folder}. What is built, the golden answers and
the parity go to the output; speeds only into the result. Judging the parity and signing live in tasks/export.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime
import onnxruntime_genai as genai
import torch
from numpy.typing import NDArray

from tasks.errors import IntegrityError
from tasks.jobs.generation import Completion, Generation
from tasks.jobs.runtime import Rank, main
from tasks.process import write_json
from tasks.serving_config import ExportConfig

T = TypeVar("T")
MODEL = "model.onnx"
DATA = "model.onnx.data"
GPT2 = "GPT2LMHeadModel"
"""Built by gpt2_graph.py."""


@dataclass(frozen=True)
class Answer:
    """One golden prompt, completed greedily by both sides."""

    prompt: str
    onnx: Completion
    torch_tokens: list[int]
    equal: bool
    """Whether both encoded the prompt to the same tokens and completed it with the same tokens."""
    logit_error: float
    """Largest absolute difference of a logit, over the prompt's positions and the vocabulary."""
    onnx_seconds: float
    torch_seconds: float


def run(rank: Rank) -> dict[str, Any]:
    """Build, check, prove. Raises ValueError for a checkpoint that cannot be exported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = ExportConfig(**rank.settings["export"])
    threads = int(rank.settings["threads"])
    torch.set_num_threads(threads)
    build(rank.inputs["checkpoint"], rank.output, precision=config.precision)
    rank.progress(1, 2, "built; comparing with PyTorch")
    sides = Comparison(rank.inputs["checkpoint"], rank.output, threads=threads)
    answers = [sides.answer(prompt, max_tokens=config.golden_tokens) for prompt in config.golden_prompts]
    golden = _golden(answers)
    parity = _parity(answers)
    write_json(rank.output / "golden.json", golden)
    write_json(rank.output / "parity.json", parity)
    size = sum((rank.output / name).stat().st_size for name in (MODEL, DATA))
    sample = {"prompt": answers[0].prompt, "completion": answers[0].onnx.text}
    return {"metrics": {**parity, "onnx_bytes": size, **_speeds(answers)}, "golden": golden, "sample": sample}


def build(checkpoint: Path, output: Path, *, precision: str) -> None:
    """Write the ONNX model, its data, genai_config.json, the tokenizer and config.json, and check the paths in it."""
    _require_supported(checkpoint)
    with tempfile.TemporaryDirectory() as cache:
        if _architecture(checkpoint) == GPT2:
            # Imported here, as in _build: it takes seconds, and it reads HF_HUB_OFFLINE.
            from tasks.jobs.gpt2_graph import build_gpt2

            build_gpt2(checkpoint, output, precision=precision, cache=cache)
        else:
            _build(checkpoint, output, precision=precision, cache=cache)
    shutil.copyfile(checkpoint / "config.json", output / "config.json")
    _forget_where_it_was_built(output / MODEL)
    check_external_data(output)


def _build(checkpoint: Path, output: Path, *, precision: str, cache: str) -> None:
    """By onnxruntime-genai's own builder. It puts its own folder on sys.path."""
    from onnxruntime_genai.models import builder

    options = builder.parse_extra_options("", str(checkpoint), str(output), precision, "cpu", cache, ["hf_token=false"])
    try:
        builder.create_model("", str(checkpoint), str(output), precision, "cpu", cache, **options)
    except NotImplementedError as error:
        raise ValueError(
            f"the checkpoint's architecture {_architecture(checkpoint)} cannot be exported: onnxruntime-genai "
            f"{genai.__version__} does not build it. Use one that it builds, such as LlamaForCausalLM."
        ) from error


def _require_supported(checkpoint: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"the checkpoint {checkpoint} has no {name}: name a Hugging Face folder with tokenizer")
    if _architecture(checkpoint) is None:
        raise ValueError(f"{checkpoint / 'config.json'} names no architecture: save the model with `save_pretrained`")


def _architecture(checkpoint: Path) -> str | None:
    named = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("architectures") or [None]
    return named[0]


def _forget_where_it_was_built(path: Path) -> None:
    """The builder stamps the git commit of whatever repository its package lies in (ours, for a .venv inside it)."""
    model = onnx.load(path, load_external_data=False)
    model.producer_version = genai.__version__
    path.write_bytes(model.SerializeToString(deterministic=True))


def check_external_data(folder: Path) -> None:
    """Raise IntegrityError unless the graph's data is one plain file beside it, and no file of the folder is a link.

    onnxruntime follows hard links (CVE-2026-34446), so files with a second name are refused here. onnx.checker is of no
    use: the builder puts onnxruntime's own operators into the default domain, which the checker does not know.
    """
    linked = [path.name for path in folder.rglob("*") if path.is_symlink() or _has_second_name(path)]
    if linked:
        raise IntegrityError(f"the export {folder} holds links: {', '.join(sorted(linked))}", remedy="Export it again.")
    graph = onnx.load(folder / MODEL, load_external_data=False).graph
    constants = [attribute.t for node in graph.node for attribute in node.attribute]
    places = [{entry.key: entry.value for entry in t.external_data} for t in [*graph.initializer, *constants]]
    outside = sorted({place["location"] for place in places if place} - {DATA})
    if outside:
        raise IntegrityError(
            f"{folder / MODEL} reads data from {outside}, not from {DATA} alone", remedy="Export it again."
        )
    size = (folder / DATA).stat().st_size
    ends = max(int(place["offset"]) + int(place["length"]) for place in places if place)
    if ends > size:
        raise IntegrityError(f"{folder / DATA} has {size} bytes, the graph reads {ends}", remedy="Export it again.")


def _has_second_name(path: Path) -> bool:
    return path.is_file() and path.stat().st_nlink != 1


class Comparison:
    """Both sides, loaded: the checkpoint in PyTorch and the exported model, each with its own tokenizer."""

    def __init__(self, checkpoint: Path, output: Path, *, threads: int) -> None:
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        self._network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._generation = Generation(output, threads)
        self._session = _open_session(output / MODEL, threads)
        decoder = json.loads((output / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        self._empty_cache = np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)

    def answer(self, prompt: str, *, max_tokens: int) -> Answer:
        """Complete a prompt on both sides, greedily and from an empty cache; the context may end it early."""
        tokens = self._generation.encode(prompt)
        known = [int(token) for token in self._tokenizer(prompt)["input_ids"]]
        limit = min(max_tokens, self._generation.context_length - len(tokens))
        said, onnx_seconds = _timed(lambda: self._generation.complete(tokens, limit))
        expected, torch_seconds = _timed(lambda: self._torch_greedy(known, limit))
        return Answer(
            prompt=prompt,
            onnx=said,
            torch_tokens=expected,
            equal=tokens == known and said.tokens == expected,
            logit_error=float(np.abs(self._onnx_logits(known) - self._torch_logits(known)).max()),
            onnx_seconds=onnx_seconds,
            torch_seconds=torch_seconds,
        )

    @torch.no_grad()
    def _torch_greedy(self, tokens: list[int], limit: int) -> list[int]:
        from transformers import GenerationConfig

        ends = self._generation.end_tokens
        greedy = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=limit,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        prompt = torch.tensor([tokens])
        said = self._network.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
        return [int(token) for token in said[0][len(tokens) :]]

    @torch.no_grad()
    def _torch_logits(self, tokens: list[int]) -> NDArray[np.float32]:
        return self._network(torch.tensor([tokens])).logits.numpy()

    def _onnx_logits(self, tokens: list[int]) -> NDArray[np.float32]:
        prompt = np.asarray([tokens], dtype=np.int64)
        wanted = [i.name for i in self._session.get_inputs()]
        positions = {"position_ids": np.arange(len(tokens), dtype=np.int64)[None]} if "position_ids" in wanted else {}
        inputs = {"input_ids": prompt, "attention_mask": np.ones_like(prompt), **positions}
        caches = {name: self._empty_cache for name in wanted if name.startswith("past_key_values.")}
        return self._session.run(["logits"], inputs | caches)[0]


def _open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _golden(answers: list[Answer]) -> dict[str, Any]:
    said = [{"prompt": a.prompt, "completion": a.onnx.text, "tokens": a.onnx.tokens} for a in answers]
    return {"prompts": said}


def _parity(answers: list[Answer]) -> dict[str, Any]:
    return {
        "max_logit_error": max(answer.logit_error for answer in answers),
        "greedy_equal": sum(answer.equal for answer in answers),
        "greedy_total": len(answers),
    }


def _speeds(answers: list[Answer]) -> dict[str, float]:
    """Tokens a second of the greedy completions, one prompt at a time, each with its prompt's prefill."""
    onnx_tokens = sum(len(answer.onnx.tokens) for answer in answers)
    torch_tokens = sum(len(answer.torch_tokens) for answer in answers)
    return {
        "tokens_per_second_onnx": onnx_tokens / sum(answer.onnx_seconds for answer in answers),
        "tokens_per_second_torch": torch_tokens / sum(answer.torch_seconds for answer in answers),
    }


if __name__ == "__main__":
    sys.exit(main(run))
