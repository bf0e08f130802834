"""Program `tasks.jobs.export`: a Hugging Face checkpoint to ONNX with a KV cache, or to what vLLM serves, and the proof that both
say the same.

settings {"export": ExportConfig, "threads": int, "made_from": [references], "licenses": {reference: licence and origin},
"measured": tokens of context}, inputs {"checkpoint":
folder, "tokens": folder}.
Without tokens there is no held-out text: nothing is said of bits per byte, and there are no variants. What is built, the golden
answers and the proof go to the output; speeds only into the result. Judging and signing live in tasks/export.py, the parts of
the work in tasks/jobs/exporting/. See docs/export.md.

The model card is README.md with the front matter that Hugging Face's tools read. Nothing in it depends on when, where or how
fast the export ran. The card of a trained network is tasks/jobs/training/card.py.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.common.process import write_json
from tasks.config.serving import ExportConfig
from tasks.evaluation.scores import Estimate
from tasks.formats.chat_template import CHAT_TEMPLATE, SETTINGS
from tasks.formats.model_folder import FILE as REFERENCE
from tasks.jobs.exporting.comparison import (
    Answer,
    Exported,
    Original,
    Sample,
    answer,
    bits_a_byte,
    bits_of,
    golden_of,
    interval_of,
    parity,
    read_sample,
    reference_of,
    share_worse,
)
from tasks.jobs.exporting.encoder import export_encoder, is_encoder
from tasks.jobs.exporting.graph import build
from tasks.jobs.exporting.variants import FILE as VARIANTS
from tasks.jobs.exporting.variants import Measured, make_variants, onnx_bytes, race
from tasks.jobs.exporting.weights import Plain, copy_weights, prove, weights_equal
from tasks.jobs.node.runtime import Rank, main
from tasks.jobs.training.card import CARD, UNKNOWN_LICENSE, front_matter_of

LIMITS = """## Limits

{does} and may repeat
what it was trained on. Its evaluations are artifacts of their own: `headway lineage` shows them."""
COMPLETES = (
    "It completes text, as its training data does. It was not taught to follow instructions, to refuse or to be right,"
)
CHATS = "It answers chats by the template of its tokenizer. It was not taught to refuse or to be right,"
FILLS_IN = "It fills in masked tokens, as its training data has them. It was not taught to be right,"
SERVED = """## How to use it

The stage deploy serves the folder with an OpenAI-compatible API. By itself, with Headway's code:

```python
from pathlib import Path

from tasks.jobs.serving.generation import Generation

model = Generation(Path("FOLDER"), threads=2)
print(model.complete(model.encode("def "), max_tokens=24).text)
```"""
BY_VLLM = """## How to use it

The stage deploy serves the folder by vLLM. By itself: `vllm serve FOLDER`, or transformers' `AutoModelForCausalLM`."""
ENCODER = """## How to use it

It fills in masked tokens, and is not served by the completions endpoint. With ONNX Runtime: `model.onnx` takes `input_ids` and
`attention_mask`, both [rows, tokens] of any size, and gives `logits` [rows, tokens, vocabulary]."""


def lineage_digest(made_from: Sequence[str]) -> str:
    """sha256 over all references that a model was made from, in order; the same wherever it was made."""
    return hashlib.sha256("\n".join(sorted(made_from)).encode()).hexdigest()


