"""What a byte of a corpus costs here in each stage: a small corpus, and the product's own functions, one after the other.

`python -m benchmarks.scale.rates UNIT OFTEN FOLDER FOLDER` goes through two corpora, in a process of its own, after it measured
the memory of a unit of UNIT bytes; the second one's profile is judged again with OFTEN rows. A rate is what the
larger one took more, by the bytes that it has more: what every size costs, as imports do, is no part of it.
"""

import json
import os
import random
import resource
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.scratch import scratch

DOCUMENT = 4000
"""Bytes of text of a document, on average."""
EXACT, NEAR = 0.03, 0.05
"""Of the documents: those that repeat an earlier one exactly, and with some other lines."""
WORKERS = len(os.sched_getaffinity(0))
SPLIT = 0.02
VOCABULARY = 8192
SHARD_GIB = 0.5


def make_corpus(folder: Path, size: int, *, shard: int, seed: int = 1) -> Path:
    """JSON lines of about `size` bytes: documents of lines that are drawn from Python's own library and installed packages."""
    drawn, lines = random.Random(seed), pool_of_lines()
    folder.mkdir(parents=True)
    kept: list[list[str]] = []
    written = number = 0
    while written < size:
        with open(folder / f"part-{number:05d}.jsonl", "w", encoding="utf-8") as file:
            while written < size and file.tell() < min(shard, size):
                choice = drawn.random()
                if choice < EXACT + NEAR and kept:
                    chosen = list(drawn.choice(kept))
                    for _ in range(0 if choice < EXACT else 2):
                        chosen[drawn.randrange(len(chosen))] = drawn.choice(lines)
                else:
                    chosen = drawn.choices(lines, k=round(DOCUMENT / AVERAGE * drawn.uniform(0.2, 1.8)))
                    if len(kept) < 20_000:
                        kept.append(chosen)
                written += file.write(json.dumps({"text": "\n".join(chosen)}) + "\n")
        number += 1
    return folder


AVERAGE = 45
"""Bytes of a line, with its line feed."""


def pool_of_lines() -> list[str]:
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    lines = dict[str, None]()
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        lines.update(dict.fromkeys(line for line in path.read_text("utf-8", "ignore").splitlines() if len(line) > 20))
        if len(lines) > 1_000_000:
            break
    return list(lines)


Step = dict[str, float]
"""cpu, wall: seconds; read, written: bytes."""


class Ledger:
    """What each step took of this process and of those that it waited for."""

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}

    def __call__(self, name: str, do: Callable[[], object]) -> object:
        before, began = usage(), time.perf_counter()
        result = do()
        wall = time.perf_counter() - began
        after = usage()
        self.steps[name] = {"wall": wall, **{key: after[key] - before[key] for key in after}}
        return result


def usage() -> Step:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {
        "cpu": sum(each.ru_utime + each.ru_stime for each in used),
        "read": float(io["rchar"]),
        "written": float(io["wchar"]),
    }


def measured(corpus: Path, home: Path, *, often: int) -> dict[str, object]:
    """Every step of both stages on one corpus, as tasks/validate.py, tasks/preprocess.py and their programs do them."""
    ledger = Ledger()
    size = sum(path.stat().st_size for path in corpus.iterdir())
    documents = validating(corpus, home, ledger, often=often)
    preprocessing(home / "left", home, ledger)
    return {"bytes": size, "documents": documents, "steps": ledger.steps}


