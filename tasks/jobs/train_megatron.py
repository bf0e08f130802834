"""The training job of the engine `megatron`: on every rank Megatron-LM's `pretrain_gpt.py` in a process of its own.

What is ours is around it: the checkpoint that it goes on from is verified first, what it saves is hashed and committed
(megatron/commits.py), its log becomes `metrics.jsonl` (tasks/formats/training_logs.py), its last checkpoint a Hugging Face folder
(megatron/child.py). Its arguments: tasks/formats/megatron_arguments.py. Which stage starts it: tasks/train.py. Ranks of
torchrun agree in torchrun's own store, for Megatron has the process group. See docs/megatron.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from tasks.common.process import write_json
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.data.tokenizing.mixture import Part, blend
from tasks.formats.megatron_arguments import Places, megatron_arguments, megatron_ds_config
from tasks.formats.mmididx import prefixes, token_count
from tasks.jobs.checkpoint.choice import choose, identity
from tasks.jobs.checkpoint.files import claim_attempt
from tasks.jobs.checkpoint.mirrored import neighbours
from tasks.jobs.checkpoint.retention import clean
from tasks.jobs.checkpoint.writer import Writing
from tasks.jobs.data.crossing import require_apart
from tasks.jobs.data.samples import TRAIN, vocabulary
from tasks.jobs.data.sources import corpora, open_source, shares_by_name, source_identity
from tasks.jobs.megatron.child import Child, Following, Neighbours, convert, require_megatron
from tasks.jobs.megatron.commits import Committing, Saves, link_verified
from tasks.jobs.node.elastic import SAVED_AND_STOPPED
from tasks.jobs.node.runtime import Rank, main
from tasks.jobs.training.card import write_account
from tasks.jobs.training.records import last_records, mend
from tasks.jobs.training.stops import Held, limited, reached
from tasks.planning.case import Network
from tasks.planning.counts import parameter_count

POLL_SECONDS = 0.2
LOOKED_BACK = 4 << 20
"""Bytes at the end of an earlier attempt's log that are looked at for steps without a record."""
PATIENT = timedelta(minutes=30)
"""Longest wait while rank 0 verifies checkpoints."""


def run(rank: Rank) -> dict[str, Any]:
    """Train to the last step, from the newest good checkpoint if there is one, and write the network to `rank.output`.

    Raises Missing without Megatron or its converter, ValueError for settings that do not fit, IntegrityError when no checkpoint
    is good, FloatingPointError when the loss is no number any more.
    """
    config = TrainingConfig.model_validate(rank.settings["training"])
    execution = ExecutionConfig.model_validate(rank.settings["execution"])
    require_megatron(execution.megatron)
    # Raises ValueError for a number of ranks, or a launcher, that Megatron cannot use.
    if rank.world_size % execution.ranks_a_copy:
        raise ValueError(
            f"{rank.world_size} ranks do not divide by execution.tensor_parallel x pipeline_parallel x context_parallel = "
            f"{execution.ranks_a_copy}"
        )
    if rank.settings.get("elastic"):
        raise ValueError(
            "the engine megatron keeps its number of ranks: take cluster.elastic away, or use the engine torch"
        )
    if rank.world_size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError("the engine megatron needs torchrun: set cluster.launcher to torchrun")
    if len(neighbours(rank.folder / "checkpoints", rank.rank, rank.world_size)) < rank.world_size:
        raise ValueError("the engine megatron needs a folder that its machines share: set cluster.nodes to 1")
    open_source(rank.inputs, config, execution)
    require_apart(rank, config, execution)
    # Rank 0 claims an attempt, chooses a checkpoint, and writes what is to be started; the others take its word.
    store = _store() if rank.world_size > 1 else None
    if rank.rank:
        assert store
        start = dict(json.loads(store.get("start")))
    else:
        output = _prepare(rank, config, execution)
        if store:
            store.set("start", json.dumps(output))
        start = output
    del store  # its connection is not held while Megatron trains
    rank = replace(rank, attempt=int(start["attempt"]))
    return Training(rank, config, execution, start).go()


