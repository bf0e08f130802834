"""One unit of a corpus as part files, and the receipt that says that they are whole.

A part lies in a folder beside the output until all are merged (tasks/data/tokenizing/merging.py). Its name is the digest of all
that its bytes depend on, so a second start takes what is there and does the rest, and nothing stale is ever taken.

Several processes of one machine encode units at once; how they live and die is tasks/data/corpus/pool.py.

Which split a document belongs to: by the hash of its content, so that it never changes sides.

Pure arithmetic; who writes the splits is tasks/data/tokenizing/units.py.

Several datasets with weights, as Megatron's arguments take them.

Names and forms after NVIDIA/Megatron-LM megatron/training/arguments.py (_add_data_args) and get_blend_from_list.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tasks.data.corpus.inputs import Shard, Unit
from tasks.data.corpus.pool import on_processes
from tasks.data.corpus.reading import Batch, read_strictly
from tasks.data.tokenizing.checking import look
from tasks.data.tokenizing.engine import Engine, frame, require_agreement
from tasks.data.tokenizing.tokenizer import OpenedTokenizer

SPLITS = {"train": "train", "heldout": "valid", "valid": "valid", "test": "test"}
"""Megatron's name of each split."""


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture."""

    weight: float
    """Share of the samples, relative to the other weights."""
    prefix: Path
    """`.bin` and `.idx` come after it."""


def parse_mixture(words: Sequence[str]) -> tuple[Part, ...]:
    """`WEIGHT PREFIX WEIGHT PREFIX ...` as parts.

    Raises ValueError when a weight is no positive number, a dataset is named twice, is not there, or stores another type;
    IntegrityError when one is not whole.
    """
    if not words or len(words) % 2:
        raise ValueError(
            "name a weight and a prefix for every dataset: 0.7 data/code_text_document 0.3 data/prose_text_document"
        )
    parts = tuple(Part(_weight(words[i]), Path(words[i + 1])) for i in range(0, len(words), 2))
    names = [part.prefix.resolve() for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is named twice; give it one weight")
    for part in parts:
        if not Path(f"{part.prefix}.idx").is_file():
            raise ValueError(f"{part.prefix}.idx does not exist; name the prefix of a dataset, without .bin or .idx")
    types = {look(part.prefix, samples=1).dtype for part in parts}
    if len(types) > 1:
        raise ValueError(f"the datasets store {' and '.join(sorted(types))}: they are of different tokenizers")
    return parts


def blend(parts: Sequence[Part]) -> list[str]:
    """A list that Megatron reads as a mixture: weights and prefixes in turn, or one prefix alone."""
    if len(parts) == 1:
        return [str(parts[0].prefix)]
    total = sum(part.weight for part in parts)
    return [word for part in parts for word in (f"{part.weight / total:.9g}", str(part.prefix))]


def data_arguments(parts: Sequence[Part]) -> tuple[str, ...]:
    """Arguments for one mixture, which Megatron divides by its own --split."""
    return ("--data-path", *blend(parts))


def blend_file(splits: Mapping[str, Sequence[Part]]) -> dict[str, list[str] | None]:
    """The content of the file that --per-split-data-args-path names, which has all three splits."""
    named = {SPLITS[split]: blend(parts) for split, parts in splits.items()}
    return {split: named.get(split) for split in ("train", "valid", "test")}


def _weight(word: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no weight: a weight stands before every prefix") from None
    if not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"weight {word} must be a number above 0")
    return weight


NAMES = {1: ("",), 2: ("train", "heldout"), 3: ("train", "valid", "test")}


@dataclass(frozen=True)
class Splits:
    """Shares of the documents, in the order of NAMES: the first is what trains."""

    fractions: tuple[float, ...] = (1.0,)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the splits; one without a name when everything goes into one file."""
        return NAMES[len(self.fractions)]

    def of(self, text: str) -> int:
        """The index of a document's split."""
        return split_of(text, self.fractions) if len(self.fractions) > 1 else 0


