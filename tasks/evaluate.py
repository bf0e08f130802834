"""Checkpoint, Tokens -> Evaluation: bits per byte on held-out text, beside n-gram models and the champion.

`evaluate` measures, in the program tasks/jobs/evaluate.py, and is reused; `compare` judges, and is always run.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.artifacts import Check, Checkpoint, Cluster, Evaluation, Pending, Tokens, parse_ref, require_checks
from tasks.errors import IntegrityError
from tasks.evaluation_config import ComparisonConfig, EvaluationConfig
from tasks.lifecycle import current
from tasks.performance.compared import bigram_checks
from tasks.programs import Program
from tasks.registry.refs import made_from
from tasks.scores import relative_loss
from tasks.stage import stage
from tasks.storage.store import find
from tasks.workbench import fetch, publish, run_job


@stage(version=1)
def evaluate(checkpoint: Checkpoint, tokens: Tokens, config: EvaluationConfig, *, on: Cluster) -> Evaluation:
    """Measure a checkpoint on the held-out split."""
    trained = json.loads((fetch(checkpoint) / "training.json").read_text())
    job = run_job(program(checkpoint, tokens, config, sequence_length=trained["sequence_length"], on=on), on=on)
    return publish(job.output, Evaluation, name=checkpoint.name, metrics=job.result["metrics"], subject=checkpoint)


def program(
    checkpoint: Checkpoint, tokens: Tokens, config: EvaluationConfig, *, sequence_length: int, on: Cluster
) -> Program:
    """What measures, on one machine with all of its threads."""
    threads = on.threads_per_node
    settings = {"evaluation": config.model_dump(mode="json"), "sequence_length": sequence_length, "threads": threads}
    inputs = {"checkpoint": checkpoint, "tokens": tokens}
    return Program("tasks.jobs.evaluate", settings, inputs, ranks=1, threads=threads)


def champion_checkpoint(model: str) -> Checkpoint | None:
    """What the champion of a name was exported from; None when there is no champion yet."""
    inputs = made_from(current().store, f"{model}/champion")
    if not inputs:
        return None
    _, name, version = parse_ref(inputs[0])
    return Checkpoint(name=name, version=version, uri="")


def compare(
    scores: Evaluation, champion: Evaluation | None, config: EvaluationConfig, limits: ComparisonConfig
) -> Checkpoint:
    """Give up the checkpoint when it beats the bigram, and is not worse than the champion. Raises GateFailed."""
    if isinstance(scores, Pending) or isinstance(champion, Pending):
        return Pending(stage="evaluate")  # type: ignore[return-value]
    if champion:
        shown = {"ref": champion.subject.ref, "bits_per_byte": champion.metrics["bits_per_byte"]}
        current().results["champion"] = shown
    checks = (*bigram_checks(scores.metrics, config, limits), *_against_champion(scores, champion, config, limits))
    current().outcomes["evaluate"].checks = [check.model_dump() for check in checks]
    require_checks("evaluate", checks)
    return scores.subject


def _against_champion(
    scores: Evaluation, champion: Evaluation | None, config: EvaluationConfig, limits: ComparisonConfig
) -> tuple[Check, ...]:
    if champion is None or champion.subject.version == scores.subject.version:
        return ()
    mine, theirs = _documents(scores), _documents(champion)
    if mine["bytes"] != theirs["bytes"]:
        raise IntegrityError(
            f"{scores.ref} and {champion.ref} were not measured on the same documents",
            remedy="Measure both again: `headway retrain --from evaluate`.",
        )
    loss = relative_loss(
        mine["model_bits"],
        theirs["model_bits"],
        samples=config.bootstrap_samples,
        confidence=config.confidence,
        seed=config.seed,
    )
    check = Check(
        name=f"relative loss to the champion, high end of the {config.confidence:.0%} interval",
        measured=loss.high,
        limit=f"<= {limits.max_loss_to_champion:.4g}",
        passed=loss.high <= limits.max_loss_to_champion,
        remedy="The champion stays; comparison.max_loss_to_champion is the margin, training.model names another line of models. "
        f"Bits per byte {scores.metrics['bits_per_byte']:.4f} against "
        f"{champion.metrics['bits_per_byte']:.4f}.",
    )
    return (check,)


def _documents(scores: Evaluation) -> dict[str, Any]:
    store = current().store
    folder = store.fetch(find(store, *parse_ref(scores.ref)))
    found: dict[str, Any] = json.loads((folder / "documents.json").read_text())
    return found