def _identity(rank: Rank, config: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
    """Megatron-LM's checkpoints load under another division of ranks; those of Megatron-DeepSpeed do not."""
    layout = {
        "world_size": rank.world_size,
        "tensor_parallel": execution.tensor_parallel,
        "pipeline_parallel": execution.pipeline_parallel,
        "zero_stage": execution.deepspeed.zero_stage,
    }
    fixed = layout if execution.megatron.flavour == "megatron-deepspeed" else {}
    same = identity(config, source_identity(rank.inputs, config))
    return {**same, "megatron": {"flavour": execution.megatron.flavour, **fixed}}


def _store() -> PrefixStore:
    """The launcher's store, under names of this start that are not Megatron's."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=PATIENT)
    return PrefixStore(f"headway/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _prepare(rank: Rank, config: TrainingConfig, execution: ExecutionConfig) -> dict[str, Any]:
    checkpoints, log = rank.folder / "checkpoints", rank.folder / "logs" / f"rank-{rank.world_size - 1}.log"
    mend(rank.folder / "metrics.jsonl")
    attempt = claim_attempt(checkpoints, rank.attempt)
    clean(checkpoints, attempt)
    manifest = choose(checkpoints, _identity(rank, config, execution), attempt=attempt, whole=True)
    for old in (rank.folder / "megatron").glob("attempt-*"):
        shutil.rmtree(old)
    own = rank.folder / "megatron" / f"attempt-{attempt}"
    own.mkdir(parents=True)
    if manifest:
        link_verified(checkpoints, manifest, own / "load")
    # Halved for every time that memory did not suffice, until it divides what a data-parallel rank computes.
    data_parallel = rank.world_size // execution.ranks_a_copy
    if config.global_batch_size % (config.micro_batch_size * data_parallel):
        raise ValueError(
            f"global_batch_size {config.global_batch_size} does not divide into micro batches of {config.micro_batch_size} on "
            f"{data_parallel} data-parallel ranks"
        )
    micro = max(1, config.micro_batch_size // 2 ** int(rank.settings.get("smaller_batches", 0)))
    while config.global_batch_size // data_parallel % micro:
        micro -= 1
    if manifest and log.exists():
        # A kill may come after a checkpoint and before the record of its step, which the log has.
        metrics = rank.folder / "metrics.jsonl"
        recorded = max((int(record["step"]) for record in last_records(metrics)), default=0) if metrics.exists() else 0
        steps = range(recorded + 1, manifest.step + 1)
        Following(rank, config, offset=max(0, log.stat().st_size - LOOKED_BACK), steps=steps).look()
    resumed = manifest is not None
    deepspeed = execution.megatron.flavour == "megatron-deepspeed"
    places = Places(
        tokens=data_path(rank.inputs, config),
        tokenizer=str(rank.inputs["tokens"] / "tokenizer"),
        save=str(own / "save"),
        cache=str(rank.folder / "megatron" / "cache"),
        load=str(own / "load") if resumed else "",
        ds_config=str(own / "ds_config.json") if deepspeed else "",
    )
    if places.ds_config:
        write_json(Path(places.ds_config), megatron_ds_config(config, execution, micro_batch=micro))
    every = int(rank.settings["checkpoint_every_steps"])
    arguments = megatron_arguments(config, execution, places, save_every=every, micro_batch=micro)
    before = Held(rank.folder).before
    output = {"attempt": attempt, "step": manifest.step if manifest else 0, "arguments": arguments, "held": before}
    write_json(own / "start.json", output)
    return {**output, "log_offset": log.stat().st_size if log.exists() else 0}


def data_path(inputs: Mapping[str, Path], config: TrainingConfig) -> tuple[str, ...]:
    """One prefix, or weights and prefixes in turn, which Megatron draws from by itself.

    Each corpus of a mixture has its share, and each of its files its part of that by tokens.
    """
    shares = shares_by_name(config).values() if config.mixture else (1.0,)
    parts = []
    for folder, share in zip(corpora(inputs, config), shares, strict=True):
        counts = {prefix: token_count(prefix) for prefix in prefixes(folder, TRAIN)}
        parts += [Part(share * count / sum(counts.values()), prefix) for prefix, count in counts.items() if count]
    return tuple(blend(parts))


class Training:
    """One rank's part: Megatron's process, and what is done with what it writes."""

    def __init__(self, rank: Rank, config: TrainingConfig, execution: ExecutionConfig, start: dict[str, Any]) -> None:
        self.rank, self.config, self.execution, self.start = rank, config, execution, start
        self.checkpoints = rank.folder / "checkpoints"
        self.identity = _identity(rank, config, execution)
        self.log = Following(rank, config, offset=int(start["log_offset"])) if rank.rank == 0 else None
        self.held = Held(rank.folder)
        self.held.before = float(start["held"])

    def go(self) -> dict[str, Any]:
        """Start Megatron, look after it until it ends, then publish."""
        if int(self.start["step"]) < self.config.steps:
            if why := reached(self.execution.limits, self.held.before):
                raise limited(why)
            if self.rank.rank == 0:
                self.held.keep()
            self._train()
        return self._finish() if self.rank.rank == 0 else {}

    def _train(self) -> None:
        log = self.rank.folder / "logs" / f"rank-{self.rank.rank}.log"
        child = Child(Path(self.execution.megatron.checkout), self.start["arguments"], log=log)
        save = self.rank.folder / "megatron" / f"attempt-{self.rank.attempt}" / "save"
        writing = Writing(
            root=str(self.checkpoints),
            rank=self.rank.rank,
            world_size=self.rank.world_size,
            attempt=self.rank.attempt,
            keep=int(self.rank.settings["keep_checkpoints"]),
            keep_every=self.rank.settings.get("keep_every"),
            log=str(self.rank.folder / "metrics.jsonl"),
            identity=self.identity,
            own=True,
        )
        commits = Committing(Saves(save, writing, global_batch=self.config.global_batch_size))
        neighbours = Neighbours(self.rank.folder / "ranks")
        commits.start()
        try:
            while not child.wait(POLL_SECONDS):
                commits.check()
                self._follow()
                if not child.asked and self._limit():
                    child.ask()  # Megatron's ranks tell each other, save after their step, and end
                if child.asked and neighbours.lost():
                    raise RuntimeError("another rank of this machine is gone, and this one was asked to stop")
        except BaseException:
            child.kill()
            raise
        self._follow()
        commits.finish(well=child.ended_well)
        child.require_success()
        if child.asked and (why := self._limit()):
            raise limited(why)
        if child.asked:
            sys.exit(SAVED_AND_STOPPED)

    def _limit(self) -> str:
        """The limit that is reached, in words, by rank 0's clock; empty while none is."""
        if self.rank.rank:
            return ""
        return reached(self.execution.limits, self.held.seconds())

    def _follow(self) -> None:
        if self.log:
            self.log.look()

    def _finish(self) -> dict[str, Any]:
        """Convert the last checkpoint, verified once more, and write what the stage publishes."""
        tokens = self.rank.inputs["tokens"]
        vocab = vocabulary(tokens)
        # A folder with the checkpoint of the last step; RuntimeError when Megatron ended without it.
        manifest = choose(self.checkpoints, self.identity, attempt=self.rank.attempt)
        if not manifest or manifest.step != self.config.steps:
            raise RuntimeError(
                f"pretrain_gpt.py ended, but its last checkpoint is of step {manifest.step if manifest else 0}"
            )
        folder = self.rank.folder / "megatron" / f"attempt-{self.rank.attempt}" / "converted"
        shutil.rmtree(folder, ignore_errors=True)
        link_verified(self.checkpoints, manifest, folder)
        convert(
            self.config,
            folder,
            self.rank.output,
            vocab=vocab,
            tokenizer=tokens / "tokenizer",
            command=self.execution.megatron.converter,
        )
        records = last_records(self.rank.folder / "metrics.jsonl")
        parameters = parameter_count(Network.of_config(self.config.network, vocab[0]), self.config.sequence_length)
        figures = write_account(self.rank, self.config, records, parameters=parameters)
        step = sum(record["step_seconds"] for record in records) / len(records)
        planned = self.rank.settings.get("planned_step_seconds")
        usual = median(record["step_seconds"] for record in records)  # no mean: some have a checkpoint in them
        beside = {"plan_error": usual / planned - 1} if planned else {}
        return {
            "metrics": {**figures, "tokens_per_second": figures["tokens"] / self.config.steps / step, **beside},
            "resumed_from_step": int(self.start["step"]) or None,
        }


if __name__ == "__main__":
    sys.exit(main(run))
