"""Which documents hold a document of a benchmark, by runs of 13 words that both have (Brown et al. 2020, appendix C).

A document is contaminated when it holds at least half (SHARE) of the different runs of one benchmark document; a benchmark
document of 5 to 12 words is one run, all of it. Shorter ones are not looked for: they occur by chance. A half, and not one
run as in that paper, since licences and imports are longer than 13 words. Words: tasks/data/corpus/tokens.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.measures import Texts
from tasks.data.corpus.tokens import Hashes, Words, ngrams, read_words

NGRAM = 13
SHORTEST = 5
SHARE = 0.5
MOST_RUNS = 4_000_000
"""Runs of all benchmarks together that are held in memory: 24 bytes each, in every rank."""
_SIEVE_BITS = 22


@dataclass(frozen=True)
class Runs:
    """The runs of one length, sorted; one may belong to several benchmark documents."""

    length: int
    hashes: Hashes
    documents: NDArray[np.int32]
    sieve: NDArray[np.bool_]
    """Whether any hash begins with these bits: most runs of a corpus are told off here."""


@dataclass(frozen=True)
class Benchmarks:
    """What training must not see."""

    runs: tuple[Runs, ...]
    needed: NDArray[np.int32]
    """How many different runs of a benchmark document make it held."""
    benchmark: NDArray[np.int16]
    """The benchmark that each document belongs to."""
    too_short: int
    """Documents that are not looked for."""


def learn(benchmarks: Iterable[Iterable[list[str]]], *, most: int = MOST_RUNS) -> Benchmarks:
    """Benchmarks from their documents, given in batches. Raises ValueError when they have too many runs."""
    pairs: dict[int, list[tuple[Hashes, NDArray[np.int32]]]] = {}
    needed: list[int] = []
    owner: list[int] = []
    too_short = total = 0
    for index, batches in enumerate(benchmarks):
        for batch in batches:
            for words in _single(batch):
                length = min(NGRAM, len(words.hashes))
                if length < SHORTEST:
                    too_short += 1
                    continue
                hashes = np.unique(ngrams(words, length).hashes)
                pairs.setdefault(length, []).append((hashes, np.full(len(hashes), len(needed), np.int32)))
                needed.append(max(1, int(np.ceil(SHARE * len(hashes)))))
                owner.append(index)
                total += len(hashes)
        if total > most:
            raise ValueError(
                f"the benchmarks have more than {most} runs of {NGRAM} words, which is what is held in memory; "
                f"take large ones out of validation.benchmarks: they are corpora"
            )
    runs = tuple(_runs(length, item) for length, item in sorted(pairs.items()))
    return Benchmarks(runs, np.array(needed, np.int32), np.array(owner, np.int16), too_short)


def held(words: Words, benchmarks: Benchmarks) -> NDArray[np.int16]:
    """The benchmark that each document holds a document of (of several the one with most runs), or -1."""
    result = np.full(len(words.bounds) - 1, -1, np.int16)
    results: dict[int, Counter[int]] = {}
    for runs in benchmarks.runs:
        ours = ngrams(words, runs.length)
        places = np.flatnonzero(runs.sieve[ours.hashes >> np.uint64(64 - _SIEVE_BITS)])
        if not len(places):
            continue
        owners = np.searchsorted(ours.bounds, places, side="right") - 1
        documents, firsts = np.unique(owners, return_index=True)
        for document, hits in zip(documents.tolist(), np.split(ours.hashes[places], firsts[1:]), strict=True):
            results.setdefault(document, Counter()).update(_owners(runs, np.unique(hits)))
    for document, counts in results.items():
        fits = [(count, -index) for index, count in counts.items() if count >= benchmarks.needed[index]]
        if fits:
            result[document] = benchmarks.benchmark[-max(fits)[1]]
    return result


def _owners(runs: Runs, hashes: Hashes) -> list[int]:
    first = np.searchsorted(runs.hashes, hashes, side="left")
    last = np.searchsorted(runs.hashes, hashes, side="right")
    return [int(owner) for low, high in zip(first, last, strict=True) for owner in runs.documents[low:high]]


def _runs(length: int, results: list[tuple[Hashes, NDArray[np.int32]]]) -> Runs:
    hashes, documents = (np.concatenate(parts) for parts in zip(*results, strict=True))
    order = np.argsort(hashes, kind="stable")
    sieve = np.zeros(1 << _SIEVE_BITS, np.bool_)
    sieve[hashes >> np.uint64(64 - _SIEVE_BITS)] = True
    return Runs(length, hashes[order], documents[order], sieve)


def _single(texts: list[str]) -> Iterable[Words]:
    for text in texts:
        one = Texts.of([text])
        yield read_words(one.buffer, one.starts)
