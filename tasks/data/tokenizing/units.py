"""One unit of a corpus as part files, and the receipt that says that they are whole.

A part lies in a folder beside the output until all are merged (tasks/data/tokenizing/merging.py). Its name is the digest of all
that its bytes depend on, so a second start takes what is there and does the rest, and nothing stale is ever taken.

Several processes of one machine encode units at once; how they live and die is tasks/data/corpus/pool.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from tasks.data.corpus.conversations import CONVERSATION
from tasks.data.corpus.inputs import Shard, Unit, line_of
from tasks.data.corpus.pool import on_processes
from tasks.data.corpus.reading import Batch, are_conversations, read_strictly
from tasks.data.tokenizing.chat import ChatEncoder
from tasks.data.tokenizing.engine import Engine, frame, require_agreement
from tasks.data.tokenizing.splits import Splits
from tasks.data.tokenizing.tokenizer import OpenedTokenizer

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
    chat: ChatEncoder | None = None
    """What encodes conversations; None: documents are text."""
    immutable: bool = False
    """Whether the input is an artifact, whose files never change: machines know them by name, wherever their copies lie."""

    def __post_init__(self) -> None:
        if self.chat is None and are_conversations(self.fields):
            raise ValueError(
                f"the field {self.fields[0]} holds conversations, which are written by a chat template: use the stage "
                "preprocess of a retraining, with preprocessing.text_field messages"
            )

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
            **({"chat": [self.chat.template.source, self.chat.template.special]} if self.chat else {}),
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
    """Where a unit's tokens and the lengths of its documents (int32) lie; of conversations, a mask beside them: `mask_file`."""
    return parts / f"{key}.{output}.bin", parts / f"{key}.{output}.len"


def mask_file(parts: Path, key: str, output: int) -> Path:
    """Where it lies which of a unit's tokens are of answers (uint8), of conversations."""
    return parts / f"{key}.{output}.mask"


def read_receipt(unit: Unit, work: Work, parts: Path) -> Receipt | None:
    """The receipt of a unit that is done; None when it is not, or its files have not the size that it says."""
    key = unit_key(unit, work)
    try:
        output = json.loads((parts / f"{key}.json").read_text(encoding="utf-8"))
        receipt = Receipt(
            key, tuple(Counts(**counts) for counts in output["counts"]), output["bytes_read"], output["engine"]
        )
        masks = [mask_file(parts, key, i).stat().st_size for i in range(len(receipt.counts))] if work.chat else []
        sizes = [[path.stat().st_size for path in part_files(parts, key, i)] for i in range(len(receipt.counts))]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    width = work.tokenizer.dtype.itemsize
    whole = [[counts.tokens * width, counts.documents * 4] for counts in receipt.counts]
    masked = not work.chat or masks == [counts.tokens for counts in receipt.counts]
    return receipt if masked and sizes == whole and len(whole) == len(work.outputs) else None


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
            [
                stack.enter_context(open(path, "wb"))
                for path in (*part_files(parts, key, i), *([mask_file(parts, key, i)] if work.chat else []))
            ]
            for i in range(len(counts))
        ]
        for number, batch in enumerate(read_strictly(unit, work.fields)):
            if number == 0 and not work.chat:
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
    if work.chat:
        return _encode_chats(batch, work, work.chat, files=files)
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


def _encode_chats(batch: Batch, work: Work, chat: ChatEncoder, *, files: list[list[IO[bytes]]]) -> list[Counts]:
    """Conversations, by the hash of their text in their split. Raises ValueError that names shard and line."""
    added = [Counts()] * len(files)
    for line, text, conversation in zip(batch.lines, batch.texts, batch.columns[CONVERSATION], strict=True):
        try:
            encoded = chat.encode(conversation)
        except ValueError as error:
            shard, line = batch.piece.shard.name, line_of(batch.piece, line)
            raise ValueError(f"{shard}:{line}: {error}") from error
        side = work.splits.of(text)
        tokens, lengths, mask = files[side]
        tokens.write(encoded.tokens.astype(work.tokenizer.dtype).data)
        lengths.write(np.int32(len(encoded.tokens)).data)
        mask.write(encoded.answers.data)
        added[side] += Counts(1, 1, len(encoded.tokens), len(text.encode()))
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
