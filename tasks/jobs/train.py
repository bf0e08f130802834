"""The training job: a causal language model from scratch, data parallel, resumed bit for bit after any interruption.

One process a rank, started by torchrun. What is read: data.py. What is trained: network.py. What survives a crash:
checkpoint.py. What lets ranks come and go: elastic.py. Which stage starts it: tasks/train.py. Nothing here knows of a backend, of
Prefect or of MLflow.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tasks.config import TrainingConfig
from tasks.jobs.checkpoint import Saver, choose, identity, restore, training_tensors
from tasks.jobs.checkpoint_files import Manifest, claim_attempt, clean, place_of, read_manifest
from tasks.jobs.data import Samples, Shares, open_samples, tokens_identity, vocabulary
from tasks.jobs.elastic import SAVED_AND_STOPPED, START_TIMEOUT, Asked, Groups, changes, fingerprint, standstill
from tasks.jobs.network import build_network, next_token_loss, parameter_count, save_network
from tasks.jobs.runtime import Rank, main

PROGRESS_SECONDS = 1.0
LOGGED = ("step", "loss", "learning_rate", "grad_norm")


def run(rank: Rank) -> dict[str, Any]:
    """Train to the last step, from the newest good checkpoint if there is one, and write the network to `rank.output`.

    Raises ValueError for settings that do not fit the tokens, the ranks or the checkpoint, IntegrityError when no
    checkpoint is good, FloatingPointError when the loss is not a number any more.
    """
    config = TrainingConfig.model_validate(rank.settings["training"])
    shares = Shares(rank.rank, rank.world_size, config.global_batch_size, config.micro_batch_size)
    shares = shares.halved(int(rank.settings.get("smaller_batches", 0)))
    samples = open_samples(rank.inputs["tokens"], config)
    _start(rank)
    training = Training(rank, config, samples=samples, shares=shares)
    training.go()
    dist.destroy_process_group()
    return training.finish() if rank.rank == 0 else {}


def _start(rank: Rank) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if rank.world_size == 1 else {}
    dist.init_process_group("gloo", timeout=START_TIMEOUT if rank.settings.get("elastic") else None, **alone)


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warmup to the peak at step `warmup_steps`, then half a cosine down to its share at the last step.

    Steps count from 1. The schedule of Loshchilov and Hutter, SGDR (2017), equation 5, without restarts.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    share = config.min_learning_rate_ratio
    return config.learning_rate * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))


def build_optimizer(network: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone; its state is there from the start, to be restored into."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
    for parameter in network.parameters():
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return optimizer


@dataclass
class Pace:
    """How fast this attempt is, and what checkpoints cost it."""

    began: float
    first: int
    """Step before the first one of this attempt."""
    stalled: float = 0.0
    """Seconds that training stood still for checkpoints; the wait for the last one after training is not among them."""
    saved: int = 0
    skipped: int = 0
    """Checkpoints that were due while the one before was still being written."""
    shown: float = 0.0

    def seconds_left(self, step: int, steps: int) -> float:
        return (time.monotonic() - self.began) / (step - self.first) * (steps - step)


class Training:
    """One rank's training: the network, the optimizer, the position in the data, and the checkpoints."""

    def __init__(self, rank: Rank, config: TrainingConfig, *, samples: Samples, shares: Shares) -> None:
        self.rank, self.config, self.samples, self.shares = rank, config, samples, shares
        self.elastic = bool(rank.settings.get("elastic"))
        self.groups, self.asked = Groups(elastic=self.elastic), Asked()
        self.checkpoints = rank.folder / "checkpoints"
        self.tokens = rank.inputs["tokens"]
        vocab_size, eod = vocabulary(self.tokens)
        self.network = build_network(config, vocab_size=vocab_size, eod=eod)
        self.optimizer = build_optimizer(self.network, config)
        torch.manual_seed(config.seed + rank.rank)
        self.tensors = training_tensors(self.network, self.optimizer)
        fixed = None if self.elastic else rank.world_size
        identical = identity(config, tokens_identity(self.tokens), world_size=fixed)
        attempt, found = self._agree(identical)
        self.rank = replace(
            rank, attempt=attempt
        )  # as claimed: it rises over machines and submissions, theirs does not
        self.resumed = found.step if found else None
        self.step, self.consumed = (found.step, found.consumed_samples) if found else (0, 0)
        if found:
            restore(self.checkpoints, found, rank=rank.rank, tensors=self.tensors)
        self.parallel = DistributedDataParallel(
            self.network, process_group=self.groups.steps, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self.to_save = self.tensors if rank.rank == 0 else {}
        self.saver = Saver(
            self.to_save,
            root=str(self.checkpoints),
            rank=rank.rank,
            world_size=rank.world_size,
            attempt=attempt,
            keep=int(rank.settings["keep_checkpoints"]),
            log=str(rank.folder / "metrics.jsonl"),
            identity=identical,
        )
        self.waited = standstill(rank.folder / "metrics.jsonl") if self.elastic and rank.rank == 0 else {}
        self.pace = Pace(began=time.monotonic(), first=self.step)

    def _agree(self, identical: dict[str, Any]) -> tuple[int, Manifest | None]:
        """Rank 0 claims an attempt and chooses a checkpoint; the others take its word and read the same manifest."""
        word = torch.tensor([0, -1, -1])
        found = None
        if self.rank.rank == 0:
            mend(self.rank.folder / "metrics.jsonl")
            attempt = claim_attempt(self.checkpoints, self.rank.attempt)
            clean(self.checkpoints, attempt)
            found = choose(self.checkpoints, identical)
            word = torch.tensor([attempt, found.step if found else -1, found.attempt if found else -1])
        dist.broadcast(word, src=0, group=self.groups.patient)
        attempt, step, of_attempt = (int(number) for number in word)
        if step >= 0 and not found:
            found = read_manifest(place_of(self.checkpoints, step, of_attempt) / "manifest.json")
        return attempt, found

    def go(self) -> None:
        """Every step that is left, then the last checkpoint. When a rank is asked to stop, all save after that step and end."""
        every = int(self.rank.settings["checkpoint_every_steps"])
        self.asked.listen()
        while self.step < self.config.steps:
            stop = self._advance()
            if stop or self.step == self.config.steps:
                self._save()
            elif self.step % every == 0:
                self._save_unless_busy()
            self.saver.busy()  # a save that failed in the background is raised here, and not at the end
            if stop and self.step < self.config.steps:
                self.saver.close()
                sys.exit(SAVED_AND_STOPPED)
        self.saver.close()
        self.asked.ignore()

    def _advance(self) -> bool:
        """One step; returns whether a rank was asked to stop."""
        began, step = time.monotonic(), self.step + 1
        rate = learning_rate(self.config, step)
        loss, asked, samples = self._gradients()
        norm = float(nn.utils.clip_grad_norm_(self.network.parameters(), self.config.gradient_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"step {step}: the loss is {loss}, the gradient's norm {norm}. Lower training.learning_rate "
                f"({self.config.learning_rate}) or raise training.warmup_steps ({self.config.warmup_steps})"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.consumed = step, self.consumed + self.config.global_batch_size
        speed = self._tokens_a_step() / (time.monotonic() - began)
        self._tell(loss=loss, learning_rate=rate, grad_norm=norm, tokens_per_second=speed, **self._proof(samples))
        return asked > 0

    def _proof(self, samples: float) -> dict[str, float]:
        """What an elastic run records beside: the position in the data, what was read, and after a start how long it took."""
        if not self.elastic:
            return {}
        waited, self.waited = self.waited, {}
        position = {"consumed": self.consumed, "samples_crc32": int(samples), "world_size": self.rank.world_size}
        return {**position, **waited}

    def _gradients(self) -> tuple[float, float, float]:
        """Gradients of the global batch, averaged over its samples.

        Returns the loss averaged over all ranks, how many of them were asked to stop, and the fingerprint of an elastic run.
        """
        batches = self.shares.micro_batches(self.samples, self.consumed)
        total = torch.zeros(3, dtype=torch.float64)
        total[1], total[2] = float(self.asked.here), fingerprint(batches) if self.elastic else 0.0
        for number, (inputs, targets) in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else self.parallel.no_sync():
                loss: Tensor = next_token_loss(self.parallel, inputs, targets) / len(batches)
                loss.backward()
            total[0] += loss.detach()
        dist.all_reduce(total, group=self.groups.steps)
        loss, asked, samples = total.tolist()
        return loss / self.rank.world_size, asked, samples

    def _tell(self, **values: float) -> None:
        left = self.pace.seconds_left(self.step, self.config.steps)
        self.rank.metrics(step=self.step, **values, seconds_left=left)
        if time.monotonic() - self.pace.shown >= PROGRESS_SECONDS or self.step == self.config.steps:
            self.pace.shown = time.monotonic()
            said = f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
            self.rank.progress(self.step, self.config.steps, said, seconds_left=left)

    def _save_unless_busy(self) -> None:
        """Rank 0's writer is done last, so whether it is busy decides for all ranks."""
        began = time.monotonic()
        busy = torch.tensor(int(self.saver.busy()))
        dist.broadcast(busy, src=0, group=self.groups.steps)
        if busy:
            self.pace.skipped += 1
        else:
            self._save()
        self.pace.stalled += time.monotonic() - began

    def _save(self) -> None:
        self.saver.save(self.to_save, step=self.step, consumed_samples=self.consumed)
        self.pace.saved += 1

    def _tokens_a_step(self) -> int:
        return self.config.global_batch_size * self.config.sequence_length

    def finish(self) -> dict[str, Any]:
        """On rank 0: write what the stage publishes, the same bytes whatever happened on the way; return the result."""
        records = last_records(self.rank.folder / "metrics.jsonl")
        tokens, parameters = self.config.steps * self._tokens_a_step(), parameter_count(self.network)
        facts = {"steps": self.config.steps, "tokens": tokens, "parameters": parameters}
        save_network(self.network, self.rank.output, tokenizer=self.tokens / "tokenizer")
        lines = [json.dumps({key: record[key] for key in LOGGED}) + "\n" for record in records]
        (self.rank.output / "training_log.jsonl").write_text("".join(lines), encoding="utf-8")
        origin = {"seed": self.config.seed, "sequence_length": self.config.sequence_length}
        (self.rank.output / "training.json").write_text(json.dumps({**facts, **origin}, indent=1), encoding="utf-8")
        speed = len(records) / sum(1 / record["tokens_per_second"] for record in records)
        return {
            "metrics": {"loss": records[-1]["loss"], **facts, "tokens_per_second": speed},
            "resumed_from_step": self.resumed,
            "checkpoint_stall_seconds": self.pace.stalled,
            "checkpoints": self.pace.saved,
            "checkpoints_skipped": self.pace.skipped,
            **({"standstills": changes(self.rank.folder / "metrics.jsonl")} if self.elastic else {}),
        }


def mend(log: Path) -> None:
    """Cut off a last line that a crash of the machine left torn, so that the next one starts a line of its own."""
    if log.exists():
        os.truncate(log, log.read_bytes().rfind(b"\n") + 1)


def last_records(log: Path) -> list[dict[str, Any]]:
    """The last attempt's record of every step: steps between a checkpoint and a kill were done, and recorded, more than once."""
    records: dict[int, dict[str, Any]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        before = records.get(record["step"])
        if before is None or before["attempt"] <= record["attempt"]:
            records[record["step"]] = record
    return [records[step] for step in sorted(records)]


if __name__ == "__main__":
    sys.exit(main(run))
