"""Tokens -> Checkpoint: the training run, as one job.

The loop is the program tasks/jobs/train.py (next); what keeps it alive is tasks/compute/supervisor.py. It resumes from its newest
verified checkpoint, whatever was killed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts import Artifact, Checkpoint, Cluster, Plan, Tokens
from tasks.config.continue_from import Origin, TakeOver
from tasks.config.engines.registry import ENGINES
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.promotion import require_signed, require_signer, sign
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import attach, note, publish, run_job
from tasks.planning.configured import division_of
from tasks.planning.spent import kind_of, measured, measured_on
from tasks.report.page import draw_training

log = logging.getLogger("headway.train")

RESULTS = ("loss", "heldout_bits_per_byte", "tokens_per_second", "mfu", "goodput")


@stage(
    version=1,
    shown=Shown(line="loss {loss:.3f}, {tokens_per_second:.0f} tokens/s", metrics=RESULTS, headlines=RESULTS),
)
def train(
    tokens: Tokens,
    config: TrainingConfig,
    base: Checkpoint | None = None,
    mixed: tuple[Tokens, ...] = (),
    origin: Origin | None = None,
    *,
    how: ExecutionConfig,
    under: Plan,
    on: Cluster,
    taking: TakeOver | None = None,
) -> Checkpoint:
    """Train a network on the train split, within the plan, and sign what came out; `how` changes no model and is in no key.

    `base` is what `config.base` names, `mixed` what `config.mixture` names beside the run's own tokens, `origin` the checkpoint
    of another run that it goes on from, and `taking` where that lies. Raises IntegrityError for a base whose signature does not
    count.
    """
    require_signer(Checkpoint, config.model)
    _require_folder(config, on)
    if base:
        require_signed(base)
    limits = saving(
        under.checkpoint_every_steps,
        under.keep_checkpoints,
        keep_every=under.keep_checkpoints_every,
        seconds_between_failures=under.seconds_between_failures,
        planned_step_seconds=under.seconds / under.steps,
    )
    peak = peak_of(on, config.precision)
    how = within_budget(how, under, on=on)
    taken_over = None
    if origin and taking:
        taken_over = {"origin": origin.model_dump(mode="json"), "how": taking.model_dump(mode="json")}
    made = program(tokens, config, how, base, mixed, limits=limits, peak=peak, continue_from=taken_over)
    job = run_job(made, on=on)
    draw_training(Path(job.folder), Path(job.output) / "training_log.jsonl")
    for folder in ("pictures", "profile"):  # beside the stage's run in MLflow, a profile where one was made
        attach(Path(job.folder) / folder)
    checkpoint = publish(job.output, Checkpoint, name=config.model, metrics=job.result["metrics"])
    sign(checkpoint)
    remember(config, how, under, on=on, metrics=job.result["metrics"])
    return checkpoint


def _require_folder(config: TrainingConfig, on: Cluster) -> None:
    """Raise ValueError where machines share no folder and the engine needs one."""
    why = ENGINES[config.engine].cannot_mirror
    if why and on.nodes > 1 and not on.config.shares_folder:
        raise ValueError(
            f"the engine {config.engine} runs on one machine where machines share no folder, and nodes is {on.nodes}: {why}. "
            "Set cluster.nodes to 1, use the engine torch or deepspeed, or a cluster with a shared folder (slurm)"
        )


def remember(
    config: TrainingConfig, how: ExecutionConfig, plan: Plan, *, on: Cluster, metrics: Mapping[str, float]
) -> None:
    """Note what it took beside its plan, for the next plan on this cluster. Raises nothing: the model is finished and signed."""
    try:
        _note(config, how, plan, on, metrics)
    except Exception as error:  # noqa: BLE001 whatever a store or a number does, the next plan only lacks one measurement
        log.warning("what %s took is not noted, the next plan does without it: %s", config.model, error)


def _note(config: TrainingConfig, how: ExecutionConfig, plan: Plan, on: Cluster, metrics: Mapping[str, float]) -> None:
    ranks = metrics.get("tokens_per_second", 0.0) / metrics.get("tokens_per_second_per_rank", 1.0)
    if "plan_error" not in metrics or ("tokens_per_second_per_rank" in metrics and round(ranks) != on.world_size):
        return  # an elastic run on fewer ranks tells nothing of all of them
    planned = plan.seconds / plan.steps
    division = division_of(config, how)
    kind = kind_of(config, division, sku=on.sku, ranks=on.world_size, parameters=plan.parameters)
    took = planned * (1 + metrics["plan_error"])
    note(measured_on(on.name), measured(kind, formula_seconds=planned / plan.correction, seconds=took))


READ_IN_PARTS = ("train*.bin", "train*.idx")
"""Files of tokens of which a machine that has its own cache of them (`execution.cache_gib`) reads what its samples need."""


def program(
    tokens: Tokens,
    config: TrainingConfig,
    how: ExecutionConfig,
    base: Checkpoint | None = None,
    mixed: tuple[Tokens, ...] = (),
    *,
    limits: dict[str, Any],
    peak: dict[str, Any] | None = None,
    continue_from: dict[str, Any] | None = None,
) -> Program:
    """What trains; `limits` are its `saving`, `peak` is what MFU is measured against, `continue_from` which checkpoint of another
    run it takes over (tasks/jobs/checkpoint/origins.py)."""
    inputs: dict[str, Artifact] = {"tokens": tokens, **({"base": base} if base else {})}
    inputs |= {f"tokens-{other.name}": other for other in mixed}
    engine = ENGINES[config.engine]
    settings = {
        "training": config.model_dump(mode="json"),
        "execution": how.model_dump(mode="json"),
        **limits,
        "peak": peak,
        "made_from": {name: artifact.ref for name, artifact in inputs.items()},
        **engine.job_settings(config, how),
        **({"continue_from": continue_from} if continue_from else {}),
    }
    by_range = {name: READ_IN_PARTS for name in inputs if name != "base"} if how.cache_gib is not None else {}
    return Program(engine.program, settings, inputs, progress="checkpoints/LATEST", by_range=by_range)


def within_budget(how: ExecutionConfig, plan: Plan, *, on: Cluster) -> ExecutionConfig:
    """The plan's budget as a limit of training, where none is configured; of an elastic run as if all its machines were there."""
    if plan.max_cost is None or not plan.cost_per_hour or how.limits.max_cost is not None:
        return how
    most = on.config.elastic.max_nodes if on.config.elastic else on.nodes
    cost = plan.cost_per_hour * most / on.nodes
    limits = how.limits.model_copy(update={"max_cost": plan.max_cost, "cost_per_hour": cost})
    return how.model_copy(update={"limits": limits})


def saving(
    every_steps: int,
    keep: int,
    *,
    keep_every: int | None,
    seconds_between_failures: float | None,
    planned_step_seconds: float | None = None,
) -> dict[str, Any]:
    """How often training is saved, what is kept, and the plan's time of a step, as settings of its job."""
    return {
        "checkpoint_every_steps": every_steps,
        "keep_checkpoints": keep,
        "keep_every": keep_every,
        "seconds_between_failures": seconds_between_failures,
        "planned_step_seconds": planned_step_seconds,
    }


def peak_of(on: Cluster, precision: str) -> dict[str, Any] | None:
    """What one rank can reach, in TFLOP/s, and who says so; None: nobody knows, and there is no MFU."""
    if precision in on.peak_tflops:
        return {"tflops": on.peak_tflops[precision], "of": f"{precision} without sparsity, by the hardware's file"}
    if not on.config.gpus_per_node and on.matmul_gflops_per_rank:
        return {
            "tflops": on.matmul_gflops_per_rank / 1000,
            "of": "fp32 matrix product, as the qualification measured it",
        }
    return None
