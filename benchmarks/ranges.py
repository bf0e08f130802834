"""Tokens that stay in the store: how soon the first batch of 100 GB comes, and how many bytes are read for those that are used.

`python -m benchmarks.ranges [--gigabytes N] [--epoch MB] [--lengths N ...]`. A small server gives ranges of files as Azure's
blobs are given, and counts them; the `.bin` files of the artifact are sparse, so what comes are zeros. A process of its own, as a
machine of a training has it, brings the rest of the artifact, opens it and takes a batch: *first batch* is all three, without
imports. An epoch of a small artifact is read by a machine that reads it where it lies, by one whose cache was filled with it
before, and by one whose cache has room for a half. *used* are the tokens of samples, each with its last target. Run by `make
bench`.
"""

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from benchmarks.scratch import scratch

STORE = {
    "uri": "az://account/ranges/bench",
    "credential": "connection_string",
    "secret": "env:HEADWAY_BENCH_CONNECTION",
}
FILE = 16 << 30
BATCH = 8
LENGTHS = (1024, 4096, 32768)
VOCABULARY = {2: 50_000, 4: 128_000}
"""By the bytes of a token."""
MOST_SECONDS, MOST_RATIO = 2.0, 1.05
ALONE, MANY = 1, 1000
EPOCHS = {"where it lies": (MANY, 1.0), "cache": (ALONE, 2.0), "half a cache": (ALONE, 0.5)}
"""How many machines share the run, by which one knows whether a cache pays, and the cache's part of the corpus."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=100)
    parser.add_argument(
        "--epoch", type=float, default=64, help="megabytes of the artifact of which an epoch is read; 0: none"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args()
    sizes = {"large": int(given.gigabytes * 1e9), "small": int(given.epoch * 1e6)}
    with scratch() as folder, served(folder) as log:
        argv = [sys.executable, "-c", "from benchmarks.ranges import machine; machine()"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as machine:
            rows = []
            for width in VOCABULARY:
                refs = {name: publish(folder, name, size, width) for name, size in sizes.items() if size}
                for length in given.lengths:
                    rows += measured(machine, log, folder, refs, width=width, length=length)
            machine.stdin.close()
    print(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=1))
    print("\n".join(table(rows)), file=sys.stderr)


def measured(machine: subprocess.Popen, log: list, folder: Path, refs: dict, *, width: int, length: int) -> list[dict]:
    """The first batch of the large artifact, and epochs of the small one, asked of a machine."""
    common = {"length": length, "width": width, "scratch": str(folder)}
    what = {"first batch": ("large", MANY, 0.1, 1)}
    if "small" in refs:
        what |= {f"epoch, {name}": ("small", machines, part, 0) for name, (machines, part) in EPOCHS.items()}
    rows = []
    for name, (artifact, machines, part, batches) in what.items():
        question = {**common, "ref": refs[artifact], "machines": machines, "part": part, "batches": batches}
        log.clear()
        machine.stdin.write(json.dumps(question) + "\n")
        machine.stdin.flush()
        times = json.loads(machine.stdout.readline())
        of_tokens = [size for path, size in log if path.endswith(".bin")]
        read, used = sum(of_tokens), times.pop("used")
        counted = {"requests": len(of_tokens), "read": read, "used": used, "ratio": read / used}
        rows.append({"what": name, "length": length, "width": width, **times, **counted})
    return rows


def machine() -> None:
    """A process of a training: answers questions, a line each, with what it took."""
    for name in ("tasks.jobs.data.sources", "tasks.storage.blob.ranges"):
        importlib.import_module(name)
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        os.write(answers, (json.dumps(answer(json.loads(line))) + "\n").encode())


def answer(asked: dict) -> dict:
    """What a machine of a training does with its tokens until it has a batch, or has read all."""
    os.environ |= {"HEADWAY_SCRATCH": asked["scratch"], "WORLD_SIZE": str(asked["machines"]), "LOCAL_WORLD_SIZE": "1"}
    from tasks.artifacts import parse_ref
    from tasks.config.training import ExecutionConfig, TrainingConfig
    from tasks.jobs.data.sources import open_source
    from tasks.storage.blob.client import open_container
    from tasks.storage.blob.ranges import fetch_but
    from tasks.storage.blob.store import BlobStore
    from tasks.storage.settings import StoreConfig
    from tasks.storage.store import find

    marks = [(time.perf_counter(), time.process_time())]

    def done() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    store = BlobStore(open_container(StoreConfig.model_validate(STORE)), Path(asked["scratch"]))
    manifest = find(store, *parse_ref(asked["ref"]))
    stay = [entry.path for entry in manifest.content.files if entry.path.endswith((".bin", ".idx"))]
    tokens = fetch_but(store, manifest, stay, Path(asked["scratch"]) / "machine")
    done()
    size = sum(entry.size for entry in manifest.content.files if entry.path.endswith(".bin"))
    samples = (size // asked["width"] - 1) // asked["length"]
    shape = {
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH,
        "steps": max(2, samples // BATCH),
        "warmup_steps": 1,
    }
    config = TrainingConfig(sequence_length=asked["length"], **shape)
    how = ExecutionConfig(cache_gib=max(size * asked["part"], 8 << 20) / 2**30)
    source = open_source({"tokens": tokens}, config, how)
    if not asked["batches"]:
        source.tokens.wait()
    done()
    taken, count = 0, BATCH * asked["batches"] or source.count
    while taken < count:
        taken += len(source.batch(taken, min(BATCH, count - taken)))
    done()
    source.close(done=True)
    seconds = [after[0] - before[0] for before, after in pairwise(marks)]
    times = {**dict(zip(("bring", "open", "batches"), seconds, strict=True)), "seconds": sum(seconds)}
    times |= {"processors": marks[-1][1] - marks[0][1]}
    return {**times, "samples": taken, "used": taken * (asked["length"] + 1) * asked["width"]}


def publish(folder: Path, name: str, size: int, width: int) -> str:
    """Lay an artifact of zeros where the server finds it, its `.bin` sparse; returns its reference."""
    from tasks.formats.mmididx import BLOCK, DIGEST
    from tasks.storage.blob import layout
    from tasks.storage.manifest import Content, FileEntry, Manifest, Provenance, hash_file, manifest_bytes

    name, sizes = f"{name}-{width}", [min(FILE, size - start) // width * width for start in range(0, size, FILE)]
    files = [f"train-{number:05d}_text_document" for number in range(len(sizes))]
    place = folder / "bench" / layout.name_folder("tokens", name) / "files"
    place.mkdir(parents=True)
    zeros = [hashlib.sha256(bytes(count)).digest()[:DIGEST] for count in (BLOCK, *(its % BLOCK for its in sizes))]
    entries = []
    for file, its, rest in zip(files, sizes, zeros[1:], strict=True):
        with open(place / f"{file}.bin", "wb") as out:
            out.truncate(its)
        (place / f"{file}.blocks").write_bytes(zeros[0] * (its // BLOCK) + rest * bool(its % BLOCK))
        entries += [
            FileEntry(path=f"{file}.bin", size=its, sha256="0" * 64),
            FileEntry(path=f"{file}.idx", size=34, sha256="0" * 64),
        ]
    (place / "tokens.json").write_text(
        json.dumps({"vocab_size": VOCABULARY[width], "eod_id": 0, "files": {"train": files}})
    )
    for path in (place / "tokens.json", *place.glob("*.blocks")):
        length, sha256 = hash_file(path)
        entries.append(FileEntry(path=path.name, size=length, sha256=sha256))
    content = Content(kind="tokens", files=tuple(sorted(entries, key=lambda entry: entry.path)))
    versions = {entry.path: "2026-11-29T00:00:00.0000000Z" for entry in entries}
    manifest = Manifest(content=content, provenance=Provenance(name=name, blob_versions=versions))
    at = folder / "bench" / layout.folder_of(manifest)
    at.mkdir(parents=True)
    (at / layout.MANIFEST).write_bytes(manifest_bytes(manifest))
    return manifest.ref


@contextmanager
def served(folder: Path):
    """A server of the files in a folder as blobs; yields what was read of which, as (path, bytes)."""
    log: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/account/ranges/")
            try:
                file = os.open(folder / path, os.O_RDONLY)
            except FileNotFoundError:
                self.send_response(404)
                self.send_header("x-ms-error-code", "BlobNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = os.fstat(file).st_size
            asked = self.headers.get("x-ms-range") or f"bytes=0-{size - 1}"
            first, last = (int(each) for each in asked.removeprefix("bytes=").split("-"))
            data = os.pread(file, min(last, size - 1) - first + 1, first)
            os.close(file)
            log.append((path, len(data)))
            self.send_response(206)
            headers = {
                "Content-Range": f"bytes {first}-{first + len(data) - 1}/{size}",
                "Content-Length": str(len(data)),
            }
            headers |= {
                "ETag": '"0x1"',
                "Last-Modified": "Sun, 29 Nov 2026 00:00:00 GMT",
                "x-ms-blob-type": "BlockBlob",
            }
            for name, value in {**headers, "Content-Type": "application/octet-stream"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Requests are counted in `log`, not printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/account"
    os.environ["HEADWAY_BENCH_CONNECTION"] = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={url};"
    try:
        yield log
    finally:
        server.shutdown()
        server.server_close()


def table(rows: list[dict]) -> list[str]:
    columns = ("seconds", "bring", "open", "batches", "processors")
    lines = [
        f"{'':24}{'tokens':>7}{'bytes':>6}"
        + "".join(f"{name:>11}" for name in columns)
        + f"{'MB used':>9}{'read/used':>10}"
    ]
    for row in rows:
        over = row["seconds"] > MOST_SECONDS if row["what"] == "first batch" else row["ratio"] > MOST_RATIO
        lines.append(
            f"{row['what']:24}{row['length']:7}{row['width']:6}"
            + "".join(f"{row[name]:11.2f}" for name in columns)
            + f"{row['used'] / 1e6:9.2f}{row['ratio']:10.2f}{'  over the limit' if over else ''}"
        )
    return lines


if __name__ == "__main__":
    main()
