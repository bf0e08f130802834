"""Tokens, Qualification -> Plan: does the run fit, and how long will it take?

The formulas are tasks/planning; the rates are the qualification's. The plan limits and informs a run, it never changes what is
trained: steps and batch are the configuration's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.artifacts import Check, Checkpoint, Cluster, Plan, Tokens
from tasks.config.base import config_digest
from tasks.config.engines.registry import ENGINES
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.model_folder import open_model_folder, shape_of
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import fetch, free_disk_bytes, home_folder, noted, publish, scratch
from tasks.planning.case_of_config import division_of
from tasks.planning.checkpointing import RESTART_SECONDS, Recovery, Saving, corrected_every_steps, expected_goodput
from tasks.planning.correction import correction, kind_of, measured_on
from tasks.planning.failures import job_seconds
from tasks.planning.gpu_plan import GpuPlan, plan_on_gpus
from tasks.planning.size import (
    activation_bytes,
    adapter_parameters,
    checkpoint_bytes,
    flops_per_token_6n,
    flops_per_token_megatron,
    parameter_count,
    step_seconds,
    training_memory_bytes,
)
from tasks.planning.spending import Use, cost_of, cost_per_hour, known_cost, plain, taken_away
from tasks.planning.spending import checks as spending_checks

WRITE_BYTES_PER_SECOND = 200e6
"""What a plain disk takes with fsync and sha256 (measured: 512 MiB in 2.0 to 2.6 s)."""
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
    vocab_size = int(json.loads((fetch(tokens) / "tokens.json").read_text())["vocab_size"])
    if base:
        result = open_model_folder(fetch(base))
        training = training.model_copy(update={"network": shape_of(result.config)})
        vocab_size = result.vocab_size
    train_tokens = int(tokens.metrics["train_tokens"])
    home = home_folder("")
    past = noted(measured_on(on.name), PAST_RUNS)
    gpus = plan_on_gpus(training, limits, how, on, vocab_size=vocab_size, home=home)
    numbers = reckon(training, limits, how, on, vocab_size=vocab_size, train_tokens=train_tokens, past=past, gpus=gpus)
    use = Use(numbers.seconds, numbers.goodput, numbers.checkpoint * limits.checkpoint.keep)
    spent = cost_of(use, limits.spending, on, home=home)
    checks = (*judge(numbers, limits, on, gpus), *spending_checks(use, spent, limits.spending, on, home=home))
    with scratch() as folder:
        page = {
            "training": config_digest(training),
            **numbers.__dict__,
            "cost": plain(spent),
            "checks": [check.model_dump() for check in checks],
        }
        (folder / "plan.json").write_text(json.dumps(page, indent=1))
        return publish(
            folder,
            Plan,
            name=training.model,
            metrics=_metrics(numbers) | known_cost(spent),
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


def reckon(
    training: TrainingConfig,
    limits: PlanningConfig,
    how: ExecutionConfig,
    on: Cluster,
    *,
    vocab_size: int,
    train_tokens: int,
    past: Sequence[Mapping[str, Any]] = (),
    gpus: GpuPlan | None = None,
) -> Numbers:
    """All numbers of a run by the formulas of tasks/planning; `past` is what earlier runs on this cluster took (train.py).

    Memory and the time of a step are the prediction's on machines with GPUs (`gpus`), and else size.py's and steptime.py's.
    """
    network = training.network
    parameters = parameter_count(network, vocab_size, positions=training.sequence_length)
    lora = training.lora
    trained = adapter_parameters(network, lora.rank, lora.targets) if lora.rank else parameters
    activations = activation_bytes(
        network, vocab_size, sequence_length=training.sequence_length, micro_batch_size=training.micro_batch_size
    )
    tokens_a_step = training.global_batch_size * training.sequence_length
    flops = tokens_a_step * flops_per_token_megatron(network, vocab_size, sequence_length=training.sequence_length)
    division = division_of(training, how)
    kind = kind_of(training, division, sku=on.sku, ranks=on.world_size, parameters=parameters)
    corrected = correction(past, kind)
    step = corrected.factor * (gpus.step_seconds if gpus else _step_seconds(flops, 4 * trained, on))
    saved = checkpoint_bytes(trained)
    state = training_memory_bytes(trained, frozen=parameters if lora.rank else 0)
    saving = Saving(gpus.stall_seconds, gpus.write_seconds) if gpus else Saving(saved / WRITE_BYTES_PER_SECOND)
    reading = gpus.write_seconds if gpus else saving.stall_seconds
    recovery = Recovery(restart_seconds=RESTART_SECONDS + reading)
    between_failures = mean_seconds_between_failures(limits, on)
    every = limits.checkpoint.every_steps or corrected_every_steps(
        training.steps,
        step,
        stall_seconds=saving.stall_seconds,
        write_seconds=saving.lag_seconds,
        mean_seconds_between_failures=between_failures,
    )
    return Numbers(
        parameters=parameters,
        memory_per_rank=round(
            gpus.memory if gpus else state * share_of_state(training, how, on.world_size) + activations
        ),
        checkpoint=saved,
        flops=flops * training.steps,
        flops_6n=tokens_a_step * training.steps * flops_per_token_6n(parameters),
        step_seconds=step,
        correction=corrected.factor,
        corrected_by_runs=corrected.runs,
        correction_said=corrected.said,
        seconds=step * training.steps,
        checkpoint_every_steps=every,
        mean_seconds_between_failures=between_failures,
        goodput=expected_goodput(every * step, saving, recovery, between_failures),
        tokens=tokens_a_step * training.steps,
        epochs=tokens_a_step * training.steps / max(train_tokens, 1),
    )


def _metrics(numbers: Numbers) -> dict[str, float]:
    return {key: float(value) for key, value in numbers.__dict__.items() if not isinstance(value, str)}


def _step_seconds(flops: float, gradient_bytes: float, on: Cluster) -> float:
    return step_seconds(
        flops,
        gradient_bytes,
        ranks=on.world_size,
        gflops_per_rank=on.matmul_gflops_per_rank,
        bus_gigabytes_per_second=on.allreduce_gigabytes_per_second,
    )


def share_of_state(training: TrainingConfig, how: ExecutionConfig, ranks: int) -> float:
    """Share of weights, gradients and optimizer state, which are as 1 : 1 : 2, that one rank holds.

    Tensor and pipeline parallel divide all of it, FSDP2 over all ranks, ZeRO's stages (Rajbhandari et al. 2020, figure 1) and
    Megatron-LM's distributed optimizer their part of it over the copies of the network.
    """
    shared = how.tensor_parallel * how.pipeline_parallel
    whole = {0: 4, 1: 2, 2: 1, 3: 0}[ENGINES[training.engine].zero_stage(how)]
    return (whole + (4 - whole) / max(ranks // shared, 1)) / 4 / shared


def mean_seconds_between_failures(limits: PlanningConfig, on: Cluster) -> float:
    """As configured; else by the rates of the cluster's machines (tasks/planning/failures.py)."""
    if limits.mean_hours_between_failures is not None:
        return limits.mean_hours_between_failures * 3600
    return job_seconds(
        machines=on.nodes,
        gpus_per_machine=on.config.gpus_per_node,
        taken_away=taken_away(limits.spending, on),
    )