def write_card(
    output: Path,
    checkpoint: Path,
    *,
    made_from: Sequence[str],
    proof: Mapping[str, Any],
    bits: Estimate | None,
    variants: Mapping[str, Any],
    context: tuple[int, int | None] | None = None,
    form: Literal["onnx", "safetensors"] = "onnx",
    licenses: Mapping[str, Mapping[str, str]] = {},
) -> None:
    """Write the card. `proof` is what parity.json holds, `bits` bits per byte with interval, `variants` as in variants.json,
    `context` the tokens that the model takes and those that its evaluation measured it up to, where that is known; `licenses` are
    licence and origin of each dataset and base model from outside.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    encoder = "max_logit_error" in proof and "greedy_equal" not in proof
    payload = front_matter_of(checkpoint)
    datasets = sorted(ref for ref in made_from if ref.startswith("dataset/"))
    matter = [
        f"library_name: {'onnxruntime' if form == 'onnx' else 'transformers'}",
        f"pipeline_tag: {'fill-mask' if encoder else 'text-generation'}",
        f"license: {payload.get('license', UNKNOWN_LICENSE)}",
        *([f"base_model: {payload['base_model']}"] if "base_model" in payload else []),
        *(["datasets:", *(f"- {ref}" for ref in datasets)] if datasets else []),
        f"lineage_digest: {lineage_digest(made_from)}",
        "tags:",
        "- headway",
        f"- {form}",
    ]
    title = "as ONNX" if form == "onnx" else "for vLLM"
    lines = ["---", *matter, "---", "", f"# {config['architectures'][0]}, {title}", ""]
    rows = {"Largest error of a logit, against PyTorch": f"{proof['max_logit_error']:.1e}"}
    if "greedy_equal" in proof:
        rows["Greedy completions equal"] = f"{proof['greedy_equal']} of {proof['greedy_total']}"
    if bits is not None:
        rows["Bits per byte on held-out text"] = (
            f"{bits.estimate:.4f} (95 % interval {bits.low:.4f} to {bits.high:.4f})"
        )
    if context is not None:
        declared, measured = context
        beyond = f" (measured up to {measured:,})" if measured and declared > measured else ""
        rows["Tokens of prompt and answer"] = f"{declared:,}{beyond}"
    lines += [
        "## Metrics",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    if kept := {name: value for name, value in variants.items() if value["passed"]}:
        lines += ["## Variants", "", "| | bytes | bits per byte |", "| --- | --- | --- |"]
        lines += (f"| `variants/{name}/` | {one['onnx_bytes']:,} | {one['loss']:+.2%} |" for name, one in kept.items())
        lines.append("")
    if made_from:
        lines += ["## Made from", "", *(f"- `{ref}`" for ref in sorted(made_from))]
    if licenses:
        lines += ["", "## Data and base", "", "| | licence | from |", "| --- | --- | --- |"]
        for ref, terms in sorted(licenses.items()):
            lines.append(
                f"| `{ref}` | {terms['license'] or 'not known'} | {terms['origin'] or 'files of its publisher'} |"
            )
    does = FILLS_IN if encoder else CHATS if _has_chat_template(checkpoint) else COMPLETES
    lines += ["", LIMITS.format(does=does), "", ENCODER if encoder else SERVED if form == "onnx" else BY_VLLM]
    (output / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _has_chat_template(checkpoint: Path) -> bool:
    settings = checkpoint / SETTINGS
    named = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    return bool(named) or (checkpoint / CHAT_TEMPLATE).is_file()


@dataclass(frozen=True)
class Loss:
    """Bits of each held-out document under the checkpoint and under the export, shape [documents]."""

    sample: Sample
    original: NDArray[np.float64]
    exported: NDArray[np.float64]

    @property
    def told(self) -> dict[str, float]:
        return {
            "bits_per_byte": bits_a_byte(self.exported, self.sample),
            "bits_per_byte_original": bits_a_byte(self.original, self.sample),
            "loss": share_worse(self.exported, self.original),
        }

    @property
    def interval(self) -> Estimate:
        return interval_of(self.exported, self.sample)


def run(rank: Rank) -> dict[str, Any]:
    """Build, prove, describe. Raises ValueError for a checkpoint that cannot be exported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = ExportConfig(**rank.settings["export"])
    threads = int(rank.settings["threads"])
    torch.set_num_threads(threads)
    if config.format == "safetensors":
        return _weights(rank, config)
    if is_encoder(rank.inputs["checkpoint"]):
        # No golden completions: what fills in masked tokens completes nothing.
        checkpoint = rank.inputs["checkpoint"]
        proof = export_encoder(checkpoint, rank.output, config.golden_prompts, threads=threads)
        write_json(rank.output / "parity.json", proof)
        made_from = rank.settings.get("made_from", ())
        write_card(rank.output, checkpoint, made_from=made_from, proof=proof, bits=None, variants={})
        return {"metrics": {**proof, "onnx_bytes": onnx_bytes(rank.output)}}
    return _causal(rank, config, threads=threads)


def _weights(rank: Rank, config: ExportConfig) -> dict[str, Any]:
    checkpoint, output = rank.inputs["checkpoint"], rank.output
    context, files = copy_weights(checkpoint, output, context=config.context_length or rank.settings.get("measured"))
    rank.progress(1, 3, "copied; comparing by PyTorch")
    proof, golden, exported = prove(checkpoint, output, config, context=context)
    sample = bits = None
    if "tokens" in rank.inputs:
        sample = read_sample(checkpoint, rank.inputs["tokens"], most_bytes=config.heldout_bytes, context=context)
        bits = bits_of(exported.network, sample, rank)
        proof["bits_per_byte"] = bits_a_byte(bits, sample)
    rank.progress(2, 3, "proven; measuring answers")
    plain = Plain(exported, output, context=context)
    reference = reference_of(
        plain, config.golden_prompts, sample, prompts=config.reference_prompts, max_tokens=config.golden_tokens
    )
    proof |= {"weights_equal": weights_equal(checkpoint, output), "weights_total": files}
    for name, entry in (("golden.json", golden), ("parity.json", proof), (REFERENCE, reference)):
        write_json(output / name, entry)
    write_card(
        output,
        checkpoint,
        made_from=rank.settings.get("made_from", ()),
        licenses=rank.settings.get("licenses", {}),
        proof=proof,
        bits=interval_of(bits, sample) if sample is not None and bits is not None else None,
        variants={},
        context=(context, rank.settings.get("measured")),
        form="safetensors",
    )
    shown = {"prompt": golden["prompts"][0]["prompt"], "completion": golden["prompts"][0]["completion"]}
    metrics = {**proof, "context_length": context}
    return {"metrics": metrics, "golden": golden, "sample": shown, "variants": {}}


