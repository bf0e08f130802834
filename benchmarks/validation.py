"""How fast a corpus is profiled, and in how much memory: the cheap rules with two processes, near duplicates apart.

`python -m benchmarks.validation [--input FILE ...] [--megabytes N]`. Without input, a corpus of N MB of Python source is made
from the standard library and the installed packages, later copies with a first line of their own. Each row is a process of its
own: seconds of all of it, and once imports are done; MB are of text. Memory: the sum over the process and its workers, sampled.
Great Expectations, which judges the profile afterwards, is not in it. Run by `make bench`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

from benchmarks.scratch import scratch

WORKERS = 2
ROWS = {
    "cheap rules": {"near_duplicates": False},
    "with near duplicates": {"near_duplicates": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", type=Path, default=[])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.profile:
        child(chosen.input, json.loads(chosen.profile))
        return
    with scratch() as folder:
        inputs = chosen.input or [make(folder / "corpus.jsonl", chosen.megabytes * 1_000_000)]
        rows = {name: measure(inputs, settings) for name, settings in ROWS.items()}
    print(json.dumps(rows, indent=1))
    for name, row in rows.items():
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in row["seconds"].items() if part != "wall")
        print(
            f"{name:<22}{row['wall']:6.1f} s, {row['profiling']:6.1f} s once imports are done: "
            f"{row['megabytes'] / row['profiling']:6.1f} MB/s, {row['peak']:4.0f} MB of memory, "
            f"{row['processors']:5.1f} s of processors ({parts})",
            file=sys.stderr,
        )


def measure(inputs: list[Path], settings: dict) -> dict:
    """One profile, made by a process of its own whose memory is watched."""
    began = time.perf_counter()
    words = [
        sys.executable,
        "-m",
        "benchmarks.validation",
        "--profile",
        json.dumps(settings),
        "--input",
        *map(str, inputs),
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    peaks = [0.0]
    watcher = threading.Thread(target=watch, args=(process, peaks), daemon=True)
    watcher.start()
    said, _ = process.communicate()
    assert process.returncode == 0
    return {**json.loads(said), "wall": time.perf_counter() - began, "peak": max(peaks), "load": os.getloadavg()[0]}


def child(inputs: list[Path], settings: dict) -> None:
    """Profile the inputs, and say how long it took once everything was imported."""
    from tasks.config.data import ValidationConfig
    from tasks.data.corpus import secrets
    from tasks.data.corpus.profile import profile

    secrets.load()
    with scratch() as folder:
        began = time.perf_counter()
        out = folder / "profile"
        columns = profile(inputs, ValidationConfig(**settings), out, heldout_fraction=0.02, workers=WORKERS)
        took = time.perf_counter() - began
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processors = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    kept = ("documents", "exact", "near", "with_secrets", "with_personal")
    said = {
        "profiling": took,
        "processors": processors,
        "megabytes": columns["bytes"] / 1e6,
        "seconds": columns["seconds"],
    }
    print(json.dumps({**said, **{name: columns[name] for name in kept}}))


def watch(process: subprocess.Popen, peaks: list[float]) -> None:
    """Megabytes that the process and its children hold together, five times a second."""
    import psutil

    root = psutil.Process(process.pid)
    while process.poll() is None:
        held = 0
        for each in (root, *children(root)):
            try:
                held += each.memory_info().rss
            except psutil.Error:
                continue
        peaks.append(held / 1e6)
        time.sleep(0.2)


def children(root):
    import psutil

    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def make(path: Path, size: int) -> Path:
    """A corpus of Python source; the files come again with a first line of their own until the size is reached."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = [file for root in roots for file in sorted(root.rglob("*.py"))]
    copy = 0
    with open(path, "w", encoding="utf-8") as out:
        while out.tell() < size:
            for file in files:
                text = file.read_text(encoding="utf-8", errors="ignore")
                out.write(json.dumps({"text": f"# copy {copy}\n{text}" if copy else text}) + "\n")
                if out.tell() >= size:
                    break
            copy += 1
    return path


if __name__ == "__main__":
    main()
