"""A lifecycle's configuration, planned: as a case, what it takes of each rank, and a plan's division as settings to train with.

What a case comes to is planned_case.py. What each rank of a cluster gives (`plan_of_ranks`) is what the stage `plan` judges. One
planner has two kinds of knowledge: of machines whose data sheet is known (tasks/hardware) memory and time are predicted as
`headway plan` does, and what would fit is searched; of all others, CPUs above all, there is what the qualification measured: the
rate of a rank's matmuls, the bandwidth between ranks, the memory of a machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.artifacts import Cluster, unqualified
from tasks.common.errors import Missing
from tasks.config.cluster import ClusterConfig
from tasks.config.engines.registry import ENGINES
from tasks.config.flows import RetrainConfig
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.hardware.machines import GB, GBIT, GIB, Machine, machine_of_sku, of_qualification
from tasks.hardware.sku import load_sku
from tasks.planning.case import Case, Network
from tasks.planning.checkpointing import Saving, checkpoint_bytes, resumable_bytes, snapshot_seconds
from tasks.planning.counts import adapter_parameters, model_flops_per_token, parameter_count
from tasks.planning.memory import HALF_GRADIENTS, memory_of_cpu_rank
from tasks.planning.prediction import Divided, Division
from tasks.planning.search import search
from tasks.planning.steps import step_time_measured

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
            remedy="`headway retrain --to plan` measures the machines and plans with that, or give a --case FILE.",
        )
    if not sku:
        raise ValueError(f"cluster {cluster.name} names no VM size: set benchmark.sku; `headway hardware` lists them")
    if training.base and "network" not in training.model_fields_set:
        raise Missing(
            f"the network is that of {training.base}, which is read when a run needs it",
            remedy="`headway retrain --to plan` plans with it; or set training.network to its shape, or give a --case FILE.",
        )
    vocab_size = config.preprocessing.tokenizer.vocab_size
    gpus = cluster.nodes * cluster.ranks_per_node
    case = case_of_training(training, how, config.planning, sku=sku, gpus=gpus, vocab_size=vocab_size, search=search)
    days = config.planning.max_minutes / DAY_MINUTES
    limits = {"max_days": days if math.isfinite(days) else None, "max_cost": config.planning.spending.max_cost}
    spot = case.cluster.spot or cluster.preemptible
    return case.model_copy(update={**limits, "cluster": case.cluster.model_copy(update={"spot": spot})})


def assumptions(config: RetrainConfig) -> tuple[str, ...]:
    """What a plan of `case_of` takes for granted, for its warnings."""
    base = config.training.base
    if not base:
        return ()
    of_adapters = ", and adapters take less: here all weights are trained" if config.training.lora.rank else ""
    return (f"planned with training.network: the run takes the network of {base}{of_adapters}",)


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
            "network": Network.of_config(training.network, vocab_size),
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


OF_CORES, OF_ETHERNET = 0.5, 0.5
"""Assumed of machines without GPUs before they are measured: a large matmul's share of the cores' peak, gloo's of the network."""


def unmeasured(config: ClusterConfig, home: Path) -> Cluster | None:
    """A cluster without GPUs as the file of its VM size has it, for a plan before its qualification.

    None where no size is named, or its file has no rate. Raises ValueError for a size of which nothing is known.
    """
    if not config.size:
        return None
    sku = load_sku(config.size, home / "hardware")
    specs = {name: float(number.value) for name, number in sku.specs.items() if not isinstance(number.value, str)}
    if not specs.keys() >= {"peak_fp32_tflops", "vcpus", "ethernet_gbit_s", "memory_gib"}:
        return None
    ranks, cores = config.ranks_per_node, specs["vcpus"] / 2
    used = min(1.0, ranks * config.threads_per_rank / cores)
    rates = {
        "matmul_gflops_per_rank": 1e3 * specs["peak_fp32_tflops"] * OF_CORES * used / ranks,
        "allreduce_gigabytes_per_second": specs["ethernet_gbit_s"] * GBIT / GB * OF_ETHERNET,
        "memory_bytes_per_node": round(specs["memory_gib"] * GIB),
    }
    return unqualified(config).model_copy(update={**rates, "sku": sku.name})


WRITER_BYTES_PER_SECOND = 200e6
"""What the writers of one machine take to a plain disk, fsync and sha256 included (measured: 512 MiB in 2.0 to 2.6 s)."""


