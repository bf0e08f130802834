"""The training job: a causal language model, resumed after any interruption from its newest good checkpoint.

One process a rank, started by torchrun. The loop is here. What computes: training/engine.py (torch, DeepSpeed). What is read:
tasks/jobs/data/samples.py. What survives a crash: tasks/jobs/checkpoint/snapshot.py. What lets ranks come and go:
tasks/jobs/node/elastic.py. Which stage starts it: tasks/train.py. Nothing here knows of a backend, of Prefect or of MLflow;
how a cluster comes to run it is a backend: that of Slurm is tasks/compute/slurm/backend.py (next).

While it trains, bits per byte of a few held-out samples tell early whether it learns what it should; they are the same samples
at every measurement. That is no evaluation: whole documents, baselines and intervals are tasks/jobs/evaluate.py. See
docs/training.md.
"""

from __future__ import annotations

from tasks.jobs.node import quick_imports  # isort: split

import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.data.tokenizing.chat import said
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.formats.mmididx import open_tokens
from tasks.jobs.checkpoint.choice import identity
from tasks.jobs.checkpoint.mirrored import terms
from tasks.jobs.checkpoint.origins import continued_from
from tasks.jobs.data.crossing import require_apart
from tasks.jobs.data.samples import (
    NOT_LEARNED,
    Batch,
    Loader,
    Shares,
    Source,
    batch_of,
    open_conversations,
    vocabulary,
)
from tasks.jobs.data.sources import conversations, open_source, source_identity, tokens_a_sample
from tasks.jobs.node.elastic import SAVED_AND_STOPPED, START_TIMEOUT, Groups, changes, standstill
from tasks.jobs.node.runtime import Rank, main
from tasks.jobs.training.card import base_ref, write_account
from tasks.jobs.training.checkpoints import LOCAL, STORE, Saves, agree, forget, local_root, restore_own
from tasks.jobs.training.engine import Engine, Setting, open_engine
from tasks.jobs.training.metrics_logger import Meter, Profile, Teller, flops_of
from tasks.jobs.training.parallel import data_place, own_gpu, repeatable
from tasks.jobs.training.records import all_records, last_of_each
from tasks.jobs.training.schedule import learning_rate
from tasks.jobs.training.stops import Reaction, Verdict
from tasks.jobs.training.watch import Watch, all_agree

SPLIT = "heldout"


class Heldout:
    """Samples of the held-out split, spread evenly over it, and this rank's part of them: stretches of text, or conversations."""

    def __init__(self, folder: Path, config: TrainingConfig, *, samples: int, shares: Shares, eod: int | None) -> None:
        """`eod`: documents are masked as in training. Raises ValueError when the tokens hold out less than one sample."""
        rows, self.bytes_per_token = (_conversations if config.objective == "sft" else _stretches)(
            folder, config, samples
        )
        rounds = math.ceil(len(rows) / shares.world_size)
        mine = [shares.rank + turn * shares.world_size for turn in range(rounds)]
        own = torch.from_numpy(rows[[at % len(rows) for at in mine]])
        counts = torch.tensor([float(at < len(rows)) for at in mine], dtype=torch.float64)
        batches = [batch_of(part, eod) for part in own.split(shares.micro_batch)]
        self._parts = list(zip(batches, counts.split(shares.micro_batch), strict=True))

    def bits_per_byte(self, engine: Engine, group: Any) -> float:
        """Of the network as it is; all ranks take part, and get the same number."""
        was_training = engine.network.training
        engine.network.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch, counts in self._parts:
                nats = _nats(engine.network, batch.to(engine.device)).cpu()
                predicted = (batch.targets != NOT_LEARNED).double().sum(1)
                total += torch.stack([(nats * counts).sum(), (predicted * counts).sum()])
        engine.network.train(was_training)
        # FSDP2 keeps its outermost part gathered after a forward pass without a backward one; what is saved must be
        # divided.
        for part in engine.network.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        dist.all_reduce(total, group=group)
        nats_per_token = float(total[0] / total[1])
        return nats_per_token / math.log(2) / self.bytes_per_token


