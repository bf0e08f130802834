"""One rank's eye on safety, as the loop uses it: bad steps, reasons to stop, stragglers, the probe for wrong machines.

Bad steps are stops.py and stops.py, reasons to stop stops.py. This file has the others, holds them together and makes ranks
agree. See docs/training.md, "Safety".
"""

from __future__ import annotations

import json
import os
import socket
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.jobs.checkpoint.files import Manifest
from tasks.jobs.checkpoint.pieces import piece_of
from tasks.jobs.data.samples import Batch
from tasks.jobs.node.elastic import Asked, Groups, fingerprint
from tasks.jobs.node.runtime import Ended, Rank
from tasks.jobs.training.engine import Engine
from tasks.jobs.training.metrics_logger import Meter
from tasks.jobs.training.network import next_token_loss
from tasks.jobs.training.stops import Guard, Held, Reaction, Stops, Verdict, losses_before, next_position, note, noted

# What ranks tell each other beside gradients: one collective a step, and rank 0's word at a start.


REASONS = ("signal", "notice", "limit")
"""Why ranks stop although they are not done: SIGTERM; the machine is about to be taken; max_hours or max_cost."""


@dataclass(frozen=True)
class Word:
    """What all ranks know after a step."""

    loss: float
    """Mean over ranks."""
    samples: float
    """Fingerprint of the global batch, of an elastic run."""
    reasons: tuple[str, ...]
    """Why at least one rank wants to stop, of REASONS."""
    seconds: tuple[float, ...]
    """By rank: its own part of the step, before it waited for others."""


def exchange(*, loss: torch.Tensor, samples: float, asked: tuple[bool, ...], seconds: float, group: Any) -> Word:
    """Each rank gives its own and gets everybody's, in one collective."""
    ranks, first = dist.get_world_size(group), 2 + len(REASONS)
    payload = torch.zeros(first + ranks, dtype=torch.float64)
    payload[0], payload[1], payload[first + dist.get_rank(group)] = loss, samples, seconds
    payload[2:first] = torch.tensor(asked, dtype=torch.float64)
    dist.all_reduce(payload, group=group)
    total, fingerprint, *rest = payload.tolist()
    reasons = tuple(name for name, count in zip(REASONS, rest, strict=False) if count)
    return Word(total / ranks, fingerprint, reasons, tuple(rest[len(REASONS) :]))


def told_by_rank_0(value: Any, group: Any) -> Any:
    """Rank 0's value on every rank, as JSON; the others' own is not looked at."""
    text = bytearray(json.dumps(value).encode() if dist.get_rank() == 0 else b"")
    size = torch.tensor(len(text))
    dist.broadcast(size, src=0, group=group)
    data = torch.frombuffer(text or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return json.loads(data.numpy().tobytes())


def all_agree(fine: bool, group: Any) -> bool:
    """Whether it is so on every rank."""
    word = torch.tensor(int(fine))
    dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
    return bool(word)


# The probe for silent data corruption: a machine that computes the same thing twice must get the same bits.
#
# Every `safety.repeat_every_steps` each rank computes the gradient of a micro batch twice and compares the bits, and
# replicas compare their weights. Neither touches training: no gradient is left, no random number drawn.


def require_same_twice(network: nn.Module, batch: Batch, *, step: int) -> None:
    """Raise Ended, of the class `node`, when this rank's gradient is another one the second time."""
    first, second = _gradient(network, batch), _gradient(network, batch)
    differing = [name for name in first if first[name] != second[name]]
    if differing:
        raise _bad_machine(
            f"step {step}: the gradient of one batch, computed twice, differs in {len(differing)} of {len(first)} "
            f"tensors, first in {differing[0]}: this machine computes wrongly"
        )


def require_equal_replicas(network: nn.Module, *, step: int, group: Any) -> None:
    """Raise Ended when weights that must be equal on all ranks are not; who is in the minority is named."""
    mine = torch.tensor(bits(parameter.detach() for parameter in network.parameters()))
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    result = Counter(int(one) for one in every)
    if len(result) == 1:
        return
    (usual, count), *_ = result.most_common()
    odd = [rank for rank, one in enumerate(every) if int(one) != usual]
    text = f"step {step}: the weights of ranks {odd} are not those of the others"
    if 2 * count > len(every) and int(mine) != usual:
        raise _bad_machine(text)
    raise Ended(f"{text}: a machine computes wrongly", failure="infrastructure")


def _gradient(network: nn.Module, batch: Batch) -> dict[str, int]:
    """A sum over the bits of each gradient. Autograd is asked for the leaves alone, so no hook of DDP runs."""
    named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    with torch.random.fork_rng():
        loss = next_token_loss(network, *batch)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: bits([item]) for name, item in zip(named, gradients, strict=True) if item is not None}


