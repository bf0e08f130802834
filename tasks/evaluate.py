"""Checkpoint, Tokens -> Evaluation: bits per byte on held-out text, beside n-gram models and the champion; slices and suites.

`evaluate` measures, in the program tasks/jobs/evaluate.py, and is reused; `compare` judges, and is always run. What a rule asks
is tasks/evaluation/comparison.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tasks.artifacts import (
    Artifact,
    Check,
    Checkpoint,
    Cluster,
    Dataset,
    Evaluation,
    Pending,
    Tokens,
    parse_ref,
    require_checks,
)
from tasks.common.errors import IntegrityError
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.evaluation.comparison import Side, against, in_words, relative_check, rule_checks
from tasks.evaluation.performance import bigram_checks
from tasks.formats.model_folder import DESCRIPTION, declared_context
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.result import ChampionScore
from tasks.orchestration.run import current
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import files_of, publish, run_job
from tasks.registry.records import Record
from tasks.registry.refs import made_from
from tasks.storage.store import find

LONGEST = 1024
"""Tokens that a model is given at once, where neither its training nor its settings say how many it takes."""


def outdated(record: Record, arguments: tuple[Any, ...]) -> bool:
    """Whether an earlier release measured something else: the head of the split, what stands before a document as its text,
    prompts of lm-evaluation-harness without that, or suites without what became of each problem, by which they are compared.
    """
    asked: EvaluationConfig = arguments[2]
    if "context" not in record.metrics and (asked.lm_eval.tasks or asked.code.problems or asked.labelled):
        return True
    if "share_of_heldout" in record.metrics:
        return False
    tokens, mixed = arguments[1], arguments[3] if len(arguments) > 3 else ()
    if mixed or record.metrics.get("documents") != tokens.metrics.get("heldout_documents"):
        return True
    store = current().store
    folder = store.fetch(find(store, *parse_ref(tokens.ref)))
    return bool(open_tokenizer(folder / "tokenizer" / "tokenizer.json").prefix)


@stage(
    version=2,
    expires=outdated,
    shown=Shown(
        line="{bits_per_byte:.3f} bits per byte, Kneser-Ney bigram {bigram_bits_per_byte:.3f}",
        metrics=("bits_per_byte", "perplexity", "accuracy", "calibration_error", "gain_over_bigram"),
        headlines=("bits_per_byte", "gain_over_bigram"),
        part="evaluation.json",
        table="documents.json",
    ),
)
def evaluate(
    checkpoint: Checkpoint,
    tokens: Tokens,
    config: EvaluationConfig,
    mixed: tuple[Tokens, ...] = (),
    files: tuple[Dataset, ...] = (),
    suites: str | None = None,
    *,
    on: Cluster,
) -> Evaluation:
    """Measure a checkpoint on the held-out split, and on those of the other corpora that it learnt from (`mixed`).

    `files` are datasets that suites read; the settings name them. `suites` is a digest of what they read by path
    (flows/support/inputs.py): files that changed are measured with anew.
    """
    with files_of(checkpoint, *DESCRIPTION) as folder:
        context = declared_context(folder) or LONGEST
    on = machines(on)
    job = run_job(program(checkpoint, tokens, config, mixed, files, sequence_length=context, on=on), on=on)
    return publish(job.output, Evaluation, name=checkpoint.name, metrics=job.result["metrics"], subject=checkpoint)


def program(
    checkpoint: Checkpoint,
    tokens: Tokens,
    config: EvaluationConfig,
    mixed: tuple[Tokens, ...] = (),
    files: tuple[Dataset, ...] = (),
    *,
    sequence_length: int,
    on: Cluster,
) -> Program:
    """What measures. `sequence_length` are the tokens that the model is given at once; `on` are the machines of `machines`.

    Raises ValueError where a machine has GPUs, and fewer than ranks.
    """
    gpus = on.config.gpus_per_node
    if config.device != "cpu" and 0 < gpus < on.ranks_per_node:
        raise ValueError(
            f"cluster.evaluation.ranks_per_node is {on.ranks_per_node}, and a machine has {gpus} GPUs: lower it to {gpus}, or "
            "set evaluation.device: cpu"
        )
    threads = on.threads_per_rank
    settings = {
        "evaluation": config.model_dump(mode="json"),
        "sequence_length": sequence_length,
        "threads": threads,
        **({"source": tokens.name} if mixed else {}),
        **({"shard": shard} if (shard := on.config.evaluation.shard) != "auto" else {}),
    }
    inputs: dict[str, Artifact] = {"checkpoint": checkpoint, "tokens": tokens}
    inputs |= {f"tokens-{other.name}": other for other in mixed}
    inputs |= {f"files-{each.name}": each for each in files}
    return Program("tasks.jobs.evaluate", settings, inputs)


def machines(on: Cluster) -> Cluster:
    """Those of a cluster that measure a model: of those that proved themselves, as many as `cluster.evaluation` asks for."""
    config = on.config.for_evaluation
    taken = {name: getattr(config, name) for name in ("nodes", "ranks_per_node", "threads_per_rank")}
    if on.admission:  # training begins on few and takes others in; of those only the first proved themselves before
        taken["nodes"] = min(taken["nodes"], len(on.proven))
    return on.model_copy(update={"config": config, **taken})


def champion_checkpoint(model: str) -> Checkpoint | None:
    """What the champion of a name was exported from; None when there is no champion yet."""
    inputs = made_from(current().store, f"{model}/champion")
    if not inputs:
        return None
    _, name, version = parse_ref(inputs[0])
    return Checkpoint(name=name, version=version, uri="")


def compare(
    scores: Evaluation,
    champion: Evaluation | None,
    config: EvaluationConfig,
    limits: ComparisonConfig,
    base: Evaluation | None = None,
) -> Checkpoint:
    """Give up the checkpoint when it beats the bigram, is not worse than the champion, and keeps to every rule.

    `base` is the model that training started from, for rules that compare with it.

    Raises GateFailed; IntegrityError when the champion was measured on other documents.
    """
    if any(isinstance(each, Pending) for each in (scores, champion, base)):
        return Pending(stage="evaluate")  # type: ignore[return-value]
    run = current()
    if champion and "bits_per_byte" in champion.metrics:
        score = ChampionScore(ref=champion.subject.ref, bits_per_byte=champion.metrics["bits_per_byte"])
        run.result = replace(run.result, champion=score)
    mine = _side(scores)
    run.result = replace(run.result, openings=mine.openings)
    theirs = None
    if champion and champion.subject.version != scores.subject.version:
        theirs = _side(champion)
        if mine.documents.get("bytes") != theirs.documents.get("bytes"):
            raise IntegrityError(
                f"the evaluations of {mine.ref} and {theirs.ref} were not made on the same documents",
                remedy="Measure both again: `headway retrain --from evaluate`.",
            )
    checks = _checks(scores, champion, mine, theirs, config, limits, base=_side(base) if base else None)
    run.outcomes["evaluate"].checks = [check.model_dump() for check in checks]
    if theirs:
        payload = against(mine, theirs, config)
        run.result = replace(run.result, comparison=payload)
        run.observer.happened("evaluate", "compared", in_words(payload))
    require_checks("evaluate", checks)
    return scores.subject


def _checks(
    scores: Evaluation,
    champion: Evaluation | None,
    mine: Side,
    theirs: Side | None,
    config: EvaluationConfig,
    limits: ComparisonConfig,
    *,
    base: Side | None,
) -> tuple[Check, ...]:
    results = list(bigram_checks(scores.metrics, config, limits))
    if theirs and champion:
        now, then = (each.metrics.get("bits_per_byte", float("nan")) for each in (scores, champion))
        remedy = (
            "The champion stays; comparison.max_loss_to_champion is the margin, training.model names another line of models. "
            f"Bits per byte {now:.4f} against {then:.4f}."
        )
        margin = limits.max_loss_to_champion
        noise = limits.seed_noise
        results.append(relative_check("bits_per_byte", margin, mine, theirs, config, seed_noise=noise, remedy=remedy))
    for rule in limits.rules:
        other = base if rule.against == "base" else theirs
        results += rule_checks(rule, mine, other, config, seed_noise=limits.seed_noise)
    return tuple(results)


def _side(scores: Evaluation) -> Side:
    store = current().store
    folder = store.fetch(find(store, *parse_ref(scores.ref)))
    paths = (folder / f"{name}.json" for name in ("evaluation", "documents", "sources", "openings"))
    # An early release had fewer.
    payload, documents, sources, openings = (
        json.loads(path.read_text("utf-8")) if path.is_file() else {} for path in paths
    )
    return Side(scores.subject.ref, payload, documents, sources, tuple(openings))