def _stretches(folder: Path, config: TrainingConfig, most: int) -> tuple[NDArray[np.int64], float]:
    """Samples of text, as many as fit without overlap, at most so many, and bytes a token of the whole split."""
    length = config.sequence_length
    output = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))["splits"].get(SPLIT, {})
    path = folder / f"{SPLIT}_text_document"
    tokens = open_tokens(path).tokens if path.with_suffix(".bin").exists() else np.zeros(0, dtype=np.int32)
    if len(tokens) <= length:
        raise ValueError(
            f"the held-out split has {len(tokens)} tokens, one sample needs {length + 1}: raise "
            "preprocessing.heldout_fraction, or leave execution.heldout_every_steps empty"
        )
    windows = (len(tokens) - 1) // length
    starts = [int(place) * length for place in np.linspace(0, windows - 1, min(most, windows)).round()]
    rows = np.stack([tokens[start:][: length + 1] for start in starts]).astype(np.int64)
    return rows, output["bytes"] / output["tokens"]


def _conversations(folder: Path, config: TrainingConfig, most: int) -> tuple[NDArray[np.int64], float]:
    """Conversations, at most so many of those that fit into a sample, and bytes of text a token of their answers."""
    held = open_conversations(folder, config, SPLIT)
    places = np.linspace(0, held.count - 1, min(most, held.count)).round().astype(np.int64)
    rows, rules = held.rows(places), open_tokenizer(folder / "tokenizer").rules
    return rows, sum(len(said(row[row >= 0], rules).encode()) for row in rows) / int((rows[:, 1:] >= 0).sum())


def _nats(network: nn.Module, batch: Batch) -> Tensor:
    """Of each sample the sum over its predictions, shape [samples], in float64."""
    logits = network(input_ids=batch.inputs, position_ids=batch.positions, use_cache=False).logits.float()
    targets = batch.targets.flatten()
    each = nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=NOT_LEARNED, reduction="none")
    return each.view(len(batch.inputs), -1).double().sum(1)


quick_imports.done()


