"""What the qualification knows of the training run to come: its network's size and FLOPs, by tasks/planning."""

from __future__ import annotations

from tasks.jobs.qualify.bench import Bench
from tasks.planning.case import Network
from tasks.planning.counts import model_flops_per_token, parameter_count

VOCABULARY = 32_000
"""Entries where nobody says: the tokenizer may not be trained yet. That of Llama 2."""


def vocabulary(bench: Bench) -> int:
    """Entries of the vocabulary, as the job's settings say (`vocab_size`)."""
    return int(bench.rank.settings.get("vocab_size", VOCABULARY))


def parameters(bench: Bench) -> int:
    """Of the configured network."""
    return parameter_count(_network(bench), bench.training.sequence_length)


def flops_per_token(bench: Bench) -> int:
    """By Megatron-LM's convention."""
    return model_flops_per_token(_network(bench), bench.training.sequence_length)


def _network(bench: Bench) -> Network:
    return Network.of_config(bench.training.network, vocabulary(bench))
