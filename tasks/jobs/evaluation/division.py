"""What the ranks of an evaluation divide among themselves: units of work, and the parts that rank 0 puts together.

A unit is a batch as one rank by itself computes it, whatever the number of ranks: a batch of windows, of prompts, of requests of
lm-evaluation-harness. So its figures have the same bits on any rank, and rank 0 adds them up in the order of the units. Each unit
that is done lies in a file of the job's folder, so after a restart it is not computed again.

Requests of lm-evaluation-harness are ordered and grouped as `Collator` in lm_eval/models/utils.py does it; what asks the model is
lm_eval_model.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tasks.common.process import whole

Unit = TypeVar("Unit")
Arrays = Mapping[str, NDArray[Any]]
"""What is kept of a unit: arrays of numbers by name."""
POLL_SECONDS = 0.1


class OnRankZero(Exception):
    """This rank's units are done, and rank 0 puts the parts of all ranks together."""


@dataclass(frozen=True)
class Division:
    """This rank among those that share an evaluation; without a folder one rank computes everything and keeps it in memory."""

    folder: Path | None = None
    rank: int = 0
    world_size: int = 1
    idle: Callable[[], None] = lambda: time.sleep(POLL_SECONDS)
    """What this rank does again and again while it waits for the others' parts."""
    shared: dict[str, Parts] = field(default_factory=dict)
    """What this process has done its share of, by name."""

    def share(
        self,
        name: str,
        units: Sequence[Unit],
        compute: Callable[[Unit], Arrays],
        *,
        first: int = 0,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> Parts:
        """Compute every n-th unit, but not one that was computed before a restart; rank `first` has the first one.

        `report` is told how many of this rank's are done.
        """
        if name in self.shared:  # rank 0 may have removed the files by now
            return self.shared[name]
        kept: dict[int, Arrays] = {}
        mine = range((self.rank - first) % self.world_size, len(units), self.world_size)
        for done, number in enumerate(mine, start=1):
            if self.folder is None:
                kept[number] = compute(units[number])
            elif not (path := part_of(self.folder, name, number)).exists():
                _write(path, compute(units[number]))
            report(done, len(mine))
        parts = Parts(self, name, len(units), kept)
        if self.folder is not None:
            self.shared[name] = parts
        return parts


@dataclass(frozen=True)
class Parts:
    """What all ranks computed of the units of one name."""

    division: Division
    name: str
    count: int
    kept: Mapping[int, Arrays]

    def all(self, check: Callable[[], None] = lambda: None) -> Iterator[Arrays]:
        """Every unit in order, as soon as it is there; `check` is called while others compute it. Raises OnRankZero elsewhere.

        A rank that is lost ends the others too, by the launcher, so nobody is waited for in vain.
        """
        if self.division.rank:
            raise OnRankZero
        return self._read(check)

    def _read(self, check: Callable[[], None]) -> Iterator[Arrays]:
        for number in range(self.count):
            if self.division.folder is None:
                yield self.kept[number]
                continue
            path = part_of(self.division.folder, self.name, number)
            while not path.exists():
                check()
                self.division.idle()
            with np.load(path, allow_pickle=False) as file:
                yield dict(file)


def part_of(folder: Path, name: str, number: int) -> Path:
    """The file of a unit."""
    return folder / f"{name}-{number:06}.npz"


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(exist_ok=True)
    with whole(path) as file:
        np.savez(file, **cast(dict[str, Any], arrays))


Tokenized = tuple[Any, list[int], list[int]]
"""A request by its texts, the tokens of its context and those of its continuation."""


def batches_of_contexts(requests: Sequence[Tokenized], size: int, *, shared: bool) -> list[list[int]]:
    """The requests of each batch, as the harness batches them: longest first, and those of one forward pass together.

    Where logits are `shared`, continuations that differ in their last token alone are answered by one pass, that of the longest.
    """
    groups: dict[Any, list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        key = tuple(context + continuation[:-1]) if shared else number
        groups.setdefault(key, []).append(number)

    def place(group: list[int]) -> tuple[int, tuple[int, ...]]:
        read = requests[max(group, key=lambda number: len(requests[number][2]))]
        tokens = tuple(read[1] + read[2])
        return -len(tokens), tokens

    ordered = sorted(groups.values(), key=place)
    return [
        sorted(number for group in ordered[start : start + size] for number in group)
        for start in range(0, len(ordered), size)
    ]


def batches_of_prompts(
    arguments: Sequence[tuple[str, Mapping[str, Any]]], size: int, *, length: Callable[[str], int]
) -> list[list[int]]:
    """The requests of each batch, as the harness batches them: by settings of generation, longest first.

    What is drawn by chance cannot be divided, for each draw depends on those before it: it is one unit.
    """
    drawn = [number for number, (_, settings) in enumerate(arguments) if settings.get("do_sample")]
    groups: dict[str, list[int]] = {}
    for number, (_, settings) in enumerate(arguments):
        if not settings.get("do_sample"):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(number)
    units = [drawn] if drawn else []
    for group in groups.values():
        ordered = sorted(group, key=lambda number: (-length(arguments[number][0]), arguments[number][0]))
        units += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return units
