"""From files to checked Megatron datasets, on one machine: find, cut, encode, merge, check, put in place.

A job of many nodes calls the same steps by itself: `plan`, `encode_parallel` for each rank's share, then
`assemble` and `appear` on one of them. Its ranks see the same files with the same times, and one folder of parts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.data.corpus.inputs import Shard, Unit, cut, find_shards
from tasks.data.corpus.reading import read_strictly
from tasks.data.tokenizing.checking import require_sound
from tasks.data.tokenizing.engine import Choice, Disagreement, Tokenizers, choose
from tasks.data.tokenizing.merging import Output, appear, merge, output_prefix, withdraw, write_record
from tasks.data.tokenizing.mixture import Part, blend_file, data_arguments
from tasks.data.tokenizing.units import Work, encode_parallel, unit_bytes, unit_key


@dataclass(frozen=True)
class Plan:
    """What is to be encoded, and where to."""

    work: Work
    shards: tuple[Shard, ...]
    units: tuple[Unit, ...]
    prefix: Path

    @property
    def parts(self) -> Path:
        """Where parts and receipts lie until the output is whole."""
        return Path(f"{self.prefix}.parts")

    @property
    def record(self) -> Path:
        """What says of which work the output is."""
        return Path(f"{self.prefix}.preprocess.json")

    @property
    def bytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    def describe(self) -> dict[str, Any]:
        """The work and its input, as the record says them."""
        return {**self.work.describe(), "units": [unit_key(unit, self.work) for unit in self.units]}


@dataclass(frozen=True)
class Done:
    """What a run gave, and what it took."""

    outputs: tuple[dict[str, Any], ...]
    arguments: tuple[str, ...]
    """What Megatron's training takes."""
    bytes_read: int
    seconds: float
    engine: str
    reason: str
    """Why the engine is the slow one."""
    units: int
    resumed: int
    """Units that were there already."""


def plan(inputs: Iterable[str | Path], work: Work, *, prefix: Path) -> Plan:
    """Find the input and cut it. Raises ValueError when there is none, or no folder for the output."""
    if not prefix.parent.is_dir():
        raise ValueError(f"{prefix.parent} is no folder; make it, or name another --output-prefix")
    if work.append_eod:
        work.tokenizer.require_eod()
    shards = find_shards(inputs)
    return Plan(work, tuple(shards), tuple(cut(shards, unit_bytes(shards))), prefix)


def preprocess(
    wanted: Plan,
    *,
    workers: int,
    overwrite: bool = False,
    report: Callable[[int], None] = lambda read: None,
) -> Done:
    """Write every dataset of a plan, whole and checked, or none; `report` hears the bytes that were read.

    Output of the same work is left as it is; of other work it is replaced with `overwrite`, else refused (ValueError), as is a
    prefix that another process writes to. What a killed run left is taken up.
    """
    began = time.monotonic()
    with _held(wanted.parts):
        if not overwrite and (existing := _already(wanted)):
            shutil.rmtree(wanted.parts)
            return existing
        _forget(wanted.parts, keep={unit_key(unit, wanted.work) for unit in wanted.units})
        choice = choose(wanted.work.tokenizer, _sample(wanted))
        try:
            resumed = _encode(wanted, choice, workers=workers, report=report)
        except Disagreement as error:
            choice = Choice(Tokenizers(wanted.work.tokenizer), error.message)
            _forget(wanted.parts, keep=set())
            resumed = _encode(wanted, choice, workers=workers, report=report)
        return _finish(wanted, choice=choice, resumed=resumed, began=began)


def assemble(wanted: Plan) -> list[Output]:
    """Merge what all units have into the folder of the parts, and check it; `appear` puts it in place.

    Raises IntegrityError when a unit is missing or the result is not sound, ValueError when a file has changed meanwhile.
    """
    work = wanted.work
    outputs = merge(wanted.units, work, wanted.parts, prefix=wanted.prefix)
    for index in range(len(outputs)):
        require_sound(wanted.parts / f"out-{index}", work.tokenizer, eod=work.eod)
    for shard in wanted.shards:
        shard.require_unchanged()
    return outputs


