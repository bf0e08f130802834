"""A lifecycle's configuration as a case to plan, and a plan's division as settings that `headway retrain -c` takes.

What is planned of it is tasks/planned_case.py. Machines without GPUs are planned by the stage (tasks/plan.py), by what their
qualification measured.
"""

from __future__ import annotations

from typing import Any

from tasks.config import RetrainConfig
from tasks.errors import Missing
from tasks.planning.case import Case
from tasks.planning.prediction import Division

DAY_MINUTES = 1440.0


def case_of(config: RetrainConfig, *, search: bool = False) -> Case:
    """The training that a configuration asks for; `search` leaves open how it is divided. Raises ValueError, Missing.

    The vocabulary is the tokenizer's as configured; a base model's network is not known before it is fetched.
    """
    training, how, cluster = config.training, config.execution, config.cluster
    sku = config.benchmark.sku or cluster.slurm.sku or cluster.azureml.size
    if not sku and not cluster.gpus_per_node:
        raise Missing(
            f"cluster {cluster.name} has no GPUs, so no size's numbers hold for it",
            remedy="`headway retrain --to plan` measures the machines and plans with that; or plan a case: --case FILE.",
        )
    if not sku:
        raise ValueError(f"cluster {cluster.name} names no VM size: set benchmark.sku; `headway hardware` lists them")
    open_ = {"batch": {"global": training.global_batch_size}}
    as_configured = {
        "parallel": _division(config),
        "batch": {"global": training.global_batch_size, "micro": training.micro_batch_size},
        "recompute": how.recompute,
    }
    return Case.model_validate(
        {
            "name": training.model,
            "network": _network(config),
            "sequence": training.sequence_length,
            "cluster": {
                "sku": sku,
                "nodes": cluster.nodes,
                "spot": config.planning.spending.price in ("spot", "low-priority"),
            },
            "precision": training.precision,
            "tokens": training.steps * training.global_batch_size * training.sequence_length,
            "engine": training.engine,
            "max_days": config.planning.max_minutes / DAY_MINUTES,
            "max_cost": config.planning.spending.max_cost,
            **(open_ if search else as_configured),
        }
    )


def settings_of(division: Division) -> dict[str, Any]:
    """A division as sections of a configuration. Raises ValueError for what Headway's engines do not have."""
    if division.ep > 1:
        raise ValueError(f"ep {division.ep}: experts are planned, and not trained by Headway's engines")
    execution: dict[str, Any] = {
        "tensor_parallel": division.tp,
        "pipeline_parallel": division.pp,
        "context_parallel": division.cp,
        "recompute": division.recompute,
    }
    if division.engine == "torch":
        execution["parallel"] = "fsdp" if division.zero == 3 else "ddp"
    if division.engine == "deepspeed":
        execution["deepspeed"] = {"zero_stage": max(division.zero, 1), "offload": division.offload}
    if division.engine == "megatron":
        arguments = ["--num-virtual-stages-per-pipeline-rank", str(division.virtual)] if division.virtual > 1 else []
        execution["megatron"] = {
            "sequence_parallel": division.sequence_parallel,
            "distributed_optimizer": division.zero > 0,
            "arguments": arguments,
        }
    return {"training": {"engine": division.engine, "micro_batch_size": division.micro}, "execution": execution}


def _network(config: RetrainConfig) -> dict[str, Any]:
    network = config.training.network
    gpt2 = network.architecture == "gpt2"
    return {
        "layers": network.layers,
        "hidden": network.hidden_size,
        "heads": network.heads,
        "kv_heads": network.kv_heads,
        "ffn": network.intermediate_size,
        "gated": not gpt2,
        "vocab": config.preprocessing.tokenizer.vocab_size,
        "tied": network.tie_embeddings,
        "learned_positions": gpt2,
        "biases": gpt2,
    }


def _division(config: RetrainConfig) -> dict[str, Any]:
    how, engine = config.execution, config.training.engine
    zero = {
        "torch": 3 if how.parallel == "fsdp" else 0,
        "deepspeed": how.deepspeed.zero_stage,
        "megatron": int(how.megatron.distributed_optimizer),
    }[engine]
    return {
        "tp": how.tensor_parallel,
        "pp": how.pipeline_parallel,
        "cp": how.context_parallel,
        "virtual": 1,
        "zero": zero,
        "offload": how.deepspeed.offload if engine == "deepspeed" else "none",
        "sequence_parallel": engine == "megatron" and how.megatron.sequence_parallel,
    }
