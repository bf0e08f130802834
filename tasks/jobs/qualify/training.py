"""A short real training of the configured network on 1, 2, 4 ... machines: how fast, and what the step's time goes to.

Each rank computes as many samples as it would on all machines, so the batch grows with the machines and the step should take
as long on many as on one (weak scaling). First every machine trains by itself, all at the same time; then the first two, the
first four. What a step is: training_steps.py. See docs/qualification.md.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

import torch

from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.rates import Together
from tasks.jobs.qualify.to_come import flops_per_token
from tasks.qualification.measured import Probe, TrainingPoint

CONVENTION = "megatron"
"""FLOPs as Megatron-LM counts them (tasks/planning/size.py): causal attention is half of the square, the output projection
counts, looking up embeddings and recomputation do not."""
TERA = 1e12


def measure(bench: Bench) -> None:
    """Write a TrainingPoint a size; local rank 0 notes `training_tflops` of its machine alone, rank 0 `scaling_efficiency`."""
    together = Together(bench, "training")
    torch.set_num_threads(bench.threads)
    names, complete = _who_is_there(together)
    if bench.node_rank not in complete:
        bench.note(Probe(check="training_tflops", status="skipped", said="not all ranks of this machine came in time"))
        return
    alone = _alone(together, names)
    for count in scales(len(complete))[1:]:
        _several(together, names, complete[:count], alone)


def scales(nodes: int) -> list[int]:
    """1, 2, 4 ... and all."""
    powers = [2**exponent for exponent in range(nodes.bit_length()) if 2**exponent < nodes]
    return [*powers, nodes]


def _who_is_there(together: Together) -> tuple[dict[int, str], list[int]]:
    """Names of the machines by node rank, and the node ranks of those whose ranks all came. All who ask get the same answer."""
    bench = together.bench
    came = {str(rank): name for rank, name in together.meet("ready", bench.node).items()}
    if bench.world_size > 1:  # some may have waited longer than others: the first one's answer counts
        came = json.loads(bench.store.compare_set("training/roster", "", json.dumps(came)))
    per_node = bench.ranks_per_node
    ranks = [int(rank) for rank in came]
    complete = [n for n in range(bench.nodes) if sum(rank // per_node == n for rank in ranks) == per_node]
    return {int(rank) // per_node: name for rank, name in came.items()}, complete


def _alone(together: Together, names: dict[int, str]) -> dict[int, float]:
    """Every machine by itself; TFLOP/s a rank by node rank."""
    bench = together.bench
    point = _train(together, names, [bench.node_rank])
    if bench.local_rank == 0:
        bench.trained(point)
        bench.note(_probe(point, alike=bench.cuda))
    said = together.meet("1/done", point.tflops_per_rank)
    return {rank // bench.ranks_per_node: tflops for rank, tflops in said.items() if tflops}


def _several(together: Together, names: dict[int, str], nodes: Sequence[int], alone: dict[int, float]) -> None:
    """The first so many machines together, while the others wait."""
    bench = together.bench
    together.meet(f"{len(nodes)}/ready")
    if bench.node_rank in nodes:
        point = _train(together, names, nodes)
        if bench.rank.rank == nodes[0] * bench.ranks_per_node:
            bench.trained(point)
            bench.note(_efficiency(point, [alone[node] for node in nodes if node in alone]))
    together.meet(f"{len(nodes)}/done")


def _train(together: Together, names: dict[int, str], nodes: Sequence[int]) -> TrainingPoint:
    """What was measured on some machines, this one among them."""
    from tasks.jobs.qualify.training_steps import train  # the network's library takes seconds to load

    bench = together.bench
    ranks = len(nodes) * bench.ranks_per_node
    bare = TrainingPoint(nodes=tuple(names[node] for node in nodes), ranks=ranks, convention=CONVENTION)
    if together.left <= 0:
        return bare.model_copy(update={"status": "timed out", "said": together.late})
    try:
        done = train(bench, nodes, seconds=together.left)
    except (RuntimeError, MemoryError, ArithmeticError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return bare.model_copy(update={"status": "timed out" if "imed out" in said else "failed", "said": said})
    flops = flops_per_token(bench) * done.tokens / ranks / TERA
    return bare.model_copy(
        update={
            "step_seconds": done.step_seconds,
            "tokens_per_step": done.tokens,
            "tflops_per_rank": flops / done.step_seconds,
            "data_share": done.data_share,
            "communication_share": done.communication_share,
            "compute_share": 1 - done.data_share - done.communication_share,
            "said": done.said,
        }
    )


def _probe(point: TrainingPoint, *, alike: bool) -> Probe:
    """Of one machine. Machines are compared by it where they are `alike` in what they have to do beside: not on CPUs."""
    said, tflops = f"a rank; {point.said}", point.tflops_per_rank
    return Probe(
        check="training_tflops",
        status=point.status,
        measured=tflops,
        peers=tflops if alike else None,
        unit="TFLOP/s",
        said=point.said if tflops is None else said,
    )


def _efficiency(point: TrainingPoint, alone: Sequence[float]) -> Probe:
    """Against the median of the same machines, each by itself."""
    where = f"{len(point.nodes)} machines"
    if point.tflops_per_rank is None or not alone:
        status = point.status if point.tflops_per_rank is None else "failed"
        return Probe(
            check="scaling_efficiency", status=status, where=where, said=point.said or "none of them trained alone"
        )
    share = point.tflops_per_rank / statistics.median(alone)
    return Probe(check="scaling_efficiency", measured=share, where=where, said="against one machine, weak scaling")
