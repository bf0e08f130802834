"""Near duplicates between the corpora of a mixture across the split: what one holds out, and training reads of another.

Equal documents are on the same side in every corpus, by the hash of their content; nearly equal ones are not, and validation
looks at one corpus at a time (tasks/data/corpus/duplicates.py, whose signatures and similarity are used here). Held-out
documents of all corpora are kept as signatures, 256 bytes each; training documents are read once and forgotten. See
docs/training.md, "Data".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasks.common.process import read_json, write_json
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.data.corpus import duplicates
from tasks.data.corpus.measures import Texts
from tasks.data.corpus.tokens import read_words
from tasks.data.tokenizing.tokenizer import around
from tasks.formats.mmididx import IndexedTokens, open_split, open_tokens
from tasks.jobs.data.samples import TRAIN
from tasks.jobs.data.sources import TOKENIZER, corpora, shares_by_name
from tasks.jobs.evaluation.heldout import HELDOUT
from tasks.jobs.node.runtime import Rank

SIMILARITY = 0.8
"""From which on two documents are near duplicates, as `validation.near_duplicate_similarity` has it by default."""
AT_ONCE = 4 << 20
"""Tokens that are decoded together, but for a document that is longer."""
MOST = 64
"""Held-out documents of one bucket that a document is compared with: boilerplate is no reason to compare all with all."""
FILE = "crossing.json"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Crossing:
    """Held-out documents of a corpus that nearly repeat a training document of another one."""

    corpus: str
    heldout: int
    crossed: int
    others: tuple[str, ...]
    """Names of the corpora that train on them."""

    @property
    def share(self) -> float:
        return self.crossed / self.heldout if self.heldout else 0.0


def require_apart(rank: Rank, config: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raise ValueError when more of a corpus's held-out documents than may be are trained on in another corpus.

    Rank 0 looks, once a job; the others wait until it has. The launcher ends them with it.
    """
    if not config.mixture or execution.max_crossing_share == 1:
        return
    path = rank.folder / FILE
    if rank.rank == 0 and not path.exists():
        folders = dict(zip(shares_by_name(config), corpora(rank.inputs, config), strict=True))
        write_json(path, [vars(each) for each in crossings(folders, rank)])
    while not path.exists():
        time.sleep(POLL_SECONDS)
    for entry in read_json(path) or ():
        result = Crossing(**{**entry, "others": tuple(entry["others"])})
        if not result.crossed:
            continue
        others, most = ", ".join(result.others), execution.max_crossing_share
        text = f"{result.crossed} of {result.heldout} held-out documents of {result.corpus} ({result.share:.1%})"
        text += f" nearly repeat documents that training reads of {others}"
        if result.share > most:
            raise ValueError(
                f"{text}; execution.max_crossing_share is {most:g}. Publish {result.corpus} and {others} as "
                "one dataset, of which validation sets near duplicates aside, or raise execution.max_crossing_share"
            )
        print(text, flush=True)


def crossings(folders: Mapping[str, Path], rank: Rank) -> list[Crossing]:
    """What is held out and trained on, of each corpus; `folders` are the tokens by the names of their corpora."""
    held = {name: path for name, path in folders.items() if (path / f"{HELDOUT}.idx").exists()}
    if not held:
        return []
    tokenizer = Tokenizer.from_file(str(next(iter(folders.values())) / TOKENIZER))
    names = list(folders)
    signed = {
        name: _Signed.of(texts for texts, _ in _batches(open_tokens(path / HELDOUT), tokenizer))
        for name, path in held.items()
    }
    owner = np.repeat([names.index(name) for name in held], [len(each.values) for each in signed.values()])
    known = _Known(_Signed.together(list(signed.values())), owner)
    opened = [open_split(path, TRAIN) for path in folders.values()]
    total, read = sum(len(each.tokens) for each in opened), 0
    for number, indexed in enumerate(opened):
        for texts, tokens in _batches(indexed, tokenizer):
            known.meet(_Signed.of([texts]), number)
            read += tokens
            rank.progress(read, total, f"{names[number]} against what the other corpora hold out")
    return [known.told(number, names) for number in range(len(names)) if names[number] in held]


@dataclass(frozen=True)
class _Signed:
    """Signatures of documents, shape [documents, HASHES], and which documents have one."""

    values: duplicates.Signatures
    has: NDArray[np.bool_]

    @classmethod
    def of(cls, batches: Any) -> _Signed:
        """Of batches of texts, one after the other."""
        made = []
        for texts in map(Texts.of, batches):
            made.append(cls(*duplicates.signatures(read_words(texts.buffer, texts.starts))))
        return cls.together(made)

    @classmethod
    def together(cls, parts: list[_Signed]) -> _Signed:
        if not parts:
            return cls(np.zeros((0, duplicates.HASHES), np.uint16), np.zeros(0, np.bool_))
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.has for part in parts]))

    def keys(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Of each document and band a key, equal where the band is, and the document's row."""
        rows = np.flatnonzero(self.has)
        records = duplicates.band_records(rows, self.values[rows], duplicates.rows_per_band(SIMILARITY))
        return records["key"], records["row"]


class _Known:
    """Held-out documents of all corpora by their bands. State: in which other corpora each was met."""

    def __init__(self, signed: _Signed, owner: NDArray[np.int64]) -> None:
        """`owner` is the number of each document's corpus, shape [documents]."""
        self._signed, self._owner = signed, owner
        keys, rows = signed.keys()
        order = np.argsort(keys, kind="stable")
        self._keys, self._rows = keys[order], rows[order]
        self._met: dict[int, set[int]] = {}
        """Rows by the number of the corpus that trains on them, for each corpus that does."""

    def meet(self, signed: _Signed, corpus: int) -> None:
        """Note which of them documents of a corpus's training split nearly repeat."""
        keys, rows = signed.keys()
        first = np.searchsorted(self._keys, keys, "left")
        counts = np.minimum(np.searchsorted(self._keys, keys, "right") - first, MOST)
        places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        theirs, mine = self._rows[places], np.repeat(rows, counts)
        other = self._owner[theirs] != corpus
        pairs = np.unique(np.stack((theirs[other], mine[other]), axis=1), axis=0)
        for start in range(0, len(pairs), duplicates.CHUNK):
            held, trained = pairs[start : start + duplicates.CHUNK].T
            alike = (self._signed.values[held] == signed.values[trained]).mean(axis=1) >= SIMILARITY
            self._met.setdefault(corpus, set()).update(held[alike].tolist())

    def told(self, corpus: int, names: list[str]) -> Crossing:
        mine = set(np.flatnonzero(self._owner == corpus).tolist())
        by = {names[other]: mine & met for other, met in self._met.items()}
        crossed = set[int]().union(*by.values())
        return Crossing(names[corpus], len(mine), len(crossed), tuple(name for name, met in by.items() if met))


def _batches(indexed: IndexedTokens, tokenizer: Tokenizer) -> Iterator[tuple[list[str], int]]:
    """Documents as text, about AT_ONCE tokens together, and how many tokens they have."""
    before, after = around(tokenizer)
    batch: list[list[int]] = []
    count = 0
    for start, end in pairwise(indexed.boundaries.tolist()):
        batch.append(indexed.tokens[start + len(before) : max(start, end - 1 - len(after))].tolist())
        count += end - start
        if count >= AT_ONCE:
            yield tokenizer.decode_batch(batch, skip_special_tokens=False), count
            batch, count = [], 0
    if batch:
        yield tokenizer.decode_batch(batch, skip_special_tokens=False), count
