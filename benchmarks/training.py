"""A training step: ours beside a plain hand-written loop of the same network, and two ranks beside one.

    python -m benchmarks.training [--rounds N] [--steps N] [--hidden N] [--layers N] [--precision fp32|bf16]

*Step*: in one process, one rank, one thread, rounds of both loops in turn (ABAB) on the same tokens: what a step takes by the
clock and in CPU time of the whole process, medians, and the losses of both, which must be equal. Ours is the job's own step
with its records, progress and prefetching; the plain loop reads a memory map, computes, clips, updates. *Scaling*: whole jobs
of one rank and of two with twice the batch, in turn; efficiency is tokens/s of two over twice those of one. Run by `make bench`.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.scratch import scratch
from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter, open_tokens
from tasks.jobs.data.samples import Shares
from tasks.jobs.data.sources import open_source
from tasks.jobs.node.runtime import Rank, main
from tasks.jobs.train import Training, run
from tasks.jobs.training.network import build_network
from tasks.jobs.training.parallel import repeatable
from tasks.jobs.training.schedule import learning_rate

VOCABULARY = 4096
WARMUP = 3


def measure() -> None:
    given = arguments()
    with scratch() as folder:
        tokens = write_tokens(folder / "tokens", 400_000)
        config = configuration(given)
        scaling = [weak_scaling(folder / f"scaling-{number}", tokens, config) for number in range(given.scaling)]
        step = compare(folder / "job", tokens, config, rounds=given.rounds, steps=given.steps)
    found = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "step": step, "weak_scaling": sorted(scaling)}
    print(json.dumps(found, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="a round and a loop")
    parser.add_argument("--scaling", type=int, default=3, help="pairs of jobs")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    return parser.parse_args()


def configuration(given: argparse.Namespace) -> TrainingConfig:
    network = NetworkConfig(
        layers=given.layers, hidden_size=given.hidden, heads=4, kv_heads=4, intermediate_size=3 * given.hidden
    )
    steps = WARMUP + given.rounds * given.steps
    return TrainingConfig(
        network=network,
        sequence_length=256,
        global_batch_size=4,
        micro_batch_size=4,
        steps=steps,
        warmup_steps=2,
        precision=given.precision,
    )


def write_tokens(folder: Path, count: int) -> Path:
    folder.mkdir()
    writer = TokenWriter(folder / "train_text_document", VOCABULARY)
    writer.add_document(np.random.default_rng(0).integers(0, VOCABULARY - 1, size=count).tolist())
    writer.close()
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": VOCABULARY, "eod_id": VOCABULARY - 1}))
    (folder / "tokenizer").mkdir()
    return folder


class Plain:
    """The same training as one would write it down in a page."""

    def __init__(self, tokens: Path, config: TrainingConfig) -> None:
        self.config, self.step = config, 0
        self.stream = open_tokens(tokens / "train_text_document").tokens
        self.order = np.argsort(
            np.random.PCG64([config.seed, 0]).random_raw((len(self.stream) - 1) // 256), kind="stable"
        )
        self.network = build_network(config, vocab_size=VOCABULARY, eod=VOCABULARY - 1)
        matrices = [weight for weight in self.network.parameters() if weight.dim() >= 2]
        vectors = [weight for weight in self.network.parameters() if weight.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)

    def advance(self) -> float:
        length, size = self.config.sequence_length, self.config.global_batch_size
        starts = self.order[self.step * size : (self.step + 1) * size].astype(np.int64) * length
        rows = np.stack([self.stream[start : start + length + 1] for start in starts]).astype(np.int64)
        samples = torch.from_numpy(rows)
        self.step += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits = self.network(input_ids=samples[:, :-1], use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), samples[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def compare(folder: Path, tokens: Path, config: TrainingConfig, *, rounds: int, steps: int) -> dict[str, float | bool]:
    """Seconds a step of both loops, in turn; ours over plain, of the medians."""
    torch.set_num_threads(1)
    repeatable(always=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours, plain = own_loop(folder, tokens, config), Plain(tokens, config)
    losses: list[float] = []
    loops = {"ours": ours._advance, "plain": lambda: losses.append(plain.advance())}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for loop in loops.values():
        for _ in range(WARMUP):
            loop()
    for _ in range(rounds):
        for name, loop in loops.items():
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                loop()
            taken[name].append(((time.perf_counter() - began) / steps, (time.process_time() - busy) / steps))
    ours.saves.close()
    ours.loader.close(done=True)
    dist.destroy_process_group()
    told = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock, cpu = ({name: statistics.median(t[which] for t in taken[name]) for name in loops} for which in (0, 1))
    return {
        "ours_seconds": clock["ours"],
        "plain_seconds": clock["plain"],
        "ours_over_plain": clock["ours"] / clock["plain"],
        "ours_over_plain_cpu_time": cpu["ours"] / cpu["plain"],
        "same_losses": told == losses,
    }


def own_loop(folder: Path, tokens: Path, config: TrainingConfig) -> Training:
    """The job's own loop as one rank, in this process."""
    (folder / "out").mkdir(parents=True)
    settings = {"checkpoint_every_steps": config.steps, "keep_checkpoints": 2}
    rank = Rank(folder, 0, 1, 1, settings, {"tokens": tokens}, folder / "out")
    execution = ExecutionConfig()
    shares = Shares(0, 1, config.global_batch_size, config.micro_batch_size)
    samples = open_source(rank.inputs, config, execution)
    training = Training(rank, config, execution, samples=samples, shares=shares)
    training.meter.start()
    return training


def weak_scaling(folder: Path, tokens: Path, config: TrainingConfig) -> float:
    """Tokens a second of two ranks over twice those of one, of one pair of jobs."""
    speeds = []
    for ranks in (1, 2):
        more = config.model_copy(update={"global_batch_size": ranks * config.global_batch_size, "steps": 30})
        speeds.append(tokens_per_second(folder / str(ranks), tokens, more, ranks=ranks))
    return speeds[1] / (2 * speeds[0])


def tokens_per_second(folder: Path, tokens: Path, config: TrainingConfig, *, ranks: int) -> float:
    """Of the median step of a whole job, its ranks forked from this process."""
    folder.mkdir(parents=True)
    settings = {
        "training": config.model_dump(mode="json"),
        "checkpoint_every_steps": config.steps,
        "keep_checkpoints": 2,
    }
    spec = {"program": "tasks.jobs.train", "settings": settings, "inputs": {"tokens": str(tokens)}}
    (folder / "config.json").write_text(json.dumps(spec))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"HEADWAY_JOB": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    children = [_fork({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError("".join(path.read_text() for path in (folder / "logs").iterdir()))
    times = [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(after - before for before, after in pairwise(times[WARMUP:]))
    return config.global_batch_size * config.sequence_length / step


def _fork(environment: dict[str, str]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        os._exit(main(run))
    return child


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    measure()
