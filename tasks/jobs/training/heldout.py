"""Bits per byte of a few held-out samples while a network is trained: the same samples at every measurement.

It tells early whether training learns what it should. It is no evaluation: whole documents, baselines and intervals are
tasks/jobs/evaluate.py. See docs/training.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tasks.formats.mmididx import open_tokens
from tasks.jobs.data.samples import Shares, positions
from tasks.jobs.training.engine import Engine

SPLIT = "heldout"


class Heldout:
    """Samples of the held-out split, spread evenly over it, and this rank's part of them."""

    def __init__(self, folder: Path, *, length: int, samples: int, shares: Shares, eod: int | None = None) -> None:
        """`eod`: documents are masked as in training. Raises ValueError when the tokens hold out less than one sample."""
        output = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))["splits"].get(SPLIT, {})
        path = folder / f"{SPLIT}_text_document"
        tokens = open_tokens(path).tokens if path.with_suffix(".bin").exists() else np.zeros(0, dtype=np.int32)
        if len(tokens) <= length:
            raise ValueError(
                f"the held-out split has {len(tokens)} tokens, one sample needs {length + 1}: raise "
                "preprocessing.heldout_fraction, or leave execution.heldout_every_steps empty"
            )
        self.bytes_per_token = output["bytes"] / output["tokens"]
        """Of the whole split: its text's bytes by its tokens, ends of documents among them."""
        # Where samples begin: as many as fit without overlap, at most `samples`, spread evenly.
        windows = (len(tokens) - 1) // length
        count = min(samples, windows)
        starts = [int(place) * length for place in np.linspace(0, windows - 1, count).round()]
        rounds = math.ceil(len(starts) / shares.world_size)
        mine = [shares.rank + turn * shares.world_size for turn in range(rounds)]
        rows = [tokens[starts[at % len(starts)] :][: length + 1] for at in mine]
        self._samples = torch.from_numpy(np.stack(rows).astype(np.int64))
        self._counts = torch.tensor([float(at < len(starts)) for at in mine], dtype=torch.float64)
        self._at_once, self._eod = shares.micro_batch, eod

    def bits_per_byte(self, engine: Engine, group: Any) -> float:
        """Of the network as it is; all ranks take part, and get the same number."""
        was_training = engine.network.training
        engine.network.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for samples, counts in zip(
                self._samples.split(self._at_once), self._counts.split(self._at_once), strict=True
            ):
                nats = _nats(engine.network, samples.to(engine.device), self._eod).cpu()
                total += torch.stack([(nats * counts).sum(), counts.sum() * (samples.shape[1] - 1)])
        engine.network.train(was_training)
        # FSDP2 keeps its outermost part gathered after a forward pass without a backward one; what is saved must be
        # divided.
        for part in engine.network.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        dist.all_reduce(total, group=group)
        nats_per_token = float(total[0] / total[1])
        return nats_per_token / math.log(2) / self.bytes_per_token


def _nats(network: nn.Module, samples: Tensor, eod: int | None) -> Tensor:
    """Of each sample the sum over its predictions, shape [samples], in float64."""
    places = None if eod is None else positions(samples[:, :-1], eod)
    logits = network(input_ids=samples[:, :-1], position_ids=places, use_cache=False).logits.float()
    each = nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
    return each.view(len(samples), -1).double().sum(1)
