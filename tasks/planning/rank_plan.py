"""What a training takes of each rank of a cluster, as it is configured: the plan that the stage `plan` judges.

One planner, two kinds of knowledge. Of machines whose data sheet is known (tasks/hardware) memory and time are predicted as
`headway plan` does, and what would fit is searched. Of all others, CPUs above all, there is what the qualification measured: the
rate of a rank's matmuls, the bandwidth between ranks, the memory of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tasks.artifacts import Cluster
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.hardware.machine import Machine
from tasks.hardware.machines import machine_of_sku, of_qualification
from tasks.planning.case import Network
from tasks.planning.case_of_config import case_of_training, division_of
from tasks.planning.checkpointing import Saving, checkpoint_bytes, resumable_bytes, snapshot_seconds
from tasks.planning.counts import adapter_parameters, model_flops_per_token, parameter_count
from tasks.planning.memory import memory_of_cpu_rank
from tasks.planning.prediction import GIB, Divided, Division
from tasks.planning.search import search
from tasks.planning.steps import step_time_measured

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
    if training.engine == "torch":
        return 1 / ranks if way["zero"] == 3 else 1.0
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
