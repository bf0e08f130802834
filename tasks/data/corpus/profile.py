"""The profile of a corpus: streamed once unit by unit (tasks/data/corpus/parts.py), put together here into files to judge by.

`documents.parquet`: one row a readable document, in the order of the corpus (columns: SCHEMA below). `findings.jsonl`: secrets
and personal data, the first 1,000 of each type. `unreadable.jsonl`: every line that is no document. `shards.json` and
`columns.json`: counts and histograms of each shard and of the corpus. `known.jsonl`: the documents of earlier corpora that some
repeat. `index/`: what later corpora are compared with (tasks/data/corpus/index.py). An exact duplicate is not
looked at again as a near one. Memory: a block of records (tasks/data/corpus/duplicates.py), one row group, and a byte a document;
the columns of duplicates, 20 bytes a document, and the signatures lie in files that are mapped. Nothing is judged here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.base import digest
from tasks.config.data import ValidationConfig
from tasks.data.corpus import measures, parts
from tasks.data.corpus.duplicates import STEPS, Linking, Links, Part, Step
from tasks.data.corpus.index import Index, Piece, open_index, write_part
from tasks.data.corpus.index import write as write_index
from tasks.data.corpus.inputs import Shard, Unit, cut, find_shards
from tasks.data.corpus.measures import CLASSES, EDGES, LENGTHS
from tasks.data.corpus.parts import MOST_FINDINGS, ROW, WORDS, Work, divide, measure_unit
from tasks.data.corpus.pool import on_processes

# What a corpus and each of its shards add up to: `columns.json` and `shards.json` of a profile.
#
# columns.json: `documents`, `unreadable`, `bytes` (of text, UTF-8), `characters`, `tokens` (estimated), `shards`;
# `histograms` (tasks/data/corpus/measures.py); `classes` (tasks/data/corpus/measures.py); `words`, 4,096 counts by
# hash of the words of a sample; `exact`, `near`, `contaminated`, `heldout` and `heldout_contaminated` documents;
# `with_secrets` and `with_personal` documents, `secret_types` and `personal_types` (findings by type); `benchmarks`;
# `seconds` and `speed`. Nothing is judged here.


CHEAP = ("read", "cheap", "secrets", "exact duplicates")
NEAR = ("words", "near", "runs", "near duplicates")


class Summary:
    """Adds up receipts at once, and documents chunk by chunk."""

    def __init__(self, work: Work, receipts: list[dict[str, Any]], folders: list[Path]) -> None:
        self._work = work
        self._receipts = receipts
        self._folders = folders
        names = {name for receipt in receipts for name in receipt["seconds"]}
        self._documents = sum(receipt["rows"] for receipt in receipts)
        self._seconds = {name: sum(receipt["seconds"].get(name, 0.0) for receipt in receipts) for name in sorted(names)}
        self._counts: Counter[str] = Counter()
        self._histograms = {name: np.zeros(len(edges), np.int64) for name, edges in EDGES.items()}
        shards = len(work.shards)
        self._lengths = np.zeros((shards, len(LENGTHS)), np.int64)
        self._marks = {name: np.zeros(shards, np.int64) for name in ("duplicates", "near", "secrets", "personal")}

    def linked(self, linking: Linking, step: Step) -> Iterator[Links]:
        """The links of a step, range by range, of rows of the corpus to rows of all; count the time that finding them took."""
        name = f"{step} duplicates"
        for links, seconds in linking.read(step):
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            links = links[links["row"] >= linking.since]
            links["row"] -= linking.since
            yield links

    def add(self, columns: dict[str, NDArray[Any]], heldout: NDArray[np.bool_]) -> None:
        """Count documents, given as columns of documents.parquet; `heldout` reaches up to the last of them."""
        near = columns["near_of"] >= 0
        crosses = near & (columns["near_of"] < len(heldout))  # not a document of an earlier corpus
        crosses[crosses] = columns["heldout"][crosses] != heldout[columns["near_of"][crosses]]
        marks = {
            "duplicates": columns["exact_of"] >= 0,
            "near": near,
            "secrets": columns["secrets"] > 0,
            "personal": columns["personal"] > 0,
        }
        for name, mark in marks.items():
            self._counts[name] += int(mark.sum())
            _count_into(self._marks[name], columns["shard"][mark])
        self._counts["known"] += int((np.maximum(columns["exact_of"], columns["near_of"]) >= self._documents).sum())
        self._counts["contaminated"] += int((columns["benchmark"] >= 0).sum())
        self._counts["heldout"] += int(columns["heldout"].sum())
        self._counts["heldout_contaminated"] += int(crosses.sum())
        ratio = columns["bytes"] / np.maximum(columns["characters"], 1)
        for name in self._histograms:
            values = columns.get(name, ratio)
            self._histograms[name] += measures.count(values, EDGES[name])
        places = columns["shard"].astype(np.int64) * len(LENGTHS) + measures.bins_of(columns["characters"], LENGTHS)
        _count_into(self._lengths.reshape(-1), places)

    def shards(self) -> list[dict[str, Any]]:
        """One object a shard, in the order of the corpus."""
        tallies: list[Counter[str]] = [Counter() for _ in self._work.shards]
        classes = np.zeros((len(tallies), len(CLASSES)), np.int64)
        for receipt in self._receipts:
            for index, tally in receipt["shards"].items():
                classes[int(index)] += tally.pop("classes")
                tallies[int(index)].update(tally)
        names = ("lines", "documents", "unreadable", "bytes", "characters")
        return [
            {
                "name": shard.name,
                **{name: tallies[index][name] for name in names},
                "classes": dict(zip(CLASSES, classes[index].tolist(), strict=True)),
                "lengths": measures.plain(LENGTHS, self._lengths[index]),
                **{name: int(mark[index]) for name, mark in self._marks.items()},
            }
            for index, shard in enumerate(self._work.shards)
        ]

    def columns(self, shards: list[dict[str, Any]], *, seconds: float) -> dict[str, Any]:
        """The whole corpus; `seconds` is the time by the clock."""
        totals = {
            name: sum(shard[name] for shard in shards) for name in ("documents", "unreadable", "bytes", "characters")
        }
        classes = {name: sum(shard["classes"][name] for shard in shards) for name in CLASSES}
        words = np.zeros(WORDS, np.int64)
        for folder in self._folders:
            words += np.fromfile(folder / "words.bin", np.int64)
        types: dict[str, Counter[str]] = {"secret": Counter(), "personal": Counter()}
        for receipt in self._receipts:
            for kind, item in receipt["types"].items():
                types[kind].update(item)
        return {
            **totals,
            "tokens": round(totals["bytes"] / self._work.config.bytes_per_token),
            "shards": len(shards),
            "histograms": {name: measures.plain(EDGES[name], counts) for name, counts in self._histograms.items()},
            "classes": classes,
            "words": words.tolist(),
            "exact": self._counts["duplicates"],
            "near": self._counts["near"],
            **({"known": self._counts["known"]} if self._work.against else {}),
            **{name: self._counts[name] for name in ("contaminated", "heldout", "heldout_contaminated")},
            "with_secrets": self._counts["secrets"],
            "with_personal": self._counts["personal"],
            "secret_types": dict(sorted(types["secret"].items())),
            "personal_types": dict(sorted(types["personal"].items())),
            "benchmarks": list(self._work.benchmarks),
            "benchmark_documents_too_short": max((receipt["too_short"] for receipt in self._receipts), default=0),
            **self._speed(totals["bytes"], seconds),
        }

    def _speed(self, text: int, seconds: float) -> dict[str, Any]:
        """Seconds of processors by what they did, and MB of text a second of one."""
        groups = {"cheap": CHEAP, "near": NEAR, "contamination": ("contamination",)}
        spent = {name: sum(self._seconds.get(part, 0.0) for part in group) for name, group in groups.items()}
        return {
            "seconds": {"wall": seconds, **self._seconds},
            "speed": {name: text / 1e6 / value for name, value in spent.items() if value},
        }

    def write(self, out: Path, *, seconds: float) -> dict[str, Any]:
        """Write shards.json and columns.json; returns the second."""
        shards = self.shards()
        columns = self.columns(shards, seconds=seconds)
        (out / "shards.json").write_text(json.dumps(shards), encoding="utf-8")
        (out / "columns.json").write_text(json.dumps(columns), encoding="utf-8")
        return columns


def _count_into(counts: NDArray[np.int64], places: NDArray[Any]) -> None:
    """Count each place. Rows that come together are of few shards, and cost by those, not by all that there are."""
    if len(places):
        first, last = int(places.min()), int(places.max()) + 1
        counts[first:last] += np.bincount(places - first, minlength=last - first)


KNOWN, INDEX = "known.jsonl", "index"
CHUNK = 100_000
"""Rows of a row group, and rows that are in memory at once."""
SCHEMA = {
    "shard": "int32",
    "line": "int64",
    "characters": "int64",
    "bytes": "int64",
    "control": "float32",
    "replacement": "float32",
    "repeated": "float32",
    "secrets": "int32",
    "personal": "int32",
    "heldout": "bool",
    "exact_of": "int64",
    "near_of": "int64",
    "near_similarity": "float32",
    "benchmark": "int16",
}
"""Columns of documents.parquet: `shard` counts in shards.json, `line` from 1 (in Parquet the row); `control`, `replacement` and
`repeated` are shares of characters, `secrets` and `personal` counts; `exact_of` and `near_of` are rows of this file, or beyond
its end documents of earlier corpora, as known.jsonl has them; `benchmark` counts in columns.json's names; -1: none."""