def _causal(rank: Rank, config: ExportConfig, *, threads: int) -> dict[str, Any]:
    checkpoint = rank.inputs["checkpoint"]
    if config.variants and "tokens" not in rank.inputs:
        raise ValueError(
            f"export.variants is {list(config.variants)}, and there is no held-out text to measure them on: hand the export "
            "the tokens as an input, or leave `variants` empty"
        )
    context = config.context_length or rank.settings.get("measured")
    build(checkpoint, rank.output, precision=config.precision, context=context)
    gc.collect()  # of what the builder left
    rank.progress(1, 4, "built; comparing with PyTorch")
    original, exported = Original(checkpoint), Exported(rank.output, threads=threads)
    loss = _loss(original, exported, rank, config, context=context)
    answers = answer(original, exported, config.golden_prompts, max_tokens=config.golden_tokens)
    golden = golden_of(answers)
    proof = {**parity(answers), **(loss.told if loss else {})}
    speeds = _speeds(original, exported, answers, seconds=config.speed_seconds)
    rank.progress(2, 4, "proven; measuring answers")
    sample = loss.sample if loss else None
    exported_context = exported.generation.context_length
    reference = reference_of(
        exported.generation,
        config.golden_prompts,
        sample,
        prompts=config.reference_prompts,
        max_tokens=config.golden_tokens,
    )
    del original, exported  # a large model does not fit into memory beside what the variants are built from
    gc.collect()
    variants, measured = _variants(rank, loss, config, threads=threads, context=context)
    for name, entry in (("golden", golden), ("parity", proof)):
        write_json(rank.output / f"{name}.json", entry)
    write_json(rank.output / REFERENCE, reference)
    write_card(
        rank.output,
        checkpoint,
        made_from=rank.settings.get("made_from", ()),
        licenses=rank.settings.get("licenses", {}),
        proof=proof,
        bits=loss.interval if loss else None,
        variants=variants,
        context=(exported_context, rank.settings.get("measured")),
    )
    metrics = {**proof, "context_length": exported_context, "onnx_bytes": onnx_bytes(rank.output), **speeds, **measured}
    shown = {"prompt": answers[0].prompt, "completion": answers[0].onnx.text}
    return {"metrics": metrics, "golden": golden, "sample": shown, "variants": variants}


def _loss(
    original: Original, exported: Exported, rank: Rank, config: ExportConfig, *, context: int | None
) -> Loss | None:
    if "tokens" not in rank.inputs:
        return None
    checkpoint, tokens = rank.inputs["checkpoint"], rank.inputs["tokens"]
    sample = read_sample(checkpoint, tokens, most_bytes=config.heldout_bytes, context=context)
    return Loss(sample, bits_of(original.network, sample, rank), bits_of(exported.network, sample, rank))


def _speeds(original: Original, exported: Exported, answers: list[Answer], *, seconds: float) -> dict[str, float]:
    """On the golden prompt with the longest answer, one request at a time, its prompt's prefill included."""
    longest = max(answers, key=lambda one: len(one.onnx.tokens))
    tokens, limit = exported.generation.encode(longest.prompt), len(longest.onnx.tokens)
    ends = exported.generation.end_tokens
    return race(
        lambda: len(exported.generation.complete(tokens, limit).tokens),
        lambda: len(original.greedy(tokens, limit, ends=ends)),
        seconds=seconds,
    ).told()


def _variants(
    rank: Rank, loss: Loss | None, config: ExportConfig, *, threads: int, context: int | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """What is kept of each variant, by name, also written beside the model, and the metrics of all."""
    if loss is None or not config.variants:
        return {}, {}
    against = Measured(rank.inputs["checkpoint"], loss.original, loss.sample, context)
    payload, metrics = make_variants(against, config, rank, threads=threads)
    write_json(rank.output / VARIANTS, payload)
    return payload["variants"], metrics


if __name__ == "__main__":
    sys.exit(main(run))
