"""The section "Variants" of a run's page: the exported model and its smaller forms, by size, loss and speed.

Values come from `variants.json` of the model and from the metrics of the stage export. See docs/export.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.report.data import RunReport, number, percent
from tasks.report.markup import Html, grid, join, tag

HEADS = ("Variant", "Megabytes", "Bits per byte", "Loss", "Tokens/s", "Beside PyTorch", "")


def variants_section(data: RunReport) -> Html:
    """Empty for a run whose export made no variants."""
    metrics: Mapping[str, Any] = next((stage.metrics for stage in data.stages if stage.name == "export"), {})
    if not data.variants:
        return Html()
    rows = [("fp32, the model", *_row(metrics, ""), "served")]
    for name, variant in data.variants.variants.items():
        rows.append((name, *_row(metrics, f"{name}."), "kept" if variant.passed else f"left out: {variant.why}"))
    limit = percent(data.variants.limit)
    said = f"Loss is by how many more bits held-out text takes than under the checkpoint; a variant may lose {limit}."
    return join(tag("p", said, class_="note"), grid(HEADS, rows))


def _row(metrics: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """Empty cells for what was not measured."""
    size, loss = metrics.get(f"{prefix}onnx_bytes"), metrics.get(f"{prefix}loss")
    ours, theirs = (metrics.get(f"{prefix}tokens_per_second_{side}") for side in ("onnx", "torch"))
    return (
        f"{size / 1e6:,.1f}" if size else "",
        number(metrics.get(f"{prefix}bits_per_byte")) if size else "",
        f"{loss:+.2%}" if loss is not None else "",
        f"{ours:,.0f}" if ours else "",
        f"{ours / theirs:.2f} times" if ours and theirs else "",
    )