def profile(
    inputs: Iterable[str | Path],
    config: ValidationConfig,
    out: Path,
    *,
    heldout_fraction: float,
    benchmarks: Mapping[str, Path] | None = None,
    against: Mapping[str, Path] | None = None,
    workers: int = 1,
    unit_bytes: int | None = None,
) -> dict[str, Any]:
    """Profile files and folders into `out`; returns what `columns.json` holds. A run that was killed is taken up again.

    Raises ValueError when a file cannot be read on, and when benchmarks are too large.
    """
    began = time.perf_counter()
    indices = tuple(open_index(name, path) for name, path in (against or {}).items())
    work = Work(tuple(find_shards(inputs)), config, heldout_fraction, dict(benchmarks or {}), indices)
    units = cut(work.shards, unit_bytes) if unit_bytes else divide(work.shards)
    folder = out.with_name(out.name + ".parts")
    measure(units, work, folder, workers=workers)
    link(units, work, folder, workers=workers)
    columns = merge(units, work, folder, out, began=began)
    shutil.rmtree(folder)
    return columns


def measure(
    units: list[Unit], work: Work, folder: Path, *, workers: int = 1, report: Callable[[int], None] = lambda read: None
) -> None:
    """Every unit's part that is not there yet, made by processes of their own; `report` hears the bytes that were read."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [unit for unit in units if not parts.receipt(folder, unit, work)]
    already = sum(unit.bytes for unit in units) - sum(unit.bytes for unit in left)
    work.prepare()

    def do(unit: Unit, report: Callable[[int], None]) -> None:
        measure_unit(unit, work, folder)
        report(unit.bytes)

    on_processes(left, do, workers=workers, already=already, report=report)


def link(units: list[Unit], work: Work, folder: Path, *, workers: int = 1) -> None:
    """Look for duplicates in all ranges of hashes; every unit must be measured."""
    write_pieces(pieces_of(work), work, folder, workers=workers)
    linking = linking_of(units, work, folder)
    for step in STEPS:
        linking.do(step, linking.ranges(step), workers=workers)


def linking_of(units: list[Unit], work: Work, folder: Path) -> Linking:
    """The search for duplicates among the parts of all units, which must be there."""
    made = [piece.part(folder) for piece in pieces_of(work)]
    since = sum(part.rows for part in made)
    for unit, receipt in zip(units, _receipts(units, work, folder), strict=True):
        place = parts.part(folder, unit)
        made.append(Part(place, receipt["rows"], place / "signatures.bin"))
    against = [(index.name, index.documents) for index in work.against]
    key = digest([work.key, work.threshold, against])
    return Linking(tuple(made), folder / f"links-{key[:16]}", work.threshold, since)


def pieces_of(work: Work) -> list[Piece]:
    """The pieces of all indices of earlier corpora, which come before the corpus."""
    return [piece for index in work.against for piece in index.pieces()]


def write_pieces(pieces: Sequence[Piece], work: Work, folder: Path, *, workers: int = 1) -> None:
    """Write the parts of pieces that are not there yet, by processes of their own."""
    on_processes(pieces, lambda piece, _: write_part(piece, folder, work.threshold), workers=workers)


def _receipts(units: list[Unit], work: Work, folder: Path) -> list[dict[str, Any]]:
    receipts = [parts.receipt(folder, unit, work) for unit in units]
    if None in receipts:
        raise FileNotFoundError(f"{folder}: a unit of the corpus has no part")
    return [receipt for receipt in receipts if receipt]


def merge(units: list[Unit], work: Work, folder: Path, out: Path, *, began: float) -> dict[str, Any]:
    """Put the parts of all units and all links together; `began`: when the work did, by time.perf_counter().

    Returns columns.json.
    """
    messages = _receipts(units, work, folder)
    temporary, scratch = out.with_name(f".{out.name}"), folder / "merge"
    for old in (temporary, scratch):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    whole = _Whole([parts.part(folder, unit) for unit in units], messages, scratch)
    summary = Summary(work, messages, whole.folders)
    # The columns of documents.parquet that say what repeats what.
    linking = linking_of(units, work, folder)
    exact_of, near_of = (whole.column(name, "<i8", -1) for name in ("exact_of", "near_of"))
    similarity = whole.column("near_similarity", "<f4", 0.0)
    for links in summary.linked(linking, "exact"):
        exact_of[links["row"]] = links["of"]
    for links in summary.linked(linking, "near"):  # a row may have links of several ranges: the earliest counts
        of = near_of[links["row"]]
        links = links[(of < 0) | (links["of"] < of)]
        near_of[links["row"]], similarity[links["row"]] = links["of"], links["similarity"]
    if linking.since:
        _write_known(whole, work.against, linking.since, (exact_of, near_of), temporary)
    _write_documents(
        whole, temporary, summary, {"exact_of": exact_of, "near_of": near_of, "near_similarity": similarity}
    )
    _write_findings(whole, work.shards, temporary)
    _write_unreadable(whole, work.shards, temporary)
    if work.config.index:
        signatures = [folder / "signatures.bin" for folder in whole.folders]
        write_index(temporary / INDEX, (rows for _, rows in whole.chunks()), signatures)
    columns = summary.write(temporary, seconds=time.perf_counter() - began)
    shutil.rmtree(scratch)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
    return columns


@dataclass(frozen=True)
class _Whole:
    """The parts of a corpus in order."""

    folders: list[Path]
    receipts: list[dict[str, Any]]
    scratch: Path

    @property
    def rows(self) -> int:
        return sum(receipt["rows"] for receipt in self.receipts)

    def bases(self) -> Iterator[tuple[Path, int, dict[str, int]]]:
        """Each unit's folder, its first row, and the lines before it in its shards (by the shard's index, as text)."""
        row, lines = 0, dict[str, int]()
        for folder, receipt in zip(self.folders, self.receipts, strict=True):
            yield folder, row, {shard: lines.get(shard, 0) for shard in receipt["shards"]}
            row += receipt["rows"]
            for shard, tally in receipt["shards"].items():
                lines[shard] = lines.get(shard, 0) + tally["lines"]

    def chunks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """The rows of the corpus with their lines within shards, and the first one's number."""
        for folder, first, before in self.bases():
            with open(folder / "rows.bin", "rb") as file:
                while len(rows := np.fromfile(file, ROW, CHUNK)):
                    for shard, lines in before.items():
                        rows["line"][rows["shard"] == int(shard)] += lines
                    yield first, rows
                    first += len(rows)

    def column(self, name: str, kind: str, fill: float) -> NDArray[Any]:
        """A column for all rows, in a file."""
        if not self.rows:
            return np.zeros(0, kind)
        made = np.memmap(self.scratch / name, kind, "w+", shape=(self.rows,))
        made[:] = fill
        return made


