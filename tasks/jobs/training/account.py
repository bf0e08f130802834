"""What stands beside a trained network in the artifact, whichever engine trained it: the log of its steps, its facts, its card.

The network itself is writing.py, of Megatron-LM tasks/jobs/megatron/converting.py; the card's words are card.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.config.training import TrainingConfig
from tasks.formats.model_folder import declared_context
from tasks.jobs.checkpoint.origins import continued_from
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.card import write_card

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
