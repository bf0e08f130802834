"""A short real training of the configured network on 1, 2, 4 ... machines: how fast, and what the step's time goes to.

Each rank computes as many samples as it would on all machines, so the batch grows with the machines and the step should take
as long on many as on one (weak scaling). First every machine trains by itself, all at the same time; then the first two, the
first four. See docs/qualification.md.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tasks.config.training import TrainingConfig
from tasks.jobs.data.samples import Mapped, Samples, Shares
from tasks.jobs.qualify import compute
from tasks.jobs.qualify.bench import Bench, Together, flops_per_token, vocabulary
from tasks.jobs.training.network import build_network, build_optimizer, next_token_loss
from tasks.jobs.training.schedule import learning_rate
from tasks.qualification.measured import Probe, TrainingPoint

# A few steps of training use train.py's network, loss, optimizer, schedule and samples, with random tokens. Clocks
# divide a step: *data* draws samples and brings them to the device; *communication* is the wait after the last
# gradients are ready (DDP's hook tells when) and the sum of the losses, so what overlaps with computing does not
# count and waiting for a slower rank does; *compute* is the rest. CPUs compute in float32 over gloo; GPUs with
# float32 weights and bf16 autocast over NCCL or RCCL, timed by events of the GPU.


WARMUP_STEPS = 2
MOST_TOKENS = 4_000_000
"""Of the stream that samples are drawn from; a short run does not read more."""


class Done(NamedTuple):
    """What some steps took on a group of ranks."""

    tokens: int
    """A step, over all ranks."""
    step_seconds: float
    """Median."""
    data_share: float
    communication_share: float
    said: str


@dataclass(frozen=True)
class Step:
    """One step's seconds on one rank."""

    all: float
    data: float
    communication: float
    loss: float
    late: bool
    """Whether a rank's time is over."""


Mark: TypeAlias = "float | torch.cuda.Event"


class Clock:
    """Of the device that computes: what a CPU has done is done, what a GPU was told is not."""

    def __init__(self, device: torch.device) -> None:
        self.of_gpu = device.type == "cuda"

    def now(self) -> Mark:
        if not self.of_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Mark, ended: Mark) -> float:
        if isinstance(began, float) or isinstance(ended, float):
            assert isinstance(began, float) and isinstance(ended, float)
            return ended - began
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


def train(bench: Bench, nodes: Sequence[int], *, seconds: float) -> Done:
    """Train on all ranks of some machines, given by their node ranks, this rank's among them.

    Raises RuntimeError when a rank does not come or the group's time is over, FloatingPointError for a loss that is no number.
    """
    ranks = [node * bench.ranks_per_node + local for node in nodes for local in range(bench.ranks_per_node)]
    device = torch.device("cuda", compute.own(bench)[0]) if bench.cuda else torch.device("cpu")
    with (
        torch.cuda.device(device) if bench.cuda else nullcontext(),
        _deterministic(device),
        _group(bench, ranks, seconds),
    ):
        probe = Probing(bench, device, ranks.index(bench.rank.rank), len(ranks), ends=time.monotonic() + seconds)
        steps = probe.go()
        sums = [[step.all, step.data, step.communication] for step in steps]
        total = torch.tensor(sums, dtype=torch.float64, device=probe.device).sum(0)
        dist.all_reduce(total)
        whole, data, communication = total.tolist()
        precision = "bf16 autocast" if probe.clock.of_gpu else "float32"
        batch = f"{probe.shares.samples} samples of {probe.config.sequence_length} tokens a rank in micro batches of "
        return Done(
            tokens=probe.tokens,
            step_seconds=statistics.median(step.all for step in steps),
            data_share=data / whole,
            communication_share=communication / whole,
            said=f"{len(steps)} steps, random tokens, {batch}{probe.shares.micro_batch}, {precision}, loss {steps[-1].loss:.4g}",
        )


