"""The model card of a trained network: README.md with the front matter that Hugging Face's tools read.

Only what is known for sure and the same after every resumption stands in it. Evaluations are artifacts of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.training import TrainingConfig
from tasks.formats.model_folder import declared_context
from tasks.jobs.checkpoint.origins import continued_from
from tasks.jobs.node.runtime import Rank

# What stands beside a trained network in the artifact, whichever engine trained it: the log of its steps, its facts,
# its card.


LOGGED = ("step", "loss", "learning_rate", "grad_norm")


def write_account(
    rank: Rank, config: TrainingConfig, records: Sequence[Mapping[str, Any]], *, parameters: int
) -> dict[str, float]:
    """Write it on rank 0, the same bytes whatever happened on the way; returns the figures that every training has.

    `records` are the last ones of each step that has a loss.
    """
    origin = continued_from(rank.settings)
    before = origin or {"step": 0, "tokens": 0}
    tokens = before["tokens"] + (config.steps - before["step"]) * config.global_batch_size * config.sequence_length
    facts = {"steps": config.steps, "tokens": tokens, "parameters": parameters}
    lines = [json.dumps({key: record.get(key) for key in LOGGED}) + "\n" for record in records]
    (rank.output / "training_log.jsonl").write_text("".join(lines), encoding="utf-8")
    base = rank.inputs.get("base")
    context = max(config.sequence_length, (declared_context(base) or 0) if base else 0)
    settings = {"seed": config.seed, "sequence_length": config.sequence_length, "context": context}
    payload = {**facts, **settings, **({"continued_from": origin} if origin else {})}
    (rank.output / "training.json").write_text(json.dumps(payload, indent=1), encoding="utf-8")
    figures = {"loss": records[-1]["loss"], **facts}
    card = {**figures, "made_from": rank.settings.get("made_from", {}), "continued_from": origin}
    write_card(rank.output, config, card, base=base)
    return figures


CARD = "README.md"
UNKNOWN_LICENSE = "unknown"
COMPLETES = "It completes text. It was not taught to follow instructions or to refuse."
ANSWERS = (
    "It was tuned on the answers of conversations, and answers chats by its tokenizer's template. It may be wrong."
)


def write_card(folder: Path, config: TrainingConfig, facts: Mapping[str, Any], *, base: Path | None) -> None:
    """Write the card of what `folder` holds. `facts`: parameters, steps, tokens, loss; `made_from`: references by input;
    `continued_from`: job, step and sha256 of the checkpoint of another run, where it went on from one.
    """
    lines = ["---", *front_matter(config, facts, base), "---", "", f"# {config.model}", "", *_words(config, facts)]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def base_ref(rank: Rank) -> str:
    """The version of the base model that training starts from; empty: random weights, or nobody said."""
    made_from: Mapping[str, str] = rank.settings.get("made_from", {})
    return made_from.get("base", "")


def front_matter(config: TrainingConfig, facts: Mapping[str, Any], base: Path | None) -> list[str]:
    """Lines of YAML; a model made from a base has the base's license."""
    made_from = facts["made_from"].get("base") or config.base
    return [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"license: {license_of(base) if base else UNKNOWN_LICENSE}",
        *([f"base_model: {made_from}"] if base else []),
        "tags:",
        "- headway",
        *(["- lora"] if config.lora.rank else []),
    ]


def license_of(folder: Path) -> str:
    """What the card in a model's folder gives as its license; `unknown` when it says nothing."""
    return front_matter_of(folder).get("license", UNKNOWN_LICENSE)


def front_matter_of(folder: Path) -> dict[str, str]:
    """The plain values that the card in a model's folder begins with; empty without a card."""
    card = folder / CARD
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    if not lines or lines[0].strip() != "---":
        return {}
    payload: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            break
        name, colon, value = line.partition(":")
        if colon and value.strip() and not name.startswith((" ", "-")):
            payload.setdefault(name.strip(), value.strip())
    return payload


def _words(config: TrainingConfig, facts: Mapping[str, Any]) -> list[str]:
    rows = {
        "Parameters": f"{facts['parameters']:,}",
        "Steps": f"{facts['steps']:,}",
        "Tokens trained on": f"{facts['tokens']:,}",
        "Loss of the last step": f"{facts['loss']:.4f} nats a token",
        "Sequence length": str(config.sequence_length),
        "Precision": config.precision,
        "Seed": str(config.seed),
    }
    if config.lora.rank:
        rows["LoRA"] = f"rank {config.lora.rank}, alpha {config.lora.alpha:g}; merged, and by itself in `adapter/`"
    if origin := facts.get("continued_from"):
        rows["Continued from"] = f"step {origin['step']:,} of `{origin['job']}`, checkpoint `{origin['sha256'][:12]}`"
    rows |= {f"Made from ({name})": f"`{ref}`" for name, ref in sorted(facts["made_from"].items())}
    return [
        "A causal language model, trained by Headway.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'network = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
        "",
        f"{ANSWERS if config.objective == 'sft' else COMPLETES} What it was measured on is not in this",
        "folder: `headway lineage` shows its evaluations.",
    ]
