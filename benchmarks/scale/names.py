"""The product's own code on the real names and sizes of a corpus that is not there: what it costs to divide, to list and to tell.

`python -m benchmarks.scale.names ROLE FOLDER BYTES SHARD DOCUMENT` does what one process of a stage does with them, and
measures itself; each role is a process of its own. Files are sparse, and have what is read of them: line feeds where units end,
receipts, and of sorted runs the records of the last range of hashes, as many as a range has. One range in 4,096 is gone through
whole; it is the machines' page cache that answers, so waiting for disks is no part of it.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from benchmarks.scale.rates import EXACT, NEAR, SPLIT

LINK = 20
"""Bytes of a link in a file of links."""


@dataclass(frozen=True)
class Names:
    """A corpus of files of one size, in a folder where its parts lie too."""

    folder: Path
    size: int
    shard: int
    document: float
    """Bytes on disk of a document."""

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"

    @property
    def documents(self) -> int:
        return round(self.size / self.document)

    def rows(self, unit) -> int:
        return max(1, round(unit.bytes / self.document))

    @cached_property
    def work(self):
        from tasks.config.data import ValidationConfig
        from tasks.data.corpus.inputs import find_shards
        from tasks.data.corpus.parts import Work

        return Work(tuple(find_shards([self.corpus])), ValidationConfig(), SPLIT)

    @cached_property
    def units(self) -> list:
        from tasks.data.corpus.parts import divide

        return divide(self.work.shards)


class Clock:
    """Seconds of this process by what it did, and the most that it held."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    def __call__(self, name: str, do):
        began = time.process_time()
        result = do()
        self.taken[name] = time.process_time() - began
        return result

    def peak(self, name: str) -> None:
        status = Path("/proc/self/status").read_text()  # ru_maxrss would begin with what the parent held when it forked
        self.taken[name] = 1024.0 * int(status.partition("VmHWM:")[2].split()[0])


def make(names: Names, clock: Clock) -> None:
    """The corpus's files, and all that units leave: nothing of it is measured."""
    make_corpus(names)
    make_parts(names)
    make_links(names)
    make_tokens(names)


