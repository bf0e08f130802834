"""What a corpus and each of its shards add up to: `columns.json` and `shards.json` of a profile.

columns.json: `documents`, `unreadable`, `bytes` (of text, UTF-8), `characters`, `tokens` (estimated), `shards`; `histograms`
(tasks/data/corpus/histograms.py); `classes` (tasks/data/corpus/measures.py); `words`, 4,096 counts by hash of the words of a
sample; `exact`, `near`, `contaminated`, `heldout` and `heldout_contaminated` documents; `with_secrets` and `with_personal`
documents, `secret_types` and `personal_types` (findings by type); `benchmarks`; `seconds` and `speed`. Nothing is judged here.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus import histograms
from tasks.data.corpus.counts import WORDS
from tasks.data.corpus.histograms import EDGES, LENGTHS
from tasks.data.corpus.measures import CLASSES
from tasks.data.corpus.parts import Work

CHEAP = ("read", "cheap", "secrets", "exact duplicates")
NEAR = ("words", "near", "near duplicates")


class Summary:
    """Adds up receipts at once, and documents chunk by chunk."""

    def __init__(self, work: Work, receipts: list[dict[str, Any]], folders: list[Path]) -> None:
        self._work = work
        self._receipts = receipts
        self._folders = folders
        names = {name for receipt in receipts for name in receipt["seconds"]}
        self._seconds = {name: sum(receipt["seconds"].get(name, 0.0) for receipt in receipts) for name in sorted(names)}
        self._counts: Counter[str] = Counter()
        self._histograms = {name: np.zeros(len(edges), np.int64) for name, edges in EDGES.items()}
        shards = len(work.shards)
        self._lengths = np.zeros((shards, len(LENGTHS)), np.int64)
        self._marks = {name: np.zeros(shards, np.int64) for name in ("duplicates", "near", "secrets", "personal")}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the processor's time inside to the seconds of `name`."""
        began = time.process_time()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.process_time() - began

    def add(self, columns: dict[str, NDArray[Any]], heldout: NDArray[np.bool_]) -> None:
        """Count documents, given as columns of documents.parquet; `heldout` reaches up to the last of them."""
        near = columns["near_of"] >= 0
        crosses = near.copy()
        crosses[near] = columns["heldout"][near] != heldout[columns["near_of"][near]]
        marks = {
            "duplicates": columns["exact_of"] >= 0,
            "near": near,
            "secrets": columns["secrets"] > 0,
            "personal": columns["personal"] > 0,
        }
        for name, mark in marks.items():
            self._counts[name] += int(mark.sum())
            self._marks[name] += np.bincount(columns["shard"][mark], minlength=len(self._marks[name]))
        self._counts["contaminated"] += int((columns["benchmark"] >= 0).sum())
        self._counts["heldout"] += int(columns["heldout"].sum())
        self._counts["heldout_contaminated"] += int(crosses.sum())
        self._add_values(columns)

    def _add_values(self, columns: dict[str, NDArray[Any]]) -> None:
        ratio = columns["bytes"] / np.maximum(columns["characters"], 1)
        for name in self._histograms:
            values = columns.get(name, ratio)
            self._histograms[name] += histograms.count(values, EDGES[name])
        places = columns["shard"] * len(LENGTHS) + histograms.bins_of(columns["characters"], LENGTHS)
        self._lengths += np.bincount(places, minlength=self._lengths.size).reshape(self._lengths.shape)

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
                "lengths": histograms.plain(LENGTHS, self._lengths[index]),
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
            for kind, found in receipt["types"].items():
                types[kind].update(found)
        return {
            **totals,
            "tokens": round(totals["bytes"] / self._work.config.bytes_per_token),
            "shards": len(shards),
            "histograms": {name: histograms.plain(EDGES[name], counts) for name, counts in self._histograms.items()},
            "classes": classes,
            "words": words.tolist(),
            "exact": self._counts["duplicates"],
            "near": self._counts["near"],
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
