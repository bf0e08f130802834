"""The model card of an export: README.md with the front matter that Hugging Face's tools read.

Nothing in it depends on when, where or how fast the export ran. The card of a trained network is tasks/jobs/training/card.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.evaluation.scores import Estimate
from tasks.jobs.training.card import CARD, UNKNOWN_LICENSE, front_matter_of

LIMITS = """## Limits

It completes text, as its training data does. It was not taught to follow instructions, to refuse or to be right, and may repeat
what it was trained on. Its evaluations are artifacts of their own: `headway lineage` shows them."""
SERVED = """## How to use it

The stage deploy serves the folder with an OpenAI-compatible API. By itself, with Headway's code:

```python
from pathlib import Path

from tasks.jobs.serving.generation import Generation

model = Generation(Path("FOLDER"), threads=2)
print(model.complete(model.encode("def "), max_tokens=24).text)
```"""
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
) -> None:
    """Write the card. `proof` is what parity.json holds, `bits` bits per byte with interval, `variants` as in variants.json,
    `context` the tokens that the model takes and those that its evaluation measured it up to, where that is known.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    encoder = "max_logit_error" in proof and "greedy_equal" not in proof
    payload = front_matter_of(checkpoint)
    datasets = sorted(ref for ref in made_from if ref.startswith("dataset/"))
    matter = [
        "library_name: onnxruntime",
        f"pipeline_tag: {'fill-mask' if encoder else 'text-generation'}",
        f"license: {payload.get('license', UNKNOWN_LICENSE)}",
        *([f"base_model: {payload['base_model']}"] if "base_model" in payload else []),
        *(["datasets:", *(f"- {ref}" for ref in datasets)] if datasets else []),
        f"lineage_digest: {lineage_digest(made_from)}",
        "tags:",
        "- headway",
        "- onnx",
    ]
    lines = ["---", *matter, "---", "", f"# {config['architectures'][0]}, as ONNX", ""]
    lines += [*_proven(proof, bits, context), "", *_variants(variants), *_lineage(made_from), "", LIMITS, ""]
    lines.append(ENCODER if encoder else SERVED)
    (output / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _proven(proof: Mapping[str, Any], bits: Estimate | None, context: tuple[int, int | None] | None) -> list[str]:
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
    return ["## Metrics", "", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]


def _variants(variants: Mapping[str, Any]) -> list[str]:
    kept = {name: value for name, value in variants.items() if value["passed"]}
    if not kept:
        return []
    rows = (f"| `variants/{name}/` | {value['onnx_bytes']:,} | {value['loss']:+.2%} |" for name, value in kept.items())
    return ["## Variants", "", "| | bytes | bits per byte |", "| --- | --- | --- |", *rows, ""]


def _lineage(made_from: Sequence[str]) -> list[str]:
    return ["## Made from", "", *(f"- `{ref}`" for ref in sorted(made_from))] if made_from else []
