"""Tokens, Qualification -> Plan: does the run fit, and how long will it take?

The formulas are tasks/planning; the rates are the qualification's. The plan limits and informs a run, it never changes what is
trained: steps and batch are the configuration's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts import Check, Checkpoint, Cluster, Plan, Tokens
from tasks.config.base import config_digest
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.model_folder import open_model_folder, shape_of
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import fetch, files_of, free_disk_bytes, home_folder, noted, publish, scratch
from tasks.planning.case import Network
from tasks.planning.checkpointing import (
    RESTART_SECONDS,
    Recovery,
    corrected_every_steps,
    expected_goodput,
    resumable_bytes,
)
from tasks.planning.configured import RankPlan, division_of, plan_of_ranks
from tasks.planning.counts import model_flops_per_token
from tasks.planning.failures import job_seconds
from tasks.planning.spending import Use, cost_of, cost_per_hour, known_cost, taken_away
from tasks.planning.spending import checks as spending_checks
from tasks.planning.spent import correction, kind_of, measured_on

GIB = 1 << 30
PAST_RUNS = 50
"""Of a cluster that are looked at for those of the same kind."""


@dataclass(frozen=True)
class Numbers:
    """What the plan is made of: bytes, seconds, counts."""

    parameters: int
    memory_per_rank: int
    checkpoint: int
    flops: int
    """By Megatron's convention, over the whole run; `flops_6n` by the 6N one."""
    flops_6n: int
    step_seconds: float
    correction: float
    """What the formulas' time of a step was multiplied by, for what earlier runs on this cluster took."""
    corrected_by_runs: int
    correction_said: str
    """Why earlier runs on this cluster do not count; empty where one does, and where there is none."""
    seconds: float
    checkpoint_every_steps: int
    mean_seconds_between_failures: float
    """As configured, else by the rates of the machines."""
    goodput: float
    """Useful share of the time, with that time between failures."""
    tokens: int
    epochs: float
    rank: RankPlan

    @property
    def figures(self) -> dict[str, Any]:
        """As `plan.json` has them."""
        return {name: value for name, value in self.__dict__.items() if name != "rank"}


@stage(
    version=2,
    same_context=True,
    shown=Shown(
        line="{parameters:.0f} parameters, about {seconds:.0f} s of training", metrics=("parameters", "seconds")
    ),
)
def plan(
    tokens: Tokens,
    training: TrainingConfig,
    limits: PlanningConfig,
    how: ExecutionConfig,
    base: Checkpoint | None = None,
    *,
    on: Cluster,
) -> Plan:
    """Size and time of a training run, and the gate on memory, disk and time; the network is the base's where there is one."""
    with files_of(tokens, "tokens.json") as folder:
        vocab_size = int(json.loads((folder / "tokens.json").read_text())["vocab_size"])
    if base:
        result = open_model_folder(fetch(base))
        training = training.model_copy(update={"network": shape_of(result.config)})
        vocab_size = result.vocab_size
    train_tokens = int(tokens.metrics["train_tokens"])
    if training.objective == "sft":  # full rows, whatever they hold
        rows = packed_rows(tokens, training) if training.packing else int(tokens.metrics["train_documents"])
        train_tokens = rows * training.sequence_length
    home = home_folder("")
    past = noted(measured_on(on.name), PAST_RUNS)
    numbers = reckon(training, limits, how, on, vocab_size=vocab_size, train_tokens=train_tokens, home=home, past=past)
    use = Use(numbers.seconds, numbers.goodput, numbers.checkpoint * limits.checkpoint.keep)
    spent = cost_of(use, limits.spending, on, home=home)
    checks = (*judge(numbers, limits), *spending_checks(use, spent, limits.spending, on, home=home))
    with scratch() as folder:
        page = {
            "training": config_digest(training),
            **numbers.figures,
            "cost": {**spent.plain(), "warnings": list(spent.warnings)},
            "checks": [check.model_dump() for check in checks],
        }
        (folder / "plan.json").write_text(json.dumps(page, indent=1))
        return publish(
            folder,
            Plan,
            name=training.model,
            metrics={
                **{name: float(value) for name, value in numbers.figures.items() if not isinstance(value, str)},
                **known_cost(spent),
            },
            checks=checks,
            steps=training.steps,
            checkpoint_every_steps=numbers.checkpoint_every_steps,
            keep_checkpoints=limits.checkpoint.keep,
            keep_checkpoints_every=limits.checkpoint.keep_every,
            seconds_between_failures=seconds_between_failures(limits, on),
            seconds=numbers.seconds,
            correction=numbers.correction,
            cost_per_hour=cost_per_hour(spent, on),
            max_cost=limits.spending.max_cost,
            parameters=numbers.parameters,
        )


def packed_rows(tokens: Tokens, training: TrainingConfig) -> int:
    """Rows that training will pack the conversations into."""
    from tasks.data.tokenizing.rows import count_rows  # numpy, which no other plan needs
    from tasks.formats.mmididx import prefixes

    with files_of(tokens, "tokens.json") as folder:
        names = [prefix.name for prefix in prefixes(folder, "train")]
    with files_of(tokens, *(f"{name}.idx" for name in names)) as folder:
        return count_rows([folder / name for name in names], training.sequence_length, training.seed)


