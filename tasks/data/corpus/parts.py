"""One unit of a corpus, measured: its rows, signatures, findings and bad lines in a folder with a receipt.

A folder with a receipt is complete, and is not made again after a kill. What stands in it counts rows and lines from the
unit's beginning; tasks/data/corpus/profile.py puts the units together.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.base import digest
from tasks.config.data import CONVERSATIONS, ValidationConfig
from tasks.data.corpus import duplicates, measures, secrets
from tasks.data.corpus.conversations import CONVERSATION, longest_turn
from tasks.data.corpus.index import Index
from tasks.data.corpus.inputs import UNIT_BYTES, Shard, Unit, cut, find_shards
from tasks.data.corpus.measures import CLASSES, Texts
from tasks.data.corpus.reading import BadLine, Batch, read_strictly, read_unit
from tasks.data.corpus.tokens import Hashes, Words, ngrams, read_words

# What is counted while a unit is read, and how long each kind of work took.


WORDS = 4096
"""Buckets of the histogram of words."""


@dataclass
class Tally:
    """What is counted of one shard within one unit."""

    lines: int = 0
    documents: int = 0
    unreadable: int = 0
    bytes: int = 0
    characters: int = 0
    classes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(CLASSES), np.int64))


@dataclass
class Counts:
    """What is counted of one unit."""

    rows: int = 0
    read: int = 0
    shards: dict[int, Tally] = field(default_factory=dict)
    types: dict[str, Counter[str]] = field(default_factory=lambda: {"secret": Counter(), "personal": Counter()})
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros(WORDS, np.int64))
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        shards = {index: {**asdict(tally), "classes": tally.classes.tolist()} for index, tally in self.shards.items()}
        return {
            "rows": self.rows,
            "read": self.read,
            "shards": shards,
            "types": self.types,
            "seconds": self.seconds,
        }


# Which documents hold a document of a benchmark, by runs of 13 words that both have (Brown et al. 2020, appendix C).
#
# A document is contaminated when it holds at least half (SHARE) of the different runs of one benchmark document; a
# benchmark document of 5 to 12 words is one run, all of it. Shorter ones are not looked for: they occur by chance. A
# half, and not one run as in that paper, since licences and imports are longer than 13 words. Words:
# tasks/data/corpus/tokens.py.


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
            for text in batch:
                one = Texts.of([text])
                words = read_words(one.buffer, one.starts)
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


SAMPLE_BYTES = 2048
UNITS, LEAST_UNIT = 64, 1 << 20
"""A corpus is divided into about 64 units, of 1 to 64 MiB: enough for many ranks, and little is lost by a kill."""
MOST_UNITS = 32_768
"""Above 2 TiB units grow instead: eight for each core of 64 machines, and files that a folder and a store can hold."""
MOST_FINDINGS = 1000
"""Findings of one type that are written down; all are counted."""
LARGEST = 16 << 20
"""Bytes of a document that its words are read from at once; only the first part makes its signature."""
TEXT_FIELD = "text"
"""Of a benchmark that is no conversations."""
FORM = 2
"""Of a unit's part; one that a job of an earlier release began is made again."""
ROW = np.dtype(
    [
        ("shard", "<i4"), ("line", "<i8"), ("characters", "<i8"), ("bytes", "<i8"), ("control", "<f4"),
        ("replacement", "<f4"), ("repeated", "<f4"), ("secrets", "<i4"), ("personal", "<i4"), ("heldout", "?"),
        ("benchmark", "<i2"), ("shingled", "?"), ("high", "<u8"), ("low", "<u8"),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is measured, and how: the same for every unit of a corpus."""

    shards: tuple[Shard, ...]
    config: ValidationConfig
    heldout_fraction: float
    benchmarks: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the named benchmarks, in the order that the column `benchmark` counts."""
    against: tuple[Index, ...] = ()
    """Indices of earlier corpora, the first of which counts where several have a document."""

    @cached_property
    def key(self) -> str:
        """Digest of all that a unit's part depends on; a part under another key is made again."""
        shards = [(shard.name, shard.kind, shard.size) for shard in self.shards]
        sets = [(name, [(s.name, s.size) for s in find_shards([path])]) for name, path in self.benchmarks.items()]
        config = self.config
        bands = duplicates.rows_per_band(config.near_duplicate_similarity) if config.near_duplicates else 0
        turns = [config.max_turn_characters] if config.max_turn_characters else []
        return digest([FORM, shards, sets, [config.text_field, bands, self.heldout_fraction, *turns]])

    @property
    def threshold(self) -> float | None:
        """Similarity from which documents are near duplicates; None: they are not looked for."""
        return self.config.near_duplicate_similarity if self.config.near_duplicates else None

    @cached_property
    def numbers(self) -> dict[Path, int]:
        """The index of each shard by its path."""
        return {shard.path: index for index, shard in enumerate(self.shards)}

    def prepare(self) -> None:
        """Have ready what every worker needs, before they are forked: it is read once, and its memory is shared."""
        secrets.load()
        _ = (self.key, self.numbers, self.learnt)

    @cached_property
    def learnt(self) -> Benchmarks | None:
        if not self.benchmarks:
            return None
        return learn(_benchmark(name, folder, self.config.text_field) for name, folder in self.benchmarks.items())


def _benchmark(name: str, folder: Path, text_field: str) -> Iterator[list[str]]:
    """The texts of a benchmark, beside conversations also of plain text. Raises ValueError, naming it, when a line of it is no
    document.
    """
    try:
        units = cut(find_shards([folder]))
        if text_field == CONVERSATIONS and units:
            first = next(read_unit(units[0], (text_field,)), None)
            text_field = TEXT_FIELD if first and not first.lines else text_field
        for unit in units:
            yield from (batch.texts for batch in read_strictly(unit, (text_field,)))
    except ValueError as error:
        raise ValueError(f"benchmark {name}: {error}; fix the file: a benchmark with a bad line is not used") from error


@dataclass(frozen=True)
class _Files:
    rows: IO[Any]
    signatures: IO[Any]
    findings: IO[Any]
    unreadable: IO[Any]


def divide(shards: tuple[Shard, ...]) -> list[Unit]:
    """The units of a corpus; the same however many ranks there are, so that they outlive a restart with others."""
    total = sum(shard.size for shard in shards)
    return cut(shards, min(max(total // UNITS, LEAST_UNIT), max(UNIT_BYTES, total // MOST_UNITS)))


def receipt(folder: Path, unit: Unit, work: Work) -> dict[str, Any] | None:
    """The counts of a unit that is measured already, or None; also where its files are still coming from another machine."""
    place = part(folder, unit)
    try:
        result = json.loads((place / "receipt.json").read_text(encoding="utf-8"))
        whole = all((place / name).stat().st_size == size for name, size in result.get("files", {}).items())
    except FileNotFoundError:
        return None
    return dict(result) if whole and result["key"] == _unit_key(unit, work) else None


def part(folder: Path, unit: Unit) -> Path:
    """Where a unit's part lies."""
    return folder / f"unit-{unit.index:06d}"


def measure_unit(unit: Unit, work: Work, folder: Path) -> None:
    """Read a unit and write its part, unless it lies there already.

    Raises ValueError when a file of the unit cannot be read on.
    """
    if receipt(folder, unit, work):
        return
    temporary = folder / f".unit-{unit.index:06d}"
    for old in (temporary, part(folder, unit)):
        shutil.rmtree(old, ignore_errors=True)
    temporary.mkdir(parents=True)
    counts = Counts()
    with counts.timed("imports"):
        secrets.load()
    with _opened(temporary) as files:
        _measure(unit, work, counts, files)
    with counts.timed("runs"):
        _write_runs(temporary, work, counts.rows)
    counts.words.tofile(temporary / "words.bin")
    too_short = work.learnt.too_short if work.learnt else 0
    sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
    output = {"key": _unit_key(unit, work), "files": sizes, "too_short": too_short, **counts.plain()}
    (temporary / "receipt.json").write_text(json.dumps(output), encoding="utf-8")
    os.replace(temporary, part(folder, unit))


def _write_runs(folder: Path, work: Work, documents: int) -> None:
    """The unit's hashes and bands, sorted: what the ranges of tasks/data/corpus/duplicates.py are read from."""
    if documents:
        rows = np.memmap(folder / "rows.bin", ROW, "r")
        values = None
        if work.threshold:
            values = np.memmap(folder / "signatures.bin", np.uint16, "r", shape=(documents, duplicates.HASHES))
        duplicates.write_runs(folder, rows["high"], rows["low"], values, rows["shingled"], work.threshold or 0.0)


@contextmanager
def _opened(folder: Path) -> Iterator[_Files]:
    with (
        open(folder / "rows.bin", "wb") as rows,
        open(folder / "signatures.bin", "wb") as signatures,
        open(folder / "findings.jsonl", "w", encoding="utf-8") as findings,
        open(folder / "unreadable.jsonl", "w", encoding="utf-8") as unreadable,
    ):
        yield _Files(rows, signatures, findings, unreadable)


def _measure(unit: Unit, work: Work, counts: Counts, files: _Files) -> None:
    batches = read_unit(unit, (work.config.text_field,))
    before: dict[int, int] = {}
    piece = None
    while True:
        with counts.timed("read"):
            batch = next(batches, None)
        if batch is None:
            return
        if most := work.config.max_turn_characters:
            batch = _without_long_turns(batch, most)
        shard = work.numbers[batch.piece.shard.path]
        tally = counts.shards.setdefault(shard, Tally())
        if batch.piece is not piece:
            piece, before[shard] = batch.piece, tally.lines
        for bad in batch.bad:
            raw = bad.raw.decode("utf-8", "replace")
            output = {"shard": shard, "line": before[shard] + bad.line, "reason": bad.reason, "raw": raw}
            files.unreadable.write(json.dumps(output) + "\n")
        if batch.lines:
            _documents(batch, shard, before[shard], work, counts, files)
        tally.lines = max(
            [
                tally.lines,
                *(before[shard] + line for line in [*batch.lines[-1:], *(bad.line for bad in batch.bad[-1:])]),
            ]
        )
        tally.unreadable += len(batch.bad)
        counts.read += batch.bytes


def _without_long_turns(batch: Batch, most: int) -> Batch:
    """The batch with conversations that have a turn of more than `most` characters among what is bad."""
    longest = [longest_turn(conversation) for conversation in batch.columns[CONVERSATION]]
    long = [
        BadLine(
            line,
            f"turn {number} ({role}): it has {size} characters, more than validation.max_turn_characters {most}; shorten it, "
            "leave the record out, or raise that",
            b"",
        )
        for line, (size, number, role) in zip(batch.lines, longest, strict=True)
        if size > most
    ]
    fits = [size <= most for size, _, _ in longest]
    columns = {name: list(compress(column, fits)) for name, column in batch.columns.items()}
    bad = sorted([*batch.bad, *long], key=lambda one: one.line)
    return replace(batch, columns=columns, lines=list(compress(batch.lines, fits)), bad=bad)


def _documents(batch: Batch, shard: int, before: int, work: Work, counts: Counts, files: _Files) -> None:
    with counts.timed("cheap"):
        texts = Texts.of(batch.texts)
        rows = np.zeros(len(texts.texts), ROW)
        rows["characters"], rows["bytes"] = texts.characters, texts.sizes
        rows["control"] = measures.control_shares(texts)
        rows["replacement"] = measures.replacement_shares(texts)
        rows["repeated"] = measures.repeated_shares(texts)
        rows["heldout"] = measures.heldout(texts, work.heldout_fraction)
        hashes = measures.content_hashes(texts)
        rows["high"], rows["low"] = hashes[:, 0], hashes[:, 1]
        rows["shard"], rows["line"] = shard, np.asarray(batch.lines) + before
        tally = counts.shards[shard]
        tally.documents += len(rows)
        tally.bytes += int(rows["bytes"].sum())
        tally.characters += int(rows["characters"].sum())
        tally.classes += measures.classes(texts.histogram)
        counts.words += _sampled_words(texts, rows["low"])
    with counts.timed("secrets"):
        for item in secrets.find(texts):
            rows["secrets" if item.kind == "secret" else "personal"][item.document] += 1
            seen = counts.types[item.kind]
            seen[item.type] += 1
            if seen[item.type] <= MOST_FINDINGS:
                row = rows[item.document]
                place = {"row": counts.rows + item.document, "shard": int(row["shard"])}
                span = {"kind": item.kind, "type": item.type, "characters": [item.start, item.stop]}
                files.findings.write(json.dumps({**place, "line": int(row["line"]), **span}) + "\n")
    _words_of(texts, rows, work, counts, files)
    rows.tofile(files.rows)
    counts.rows += len(rows)


def _sampled_words(texts: Texts, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Words by hash, of the first SAMPLE_BYTES of every fourth document; which ones, their content says."""
    chosen = [texts.encoded[index][:SAMPLE_BYTES] for index in np.flatnonzero(hashes % np.uint64(4) == 0).tolist()]
    words = read_words(b"\n".join(chosen), np.zeros(1, np.int64))
    return np.bincount((words.hashes >> np.uint64(52)).astype(np.int64), minlength=WORDS)


def _words_of(texts: Texts, rows: NDArray[Any], work: Work, counts: Counts, files: _Files) -> None:
    """What is told by words: signatures of near duplicates, and benchmarks."""
    rows["benchmark"] = -1
    if not work.config.near_duplicates and not work.learnt:
        return
    for first, starts, buffer, opens in _slices(texts):
        with counts.timed("words"):
            words = read_words(buffer, starts)
        span = slice(first, first + len(starts) - 1)
        if work.learnt:
            with counts.timed("contamination"):
                rows["benchmark"][span] = np.maximum(rows["benchmark"][span], held(words, work.learnt))
        if work.config.near_duplicates and opens:
            with counts.timed("near"):
                values, rows["shingled"][span] = duplicates.signatures(words)
                values.tofile(files.signatures)


def _slices(texts: Texts) -> Iterator[tuple[int, NDArray[np.int64], bytes, bool]]:
    """What is looked at together, a batch or part of a huge one: first document, beginnings, buffer, whether it opens one."""
    if len(texts.buffer) <= LARGEST:
        yield 0, texts.starts, texts.buffer, True
        return
    for index, data in enumerate(texts.encoded):
        for begin in range(0, max(len(data), 1), LARGEST):
            piece = data[begin : begin + LARGEST]
            yield index, np.array([0, len(piece) + 1]), piece, begin == 0


def _unit_key(unit: Unit, work: Work) -> str:
    pieces = [[work.numbers[piece.shard.path], piece.start, piece.stop] for piece in unit.pieces]
    return digest([work.key, pieces])
