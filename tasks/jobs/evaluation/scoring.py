"""A model's scores of documents, all from one forward pass: bits, whether the likeliest token was right, and how sure it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tasks.config.evaluation import EvaluationConfig
from tasks.evaluation import scores
from tasks.evaluation.scores import add_certainty, no_certainty
from tasks.formats.model_folder import open_model_folder
from tasks.jobs.evaluation.division import Arrays
from tasks.jobs.evaluation.generating import WHOLE_LOGITS, logits_in_parts
from tasks.jobs.evaluation.heldout import Encoded
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.parallel import own_device, own_gpu

# The network that is measured: on which device, in which precision, and whether it has room there.


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BESIDE_WEIGHTS = 1 << 30
"""Bytes of a GPU that a batch takes beside the weights: logits (256 MiB), activations, keys and values, the libraries' own."""


def device_of(config: EvaluationConfig, *, local_rank: int = 0) -> torch.device:
    """Where is measured: the GPU of this rank of the machine, as a rank of training has it, else the CPU.

    Raises ValueError where the machine has GPUs, but fewer than ranks.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    own_gpu(local_rank, setting="cluster.evaluation.ranks_per_node")
    return own_device()


def load_model(checkpoint: Path, *, precision: str = "fp32", device: torch.device | str = "cpu") -> Any:
    """The causal language model of a folder, in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(
        str(checkpoint), dtype=PRECISIONS[precision], local_files_only=True, trust_remote_code=False
    )
    return model.to(device).eval()