def bits(tensors: Iterable[Tensor]) -> int:
    """The wrapping sum of all bytes taken as integers: any one flipped bit changes it."""
    total = 0
    for tensor in tensors:
        whole = torch.int32 if tensor.element_size() == 4 else torch.int16
        total += int(tensor.contiguous().view(-1).view(whole).sum(dtype=torch.int64))
    return total


def _bad_machine(what: str) -> Ended:
    name = os.environ.get("HEADWAY_NODE_NAME") or socket.gethostname()
    remedy = f"Have {name} checked: `headway qualify` measures it. Checkpoints since the last probe may hold its error."
    return Ended(what, failure="node", remedy=remedy, nodes=(name,))


# Which rank is slow, by what each does of a step before it waits for others. A straggler is named, never killed.
#
# A rank's own part is what its meter counts as data and compute when the step's collective begins. Under DDP waiting
# for others is none of that; under FSDP and ZeRO 3 the forward pass waits too, so there only a rank that waits for its
# data is seen.


WINDOW = 20
"""Steps whose median counts."""
LEAST_SECONDS = 0.002
"""What a rank must be slower by: less is the clock's and the scheduler's."""


class Stragglers:
    """State: of each rank, the own part of its last steps; and which ranks were slow, how much, and when."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._last: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self.found: dict[int, dict[str, Any]] = {}

    def take(self, step: int, seconds: Sequence[float]) -> dict[str, float]:
        """What a step's record says: the slowest rank where it is a straggler, and how many times the middle one it takes."""
        self._last.append(seconds)
        if len(self._last) < WINDOW or len(seconds) < 2:
            return {}
        usual = [statistics.median(each) for each in zip(*self._last, strict=True)]
        middle, slowest = statistics.median_low(usual), max(range(len(usual)), key=usual.__getitem__)
        if usual[slowest] < self.factor * middle or usual[slowest] < middle + LEAST_SECONDS:
            return {}
        times = usual[slowest] / max(middle, 1e-9)
        known = self.found.setdefault(slowest, {"rank": slowest, "first_step": step, "times": 0.0})
        known.update(last_step=step, times=max(known["times"], times))
        return {"straggler": slowest, "straggler_times": times}

    def named(self, job: Path) -> list[dict[str, Any]]:
        """All of this start, with the machine that each ran on."""
        hosts = {rank: json.loads((job / "ranks" / f"{rank}.json").read_bytes())["host"] for rank in self.found}
        return [{**known, "host": str(hosts[rank])} for rank, known in sorted(self.found.items())]


