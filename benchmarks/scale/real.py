"""Both commands for real on a generated corpus, beside what the simulation says of it on one machine."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.preprocessing import proportional_kibibytes, tree
from benchmarks.scale import rates
from benchmarks.scale.chain import OF_A_DOCUMENT, Rates

POLL_SECONDS = 0.2
SETTINGS = (
    f"preprocessing.heldout_fraction={rates.SPLIT}",
    f"preprocessing.shard_gib={rates.SHARD_GIB}",
    f"preprocessing.tokenizer.vocab_size={rates.VOCABULARY}",
    "preprocessing.tokenizer.sample_bytes=16000000",
)
COMMANDS = {
    "validate": ("validate", "corpus", "-c", "tiny"),
    "preprocess": ("retrain", "-c", "tiny", "--dataset", "corpus", "--to", "preprocess"),
}
STEPS = {
    "validate": ("verify", "measure", "exact", "near", "merge", "verify", "mark", "divide", "join", "publish"),
    "preprocess": ("verify", "encode", "write", "publish tokens"),
}
"""Of rates.py, what each command does. A verdict is judged beside them, by documents."""
FIGURES = ("cpu", "wall", "read", "written")
RANKS, LAUNCHER = "ranks", "launcher"


def compared(folder: Path, size: int, small: int) -> dict:
    """Run, predict, and divide one by the other."""
    corpora = {name: folder / name for name in ("smallest", "small", "large")}
    for corpus, its in zip(corpora.values(), (small // 5, small, size), strict=True):
        rates.make_corpus(corpus, its, shard=max(1_000_000, its // 8), seed=its)
    unit = min(max(size // 64, 1 << 20), 64 << 20)
    words = [str(unit), str(500_000), str(corpora["smallest"]), str(corpora["small"])]
    command = [sys.executable, "-m", "benchmarks.scale.rates", *words]
    measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    known = Rates(measured["corpora"])
    sizes = {name: sum(path.stat().st_size for path in corpus.iterdir()) for name, corpus in corpora.items()}
    runs = {name: run(folder / "home" / name, corpora[name]) for name in ("small", "large")}
    more = sizes["large"] - sizes["small"]
    rows = {}
    for stage, steps in STEPS.items():
        before, after = runs["small"][stage], runs["large"][stage]
        judging = known.judging if stage == "validate" else dict.fromkeys(FIGURES, 0.0)
        grown = {
            what: more * (sum(known(step, what) for step in steps) + judging[what] / known.document) for what in FIGURES
        }
        predicted = {what: before[what] + grown[what] for what in FIGURES}
        documents = more / known.document
        of_ranks = OF_A_DOCUMENT["ranks"] + OF_A_DOCUMENT["mapped"] if stage == "validate" else 0
        of_launcher = OF_A_DOCUMENT["launcher"] if stage == "validate" else 0
        predicted[RANKS] = max(before[RANKS] + documents * of_ranks, before["base"] + rates.WORKERS * measured["unit"])
        predicted[LAUNCHER] = before[LAUNCHER] + documents * of_launcher
        rows[stage] = {
            what: {"predicted": predicted[what], "real": after[what], "small": before[what]} for what in predicted
        }
    return {"bytes": sizes, "load": os.getloadavg(), "cores": rates.WORKERS, "rows": rows, "rates": measured}


def run(home: Path, corpus: Path) -> dict[str, dict[str, float]]:
    """What both commands take of a corpus; the home goes afterwards."""
    environment = {**os.environ, "HEADWAY_HOME": str(home)}
    headway = str(Path(sys.executable).parent / "headway")
    say([headway, "dataset", "publish", "corpus", str(corpus)], environment)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    measured = {name: watched([headway, *words, *settings], environment) for name, words in COMMANDS.items()}
    say([headway, "down", "--yes"], environment)
    shutil.rmtree(home)
    return measured


def say(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}"


def watched(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command; processes that outlive their parents become ours, so that nothing that they take is lost."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    before, began = rates.usage(), time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    peaks = {RANKS: 0.0, LAUNCHER: 0.0, "base": float("inf")}
    watcher = threading.Thread(target=watch, args=(process, peaks))
    watcher.start()
    code = process.wait()
    wall = time.perf_counter() - began
    watcher.join()
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    after = rates.usage()
    assert code == 0, f"{command} ended with {code}"
    return {"wall": wall, **{key: after[key] - before[key] for key in after}, **peaks}


def watch(process: subprocess.Popen, peaks: dict[str, float]) -> None:
    """Most bytes that ranks with their workers held, and what waits for them with those that judge; shared pages once."""
    while process.poll() is None:
        held = {RANKS: 0.0, LAUNCHER: 0.0}
        for pid in tree(os.getpid()):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                is_rank = "tasks.jobs.profile" in words or "tasks.jobs.preprocess" in words
                if is_rank or "headway" in words.partition(" -")[0] or "tasks.data.judging" in words:
                    held[RANKS if is_rank and "tasks.jobs.node" not in words else LAUNCHER] += (
                        1024 * proportional_kibibytes(pid)
                    )
        for place in (RANKS, LAUNCHER):
            peaks[place] = max(peaks[place], held[place])
        if held[RANKS]:
            peaks["base"] = min(peaks["base"], held[RANKS])
        time.sleep(POLL_SECONDS)


def table(row: dict) -> list[str]:
    units = dict.fromkeys(("read", "written", RANKS, LAUNCHER), ("MB", 1e6)) | dict.fromkeys(
        ("cpu", "wall"), ("s", 1.0)
    )
    lines = [f"{row['bytes']['large'] / 1e9:.2f} GB, {row['cores']} cores, load {row['load'][0]:.1f}"]
    for stage, figures in row["rows"].items():
        for what, figure in figures.items():
            unit, scale = units[what]
            predicted, real = figure["predicted"] / scale, figure["real"] / scale
            off = 100 * (predicted / real - 1)
            lines.append(
                f"{stage:12}{what:10} predicted{predicted:10.1f} {unit:3} real{real:10.1f} {unit:3}{off:+7.1f} %"
            )
    return lines
