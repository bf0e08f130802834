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

from tasks.common.errors import IntegrityError
from tasks.data.corpus.inputs import Unit
from tasks.data.tokenizing.units import Counts, Receipt, Work, part_files, read_receipt
from tasks.formats.mmididx import write_index

COPY_BYTES = 4 << 20


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
    return [_merge_one(index, receipts, work, parts, prefix=prefix) for index in range(len(work.outputs))]


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


def _merge_one(index: int, receipts: Sequence[Receipt], work: Work, parts: Path, *, prefix: Path) -> Output:
    split, key = work.outputs[index]
    counts = sum((receipt.counts[index] for receipt in receipts), Counts())
    if not counts.documents:
        raise ValueError(_empty(split, work))
    files = [part_files(parts, receipt.key, index) for receipt in receipts]
    sources = [tokens for tokens, _ in files]
    target = parts / f"out-{index}.bin"
    with open(target, "wb") as out:
        for source in sources:
            with open(source, "rb") as file:
                shutil.copyfileobj(file, out, COPY_BYTES)
        os.fsync(out.fileno())
    header = write_index(parts / f"out-{index}.idx", [lengths for _, lengths in files], work.tokenizer.dtype)
    if (header.documents, header.sequences) != (counts.documents, counts.sequences):
        raise IntegrityError(f"{parts}: the lengths of {split or key} are not those that the receipts count")
    return Output(split, key, output_prefix(prefix, split, key), counts, work.tokenizer.dtype.name)


def _empty(split: str, work: Work) -> str:
    if not split:
        return "the input has no documents; name files that have some"
    share = work.splits.fractions[work.splits.names.index(split)]
    return f"the {split} split has no documents, its share is {share:g}; raise it, or name more input"