def make_corpus(names: Names) -> None:
    from tasks.data.corpus.inputs import UNIT_BYTES
    from tasks.data.corpus.parts import LEAST_UNIT, MOST_UNITS, UNITS

    unit = min(max(names.size // UNITS, LEAST_UNIT), max(UNIT_BYTES, names.size // MOST_UNITS))
    names.corpus.mkdir(parents=True)
    for number in range(-(-names.size // names.shard)):
        file = os.open(names.corpus / f"part-{number:07d}.jsonl", os.O_RDWR | os.O_CREAT)
        size = min(names.shard, names.size - number * names.shard)
        os.ftruncate(file, size)
        for end in range(unit, size, unit) if size > unit else ():
            os.pwrite(file, b"\n", end - 1)
        os.close(file)


def make_parts(names: Names) -> None:
    """Of each unit the files that tasks/data/corpus/parts.py writes."""
    from tasks.data.corpus import parts
    from tasks.data.corpus.duplicates import HASHES, rows_per_band

    bands = HASHES // rows_per_band(names.work.config.near_duplicate_similarity)
    words = np.ones(parts.WORDS, np.int64).tobytes()
    rows = np.array([names.rows(unit) for unit in names.units])
    exact, near = (Runs(rows * each, names.documents * each, again) for each, again in ((1, EXACT), (bands, NEAR)))
    for number, unit in enumerate(names.units):
        place, count = str(parts.part(names.parts, unit)), int(rows[number])
        Path(place).mkdir(parents=True)
        sizes = {"rows.bin": count * parts.ROW.itemsize, "signatures.bin": count * 2 * HASHES, "words.bin": len(words)}
        sizes |= {"findings.jsonl": 0, "unreadable.jsonl": 0}
        for name, size in sizes.items():
            write_sparse(f"{place}/{name}", size, {0: words} if name == "words.bin" else {})
        for name, runs, wide in (("exact-000.run", exact, True), ("near-000.run", near, False)):
            sizes[name], data = runs.of(number, rows=count, wide=wide)
            write_sparse(f"{place}/{name}", sizes[name], data)
        with open(f"{place}/receipt.json", "w", encoding="utf-8") as file:
            file.write(json.dumps(receipt(names, unit, count, sizes)))


def receipt(names: Names, unit, rows: int, sizes: dict[str, int]) -> dict:
    """As tasks/data/corpus/parts.py writes it, with what a unit of Python's library says."""
    from tasks.data.corpus import parts

    tallies = {}
    for piece in unit.pieces:
        count = max(1, round(piece.bytes / names.document))
        text = {"bytes": round(piece.bytes * 0.9), "characters": round(piece.bytes * 0.9)}
        tallies[names.work.numbers[piece.shard.path]] = {"lines": count, "documents": count, "unreadable": 0, **text}
        tallies[names.work.numbers[piece.shard.path]]["classes"] = [round(piece.bytes * 0.05)] * len(parts.CLASSES)
    seconds = dict.fromkeys(("imports", "read", "cheap", "secrets", "words", "near", "runs"), 1.234567)
    types = {"secret": {"Secret Keyword": 3}, "personal": {"email": 10}}
    counts = {"rows": rows, "read": unit.bytes, "shards": tallies, "types": types, "seconds": seconds}
    return {"key": parts._unit_key(unit, names.work), "files": sizes, "too_short": 0, **counts}


class Runs:
    """The last range of hashes of every unit's run, as long as it would be; `again` of the records share a hash with others."""

    def __init__(self, records: np.ndarray, every: int, again: float) -> None:
        from tasks.data.corpus.runs import ranges

        last = ranges(every)[-1]
        self.records, self.counts = records, np.maximum(1, records // (last.index + 1))
        drawn, high = np.random.default_rng(every), last.last - last.first
        shape = (len(records), int(self.counts.max()))
        keys = drawn.integers(high, size=shape, dtype=np.uint64)
        pool = max(1, round(every / (last.index + 1) * again / 2))
        repeated = drawn.random(shape, np.float32) < again
        keys[repeated] = drawn.integers(pool, size=int(repeated.sum()), dtype=np.uint64) * np.uint64(high // pool)
        self.keys = np.sort(keys, axis=1) + np.uint64(last.first)
        self.rows = drawn.random(shape, np.float32)

    def of(self, number: int, *, rows: int, wide: bool) -> tuple[int, dict[int, bytes]]:
        """The size of a unit's run, and what stands in it where: keys, lows where it is wide, rows."""
        records, count = int(self.records[number]), int(self.counts[number])
        keys, chosen = self.keys[number, -count:], (self.rows[number, :count] * (rows - 1)).astype(np.uint32)
        data, start = {}, 0
        for width, column in ((8, keys), *(((8, keys),) if wide else ()), (4, chosen)):
            start += width * records
            data[start - width * count] = column.tobytes()
        return start, data


def write_sparse(path: str | Path, size: int, data: dict[int, bytes]) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, size)
    for at, part in data.items():
        os.pwrite(file, part, at)
    os.close(file)


def make_links(names: Names) -> None:
    """Of each range of equal documents a file of links, one file under many names."""
    from tasks.data.corpus.duplicates import LINK as FORM
    from tasks.data.corpus.profile import linking_of

    linking = linking_of(names.units, names.work, names.parts)
    linking.folder.mkdir()
    wanted = linking.ranges("exact")
    links = np.zeros(max(1, round(names.documents * EXACT / len(wanted))), FORM)
    links["row"] = np.linspace(0, int(linking.firsts[-1]) - 1, len(links), dtype=np.int64)
    first = linking.links_of("exact", wanted[0])
    with open(first, "wb") as file:
        np.savez(file, links=links, seconds=1.0)
    for each in wanted[1:]:
        os.link(first, linking.links_of("exact", each))


def token_work(names: Names):
    """Units and work of tokenizing; the tokenizer is any small one, since nothing is encoded."""
    from tasks.data.tokenizing.splits import Splits
    from tasks.data.tokenizing.tokenizer import open_tokenizer
    from tasks.data.tokenizing.units import Work

    return Work(open_tokenizer(names.folder / "tokenizer"), ("text",), Splits((1 - SPLIT, SPLIT)), immutable=True)


def token_units(names: Names) -> list:
    from tasks.data.corpus.inputs import cut
    from tasks.data.tokenizing.units import unit_bytes

    return cut(names.work.shards, unit_bytes(names.work.shards))


def make_tokens(names: Names) -> None:
    from tokenizers import Tokenizer, models

    from tasks.data.tokenizing.units import Counts, _dependencies, part_files, unit_key
    from tasks.jobs.preprocess import END_OF_DOCUMENT, save_tokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    save_tokenizer(tokenizer, names.folder / "tokenizer")
    work, parts = token_work(names), names.folder / "tokens"
    parts.mkdir()
    width = work.tokenizer.dtype.itemsize
    for unit in token_units(names):
        key, counts = unit_key(unit, work), []
        for index, share in enumerate((1 - SPLIT, SPLIT)):
            documents, tokens = round(names.rows(unit) * share), round(unit.bytes * share / 4)
            counts.append(asdict(Counts(documents, documents, tokens, round(unit.bytes * share))))
            binary, lengths = part_files(parts, key, index)
            write_sparse(binary, tokens * width, {})
            write_sparse(lengths, documents * 4, {})
        output = {
            **_dependencies(unit, work),
            "key": key,
            "counts": counts,
            "bytes_read": unit.bytes,
            "engine": "gigatoken",
        }
        (parts / f"{key}.json").write_text(json.dumps(output))


def rank(names: Names, clock: Clock) -> None:
    """One rank of `validate`, beside its units: the list, the receipts of all units, and one range of each step."""
    from tasks.data.corpus import parts
    from tasks.data.corpus.profile import linking_of

    clock("list", lambda: (names.units, names.work.key, names.work.numbers))
    clock.peak("peak after the list")
    clock("receipts", lambda: [parts.receipt(names.parts, unit, names.work) is not None for unit in names.units])
    linking = clock("linking", lambda: linking_of(names.units, names.work, names.parts))
    clock.peak("peak after receipts")
    clock.taken["units"], clock.taken["shards"] = len(names.units), len(names.work.shards)
    for step in ("exact", "near"):
        wanted = linking.ranges(step)[-1]
        runs = clock(f"{step}: begin", partial(linking._runs, step))
        link = partial(_equal, runs) if step == "exact" else clock("near: links", partial(linking._near, runs))
        opened = Opened()
        links = clock(f"{step}: a range", partial(link, wanted))
        clock.taken |= {
            f"{step}: ranges": wanted.index + 1,
            f"{step}: found": len(links),
            f"{step}: opened": opened.count,
        }
    clock.peak("peak")


def _equal(runs: list, wanted):
    from tasks.data.corpus import duplicates
    from tasks.data.corpus.runs import buckets

    return duplicates.equal(buckets(runs, wanted))


class Opened:
    """Files that this process opens from now on."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        self.count += event == "open"


def first(names: Names, clock: Clock) -> None:
    """The first rank when it merges, beside what documents cost: receipts, what shards add up to, one unit's rows."""
    from tasks.data.corpus import parts
    from tasks.data.corpus.measures import LENGTHS
    from tasks.data.corpus.profile import SCHEMA, Summary, _receipts

    clock("list", lambda: (names.units, names.work.key, names.work.numbers))
    folders = [parts.part(names.parts, unit) for unit in names.units]
    receipts = clock("receipts", lambda: _receipts(names.units, names.work, names.parts))
    summary = clock("summary", lambda: Summary(names.work, receipts, folders))
    unit = names.units[len(names.units) // 2]
    rows, shard = min(names.rows(unit), 100_000), names.work.numbers[unit.pieces[0].shard.path]
    columns = {name: np.zeros(rows, kind.replace("bool", "?")) for name, kind in SCHEMA.items()}
    columns["shard"][:] = shard
    columns["exact_of"][:] = columns["near_of"][:] = columns["benchmark"][:] = -1
    columns["characters"][:] = LENGTHS[20]
    heldout = np.zeros(rows, np.bool_)
    clock("rows of a unit", lambda: summary.add(columns, heldout))
    clock.taken["rows"] = rows
    out = names.folder / "profile"
    out.mkdir(exist_ok=True)
    clock("write", lambda: summary.write(out, seconds=1.0))
    clock.peak("peak")


def launcher(names: Names, clock: Clock) -> None:
    """The stage's process: the shards of a profile judged and written down, and a manifest of the corpus's files."""
    from tasks.data.corpus.quarantine import Profile
    from tasks.data.drift.histograms import outliers
    from tasks.data.expectations import DocumentRule  # noqa: F401 - what a stage has imported
    from tasks.data.judging import Judged, _shard
    from tasks.storage.manifest import Content, FileEntry, Manifest, Provenance, manifest_bytes, parse_manifest

    paths = sorted(path.name for path in os.scandir(names.corpus))

    def written() -> Manifest:
        entries = tuple(
            FileEntry(path=path, size=names.shard, sha256=f"{number:064x}") for number, path in enumerate(paths)
        )
        versions = dict.fromkeys(paths, "2026-11-29T12:00:00.0000000Z")
        content = Content(kind="dataset", files=entries)
        return Manifest(content=content, provenance=Provenance(name="corpus", blob_versions=versions))

    manifest = clock("manifest", written)
    data = clock("manifest written", partial(manifest_bytes, manifest))
    clock.taken["bytes of the manifest"] = len(data)
    about = {"where": "names.py", "kind": "dataset", "name": "corpus", "version": manifest.version}
    clock("manifest read", partial(parse_manifest, data, **about))
    clock.peak("peak of the manifest")
    del manifest, data
    profile = Profile(names.folder / "profile")
    clock.taken["bytes of shards.json"] = (profile.folder / "shards.json").stat().st_size
    clock("shards read", lambda: profile.shards)
    apart = clock("shards judged", lambda: outliers(profile.shards, fewest=100))
    judged = Judged(profile, (), [], np.zeros(0, np.uint16), (), [], apart, {})
    clock("shards written", lambda: json.dumps([_shard(shard, judged) for shard in profile.shards], indent=1))
    clock.peak("peak")


def tokens(names: Names, clock: Clock) -> None:
    """One rank of `preprocess`, beside its units: the list, the receipts of all units, and who writes which file."""
    from tasks.data.tokenizing.merging import token_files
    from tasks.data.tokenizing.units import read_receipt

    units = clock("list", lambda: token_units(names))
    work = token_work(names)
    receipts = clock("receipts", lambda: [read_receipt(unit, work, names.folder / "tokens") for unit in units])
    assert all(receipts)
    files = clock("files", lambda: token_files(receipts, work, most_bytes=16 * 2**30))
    clock.taken["files"] = len(files)
    clock.peak("peak")


def mirror(names: Names, clock: Clock) -> None:
    """The first machine where machines share no folder: what others sent, by name, of which all is here already."""
    from tasks.jobs.node.checkpoint_mirror import SENT, PartsMirror
    from tasks.storage.blob.client import open_container
    from tasks.storage.blob.folder import BlobFolder
    from tasks.storage.settings import StoreConfig

    job = names.folder
    listed = [path.relative_to(job).as_posix() for path in names.parts.rglob("*") if path.is_file()]
    other = job / "nodes" / "1" / SENT
    other.parent.mkdir(parents=True)
    other.write_text(
        "".join(json.dumps({"name": name, "etag": f"0x{number:015X}"}) + "\n" for number, name in enumerate(listed))
    )
    folder = BlobFolder(open_container(StoreConfig(uri="az://account/container")), "jobs/1", job, only="parts/")
    folder._there |= {name: f"0x{number:015X}" for number, name in enumerate(listed)}
    clock.taken["names"] = len(listed)
    clock("announcements", PartsMirror(folder, job / "nodes" / "0", leads=True).bring)
    clock("a look", lambda: sum(1 for _ in folder._look()))
    clock.peak("peak")


ROLES = {role.__name__: role for role in (make, rank, first, launcher, tokens, mirror)}


def main() -> None:
    role, folder, *numbers = sys.argv[1:]
    answers = os.dup(1)
    os.dup2(2, 1)
    size, shard = map(int, numbers[:2])
    names, clock = Names(Path(folder), size, shard, float(numbers[2])), Clock()
    began = time.perf_counter()
    ROLES[role](names, clock)
    os.write(answers, json.dumps({**clock.taken, "wall": time.perf_counter() - began}).encode())


if __name__ == "__main__":
    main()
