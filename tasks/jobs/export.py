"""Program `tasks.jobs.export`: a Hugging Face checkpoint to ONNX with a KV cache, and the proof that both say the same.

settings {"export": ExportConfig, "threads": int, "made_from": [references], "measured": tokens of context}, inputs {"checkpoint":
folder, "tokens": folder}.
Without tokens there is no held-out text: nothing is said of bits per byte, and there are no variants. What is built, the golden
answers and the proof go to the output; speeds only into the result. Judging and signing live in tasks/export.py, the parts of
the work in tasks/jobs/exporting/. See docs/export.md.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.common.process import write_json
from tasks.config.serving import ExportConfig
from tasks.evaluation.scores import Estimate
from tasks.formats.model_folder import FILE as REFERENCE
from tasks.jobs.exporting.card import write_card
from tasks.jobs.exporting.comparison import Answer, Exported, Original, answer, golden_of, parity
from tasks.jobs.exporting.encoder import export_encoder, is_encoder
from tasks.jobs.exporting.graph import build
from tasks.jobs.exporting.loss import Sample, bits_a_byte, bits_of, interval_of, read_sample, share_worse
from tasks.jobs.exporting.reference import reference_of
from tasks.jobs.exporting.variants import FILE as VARIANTS
from tasks.jobs.exporting.variants import Measured, make_variants, onnx_bytes, race
from tasks.jobs.node.runtime import Rank, main


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
    if is_encoder(rank.inputs["checkpoint"]):
        # No golden completions: what fills in masked tokens completes nothing.
        checkpoint = rank.inputs["checkpoint"]
        proof = export_encoder(checkpoint, rank.output, config.golden_prompts, threads=threads)
        write_json(rank.output / "parity.json", proof)
        made_from = rank.settings.get("made_from", ())
        write_card(rank.output, checkpoint, made_from=made_from, proof=proof, bits=None, variants={})
        return {"metrics": {**proof, "onnx_bytes": onnx_bytes(rank.output)}}
    return _causal(rank, config, threads=threads)


def _causal(rank: Rank, config: ExportConfig, *, threads: int) -> dict[str, Any]:
    checkpoint = rank.inputs["checkpoint"]
    _require_measurable(rank, config)
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
        proof=proof,
        bits=loss.interval if loss else None,
        variants=variants,
        context=(exported_context, rank.settings.get("measured")),
    )
    metrics = {**proof, "context_length": exported_context, "onnx_bytes": onnx_bytes(rank.output), **speeds, **measured}
    shown = {"prompt": answers[0].prompt, "completion": answers[0].onnx.text}
    return {"metrics": metrics, "golden": golden, "sample": shown, "variants": variants}


def _require_measurable(rank: Rank, config: ExportConfig) -> None:
    if config.variants and "tokens" not in rank.inputs:
        raise ValueError(
            f"export.variants is {list(config.variants)}, and there is no held-out text to measure them on: hand the export "
            "the tokens as an input, or leave `variants` empty"
        )


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
