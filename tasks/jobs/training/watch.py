"""One rank's eye on safety, as the loop uses it: bad steps, reasons to stop, stragglers, the probe for wrong machines.

Each has a room of its own: safety.py and reactions.py, stops.py, stragglers.py, repeat.py. This one holds them together and makes
ranks agree. See docs/training.md, "Safety".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.jobs.checkpoint.files import Manifest
from tasks.jobs.data.samples import Batch
from tasks.jobs.node.elastic import Asked, Groups, fingerprint
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.agreement import Word, all_agree, exchange, told_by_rank_0
from tasks.jobs.training.engine import Engine
from tasks.jobs.training.machine_time import Held
from tasks.jobs.training.meter import Meter
from tasks.jobs.training.pieces import piece_of
from tasks.jobs.training.reactions import Reaction, losses_before, next_position, note, noted
from tasks.jobs.training.repeat import require_equal_replicas, require_same_twice
from tasks.jobs.training.safety import Guard, Verdict
from tasks.jobs.training.stops import Stops
from tasks.jobs.training.stragglers import Stragglers


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

    def go_back(self, bad: Reaction, found: Manifest | None) -> None:
        """Write a rollback down; raises FloatingPointError when there is no checkpoint yet to go back to."""
        if found is None:
            raise FloatingPointError(
                f"step {bad.step}: {bad.why}, and there is no checkpoint yet to go back to: set training.safety to skip, "
                "or have checkpoints written more often"
            )
        self.react(replace(bad, begin=found.consumed_samples, attempt=self.rank.attempt))

    def unfit_to_save(self, engine: Engine, step: int) -> Verdict | None:
        """The verdict on weights that are no numbers, which one update too large makes of a finite gradient."""
        if all_agree(_finite(engine), self.groups.steps):
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


def _finite(engine: Engine) -> bool:
    """Whether this rank's part of the weights is finite: a sum reads each once, and keeps what is not."""
    # ZeRO 3 keeps this rank's part beside the weight, which is empty meanwhile
    parts = [getattr(weight, "ds_tensor", weight) for weight in engine.network.parameters()]
    sums = [piece_of(part).tensor.sum(dtype=torch.float32).to(engine.device) for part in parts]
    return bool(torch.stack(sums).isfinite().all())