def split_of(text: str, fractions: tuple[float, ...]) -> int:
    """Which split a document belongs to, the last for the smallest hashes.

    The first 8 bytes of its sha256 are a number below 2^64; with (train, held out) it is held out below the second share.
    """
    first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    share = 0.0
    for index in range(len(fractions) - 1, 0, -1):
        share += fractions[index]
        if first < share * 2**64:
            return index
    return 0


def parse_splits(text: str) -> Splits:
    """Shares as `0.98,0.02` says them; nothing is one split. Raises ValueError when they are no shares of a whole."""
    if not text:
        return Splits()
    try:
        fractions = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--split {text!r} is no list of numbers; write for example 0.98,0.02") from None
    if len(fractions) not in (2, 3) or not all(0 < share < 1 for share in fractions):
        raise ValueError(
            f"--split {text} must have two or three shares between 0 and 1: train,heldout or train,valid,test"
        )
    if not math.isclose(sum(fractions), 1.0, abs_tol=1e-9):
        raise ValueError(f"--split {text} adds up to {sum(fractions):g}; the shares must add up to 1")
    return Splits(fractions)


LEAST_UNIT = 1 << 20
MOST_UNIT = 64 << 20
UNITS, MOST_UNITS = 256, 32_768


@dataclass(frozen=True)
class Work:
    """What is done to every document."""

    tokenizer: OpenedTokenizer
    fields: tuple[str, ...] = ("text",)
    splits: Splits = field(default_factory=Splits)
    append_eod: bool = True
    immutable: bool = False
    """Whether the input is an artifact, whose files never change: machines know them by name, wherever their copies lie."""

    @property
    def eod(self) -> int | None:
        return self.tokenizer.require_eod() if self.append_eod else None

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """Split and field of each dataset, in the order of the part files."""
        return [(split, name) for split in self.splits.names for name in self.fields]

    def describe(self) -> dict[str, Any]:
        """All that the bytes depend on beside the text."""
        return {
            "format": 1,
            "tokenizer": self.tokenizer.digest,
            "fields": list(self.fields),
            "splits": list(self.splits.fractions),
            "append_eod": self.append_eod,
        }


@dataclass(frozen=True)
class Counts:
    """How much one dataset, or a part of it, holds."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of the text, in UTF-8."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.documents + other.documents,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
        )


@dataclass(frozen=True)
class Receipt:
    """That the parts of a unit are whole, and what they hold."""

    key: str
    counts: tuple[Counts, ...]
    """In the order of Work.outputs."""
    bytes_read: int
    engine: str


def unit_bytes(shards: Iterable[Shard]) -> int:
    """Size of a unit: enough of them for many workers, few enough to keep; never by the number of workers, for resuming."""
    total = sum(shard.size for shard in shards)
    return min(max(total // UNITS, LEAST_UNIT), max(MOST_UNIT, total // MOST_UNITS))


def unit_key(unit: Unit, work: Work) -> str:
    """The digest of all that a unit's parts depend on."""
    return hashlib.sha256(json.dumps(_dependencies(unit, work), sort_keys=True).encode()).hexdigest()[:32]


def part_files(parts: Path, key: str, output: int) -> tuple[Path, Path]:
    """Where a unit's tokens and the lengths of its documents (int32) lie."""
    return parts / f"{key}.{output}.bin", parts / f"{key}.{output}.len"


def read_receipt(unit: Unit, work: Work, parts: Path) -> Receipt | None:
    """The receipt of a unit that is done; None when it is not, or its files have not the size that it says."""
    key = unit_key(unit, work)
    try:
        output = json.loads((parts / f"{key}.json").read_text(encoding="utf-8"))
        receipt = Receipt(
            key, tuple(Counts(**counts) for counts in output["counts"]), output["bytes_read"], output["engine"]
        )
        sizes = [[path.stat().st_size for path in part_files(parts, key, i)] for i in range(len(receipt.counts))]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    width = work.tokenizer.dtype.itemsize
    whole = [[counts.tokens * width, counts.documents * 4] for counts in receipt.counts]
    return receipt if sizes == whole and len(whole) == len(work.outputs) else None