def seconds_between_failures(limits: PlanningConfig, on: Cluster) -> float | None:
    """By which training corrects the interval; None where it was given."""
    return None if limits.checkpoint.every_steps else mean_seconds_between_failures(limits, on)


def judge(numbers: Numbers, limits: PlanningConfig, on: Cluster, gpus: GpuPlan | None = None) -> tuple[Check, ...]:
    """The gate: memory a rank, room for the checkpoints, time."""
    memory = memory_limit(limits, on, gpus)
    nearest = f" The nearest that fits: {gpus.nearest}." if gpus and gpus.nearest else ""
    room, kept = free_disk_bytes(), numbers.checkpoint * (limits.checkpoint.keep + 1)
    return (
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
            remedy="Free room, keep fewer checkpoints, or set HEADWAY_HOME to a larger disk.",
        ),
        Check(
            name="training time, minutes",
            measured=numbers.seconds / 60,
            limit=f"<= {limits.max_minutes:.4g}",
            passed=numbers.seconds <= limits.max_minutes * 60,
            remedy="Lower training.steps or the network, add ranks, or raise planning.max_minutes.",
        ),
        *_useful_enough(numbers, limits),
        *_like_an_earlier_run(numbers),
    )


def _useful_enough(numbers: Numbers, limits: PlanningConfig) -> tuple[Check, ...]:
    if limits.min_goodput is None:
        return ()
    check = Check(
        name="goodput, share of useful time",
        measured=numbers.goodput,
        limit=f">= {limits.min_goodput:g}",
        passed=numbers.goodput >= limits.min_goodput,
        remedy="Leave planning.checkpoint.every_steps empty for the best interval, use fewer or better machines "
        "(planning.mean_hours_between_failures), or lower planning.min_goodput.",
    )
    return (check,)


def _like_an_earlier_run(numbers: Numbers) -> tuple[Check, ...]:
    """Closes nothing: it says that a time is the formulas' alone although this cluster has trained before."""
    if not numbers.correction_said:
        return ()
    check = Check(
        name="earlier runs of this kind",
        measured=0.0,
        limit="any number",
        passed=True,
        warned=True,
        remedy=f"The time is the formulas' alone: {numbers.correction_said}.",
    )
    return (check,)


def memory_limit(limits: PlanningConfig, on: Cluster, gpus: GpuPlan | None = None) -> float:
    """Bytes that a rank may take."""
    if limits.memory_per_rank_gib is not None:
        return limits.memory_per_rank_gib * GIB
    if gpus:
        return gpus.usable
    node = on.config.memory_gib * GIB if on.config.memory_gib else on.memory_bytes_per_node
    return node / on.ranks_per_node