def reckon(
    training: TrainingConfig,
    limits: PlanningConfig,
    how: ExecutionConfig,
    on: Cluster,
    *,
    vocab_size: int,
    train_tokens: int,
    home: Path,
    past: Sequence[Mapping[str, Any]] = (),
) -> Numbers:
    """All numbers of a run by the formulas of tasks/planning; `past` is what earlier runs on this cluster took (train.py)."""
    rank = plan_of_ranks(training, limits, how, on, vocab_size=vocab_size, home=home)
    network = Network.of_config(training.network, vocab_size)
    tokens = training.global_batch_size * training.sequence_length * training.steps
    division = division_of(training, how)
    kind = kind_of(training, division, sku=on.sku, ranks=on.world_size, parameters=rank.parameters)
    corrected = correction(past, kind)
    step = corrected.factor * rank.step_seconds
    recovery = Recovery(restart_seconds=RESTART_SECONDS + rank.reading_seconds)
    between_failures = mean_seconds_between_failures(limits, on)
    every = limits.checkpoint.every_steps or corrected_every_steps(
        training.steps,
        step,
        stall_seconds=rank.saving.stall_seconds,
        write_seconds=rank.saving.lag_seconds,
        mean_seconds_between_failures=between_failures,
    )
    return Numbers(
        parameters=rank.parameters,
        memory_per_rank=round(rank.memory),
        checkpoint=resumable_bytes(rank.trained),
        flops=tokens * model_flops_per_token(network, training.sequence_length),
        flops_6n=tokens * 6 * rank.parameters,
        step_seconds=step,
        correction=corrected.factor,
        corrected_by_runs=corrected.runs,
        correction_said=corrected.said,
        seconds=step * training.steps,
        checkpoint_every_steps=every,
        mean_seconds_between_failures=between_failures,
        goodput=expected_goodput(every * step, rank.saving, recovery, between_failures),
        tokens=tokens,
        epochs=tokens / max(train_tokens, 1),
        rank=rank,
    )


def mean_seconds_between_failures(limits: PlanningConfig, on: Cluster) -> float:
    """As configured; else by the rates of the cluster's machines (tasks/planning/failures.py)."""
    if limits.mean_hours_between_failures is not None:
        return limits.mean_hours_between_failures * 3600
    return job_seconds(
        machines=on.nodes, gpus_per_machine=on.config.gpus_per_node, taken_away=taken_away(limits.spending, on)
    )


def seconds_between_failures(limits: PlanningConfig, on: Cluster) -> float | None:
    """By which training corrects the interval; None where it was given."""
    return None if limits.checkpoint.every_steps else mean_seconds_between_failures(limits, on)


def judge(numbers: Numbers, limits: PlanningConfig) -> tuple[Check, ...]:
    """The gate: memory a rank, room for the checkpoints, time; useful time where a least share is asked for.

    A time that is the formulas' alone although this cluster has trained before is said, and closes nothing.
    """
    memory = numbers.rank.usable
    nearest = f" The nearest that fits: {numbers.rank.nearest}." if numbers.rank.nearest else ""
    room, kept = free_disk_bytes(), numbers.checkpoint * (limits.checkpoint.keep + 1)
    checks = (
        Check(
            name="memory per rank, GiB",
            measured=numbers.memory_per_rank / GIB,
            limit=f"<= {memory / GIB:.3g}",
            passed=numbers.memory_per_rank <= memory,
            remedy=f"Divide it (execution.parallel: fsdp), lower training.micro_batch_size, or use fewer ranks a node.{nearest}",
        ),
        Check(
            name="disk for checkpoints, GiB",
            measured=kept / GIB,
            limit=f"<= {room / GIB:.3g}",
            passed=kept <= room,
            remedy="Free space, keep fewer checkpoints, or set HEADWAY_HOME to a larger disk.",
        ),
        Check(
            name="training time, minutes",
            measured=numbers.seconds / 60,
            limit=f"<= {limits.max_minutes:.4g}",
            passed=numbers.seconds <= limits.max_minutes * 60,
            remedy="Lower training.steps or the network, add ranks, or raise planning.max_minutes.",
        ),
    )
    useful = (
        ()
        if limits.min_goodput is None
        else (
            Check(
                name="goodput, share of useful time",
                measured=numbers.goodput,
                limit=f">= {limits.min_goodput:g}",
                passed=numbers.goodput >= limits.min_goodput,
                remedy="Leave planning.checkpoint.every_steps empty for the best interval, use fewer or better machines "
                "(planning.mean_hours_between_failures), or lower planning.min_goodput.",
            ),
        )
    )
    earlier = (
        ()
        if not numbers.correction_said
        else (
            Check(
                name="earlier runs of this kind",
                measured=0.0,
                limit="any number",
                passed=True,
                warned=True,
                remedy=f"The time is the formulas' alone: {numbers.correction_said}.",
            ),
        )
    )
    return (*checks, *useful, *earlier)