def _write_documents(whole: _Whole, out: Path, summary: Summary, result: dict[str, NDArray[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    heldout = whole.column("heldout", "?", False)
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in SCHEMA.items()])
    waiting: list[Any] = []
    with pq.ParquetWriter(out / "documents.parquet", schema, compression="zstd") as writer:
        for first, rows in whole.chunks():
            span = slice(first, first + len(rows))
            heldout[span] = rows["heldout"]
            columns = {
                name: np.ascontiguousarray(result[name][span] if name in result else rows[name]) for name in SCHEMA
            }
            summary.add(columns, heldout)
            waiting.append(pa.table(columns, schema=schema))
            if sum(map(len, waiting)) >= CHUNK:
                # Write the full row groups of a table; what is left over.
                table = pa.concat_tables(waiting)
                full = len(table) // CHUNK * CHUNK
                writer.write_table(table.slice(0, full), row_group_size=CHUNK)
                waiting = [table.slice(full)] if full < len(table) else []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


def _write_known(
    whole: _Whole, against: Sequence[Index], known: int, columns: Sequence[NDArray[np.int64]], out: Path
) -> None:
    """Have columns count the rows of the corpus first, those of earlier corpora from there on; write what these documents are."""
    named: set[int] = set()
    for column in columns:
        for start in range(0, whole.rows, CHUNK):
            of = column[start : start + CHUNK]
            of[of >= 0] = np.where(of < known, whole.rows + of, of - known)[of >= 0]
            named.update(of[of >= whole.rows].tolist())
    firsts = np.cumsum([0, *(index.documents for index in against)])
    with open(out / KNOWN, "w", encoding="utf-8") as file:
        for row in sorted(named):
            number = int(np.searchsorted(firsts, row - whole.rows, "right")) - 1
            place = against[number].place_of(row - whole.rows - int(firsts[number]))
            file.write(json.dumps({"row": row, "place": place}, ensure_ascii=False) + "\n")


def _write_findings(whole: _Whole, shards: tuple[Shard, ...], out: Path) -> None:
    written: Counter[str] = Counter()
    with open(out / "findings.jsonl", "w", encoding="utf-8") as file:
        for folder, first, before in whole.bases():
            for item in _lines(folder / "findings.jsonl"):
                written[item["type"]] += 1
                if written[item["type"]] <= MOST_FINDINGS:
                    place = {"row": item["row"] + first, **_place(item, before, shards)}
                    file.write(json.dumps({**item, **place}, ensure_ascii=False) + "\n")


def _write_unreadable(whole: _Whole, shards: tuple[Shard, ...], out: Path) -> None:
    with open(out / "unreadable.jsonl", "w", encoding="utf-8") as file:
        for folder, _, before in whole.bases():
            for bad in _lines(folder / "unreadable.jsonl"):
                file.write(json.dumps({**bad, **_place(bad, before, shards)}, ensure_ascii=False) + "\n")


def _place(result: dict[str, Any], before: dict[str, int], shards: tuple[Shard, ...]) -> dict[str, Any]:
    """The shard's name and the line within it."""
    index = result["shard"]
    return {"shard": shards[index].name, "line": result["line"] + before[str(index)]}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)