class Probing:
    """One rank's training: as train.py's, without checkpoints, and with clocks."""

    def __init__(self, bench: Bench, device: torch.device, rank: int, ranks: int, *, ends: float) -> None:
        self.config, self.device, self.clock, self.ends = bench.training, device, Clock(device), ends
        self.timed = bench.config.probe_steps
        self.shares = shares(bench.training, rank, ranks=ranks, all_ranks=bench.world_size)
        self.samples = random_samples(bench.training, vocabulary(bench), self.tokens * (WARMUP_STEPS + self.timed))
        self.network = build_network(bench.training, vocab_size=vocabulary(bench), eod=0).to(device)
        self.optimizer = build_optimizer(self.network, bench.training)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].to(device)
        self.parallel = DistributedDataParallel(self.network, gradient_as_bucket_view=True, broadcast_buffers=False)
        # DDP reads the hook's annotations, which are text in this module; a lambda has none
        self.parallel.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        self.ready: Mark = 0.0

    @property
    def tokens(self) -> int:
        return self.shares.global_batch * self.config.sequence_length

    def go(self) -> list[Step]:
        """Those steps that are timed. Raises RuntimeError when there are none in time."""
        steps: list[Step] = []
        while len(steps) < WARMUP_STEPS + self.timed and not (steps and steps[-1].late):
            steps.append(self._step(len(steps)))
            if not math.isfinite(steps[-1].loss):
                raise FloatingPointError(f"the loss of step {len(steps)} of the probe is {steps[-1].loss}")
        if len(steps) <= WARMUP_STEPS:
            raise RuntimeError(f"timed out: {len(steps)} steps were done in the time of the group, none was timed")
        return steps[WARMUP_STEPS:]

    def _step(self, number: int) -> Step:
        now = self.clock.now
        began = now()
        batches = self.shares.micro_batches(self.samples, number * self.shares.global_batch)
        batches = [batch.to(self.device) for batch in batches]
        drawn = now()
        output = torch.tensor([0.0, float(time.monotonic() > self.ends)], dtype=torch.float64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for place, batch in enumerate(batches, start=1):
            with nullcontext() if place == len(batches) else self.parallel.no_sync():
                with torch.autocast("cuda", torch.bfloat16, enabled=self.clock.of_gpu):
                    part = next_token_loss(self.parallel, batch.inputs, batch.targets) / len(batches)
                part.backward()
            total += part.detach()
        output[0] = total
        dist.all_reduce(output)
        summed = now()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, min(number + 1, self.config.steps))
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = now()
        loss, late = (output / dist.get_world_size()).tolist()
        return Step(
            all=self.clock.seconds(began, ended),
            data=self.clock.seconds(began, drawn),
            communication=self.clock.seconds(self.ready, summed),
            loss=loss,
            late=late > 0,
        )

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's own averaging of a bucket of gradients; notes when the last one was ready."""
        if bucket.is_last():
            self.ready = self.clock.now()
        return allreduce_hook(None, bucket)


def shares(config: TrainingConfig, rank: int, *, ranks: int, all_ranks: int) -> Shares:
    """As many samples a rank as on all ranks; rounded, where the global batch does not divide into them."""
    times = max(1, config.global_batch_size // (config.micro_batch_size * all_ranks))
    return Shares(rank, ranks, config.micro_batch_size * times * ranks, config.micro_batch_size)


def random_samples(config: TrainingConfig, vocab_size: int, tokens: int) -> Samples:
    """A stream of random tokens in memory, the same on all ranks."""
    length = max(config.sequence_length + 1, min(tokens, MOST_TOKENS))
    drawn = np.random.default_rng(config.seed).integers(0, vocab_size, size=length, dtype=np.int32)
    return Samples(Mapped(drawn), length=config.sequence_length, seed=config.seed)


@contextmanager
def _group(bench: Bench, ranks: Sequence[int], seconds: float) -> Iterator[None]:
    """These ranks as torch's default group, made on the launcher's store."""
    name = f"training-{len(ranks)}-{ranks[0]}"
    store = dist.PrefixStore(name, dist.HashStore() if len(ranks) == 1 else bench.store)
    dist.init_process_group(
        "nccl" if bench.cuda else "gloo",
        store=store,
        rank=ranks.index(bench.rank.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On the CPU as train.py has it; cuBLAS would want settings from the first product on."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


CONVENTION = "megatron"
"""FLOPs as Megatron-LM counts them (tasks/planning/counts.py): causal attention is half of the square, the output projection
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
