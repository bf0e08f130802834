"""How fast exact and near duplicates of a corpus are found, by one process and by two, beside what finding them needs on disk.

`python -m benchmarks.duplicates [--documents N] [--rounds R] [--input FILE ...]`. Without input, N documents of 200 words are
made, of which a tenth repeat another one exactly and a fifth nearly. The corpus is measured once by two processes; then ranges
of hashes are gone through by one process and by two, in turn, R times: the fastest of each counts, and the ratio is of one run.
Both must make the same links. `cores` is how many cores' time two processes got: a busy machine gives them less than two.
"""

import argparse
import json
import os
import random
import resource
import sys
import time
from pathlib import Path

from benchmarks.scratch import scratch

WORDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", type=Path, default=[])
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with scratch() as folder:
        inputs = chosen.input or [make(folder / "corpus.jsonl", chosen.documents)]
        row = measured(inputs, folder / "parts", chosen.rounds)
    print(json.dumps(row, indent=1))
    print(
        f"{row['documents']} documents: measured in {row['measuring']:.1f} s; duplicates by one process {row['one']:.2f} s, "
        f"by two {row['two']:.2f} s: {row['ratio']:.2f} times as fast ({row['cores']:.2f} cores), "
        f"{row['documents_per_second']:,.0f} documents/s a process; {row['bytes_per_document']:.0f} bytes a document on disk",
        file=sys.stderr,
    )


def measured(inputs: list[Path], folder: Path, rounds: int) -> dict:
    """Seconds of one process and of two, and what they found."""
    from tasks.config.data import ValidationConfig
    from tasks.data.corpus.inputs import find_shards
    from tasks.data.corpus.parts import Work, divide
    from tasks.data.corpus.profile import measure

    work = Work(tuple(find_shards(inputs)), ValidationConfig(), 0.02)
    units = divide(work.shards)
    began = time.perf_counter()
    measure(units, work, folder, workers=2)
    measuring = time.perf_counter() - began
    best: dict[int, tuple[float, float]] = {}
    links: dict[int, list] = {}
    for round_ in range(rounds):
        for workers in (1, 2):
            seconds, processors, links[workers] = once(
                units, work, folder, folder / f"links-{round_}-{workers}", workers
            )
            best[workers] = min(best.get(workers, (seconds, processors)), (seconds, processors))
    assert links[1] == links[2], "two processes found something else"
    (one, _), (two, processors) = best[1], best[2]
    documents = links[1][0]
    disk = sum(path.stat().st_size for name in ("*.run", "signatures.bin") for path in folder.glob(f"unit-*/{name}"))
    return {
        "documents": documents,
        "exact": links[1][1],
        "near": links[1][2],
        "measuring": measuring,
        "one": one,
        "two": two,
        "ratio": one / two,
        "cores": processors / two,
        "documents_per_second": documents / one,
        "bytes_per_document": disk / documents,
        "load": os.getloadavg()[0],
    }


def once(units: list, work, folder: Path, links: Path, workers: int) -> tuple[float, float, list]:
    """Go through all ranges: seconds, seconds of processors, and counts and a digest of what was found."""
    from dataclasses import replace
    from hashlib import sha256

    from tasks.data.corpus.duplicates import STEPS
    from tasks.data.corpus.profile import linking_of

    before, began = processors(), time.perf_counter()
    linking = replace(linking_of(units, work, folder), folder=links)
    for step in STEPS:
        linking.do(step, linking.ranges(step), workers=workers)
    seconds, spent = time.perf_counter() - began, processors() - before
    digest, rows = sha256(), {step: set() for step in STEPS}
    for step in STEPS:
        for each, _ in linking.read(step):
            digest.update(each.tobytes())
            rows[step].update(each["row"].tolist())
    return seconds, spent, [int(linking.firsts[-1]), *(len(each) for each in rows.values()), digest.hexdigest()]


def processors() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def make(path: Path, documents: int) -> Path:
    """Random words; of ten documents one is a copy of an earlier one, and two nearly are."""
    drawn = random.Random(1)
    vocabulary = [f"word{number}" for number in range(20_000)]
    kept: list[list[str]] = []
    with open(path, "w", encoding="utf-8") as file:
        for number in range(documents):
            words = drawn.choices(vocabulary, k=WORDS)
            if number % 10 in (3, 6, 9) and kept:
                words = list(drawn.choice(kept))
                if number % 10 != 9:
                    words[drawn.randrange(WORDS)] = "edited"
            if len(kept) < 20_000:
                kept.append(words)
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


if __name__ == "__main__":
    main()