def run(rank: Rank) -> dict[str, Any]:
    """Train to the last step, from the newest good checkpoint if there is one, and write the network to `rank.output`.

    Raises ValueError for settings that do not fit the tokens, the ranks or the checkpoint, IntegrityError when no
    checkpoint is good, FloatingPointError when the loss is not a number any more.
    """
    config = TrainingConfig.model_validate(rank.settings["training"])
    execution = ExecutionConfig.model_validate(rank.settings.get("execution", {}))
    place, places = data_place(rank.rank, rank.world_size, execution)
    shares = Shares(place, places, config.global_batch_size, config.micro_batch_size)
    shares = shares.halved(int(rank.settings.get("smaller_batches", 0)))
    samples = open_source(rank.inputs, config, execution)
    require_apart(rank, config, execution)
    learned, long = conversations(samples)
    if rank.rank == 0 and long:
        print(
            f"{long} conversations of more than training.sequence_length + 1 = {config.sequence_length + 1} tokens are left out, "
            f"{learned} are learned",
            flush=True,
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backends = own_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    repeatable(always=config.safety.repeat_every_steps is not None)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if rank.world_size == 1 else {}
    dist.init_process_group(backends, timeout=START_TIMEOUT if rank.settings.get("elastic") else None, **alone)
    training = Training(rank, config, execution, samples=samples, shares=shares)
    training.go()
    result = training.finish()
    dist.destroy_process_group()
    return result


@dataclass
class Pace:
    """How fast this attempt is."""

    began: float
    first: int
    """Step before the first one of this attempt."""

    def seconds_left(self, step: int, steps: int) -> float:
        return (time.monotonic() - self.began) / (step - self.first) * (steps - step)


class Training:
    """One rank's training: the engine, the position in the data, and the checkpoints."""

    def __init__(
        self, rank: Rank, config: TrainingConfig, execution: ExecutionConfig, *, samples: Source, shares: Shares
    ) -> None:
        self.rank, self.config, self.execution, self.samples, self.shares = rank, config, execution, samples, shares
        self.elastic = bool(rank.settings.get("elastic"))
        self.groups = Groups(elastic=self.elastic)
        self.watch = Watch(rank, config, execution, self.groups)
        self.checkpoints, self.local = rank.folder / "checkpoints", local_root(rank, execution)
        often = execution.local_every_steps
        self.saves = Saves(
            rank.settings,
            steps=config.steps,
            local_every=often,
            group=self.groups.steps,
            mirrored=terms(self.checkpoints) is not None,
        )
        self.tokens = rank.inputs["tokens"]
        vocab_size, eod = vocabulary(self.tokens)
        base = self.rank.inputs.get("base")
        self.engine = open_engine(
            Setting(self.rank, self.config, self.execution, vocab_size, eod, base, self.groups.steps)
        )
        self.eod = vocabulary(self.tokens)[1] if config.mask_documents else None
        ahead, device = self.execution.prefetch_steps, self.engine.device
        self.loader = Loader(self.samples, self.shares, device=device, ahead=ahead, eod=self.eod)
        self.meter = Meter()
        origin = continued_from(rank.settings)
        self.identical = identity(config, source_identity(rank.inputs, config), base=base_ref(rank), continues=origin)
        self._resume()
        self.resumed = self.step or None
        self.waited = standstill(rank.folder / "metrics.jsonl") if self.elastic and rank.rank == 0 else {}
        self.pace = Pace(began=time.monotonic(), first=self.step)
        self.heldout: Heldout | None = None
        if execution.heldout_every_steps:
            count = execution.heldout_samples
            self.heldout = Heldout(self.tokens, config, samples=count, shares=shares, eod=self.eod)
        cuda = self.engine.device.type == "cuda"
        self.profile = Profile(rank.folder / "profile", execution, rank=rank.rank, cuda=cuda)
        flops = flops_of(self.engine.network, self.config, self.engine.parameters())
        sizes = {
            "tokens_a_step": round(self.config.global_batch_size * tokens_a_sample(self.samples, self.config)),
            "steps": self.config.steps,
        }
        self.teller = Teller(self.rank, flops, device=self.engine.device, **sizes)

    def _resume(self, bad: Reaction | None = None) -> None:
        """Go on from the newest good checkpoint, as a new attempt: at a start, and after a step that was `bad`."""
        chosen = agree(self.rank, self.checkpoints, self.local, self.identical, self.groups.patient, engine=self.engine)
        # as claimed: it rises over machines and submissions, theirs does not
        self.rank, result = replace(self.rank, attempt=chosen.attempt), chosen.manifest
        self.step, self.consumed = (result.step, result.consumed_samples) if result else (0, 0)
        if result and chosen.own:
            restore_own(chosen.own, result, self.engine.pieces(), group=self.groups.patient)
        elif result:
            self.engine.restore(self.checkpoints, result)
        if bad:
            self.watch.go_back(bad, result)
        self.watch.resume(self.rank, self.step)
        self.saves.open(
            self.engine.saving(
                {
                    "root": str(self.checkpoints),
                    "rank": self.rank.rank,
                    "world_size": self.rank.world_size,
                    "attempt": self.rank.attempt,
                    "keep": int(self.rank.settings["keep_checkpoints"]),
                    "keep_every": self.rank.settings.get("keep_every"),
                    "local": str(self.local or ""),
                    "log": str(self.rank.folder / "metrics.jsonl"),
                    "identity": self.identical,
                }
            ),
            self.step,
        )
        all_agree(
            True, self.groups.patient
        )  # rank 0's snapshot is the largest: a step's patience may be too short for it

    def go(self) -> None:
        """Every step that is left, then the last checkpoint. When a rank is asked to stop, all save after that step and end."""
        self.watch.asked.listen()
        self.meter.start()
        while self.step < self.config.steps:
            done, reasons = self.step, self._advance()
            if self.step <= done:
                continue  # it went back to a checkpoint
            with self.meter.part("checkpoint"):
                last = bool(reasons) or self.step == self.config.steps
                if last:
                    self.rank.progress(self.step, self.config.steps, "saving the last checkpoint")
                if tier := STORE if last else self.saves.due(self.step):
                    self._save(tier, wait=last)
                self.saves.look()
            if reasons and self.step < self.config.steps:
                self.saves.close()
                self.saves.say()
                self.loader.close(done=False)
                self.watch.stops.end(reasons, self.step)
                sys.exit(SAVED_AND_STOPPED)
        self.saves.close()
        self.loader.close(done=True)
        forget(self.local)
        self.teller.over()
        self.watch.asked.ignore()

    def _advance(self) -> tuple[str, ...]:
        """One step, or back to a checkpoint; returns why ranks were asked to stop."""
        step = self.step + 1
        with self.meter.part("profile"):
            self.profile.before(step)
        rate = learning_rate(self.config, step)
        # Gradients of the global batch, averaged over its samples; returns what all ranks know then.
        self.consumed = self.watch.next_position(self.consumed)
        with self.meter.part("data"):
            batches = self.loader.take(self.consumed)
        self.watch.probe(self.engine, batches, self.step + 1)
        with self.meter.part("compute"):
            loss = self.engine.gradients(batches, self.meter)
        with self.meter.part("communication"):
            word = self.watch.exchange(loss, batches, self.meter)
        with self.meter.part("compute"):
            norm = self.engine.clip()
            verdict = self.watch.judge(step, self.consumed, word.loss, norm)
            if verdict:
                self.engine.discard()
            else:
                self.engine.update(rate)
        self.consumed += self.config.global_batch_size
        if verdict and verdict.kind == "rollback":
            with self.meter.part("rollback"):
                self._go_back(verdict, step)
            return ()
        self.step = step
        with self.meter.part("profile"):
            self.profile.after(step, over=bool(word.reasons) or step == self.config.steps)
        losses = {"loss": word.loss, "grad_norm": norm}
        if verdict:
            losses = {key: value for key, value in losses.items() if math.isfinite(value)} | {"skipped": 1.0}
        slow = self.watch.stragglers.take(step, word.seconds)
        behind = self.saves.behind(step)
        self._tell(**losses, learning_rate=rate, **self._proof(word.samples), **self._measured(), **slow, **behind)
        return word.reasons

    def _go_back(self, verdict: Verdict, step: int) -> None:
        """To the newest checkpoint; the batches since then are left out for good."""
        self.saves.close()
        position = self.consumed - self.config.global_batch_size
        self._resume(Reaction(step, position, "rollback", verdict.why, end=self.consumed))
        self.pace.began, self.pace.first = time.monotonic(), self.step
        self.teller.go_on(self.rank)

    def _measured(self) -> dict[str, float]:
        """Held-out text after every so many steps, and after the last."""
        every = self.execution.heldout_every_steps or 0
        if not self.heldout or (self.step % every and self.step != self.config.steps):
            return {}
        with self.meter.part("heldout"):
            return {"heldout_bits_per_byte": self.heldout.bits_per_byte(self.engine, self.groups.steps)}

    def _proof(self, samples: float) -> dict[str, float]:
        """What an elastic run records beside: the position in the data, what was read, and after a start how long it took."""
        if not self.elastic:
            return {}
        waited, self.waited = self.waited, {}
        position = {"consumed": self.consumed, "samples_crc32": int(samples), "world_size": self.rank.world_size}
        return {**position, **waited}

    def _conversations(self) -> dict[str, float]:
        """How many are learned, and how many were too long."""
        if self.config.objective != "sft":
            return {}
        learned, long = conversations(self.samples)
        return {"conversations": float(learned), "conversations_left_out": float(long)}

    def _tell(self, **values: float) -> None:
        left = self.pace.seconds_left(self.step, self.config.steps)
        self.teller.tell(self.step, self.meter, **values, seconds_left=left)

    def _save(self, tier: str, *, wait: bool) -> None:
        if not self.saves.room(wait=wait or (tier == STORE and self.saves.last == LOCAL)):
            return
        if verdict := self.watch.unfit_to_save(self.engine, self.step):
            with self.meter.part("rollback"):
                self._go_back(verdict, self.step)
            return
        self.saves.save(tier, step=self.step, consumed_samples=self.consumed)

    def finish(self) -> dict[str, Any]:
        """Write what the stage publishes, the same bytes whatever happened on the way; rank 0 returns the result."""
        self.rank.progress(self.step, self.config.steps, "writing the model")
        self.engine.write(self.rank.output, self.tokens / "tokenizer")
        if self.rank.rank:
            return {}
        every = all_records(self.rank.folder / "metrics.jsonl")
        records = [record for record in last_of_each(every) if "loss" in record]  # a skipped step may have none
        figures = write_account(self.rank, self.config, records, parameters=self.engine.parameters())
        return {
            "metrics": {**figures, **self._conversations(), **self.teller.summary(every, records)},
            "time": self.teller.time(every),
            "resumed_from_step": self.resumed,
            **self.saves.told(),
            **self.watch.told(),
            **({"standstills": changes(self.rank.folder / "metrics.jsonl")} if self.elastic else {}),
        }


if __name__ == "__main__":
    sys.exit(main(run))