def encode_unit(
    unit: Unit, work: Work, parts: Path, *, engine: Engine, report: Callable[[int], None] = lambda read: None
) -> Receipt:
    """Write the parts of one unit, then its receipt; `report` hears the bytes that were read.

    Raises ValueError, naming shard and line, at the first line that is no document; Disagreement when the engine does not give
    the tokens of `tokenizers` for a sample of the unit.
    """
    key = unit_key(unit, work)
    counts = [Counts()] * len(work.outputs)
    read = 0
    with ExitStack() as stack:
        files: list[list[IO[bytes]]] = [
            [stack.enter_context(open(path, "wb")) for path in part_files(parts, key, i)] for i in range(len(counts))
        ]
        for number, batch in enumerate(read_strictly(unit, work.fields)):
            if number == 0:
                require_agreement(engine, work.tokenizer, batch.texts)
            added = _encode(batch, work, engine=engine, files=files)
            counts = [before + more for before, more in zip(counts, added, strict=True)]
            read += batch.bytes
            report(batch.bytes)
        for file in (file for pair in files for file in pair):
            file.flush()
            os.fsync(file.fileno())
    receipt = Receipt(key, tuple(counts), read, engine.name)
    _write(parts / f"{key}.json", {**_dependencies(unit, work), **asdict(receipt)})
    return receipt


def _encode(batch: Batch, work: Work, *, engine: Engine, files: list[list[IO[bytes]]]) -> list[Counts]:
    first = batch.columns[work.fields[0]]
    sides = [work.splits.of(text) for text in first] if len(work.splits.names) > 1 else None
    added = []
    for index, name in enumerate(work.fields * len(work.splits.names)):
        side = index // len(work.fields)
        texts = batch.columns[name]
        if sides is not None:
            texts = [text for text, at in zip(texts, sides, strict=True) if at == side]
        added.append(_append(texts, work, engine=engine, files=files[index]))
    return added


def _append(texts: list[str], work: Work, *, engine: Engine, files: list[IO[bytes]]) -> Counts:
    tokens, lengths = frame(engine.encode(texts), work.tokenizer, work.eod)
    files[0].write(tokens.data)
    files[1].write(lengths.data)
    size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    return Counts(len(lengths), int((lengths > 0).sum()), len(tokens), size)


def _dependencies(unit: Unit, work: Work) -> dict[str, Any]:
    pieces = [
        {
            "shard": piece.shard.name if work.immutable else str(piece.shard.path.resolve()),
            "size": piece.shard.size,
            "modified": 0 if work.immutable else piece.shard.modified,
            "kind": piece.shard.kind,
            "start": piece.start,
            "stop": piece.stop,
        }
        for piece in unit.pieces
    ]
    return {**work.describe(), "pieces": pieces}


def _write(path: Path, value: dict[str, Any]) -> None:
    """A JSON file that is there whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def encode_parallel(
    units: Sequence[Unit],
    work: Work,
    parts: Path,
    *,
    engine: Engine,
    workers: int,
    report: Callable[[int], None] = lambda read: None,
) -> int:
    """Encode what has no receipt yet on `workers` processes; returns how many units were there already.

    `report` hears the bytes that were read, in this process. Raises what a worker raised, after all of them are gone.
    """
    parts.mkdir(parents=True, exist_ok=True)
    receipts = [read_receipt(unit, work, parts) for unit in units]
    left = [unit for unit, receipt in zip(units, receipts, strict=True) if not receipt]
    already = sum(receipt.bytes_read for receipt in receipts if receipt)

    def do(unit: Unit, report: Callable[[int], None]) -> None:
        encode_unit(unit, work, parts, engine=engine, report=report)

    on_processes(left, do, workers=workers, already=already, report=report)
    return len(units) - len(left)