class Watch:
    """State: the run's reactions so far, why it should stop, and which ranks are slow."""

    def __init__(self, rank: Rank, config: TrainingConfig, execution: ExecutionConfig, groups: Groups) -> None:
        self.rank, self.config, self.groups, self.asked = rank, config, groups, Asked()
        self.guard, self.stragglers = Guard(config), Stragglers(execution.straggler_factor)
        held = Held(rank.folder)
        held.before = told_by_rank_0(held.before if rank.rank == 0 else None, groups.patient)
        if rank.rank == 0:
            held.keep()
        self.stops = Stops(rank, execution, self.asked, held=held)
        self.stops.require_room()

    def resume(self, rank: Rank, step: int) -> None:
        """Take over what the run knows at a step that it goes on from, as a new attempt."""
        self.rank = rank
        known = told_by_rank_0(self._noted(step) if rank.rank == 0 else None, self.groups.patient)
        self.guard.remember(known["losses"], [Reaction(**reaction) for reaction in known["reactions"]])

    def _noted(self, step: int) -> dict[str, Any]:
        """What the job's folder says; rank 0's view of it counts."""
        losses = losses_before(self.rank.folder / "metrics.jsonl", step, self.config.safety)
        return {"reactions": [asdict(reaction) for reaction in noted(self.rank.folder)], "losses": losses}

    def next_position(self, consumed: int) -> int:
        """Where the data goes on: after what rollbacks left out."""
        return next_position(consumed, self.guard.reactions)

    def exchange(self, loss: Tensor, batches: Sequence[Batch], meter: Meter) -> Word:
        """What all ranks know after this one has its gradients."""
        own = meter.seconds.get("data", 0.0) + meter.seconds.get("compute", 0.0)
        samples = fingerprint(batches) if self.stops.elastic else 0.0
        return exchange(loss=loss, samples=samples, asked=self.stops.here(), seconds=own, group=self.groups.steps)

    def judge(self, step: int, position: int, loss: float, norm: float) -> Verdict | None:
        """The guard's verdict; a batch to be skipped is written down before its gradient goes."""
        verdict = self.guard.judge(step, position, loss, norm)
        if verdict and verdict.kind == "skip" and not verdict.known:
            self.react(Reaction(step, position, "skip", verdict.why))
        return verdict

    def react(self, reaction: Reaction) -> None:
        """Write a reaction down, before anything is done about the step."""
        self.guard.reactions.append(reaction)
        if self.rank.rank == 0:
            note(self.rank.folder, len(self.guard.reactions), reaction)
            print(f"step {reaction.step}: {reaction.kind}, because {reaction.why}", flush=True)

    def go_back(self, bad: Reaction, result: Manifest | None) -> None:
        """Write a rollback down; raises FloatingPointError when there is no checkpoint yet to go back to."""
        if result is None:
            raise FloatingPointError(
                f"step {bad.step}: {bad.why}, and there is no checkpoint yet to go back to: set training.safety to skip, "
                "or have checkpoints written more often"
            )
        self.react(replace(bad, begin=result.consumed_samples, attempt=self.rank.attempt))

    def unfit_to_save(self, engine: Engine, step: int) -> Verdict | None:
        """The verdict on weights that are no numbers, which one update too large makes of a finite gradient."""
        # Whether this rank's part of the weights is finite: a sum reads each once, and keeps what is not.
        # ZeRO 3 keeps this rank's part beside the weight, which is empty meanwhile
        parts = [getattr(weight, "ds_tensor", weight) for weight in engine.network.parameters()]
        sums = [piece_of(part).tensor.sum(dtype=torch.float32).to(engine.device) for part in parts]
        if all_agree(bool(torch.stack(sums).isfinite().all()), self.groups.steps):
            return None
        asked = self.config.safety.not_finite
        kind = "rollback" if asked == "skip" else asked  # the update is done: its gradient cannot be left out any more
        return self.guard.reaction(step, kind, "weights are NaN or infinite after the update")

    def probe(self, engine: Engine, batches: Sequence[Batch], step: int) -> None:
        """Every so many steps: does this machine compute the same twice, and do replicas have the same weights?"""
        every = self.config.safety.repeat_every_steps
        if every and step % every == 0:
            with torch.autocast(engine.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                require_same_twice(engine.network, batches[0].to(engine.device), step=step)
            require_equal_replicas(engine.network, step=step, group=self.groups.steps)

    def told(self) -> dict[str, Any]:
        """What the result of the job says of it."""
        return {
            "reactions": [asdict(reaction) for reaction in self.guard.reactions],
            "stragglers": self.stragglers.named(self.rank.folder),
        }
