"""What one GPU of a pipeline stage computes for one micro batch: seconds of matmuls, attention and moved bytes. Pure.

Its rates are efficiency.py; what is sent between GPUs, traffic.py. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.planning import counts, efficiency
from tasks.planning.case import Network
from tasks.planning.efficiency import Rates
from tasks.planning.prediction import Division

NORMS_AND_RESIDUALS = 10
"""Numbers of width h that a layer's forward moves: two norms read and write one, two additions read two and write one."""
COPIES_OF_A_TOKEN = 8
"""Numbers of width h moved for each expert that a token goes to, forward: sorted by rank, sorted by expert, and both back, each
read and written."""
BYTES_OF_A_LOGIT = 30
"""Moved for one, forward and backward: written in 16 bits, read, kept as 32, its largest and its sum found, its gradient."""


@dataclass(frozen=True)
class Work:
    """Seconds of one micro batch."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound

    def times(self, number: float) -> Work:
        return Work(self.matmul * number, self.attention * number, self.memory_bound * number)

    def plus(self, other: Work) -> Work:
        return Work(
            self.matmul + other.matmul, self.attention + other.attention, self.memory_bound + other.memory_bound
        )


def layer_work(network: Network, division: Division, *, sequence: int, at: Rates, flash: bool, experts: bool) -> Work:
    """Of one layer, forward and backward, with what is computed again."""
    tokens = division.micro * sequence / division.cp
    forward_attention, backward_attention = efficiency.attention_seconds(
        sequence,
        counts.query_size(network) / division.tp,
        samples=division.micro / division.cp,
        at=at,
        flash=flash,
    )
    scores = 0.0 if flash else network.heads / division.tp * division.micro * sequence * (sequence / division.cp)
    forward_scores = efficiency.moving_seconds(scores * efficiency.SCORE_BYTES_FORWARD, at)
    backward_scores = efficiency.moving_seconds(scores * efficiency.SCORE_BYTES_BACKWARD, at)
    matrices = _matrices(network, division, tokens=tokens, at=at, experts=experts)
    numbers = _moved_bytes(network, division, tokens=tokens, at=at, experts=experts)
    moved = efficiency.moving_seconds(numbers * at.unfused, at)
    full = division.recompute == "full"
    core = full or (division.recompute == "selective" and not flash)
    again = passes(division)
    return Work(
        matmul=matrices * again,
        attention=forward_attention * (2 if core else 1) + backward_attention,
        memory_bound=moved * again + forward_scores * (2 if core else 1) + backward_scores,
    )


def passes(division: Division) -> float:
    """Forward passes that a layer's matrices and small kernels cost: one, two backward, and what is computed again.

    PyTorch's selective checkpointing computes every other matmul again (torchtitan); Megatron-LM's only attention's core.
    """
    if division.recompute == "full":
        return 4.0
    return 3.5 if division.recompute == "selective" and division.engine == "torch" else 3.0


def output_work(network: Network, division: Division, *, sequence: int, at: Rates) -> Work:
    """Of the output over the vocabulary and the loss, on the last stage."""
    tokens = division.micro * sequence / division.cp
    wide = network.vocab / division.tp
    return Work(
        matmul=3 * efficiency.matmul_seconds(tokens, wide, network.hidden, at),
        memory_bound=efficiency.moving_seconds(BYTES_OF_A_LOGIT * tokens * wide, at),
    )


def _matrices(network: Network, division: Division, *, tokens: float, at: Rates, experts: bool) -> float:
    """Seconds of a layer's matmuls forward."""
    hidden, query = network.hidden, counts.query_size(network) / division.tp
    keys = counts.kv_size(network) / min(division.tp, counts.kv_heads(network))
    seconds = efficiency.matmul_seconds(tokens, query + 2 * keys, hidden, at)
    seconds += efficiency.matmul_seconds(tokens, hidden, query, at)
    mixture = network.experts if experts else None
    if mixture is None:
        return seconds + _feed_forward(network, counts.ffn_size(network) / division.tp, tokens=tokens, at=at)
    width = counts.expert_ffn_size(network) / division.tp
    local = mixture.count / division.ep
    each = tokens * mixture.active / local
    seconds += local * _feed_forward(network, width, tokens=each, at=at)
    if mixture.shared:
        seconds += _feed_forward(network, mixture.shared * width, tokens=tokens, at=at)
    return seconds


def _feed_forward(network: Network, width: float, *, tokens: float, at: Rates) -> float:
    up = counts.ffn_matrices(network) - 1
    return efficiency.matmul_seconds(tokens, up * width, network.hidden, at) + efficiency.matmul_seconds(
        tokens, network.hidden, width, at
    )


def _moved_bytes(network: Network, division: Division, *, tokens: float, at: Rates, experts: bool) -> float:
    """Bytes that a layer's forward moves outside of its matmuls and scores.

    Rotated or transposed queries, keys and values are read and written; an activation is read, with its gate, and written. With
    experts each token is sorted to its experts and added up again.
    """
    share = division.tp if division.sequence_parallel else 1
    mixture = network.experts if experts else None
    width: float = counts.ffn_size(network)
    if mixture:
        width = (mixture.active + mixture.shared) * counts.expert_ffn_size(network)
    numbers = NORMS_AND_RESIDUALS * network.hidden / share
    numbers += 2 * (counts.query_size(network) + 2 * counts.kv_size(network)) / division.tp
    numbers += counts.ffn_matrices(network) * width / division.tp
    numbers += COPIES_OF_A_TOKEN * mixture.active * network.hidden / share if mixture else 0
    return numbers * tokens * at.element_bytes