def load_measured(
    checkpoint: Path, config: EvaluationConfig, *, rank: Rank | None = None, local_rank: int = 0
) -> tuple[Any, bool]:
    """The same, as the settings say, and whether the ranks of a job share it: as `cluster.evaluation.shard` says.

    `auto` is by room: they share what does not fit on the GPU of each. Raises ValueError, before anything is loaded, where a GPU
    has no room for it, or for its share.
    """
    device = device_of(config, local_rank=local_rank)
    several = rank is not None and rank.world_size > 1
    shard = rank.settings.get("shard", "auto") if rank is not None and several else "never"
    shares = 1
    if rank is not None and (shard == "always" or (shard == "auto" and device.type == "cuda")):
        from tasks.jobs.evaluation import sharded  # torch's FSDP2 and accelerate take seconds to import

        name, place = f"evaluation-{rank.attempt}", sharded.meeting_place()
        sharded.open_group(device, name=name, rank=rank.rank, world_size=rank.world_size, place=place)
        shares = rank.world_size
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copies = 2 if config.lm_eval.tasks else 1  # the harness's process has its own
        weights = weight_bytes(checkpoint, config.precision)
        if shares > 1:
            free = sharded.fewest(free)
        if shard == "auto" and copies * (weights + BESIDE_WEIGHTS) <= free:
            shares = 1
        require_room(weights // shares, free, precision=config.precision, copies=copies)
    if shares > 1:
        return sharded.load_sharded(checkpoint, dtype=PRECISIONS[config.precision], device=device), True
    return load_model(checkpoint, precision=config.precision, device=device), False


def require_room(weights: int, free: int, *, precision: str, copies: int = 1) -> None:
    """Raises ValueError, with what to do, where weights and a batch need more bytes than a GPU has free."""
    needed = copies * (weights + BESIDE_WEIGHTS)
    if needed <= free:
        return
    remedies = ["set evaluation.precision: bf16, which halves the weights"] if precision == "fp32" else []
    remedies += ["leave evaluation.lm_eval.tasks empty, whose process loads them once more"] if copies > 1 else []
    remedies += ["measure on a machine with a larger GPU, or set evaluation.device: cpu"]
    raise ValueError(
        f"the weights take {weights / 2**30:.1f} GiB in {precision}, and measuring {needed / 2**30:.1f} GiB of one GPU, "
        f"which has {free / 2**30:.1f} GiB free: {'; or '.join(remedies)}"
    )


def weight_bytes(checkpoint: Path, precision: str) -> int:
    """What the weights of a folder take once they are loaded, by the heads of its files."""
    return open_model_folder(checkpoint).parameters * PRECISIONS[precision].itemsize


# Bits by position: how many tokens a model had read when it predicted one, in buckets that grow, up to its context.
#
# What a model declares, and an endpoint takes, is the context that it was measured up to. Where no document is so long,
# documents are joined one behind the other, as training reads them.


FIRST = 16
"""Last position of the first bucket. Then there are two to each doubling: 24, 32, 48, 64, 96, ..."""
DECIMALS = 6
"""What float32 can carry."""
MOST_ROWS = 64
"""Most rows of joined documents."""


def ends(context: int) -> list[int]:
    """The last position of each bucket; the last of all is the context."""
    result, end = list[int](), FIRST
    while end < context:
        result.append(end)
        if end * 3 // 2 < context:
            result.append(end * 3 // 2)
        end *= 2
    return [*result, context]


@dataclass(frozen=True)
class Positions:
    """Of each document and bucket."""

    context: int
    bits: NDArray[np.float64]
    """Shape [documents, buckets]."""
    tokens: NDArray[np.int64]
    """Those that were predicted, shape [documents, buckets]."""

    @classmethod
    def none(cls, documents: int, context: int) -> Positions:
        shape = (documents, len(ends(context)))
        return cls(context, np.zeros(shape), np.zeros(shape, np.int64))

    def add(self, rows: NDArray[np.int64], scored: NDArray[np.bool_], lost: NDArray[np.float64]) -> None:
        """Count a batch of windows, which belong to the documents `rows`: whether a position is scored, and nats, both of shape
        [windows, positions]. The first position has read one token.
        """
        buckets = np.searchsorted(ends(self.context), np.arange(1, scored.shape[1] + 1))
        for bucket in np.unique(buckets):
            part = buckets == bucket
            np.add.at(self.bits, (rows, bucket), lost[:, part].sum(axis=1) / math.log(2))
            np.add.at(self.tokens, (rows, bucket), scored[:, part].sum(axis=1))


def longest(encoded: Encoded, context: int) -> int:
    """The last position that is read of any document."""
    return min(context, int(encoded.lengths.max()) + len(encoded.context) - 1)


def joined(encoded: Encoded, positions: int) -> Encoded | None:
    """Documents one behind the other, cut into rows of so many positions; None where they do not fill one."""
    if encoded.answers is not None:
        return None  # a conversation is read by itself
    whole, length = np.concatenate(encoded.documents), positions - len(encoded.context) + 1
    rows = min(len(whole) // length, MOST_ROWS)
    if not rows:
        return None
    return Encoded(list(whole[: rows * length].reshape(rows, length)), encoded.eod_id, encoded.opening)


def by_position(
    documents: Positions, rows: Positions | None, config: EvaluationConfig, *, reached: int
) -> list[dict[str, Any]]:
    """The list `positions` of `evaluation.json`: of documents, and beyond `reached`, where they end, of joined rows."""
    first, payload = 1, []
    for bucket, end in enumerate(ends(documents.context)):
        of = rows if rows and end > reached and rows.tokens[:, bucket].any() else documents
        payload.append({"from": first, "to": end, **_bucket(of, bucket, config), "joined": of is rows})
        first = end + 1
    return payload


def _bucket(of: Positions, bucket: int, config: EvaluationConfig) -> Mapping[str, Any]:
    """Bits a token, with an interval where there are documents enough; no bits where no token was measured."""
    bits, tokens = of.bits[:, bucket], of.tokens[:, bucket]
    reached = tokens > 0
    if not reached.any():
        return {"tokens": 0, "documents": 0, "bits_per_token": None, "interval": None}
    result = scores.ratio(
        bits[reached],
        tokens[reached],
        samples=config.bootstrap_samples,
        confidence=config.confidence,
        seed=config.seed,
    )
    enough = reached.sum() >= config.min_slice_documents
    return {
        "tokens": int(tokens.sum()),
        "documents": int(reached.sum()),
        "bits_per_token": round(result.estimate, DECIMALS),
        "interval": [round(result.low, DECIMALS), round(result.high, DECIMALS)] if enough else None,
    }


# Windows of documents that are longer than the model takes, and batches of them. Arithmetic only.


@dataclass(frozen=True)
class Window:
    """Positions [start, end) of one document; only those from `scored_from` on are scored, the others are context."""

    document: int
    start: int
    end: int
    scored_from: int

    @property
    def length(self) -> int:
        return self.end - self.start


def windows(lengths: Sequence[int], sequence_length: int) -> list[Window]:
    """Cover every position of every document once: whole where it fits, else windows that overlap by half.

    A later window is moved back to full length, so what it scores has at least half a window of context.
    """
    stride = max(1, sequence_length // 2)
    results = []
    for document, length in enumerate(lengths):
        end = min(sequence_length, length)
        results.append(Window(document, start=0, end=end, scored_from=0))
        while end < length:
            scored_from, end = end, min(end + stride, length)
            results.append(Window(document, start=end - sequence_length, end=end, scored_from=scored_from))
    return results


def batches(results: Sequence[Window], positions: int) -> Iterator[list[Window]]:
    """Windows of similar length, longest first; padded to its longest, a batch of several takes at most `positions`."""
    batch: list[Window] = []
    for window in sorted(results, key=lambda window: -window.length):
        if batch and (len(batch) + 1) * batch[0].length > positions:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


BATCH_POSITIONS = 8192
"""Most positions, padding included, that one forward pass takes."""
NOT_SCORED = -100


@dataclass(frozen=True)
class Scored:
    """What a model made of documents, each with its end."""

    bits: NDArray[np.float64]
    """Of all tokens of a document, shape [documents]."""
    tokens: NDArray[np.int64]
    """Tokens of a document, shape [documents]."""
    correct: NDArray[np.int64]
    """Those that the model held for the likeliest, shape [documents]."""
    certainty: NDArray[np.float64]
    """How sure it was of the likeliest token, shape [documents, bins, 3]: see tasks/evaluation/scores.py."""
    positions: Positions


def batch_positions(model: Any) -> int:
    """Most positions of a batch of several rows: large vocabularies take fewer."""
    return min(BATCH_POSITIONS, WHOLE_LOGITS // model.config.vocab_size)


def context_of(model: Any, most: int) -> int:
    """Tokens that a model takes at once, at most `most`."""
    return min(most, getattr(model.config, "max_position_embeddings", most))


def score(model: Any, encoded: Encoded, *, context: int, rank: Rank) -> Scored:
    """Score each document and its end, with what its tokenizer puts before a document as left context, else end-of-document.

    Raises ValueError where the model gives no finite probability.
    """
    units = to_score(model, encoded, context=context)

    def computed() -> Iterator[Arrays]:
        for done, unit in enumerate(units, start=1):
            yield scored_unit(model, encoded, unit)
            rank.progress(done, len(units), f"{done} of {len(units)} batches of windows")

    return add_up(encoded, units, computed(), context=context)


def to_score(model: Any, encoded: Encoded, *, context: int) -> list[list[Window]]:
    """The batches that the documents are scored in, one behind the other: the same, whoever scores which."""
    lengths = encoded.lengths + len(encoded.context) - 1
    return list(batches(windows(lengths.tolist(), context), batch_positions(model)))


def scored_unit(model: Any, encoded: Encoded, batch: Sequence[Window]) -> Arrays:
    """What the model makes of one batch, as `_scores` says it."""
    names = ("scored", "lost", "right", "sure")
    return {name: part.numpy() for name, part in zip(names, _scores(model, batch, encoded), strict=True)}


def add_up(encoded: Encoded, units: Sequence[Sequence[Window]], parts: Iterable[Arrays], *, context: int) -> Scored:
    """The documents' scores from those of all batches, in their order. Raises ValueError for one that is not finite."""
    count = len(encoded.documents)
    positions = Positions.none(count, context)
    bits, correct, certainty = np.zeros(count), np.zeros(count, np.int64), no_certainty(count)
    for batch, part in zip(units, parts, strict=True):
        rows = np.array([window.document for window in batch])
        scored, lost, right, sure = part["scored"], part["lost"], part["right"], part["sure"]
        np.add.at(bits, rows, lost.sum(axis=1) / math.log(2))
        np.add.at(correct, rows, right.sum(axis=1))
        positions.add(rows, scored, lost)
        add_certainty(certainty, np.repeat(rows, scored.sum(axis=1)), sure[scored], right[scored])
    if not np.isfinite(bits).all():
        raise ValueError(
            f"the model gives no finite probability to {int((~np.isfinite(bits)).sum())} of {len(bits)} held-out "
            "documents: its weights are broken; train again with a lower training.learning_rate"
        )
    return Scored(bits=bits, tokens=encoded.scored, correct=correct, certainty=certainty, positions=positions)


@torch.inference_mode()
def _scores(
    model: torch.nn.Module, batch: Sequence[Window], encoded: Encoded
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each position, shape [windows, positions]: whether it is scored, nats, whether the likeliest token is right, and its
    probability; of one that is not scored, nats are 0 and nothing is right.

    Padding is on the right, where causal attention does not see it from any scored position: no mask is needed.
    """
    # What the model reads and what it should say, each of shape [windows, positions].
    shape = (len(batch), batch[0].length)
    inputs, targets = np.full(shape, encoded.eod_id), np.full(shape, NOT_SCORED)
    for row, window in enumerate(batch):
        read = np.concatenate((np.array(encoded.context, np.int64), encoded.documents[window.document]))
        wanted = read
        if encoded.answers is not None:
            wanted = np.where(encoded.answers[window.document], read, NOT_SCORED)
        first = max(window.scored_from, len(encoded.context) - 1)
        inputs[row, : window.length] = read[window.start : window.end]
        targets[row, first - window.start : window.length] = wanted[first + 1 : window.end + 1]
    inputs, targets = torch.from_numpy(inputs), torch.from_numpy(targets)
    device = getattr(model, "device", "cpu")
    entries = [_told(logits, targets[:, part].to(device)) for part, logits in logits_in_parts(model, inputs.to(device))]
    scored, lost, right, sure = (torch.cat(parts, dim=1) for parts in zip(*entries, strict=True))
    return scored, lost, right, sure


def _told(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `_scores` says, of some positions; the logits [windows, positions, vocabulary] are overwritten."""
    highest, likeliest = logits.max(dim=-1)
    wanted = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    spread = logits.sub_(highest.unsqueeze(-1)).exp_().sum(dim=-1)
    scored = targets != NOT_SCORED
    lost = torch.where(scored, (spread.log() + highest - wanted).double(), 0.0)
    return tuple(each.cpu() for each in (scored, lost, scored & (likeliest == targets), 1 / spread))
