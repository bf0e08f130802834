"""A lifecycle's configuration as a case to plan, and a plan's division as settings that `headway retrain -c` takes.

What is planned of it is tasks/planning/planned_case.py. Machines without GPUs are planned by the stage (tasks/plan.py), by what
their qualification measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tasks.common.errors import Missing
from tasks.config.engines.registry import ENGINES
from tasks.config.flows import RetrainConfig
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.planning.case import Case
from tasks.planning.memory import HALF_GRADIENTS
from tasks.planning.prediction import Division

DAY_MINUTES = 1440.0


def case_of(config: RetrainConfig, *, search: bool = False) -> Case:
    """The training that a configuration asks for; `search` leaves open how it is divided. Raises ValueError, Missing.

    The vocabulary is the tokenizer's as configured.
    """
    training, how, cluster = config.training, config.execution, config.cluster
    sku = config.benchmark.sku or cluster.size
    if not sku and not cluster.gpus_per_node:
        raise Missing(
            f"cluster {cluster.name} has no GPUs, so no size's numbers hold for it",
            remedy="`headway retrain --to plan` measures the machines and plans with that; or plan a case: --case FILE.",
        )
    if not sku:
        raise ValueError(f"cluster {cluster.name} names no VM size: set benchmark.sku; `headway hardware` lists them")
    if training.base:
        raise Missing(
            f"the network is that of {training.base}, which is read when a run needs it",
            remedy="`headway retrain --to plan` plans with it; or plan a case of its shape: --case FILE.",
        )
    vocab_size = config.preprocessing.tokenizer.vocab_size
    gpus = cluster.nodes * cluster.ranks_per_node
    case = case_of_training(training, how, config.planning, sku=sku, gpus=gpus, vocab_size=vocab_size, search=search)
    days = config.planning.max_minutes / DAY_MINUTES
    limits = {"max_days": days if math.isfinite(days) else None, "max_cost": config.planning.spending.max_cost}
    spot = case.cluster.spot or cluster.preemptible
    return case.model_copy(update={**limits, "cluster": case.cluster.model_copy(update={"spot": spot})})


def case_of_training(
    training: TrainingConfig,
    how: ExecutionConfig,
    limits: PlanningConfig,
    *,
    sku: str,
    gpus: int,
    vocab_size: int,
    search: bool = False,
) -> Case:
    """The same of a training whose vocabulary and GPUs are known."""
    open_ = {"batch": {"global": training.global_batch_size}}
    as_configured = {
        "parallel": division_of(training, how),
        "batch": {"global": training.global_batch_size, "micro": training.micro_batch_size},
        "recompute": how.recompute,
    }
    return Case.model_validate(
        {
            "name": training.model,
            "network": _network(training.network, vocab_size),
            "sequence": training.sequence_length,
            "cluster": {"sku": sku, "gpus": gpus, "spot": limits.spending.price in ("spot", "low-priority")},
            "precision": training.precision,
            "tokens": training.steps * training.global_batch_size * training.sequence_length,
            "engine": training.engine,
            **(open_ if search else as_configured),
        }
    )


def settings_of(division: Division, needs: Sequence[str] = ()) -> dict[str, Any]:
    """A division as sections of a configuration, with the options that it `needs` to fit (Prediction.needs).

    Raises ValueError for what Headway's engines do not have.
    """
    if division.ep > 1:
        raise ValueError(f"ep {division.ep}: experts are planned, and not trained by Headway's engines")
    engine = ENGINES[division.engine]
    options = [engine.planned.half_gradients_option if need == HALF_GRADIENTS else "" for need in needs]
    if "" in options:
        raise ValueError(
            f"the plan fits only with {' and '.join(needs)}, which engine {division.engine} has no setting for:"
            " lower batch.micro, or take more GPUs"
        )
    execution: dict[str, Any] = {
        "tensor_parallel": division.tp,
        "pipeline_parallel": division.pp,
        "context_parallel": division.cp,
        "recompute": division.recompute,
    }
    execution |= engine.execution(
        zero=division.zero,
        offload=division.offload,
        virtual=division.virtual,
        sequence_parallel=division.sequence_parallel,
        options=options,
    )
    return {"training": {"engine": division.engine, "micro_batch_size": division.micro}, "execution": execution}


def _network(network: NetworkConfig, vocab_size: int) -> dict[str, Any]:
    gpt2 = network.architecture == "gpt2"
    return {
        "layers": network.layers,
        "hidden": network.hidden_size,
        "heads": network.heads,
        "kv_heads": network.kv_heads,
        "ffn": network.intermediate_size,
        "gated": not gpt2,
        "vocab": vocab_size,
        "tied": network.tie_embeddings,
        "learned_positions": gpt2,
        "biases": gpt2,
    }


def division_of(training: TrainingConfig, how: ExecutionConfig) -> dict[str, Any]:
    """How a training is divided, as `parallel` of a case has it."""
    engine = ENGINES[training.engine]
    own = engine.division(training, how)
    return {
        "tp": how.tensor_parallel,
        "pp": how.pipeline_parallel,
        "cp": how.context_parallel,
        "virtual": own["virtual"],
        "zero": engine.zero_stage(how),
        "offload": own["offload"],
        "sequence_parallel": own["sequence_parallel"],
    }
