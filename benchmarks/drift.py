"""How fast new data is compared with a reference, in how much memory, and what the verdict is worth.

`python -m benchmarks.drift [--megabytes 100] [--tokenizer FOLDER]`: N MB against N MB of Python source on two processes; MB are
of files. Seconds of the whole process, and once imports are done. Memory: the sum over the process and its workers, sampled.
`python -m benchmarks.drift --power N [--seed S]`: alarms of N windows of unchanged text, and N trials of every planted shift,
with Clopper and Pearson's interval (benchmarks/drift_power.py).
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.scratch import scratch
from benchmarks.validation import make, watch

WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--power", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", nargs=2, type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.power:
        power(chosen.power, chosen.seed, chosen.tokenizer)
    elif chosen.compare:
        child(*chosen.compare, chosen.tokenizer)
    else:
        with scratch() as folder:
            size = chosen.megabytes * 1_000_000
            whole = make(folder / "whole.jsonl", 2 * size)
            measure(halves(whole, folder), chosen.tokenizer)


def halves(whole: Path, folder: Path) -> list[Path]:
    """Every other line of a file: two corpora of one kind."""
    paths = [folder / "reference.jsonl", folder / "new.jsonl"]
    with open(whole, "rb") as lines, open(paths[0], "wb") as one, open(paths[1], "wb") as other:
        for number, line in enumerate(lines):
            (one, other)[number % 2].write(line)
    return paths


def measure(paths: list[Path], tokenizer: Path | None) -> None:
    """One comparison in a process of its own, whose memory is watched."""
    words = [sys.executable, "-m", "benchmarks.drift", "--compare", *map(str, paths)]
    began = time.perf_counter()
    process = subprocess.Popen(
        words + (["--tokenizer", str(tokenizer)] if tokenizer else []), stdout=subprocess.PIPE, text=True
    )
    peaks = [0.0]
    threading.Thread(target=watch, args=(process, peaks), daemon=True).start()
    said, _ = process.communicate()
    assert process.returncode == 0
    row = {**json.loads(said), "wall": time.perf_counter() - began, "peak": max(peaks), "load": os.getloadavg()[0]}
    print(json.dumps(row))
    print(
        f"{row['megabytes']:.0f} MB in {row['wall']:.1f} s, {row['seconds']['all']:.1f} s once imports are done, "
        f"{row['processors']:.1f} s of processors, {row['peak']:.0f} MB of memory, load {row['load']:.1f}",
        file=sys.stderr,
    )


def child(reference: Path, new: Path, tokenizer: Path | None) -> None:
    """Compare, and say how long it took once everything was imported."""
    import resource

    from tasks.config.revalidation import DriftConfig
    from tasks.data.corpus.inputs import find_shards
    from tasks.data.drift.comparison import Corpus, drift_of

    corpora = [Corpus(path.name, tuple(find_shards([path]))) for path in (reference, new)]
    with scratch() as folder:
        made = drift_of(
            corpora[0],
            corpora[1],
            DriftConfig(),
            folder,
            tokenizer=tokenizer,
            text_field="text",
            workers=WORKERS,
        )
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    megabytes = sum(path.stat().st_size for path in (reference, new)) / 1e6
    processors = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    kept = {name: made[name] for name in ("verdict", "documents", "seconds")}
    print(json.dumps({"megabytes": megabytes, "processors": processors, **kept}))


def power(trials: int, seed: int, tokenizer: Path | None) -> None:
    """Alarms of unchanged windows and planted shifts that are found."""
    from benchmarks.drift_power import SHIFTS, planted, pool, unchanged

    drawn = pool(seed, tokenizer=tokenizer)
    rows = {"unchanged": lambda number: unchanged(drawn, number)}
    rows |= {shift: lambda number, shift=shift: planted(drawn, shift, number) for shift in SHIFTS}
    for name, trial in rows.items():
        found = sum(trial(seed * 10_000 + number)["verdict"] == "drift" for number in range(trials))
        low, high = interval(found, trials)
        print(
            f"{name:<40}{found:4} of {trials} ({found / trials:.1%}, 95 % interval {low:.1%} to {high:.1%})", flush=True
        )


def interval(found: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's exact interval of a share."""
    from scipy.stats import beta

    rest = (1 - confidence) / 2
    low = float(beta.ppf(rest, found, trials - found + 1)) if found else 0.0
    return low, float(beta.ppf(1 - rest, found + 1, trials - found)) if found < trials else 1.0


if __name__ == "__main__":
    main()
