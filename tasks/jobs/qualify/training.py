"""A short real training of the configured network on 1, 2, 4 ... machines: how fast, and what the step's time goes to.

Each rank computes as many samples as it would on all machines, so the batch grows with the machines and the step should take
as long on many as on one (weak scaling). First every machine trains by itself, all at the same time; then the first two, the
first four. What a step is: training_steps.py. See docs/qualification.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.rates import Together
from tasks.jobs.qualify.workload_size import flops_per_token
from tasks.qualification.measured import Probe, TrainingPoint

CONVENTION = "megatron"
"""FLOPs as Megatron-LM counts them (tasks/planning/size.py): causal attention is half of the square, the output projection
counts, looking up embeddings and recomputation do not."""
TERA = 1e12


def measure(bench: Bench) -> None:
    """Write a TrainingPoint a machine, and one for each number of machines together; what is left of the rate is judged."""
    together = Together(bench, "training")
    torch.set_num_threads(bench.threads)
    names, complete = _who_is_there(together)
    if bench.node_rank not in complete:
        text = "not all ranks of this machine came in time"
        bench.note(Probe(check="training_tflops", status="timed out", unit="TFLOP/s", said=text))
        return
    _train(together, names, [bench.node_rank])
    for count in scales(len(complete))[1:]:
        together.meet(f"{count} machines")
        if bench.node_rank in complete[:count]:
            _train(together, names, complete[:count])


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


def _train(together: Together, names: dict[int, str], nodes: Sequence[int]) -> None:
    """On some machines, this one among them; their first rank writes what came of it."""
    bench = together.bench
    ranks = len(nodes) * bench.ranks_per_node
    bare = TrainingPoint(nodes=tuple(names[node] for node in nodes), ranks=ranks, convention=CONVENTION)
    result = _probe(together, nodes, flops_a_rank=flops_per_token(bench) / ranks)
    if bench.rank.rank == nodes[0] * bench.ranks_per_node:
        bench.trained(bare.model_copy(update=result))


def _probe(together: Together, nodes: Sequence[int], *, flops_a_rank: float) -> dict[str, Any]:
    """What a TrainingPoint says of some steps, or why there are none."""
    from tasks.jobs.qualify.training_steps import train  # the network's library takes seconds to load

    if together.left <= 0:
        return {"status": "timed out", "said": together.late}
    try:
        done = train(together.bench, nodes, seconds=together.left)
    except (RuntimeError, MemoryError, ArithmeticError) as error:
        output = (str(error).splitlines() or [type(error).__name__])[0]
        return {"status": "timed out" if "imed out" in output else "failed", "said": output}
    return {
        "step_seconds": done.step_seconds,
        "tokens_per_step": done.tokens,
        "tflops_per_rank": flops_a_rank * done.tokens / done.step_seconds / TERA,
        "data_share": done.data_share,
        "communication_share": done.communication_share,
        "compute_share": 1 - done.data_share - done.communication_share,
        "said": done.said,
    }