@dataclass(frozen=True)
class RankPlan:
    """What a training takes. Bytes, seconds, counts."""

    parameters: int
    trained: int
    """Those that have gradients: of adapters, theirs alone."""
    memory: float
    """Of the fullest rank."""
    usable: float
    """Of one rank, what training may take."""
    step_seconds: float
    saving: Saving
    """Of one checkpoint, copied to the machines' memory and written beside training; without a data sheet, written at once."""
    reading_seconds: float
    """A checkpoint that training goes on from, after a failure."""
    predicted: bool
    """By a data sheet; else from what was measured."""
    nearest: str = ""
    """What would fit; empty where it does, and where nothing was searched."""


def plan_of_ranks(
    training: TrainingConfig, limits: PlanningConfig, how: ExecutionConfig, on: Cluster, *, vocab_size: int, home: Path
) -> RankPlan:
    """Raises ValueError, by value and remedy, for a training that cannot be divided as it is configured, and for rates of 0."""
    network, rank = Network.of_config(training.network, vocab_size), training.lora.rank
    parameters = parameter_count(network, training.sequence_length)
    trained = adapter_parameters(network, rank, training.lora.targets) if rank else parameters
    given = limits.memory_per_rank_gib * GIB if limits.memory_per_rank_gib is not None else None
    machine = _machine(on, home) if on.config.gpus_per_node and on.sku and not rank else None
    if machine is not None and training.precision in machine.achievable_flops:
        case = case_of_training(training, how, limits, sku=on.sku, gpus=on.world_size, vocab_size=vocab_size)
        result = search(case, machine, gpus=on.world_size)
        value = result.plans[0] if result.plans else result.closest
        if value is not None:
            size = checkpoint_bytes(parameters, precision=training.precision, engine=training.engine)
            writing = size / (WRITER_BYTES_PER_SECOND * on.nodes)
            return RankPlan(
                parameters=parameters,
                trained=trained,
                memory=value.memory.total,
                usable=machine.usable_memory_bytes if given is None else given,
                step_seconds=value.step_seconds,
                saving=Saving(snapshot_seconds(size, machine, on.world_size), writing),
                reading_seconds=writing,
                predicted=True,
                nearest=result.nearest,
            )
    whole = Divided(
        network, Division(engine="torch", precision="fp32", micro=training.micro_batch_size), training.sequence_length
    )
    tokens = training.global_batch_size * training.sequence_length
    time = step_time_measured(
        tokens * model_flops_per_token(network, training.sequence_length),
        4 * trained,
        ranks=on.world_size,
        gflops_per_rank=on.matmul_gflops_per_rank,
        bus_gigabytes_per_second=on.allreduce_gigabytes_per_second,
    )
    writing = resumable_bytes(trained) / WRITER_BYTES_PER_SECOND
    node = on.config.memory_gib * GIB if on.config.memory_gib else on.memory_bytes_per_node
    share = share_of_state(training, how, on.world_size)
    return RankPlan(
        parameters=parameters,
        trained=trained,
        memory=memory_of_cpu_rank(whole, trained=trained, frozen=parameters if rank else 0, share=share),
        usable=node / on.ranks_per_node if given is None else given,
        step_seconds=time.total,
        saving=Saving(writing),
        reading_seconds=writing,
        predicted=False,
    )


def share_of_state(training: TrainingConfig, how: ExecutionConfig, ranks: int) -> float:
    """Share of weights, gradients and optimizer state, which are as 1 : 1 : 2, that one rank holds.

    Tensor and pipeline parallel divide all of it, FSDP2 over all ranks, ZeRO's stages (Rajbhandari et al. 2020, figure 1) and
    Megatron-LM's distributed optimizer their part of it over the copies of the network.
    """
    way = division_of(training, how)
    shared = way["tp"] * way["pp"]
    whole = (4, 2, 1, 0)[way["zero"]]
    return float((whole + (4 - whole) / max(ranks // shared, 1)) / 4 / shared)


def _machine(on: Cluster, home: Path) -> Machine | None:
    """The cluster's machines, with the ranks of one as its GPUs and the bandwidth that was measured; None: too little is known.

    The file of `headway qualify --record` may have no numbers of GPUs.
    """
    try:
        machine = machine_of_sku(on.sku, home / "hardware")
    except ValueError:
        return None
    if machine.gpus != on.ranks_per_node:
        share = machine.gpus / on.ranks_per_node
        machine = replace(machine, gpus=on.ranks_per_node, network_bandwidth=machine.network_bandwidth * share)
    return of_qualification(machine, allreduce_bus_bandwidth=on.allreduce_gigabytes_per_second * 1e9, nodes=on.nodes)
