"""The parts of all units as Megatron datasets, in the order of the input, without tokenising again.

Tokens and lengths are copied in chunks, so memory stays flat. What is merged appears at once: `.bin` first, `.idx` last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.common.errors import IntegrityError
from tasks.data.corpus.inputs import Unit
from tasks.data.tokenizing.units import Counts, Receipt, Work, mask_file, part_files, read_receipt
from tasks.formats.mmididx import mask_of, write_index

COPY_BYTES = 4 << 20
SHARDED = "train"
"""The split that may be several files; what is held out is small, and one."""


@dataclass(frozen=True)
class Output:
    """One dataset that was written."""

    split: str
    """Empty when there are no splits."""
    key: str
    """The field that it was made of."""
    prefix: Path
    """`.bin` and `.idx` come after it."""
    counts: Counts
    dtype: str

    def describe(self) -> dict[str, Any]:
        """As the command's JSON says it."""
        return {
            "split": self.split,
            "key": self.key,
            "bin": f"{self.prefix}.bin",
            "idx": f"{self.prefix}.idx",
            **asdict(self.counts),
            "dtype": self.dtype,
        }


def output_prefix(prefix: Path, split: str, key: str) -> Path:
    """`PREFIX_KEY_document`, with a split `PREFIX_SPLIT_KEY_document`: Megatron's names."""
    return Path("_".join(part for part in (str(prefix), split, key, "document") if part))


def gather(units: Sequence[Unit], work: Work, parts: Path) -> list[Receipt]:
    """The receipts of all units. Raises IntegrityError when one is missing."""
    receipts = [read_receipt(unit, work, parts) for unit in units]
    if missing := sum(receipt is None for receipt in receipts):
        raise IntegrityError(
            f"{parts} holds no whole part of {missing} of {len(units)} units", remedy="Encode them, then merge again."
        )
    return [receipt for receipt in receipts if receipt]


def merge(units: Sequence[Unit], work: Work, parts: Path, *, prefix: Path) -> list[Output]:
    """Write every dataset into the folder of the parts, `out-N.bin` and `out-N.idx`; `appear` puts them in place.

    Raises IntegrityError when a unit has no receipt, ValueError when a split stays without documents.
    """
    receipts = gather(units, work, parts)
    outputs = []
    for index, (split, key) in enumerate(work.outputs):
        counts = sum((receipt.counts[index] for receipt in receipts), Counts())
        if not counts.documents:
            raise ValueError(_empty(split, work))
        write_dataset(parts / f"out-{index}", index, receipts, work, parts)
        outputs.append(Output(split, key, output_prefix(prefix, split, key), counts, work.tokenizer.dtype.name))
    return outputs


@dataclass(frozen=True)
class TokenFile:
    """One of the datasets that a corpus becomes: the parts of neighbouring units."""

    name: str
    """`.bin` and `.idx` come after it."""
    index: int
    """In Work.outputs."""
    receipts: tuple[Receipt, ...]


def token_files(receipts: Sequence[Receipt], work: Work, *, most_bytes: float) -> list[TokenFile]:
    """The files of each split, in the order of the input: of the training split as many as keep each below `most_bytes`.

    A unit is in one file whole, so a file of one unit may be larger. Depends on the units alone, not on who merges.
    """
    files = []
    for index, (split, _) in enumerate(work.outputs):
        groups: list[list[Receipt]] = [[]]
        size = 0
        for receipt in receipts:
            more = receipt.counts[index].tokens * work.tokenizer.dtype.itemsize
            if split == SHARDED and size and size + more > most_bytes:
                groups.append([])
                size = 0
            groups[-1].append(receipt)
            size += more
        many = len(groups) > 1
        files += [
            TokenFile(f"{split}-{number:05d}_text_document" if many else f"{split}_text_document", index, tuple(group))
            for number, group in enumerate(groups)
        ]
    return files


def appear(outputs: Sequence[Output], parts: Path) -> None:
    """Put merged datasets in their places, every `.bin` before every `.idx`: a dataset with an index is whole."""
    withdraw(outputs)
    for suffix in (".bin", ".idx"):
        for index, output in enumerate(outputs):
            os.replace(parts / f"out-{index}{suffix}", f"{output.prefix}{suffix}")


def withdraw(outputs: Sequence[Output]) -> None:
    """Take the indexes of older datasets away: from now on nothing there looks whole."""
    for output in outputs:
        Path(f"{output.prefix}.idx").unlink(missing_ok=True)


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def write_dataset(prefix: Path, index: int, receipts: Sequence[Receipt], work: Work, parts: Path) -> None:
    """The parts of some units, of one of Work.outputs, as `PREFIX.bin` and `PREFIX.idx`; of conversations with their masks."""
    files = [part_files(parts, receipt.key, index) for receipt in receipts]
    with open(f"{prefix}.bin", "wb") as out:
        for source, _ in files:
            with open(source, "rb") as file:
                shutil.copyfileobj(file, out, COPY_BYTES)
        os.fsync(out.fileno())
    header = write_index(Path(f"{prefix}.idx"), [lengths for _, lengths in files], work.tokenizer.dtype)
    counts = sum((receipt.counts[index] for receipt in receipts), Counts())
    if work.chat:
        masked = mask_of(prefix)
        with open(f"{masked}.bin", "wb") as out:
            for receipt in receipts:
                with open(mask_file(parts, receipt.key, index), "rb") as file:
                    shutil.copyfileobj(file, out, COPY_BYTES)
            os.fsync(out.fileno())
        write_index(Path(f"{masked}.idx"), [lengths for _, lengths in files], np.dtype(np.uint8))
    if (header.documents, header.sequences) != (counts.documents, counts.sequences):
        raise IntegrityError(f"{parts}: the lengths of {prefix.name} are not those that the receipts count")


def _empty(split: str, work: Work) -> str:
    if not split:
        return "the input has no documents; name files that have some"
    share = work.splits.fractions[work.splits.names.index(split)]
    return f"the {split} split has no documents, its share is {share:g}; raise it, or name more input"
