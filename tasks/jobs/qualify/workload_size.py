"""What the qualification knows of the training run to come: its network's size and FLOPs, by tasks/planning."""

from __future__ import annotations

from tasks.jobs.qualify.bench import Bench
from tasks.planning.size import flops_per_token_megatron, parameter_count

VOCABULARY = 32_000
"""Entries where nobody says: the tokenizer may not be trained yet. That of Llama 2."""


def vocabulary(bench: Bench) -> int:
    """Entries of the vocabulary, as the job's settings say (`vocab_size`)."""
    return int(bench.rank.settings.get("vocab_size", VOCABULARY))


def parameters(bench: Bench) -> int:
    """Of the configured network."""
    return parameter_count(bench.training.network, vocabulary(bench), positions=bench.training.sequence_length)


def flops_per_token(bench: Bench) -> int:
    """By Megatron-LM's convention."""
    length = bench.training.sequence_length
    return flops_per_token_megatron(bench.training.network, vocabulary(bench), sequence_length=length)