def repeated(profile, folder: Path, documents: int):
    """A profile with the rows of another one, again and again: a document takes little to be judged, beside the imports."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.data.corpus.quarantine import Profile

    table = pq.read_table(profile.folder / "documents.parquet")
    times = max(2, round(documents / len(table)))
    shutil.copytree(profile.folder, folder)
    pq.write_table(
        pa.concat_tables([table] * times), folder / "documents.parquet", row_group_size=100_000, compression="zstd"
    )
    columns = {**profile.columns, "documents": len(table) * times}
    (folder / "columns.json").write_text(json.dumps(columns))
    return Profile(folder)


def unit_memory(folder: Path, size: int) -> float:
    """Bytes that measuring one unit of a size adds to a process that has imported and loaded all that it needs."""
    from tasks.config.data import ValidationConfig
    from tasks.data.corpus.inputs import cut, find_shards
    from tasks.data.corpus.parts import Work, measure_unit

    corpus = make_corpus(folder / "unit", size, shard=2 * size)
    work = Work(tuple(find_shards([corpus])), ValidationConfig(), SPLIT)
    [unit] = cut(work.shards, 2 * size)
    work.prepare()
    pid = os.fork()
    if not pid:
        before = held()
        measure_unit(unit, work, folder / "unit parts")
        (folder / "unit held").write_text(str(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return float((folder / "unit held").read_text())


def held() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def validating(corpus: Path, home: Path, ledger: Ledger, *, often: int) -> int:
    from tasks.config.data import ValidationConfig
    from tasks.data import judging
    from tasks.data.corpus.dividing import Division, write_marks
    from tasks.data.corpus.duplicates import STEPS
    from tasks.data.corpus.inputs import find_shards
    from tasks.data.corpus.parts import Work, divide
    from tasks.data.corpus.pool import on_processes
    from tasks.data.corpus.profile import linking_of, measure, merge
    from tasks.data.corpus.quarantine import Profile
    from tasks.storage import open_store
    from tasks.storage.manifest import Provenance

    config, parts, out = ValidationConfig(), home / "parts", home / "profile"
    store = open_store(home)

    def publish(folder: Path, kind: str, *, link: bool = False):
        return store.publish(folder, kind=kind, inputs=(), provenance=Provenance(name="corpus"), link=link)

    dataset = publish(corpus, "dataset")
    folder = ledger("verify", lambda: store.fetch(dataset))
    work = Work(tuple(find_shards([folder])), config, SPLIT)
    units = divide(work.shards)
    ledger("measure", lambda: measure(units, work, parts, workers=WORKERS))
    linking = linking_of(units, work, parts)
    for step in STEPS:
        ledger(step, lambda step=step: linking.do(step, linking.ranges(step), workers=WORKERS))
    ledger("merge", lambda: merge(units, work, parts, out, began=time.perf_counter()))
    profile = Profile(out)
    (home / "judged").mkdir()
    place = judging.Place(home, "corpus", "run")
    judged = ledger(
        "judge",
        lambda: judging.judge_apart(
            profile, config, before=None, strange={}, own=None, place=place, folder=home / "judged"
        ),
    )
    if often:
        many = repeated(profile, home / "often", often)
        (home / "judged often").mkdir()
        ledger(
            "judge often",
            lambda: judging.judge_apart(
                many, config, before=None, strange={}, own=None, place=place, folder=home / "judged often"
            ),
        )
        ledger.steps["judge often"]["documents"] = float(many.documents - profile.documents)
    assert judged.passed, [check for check in judged.checks if not check.passed]
    ledger("mark", lambda: write_marks(home / "marks", profile.names, *judged.marked()))
    division = Division(folder, home / "marks", home / "divided", home / "left")
    ledger("divide", lambda: on_processes(division.files, lambda name, _: division.do(name), workers=WORKERS))
    ledger("join", lambda: division.finish(home / "aside"))
    # A job's output is taken over; what the launcher divided by itself is copied.
    ledger("take over", lambda: publish(home / "left", "dataset", link=True))
    (home / "left" / "copied").touch()
    ledger("publish", lambda: publish(home / "left", "dataset"))
    (home / "left" / "copied").unlink()
    shutil.rmtree(parts)
    return profile.documents


def preprocessing(corpus: Path, home: Path, ledger: Ledger) -> None:
    from tasks.config.data import PreprocessingConfig
    from tasks.data.corpus.inputs import cut, find_shards
    from tasks.data.tokenizing.engine import choose
    from tasks.data.tokenizing.merging import token_files
    from tasks.data.tokenizing.tokenizer import open_tokenizer
    from tasks.data.tokenizing.units import Work, encode_parallel, read_receipt, unit_bytes
    from tasks.jobs.preprocess import _first_texts, _merge, _splits, save_tokenizer, train_tokenizer
    from tasks.storage import open_store
    from tasks.storage.manifest import Provenance

    config = PreprocessingConfig(tokenizer={"vocab_size": VOCABULARY}, shard_gib=SHARD_GIB, heldout_fraction=SPLIT)
    shards, parts = find_shards([corpus]), home / "tokens"
    units = cut(shards, unit_bytes(shards))
    ledger("tokenizer", lambda: save_tokenizer(train_tokenizer(units, config), home / "tokenizer"))
    tokenizer = open_tokenizer(home / "tokenizer")
    work = Work(tokenizer, (config.text_field,), _splits(config), immutable=True)
    choice = choose(tokenizer, _first_texts(units, config.text_field))
    ledger("encode", lambda: encode_parallel(units, work, parts, engine=choice.engine, workers=WORKERS))
    receipts = [read_receipt(unit, work, parts) for unit in units]
    files = token_files(receipts, work, most_bytes=SHARD_GIB * 2**30)
    ledger("write", lambda: [_merge(file, work, parts, blocks=True) for file in files])
    out = home / "out"
    out.mkdir()
    for path in [
        path for path in parts.iterdir() if path.suffix in (".bin", ".idx", ".blocks") and "document" in path.name
    ]:
        path.rename(out / path.name)
    store = open_store(home)
    ledger(
        "publish tokens",
        lambda: store.publish(out, kind="tokens", inputs=(), provenance=Provenance(name="corpus"), link=True),
    )
    ledger.steps["tokens"] = {"bytes": float(sum(path.stat().st_size for path in out.glob("*.bin")))}


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    unit, often, *folders = sys.argv[1:]
    with scratch(Path(folders[0]).parent) as home:
        memory = unit_memory(home, int(unit))
    corpora = []
    for folder in folders:
        with scratch(Path(folder).parent) as home:
            corpora.append(measured(Path(folder), home, often=int(often) * (folder == folders[-1])))
    os.write(answers, json.dumps({"unit": memory, "corpora": corpora}).encode())


if __name__ == "__main__":
    main()