def _finish(wanted: Plan, *, choice: Choice, resumed: int, began: float) -> Done:
    """Assemble, put in place with the record of the work, and forget the parts."""
    outputs = assemble(wanted)
    arguments = _arguments(wanted, outputs)
    done = Done(
        outputs=tuple(output.describe() for output in outputs),
        arguments=arguments,
        bytes_read=wanted.bytes,
        seconds=round(time.monotonic() - began, 3),
        engine=choice.engine.name,
        reason=choice.reason,
        units=len(wanted.units),
        resumed=resumed,
    )
    withdraw(outputs)
    write_record(wanted.record, {**wanted.describe(), "outputs": done.outputs, "arguments": arguments})
    appear(outputs, wanted.parts)
    shutil.rmtree(wanted.parts)
    return done


def _arguments(wanted: Plan, outputs: Sequence[Output]) -> tuple[str, ...]:
    """Megatron's arguments for the outputs; with splits they are in a file, which is written."""
    splits: dict[str, list[Part]] = {}
    for output in outputs:
        splits.setdefault(output.split, []).append(Part(float(output.counts.tokens), output.prefix.resolve()))
    if "" in splits:
        return data_arguments(splits[""])
    path = Path(f"{wanted.prefix}.megatron.json")
    write_record(path, blend_file(splits))
    return ("--per-split-data-args-path", str(path.resolve()))


def _already(wanted: Plan) -> Done | None:
    """The finished output of the same work. Raises ValueError when there is output of other work."""
    prefixes = [output_prefix(wanted.prefix, split, key) for split, key in wanted.work.outputs]
    existing = [Path(f"{prefix}{suffix}") for prefix in prefixes for suffix in (".bin", ".idx")]
    existing = [path for path in existing if path.exists()]
    try:
        record = json.loads(wanted.record.read_text(encoding="utf-8"))
        same = all(record[name] == value for name, value in wanted.describe().items())
    except (OSError, ValueError, KeyError):
        same = False
    if existing and not same:
        raise ValueError(
            f"{existing[0]} is there, of other input or settings; name another --output-prefix or add --overwrite"
        )
    if not existing or not all(_whole(output) for output in record["outputs"]):
        return None
    units = len(wanted.units)
    outputs, arguments = tuple(record["outputs"]), tuple(record["arguments"])
    return Done(outputs, arguments, 0, 0.0, engine="", reason="", units=units, resumed=units)


def _whole(output: dict[str, Any]) -> bool:
    """Whether files have the sizes that their record says."""
    width = {"uint16": 2, "int32": 4}[output["dtype"]]
    index = 42 + 12 * output["sequences"] + 8 * output["documents"]
    try:
        sizes = [Path(output[kind]).stat().st_size for kind in ("bin", "idx")]
    except OSError:
        return False
    return sizes == [output["tokens"] * width, index]


def _sample(wanted: Plan) -> list[str]:
    """The texts of the first batch, on which the engines must agree."""
    for unit in wanted.units:
        for batch in read_strictly(unit, wanted.work.fields):
            if batch.texts:
                return batch.texts
    return []


def _encode(wanted: Plan, choice: Choice, *, workers: int, report: Callable[[int], None]) -> int:
    return encode_parallel(
        wanted.units, wanted.work, wanted.parts, engine=choice.engine, workers=workers, report=report
    )


def _forget(parts: Path, *, keep: set[str]) -> None:
    """Delete the parts of all units but some, which are named by their keys."""
    for path in parts.iterdir():
        if path.name != ".lock" and path.name.partition(".")[0] not in keep:
            path.unlink()


@contextmanager
def _held(parts: Path) -> Iterator[None]:
    """Hold the folder of the parts against other processes; the lock goes with this process, however it dies.

    Raises ValueError when another process holds it.
    """
    while True:
        parts.mkdir(exist_ok=True)
        path = parts / ".lock"
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process writes to {parts.with_suffix('')}; wait for it, or stop it"
                ) from None
            if _is_same(path, file.fileno()):
                try:
                    yield
                finally:
                    _drop_empty(parts)
                return


def _drop_empty(parts: Path) -> None:
    """Leave no folder behind in which there is nothing to go on from."""
    if parts.is_dir() and [path.name for path in parts.iterdir()] == [".lock"]:
        shutil.rmtree(parts)


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether the file behind a descriptor is still the one at a path: its folder goes when another run is done."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
