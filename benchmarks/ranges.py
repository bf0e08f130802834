"""Tokens that stay in the store: how soon the first batch of 100 GB comes, and how many bytes are read for those that are used.

`python -m benchmarks.ranges [--gigabytes N] [--epoch MB] [--lengths N ...]`. Azurite keeps an artifact of tokens, but not its
`.bin` files: those are zeros that a relay before it answers ranges of, by the blobs' protocol, and counts. A process of its own,
as a machine has it, brings the rest of the artifact, opens it and takes a batch; *first batch* is all three, without imports.
An epoch of a small artifact is read by a machine that reads it where it lies, by one that has a cache with room for it and by one with
room for a half. *used* are the tokens of samples, each with its last target. Run by `make bench`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.scratch import scratch

ROOT = Path(__file__).parents[1]
CONTAINER, SECRET = "ranges", "HEADWAY_BENCH_CONNECTION"
FILE = 16 << 30
BATCH = 8
LENGTHS = (1024, 4096, 32768)
VOCABULARY = {2: 50_000, 4: 128_000}
MOST_SECONDS, MOST_RATIO = 2.0, 1.05
MACHINES = {"where it lies": (1000, 1.0), "cache": (1, 1.0), "half a cache": (1, 0.5)}
"""Of an epoch: how many machines share the run, by which one knows whether a cache pays, and the cache's part of the corpus."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=100)
    parser.add_argument("--epoch", type=float, default=64, help="megabytes of the artifact of which an epoch is read")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.machine:
        machine(json.loads(given.machine))
        return
    with scratch() as folder, service(folder) as relay:
        os.environ[SECRET] = relay.azurite.connection_string
        artifacts = {
            (name, width): publish(folder, name, size, width)
            for name, size in (("large", int(given.gigabytes * 1e9)), ("small", int(given.epoch * 1e6)))
            for width in VOCABULARY
        }
        os.environ[SECRET] = relay.endpoint.connection_string
        rows = [row for width in VOCABULARY for length in given.lengths for row in measured(relay, folder, artifacts, width, length)]
    print(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=1))
    print("\n".join(table(rows)), file=sys.stderr)


def measured(relay, folder: Path, artifacts: dict, width: int, length: int) -> list[dict]:
    common = {"store": relay.store, "length": length, "width": width, "scratch": str(folder)}
    first = asked(relay, {**common, "ref": artifacts["large", width], "machines": 1000, "part": 0.1, "batches": 1})
    rows = [{"what": "first batch", **first}]
    for what, (machines, part) in MACHINES.items():
        row = asked(relay, {**common, "ref": artifacts["small", width], "machines": machines, "part": part, "batches": 0})
        rows.append({"what": f"epoch, {what}", **row})
    return rows


def asked(relay, question: dict) -> dict:
    """Have a machine do what is asked, and count what it was given of `.bin` files."""
    since = len(relay.log)
    command = [sys.executable, "-m", "benchmarks.ranges", "--machine", json.dumps(question)]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    requests = [r for r in relay.log[since:] if r.method == "GET" and r.place[1].endswith(".bin")]
    read = sum(request.asked_bytes for request in requests)
    kept = {key: question[key] for key in ("length", "width")}
    return {**kept, **said, "requests": len(requests), "read": read, "ratio": read / said["used"]}


def machine(asked: dict) -> None:
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

    began = time.perf_counter()
    store = BlobStore(open_container(StoreConfig.model_validate(asked["store"])), Path(asked["scratch"]))
    manifest = find(store, *parse_ref(asked["ref"]))
    stay = [entry.path for entry in manifest.content.files if entry.path.endswith((".bin", ".idx"))]
    there = fetch_but(store, manifest, stay, Path(asked["scratch"]) / "machine")
    brought = time.perf_counter()
    size = sum(entry.size for entry in manifest.content.files if entry.path.endswith(".bin"))
    samples = (size // asked["width"] - 1) // asked["length"]
    steps = max(1, samples // BATCH)
    config = TrainingConfig(
        sequence_length=asked["length"], steps=steps, global_batch_size=BATCH, micro_batch_size=BATCH, warmup_steps=0
    )
    how = ExecutionConfig(cache_gib=max(size * asked["part"], 8 << 20) / 2**30)
    source = open_source({"tokens": there}, config, how)
    opened = time.perf_counter()
    batches, place = asked["batches"] or -(-source.count // BATCH), 0
    for _ in range(batches):
        place += len(source.batch(place, min(BATCH, source.count - place)))
    read = time.perf_counter()
    source.close(done=True)
    seconds = {"bring": brought - began, "open": opened - brought, "batches": read - opened, "seconds": read - began}
    print(json.dumps({**seconds, "samples": place, "used": place * (asked["length"] + 1) * asked["width"]}))


def publish(folder: Path, name: str, size: int, width: int) -> str:
    """An artifact of zeros whose `.bin` are nowhere; what is brought of it is published as ever. Returns its reference."""
    from tasks.formats.token_blocks import BLOCK, DIGEST
    from tasks.storage.blob import layout
    from tasks.storage.blob.client import open_container
    from tasks.storage.blob.store import BlobStore
    from tasks.storage.manifest import FileEntry, Provenance, manifest_bytes
    from tasks.storage.settings import StoreConfig

    made = folder / f"{name}-{width}"
    made.mkdir()
    size -= size % width
    sizes = [min(FILE, size - start) for start in range(0, size, FILE)]
    files = [f"train-{number:05d}_text_document" for number in range(len(sizes))]
    whole = hashlib.sha256(bytes(BLOCK)).digest()[:DIGEST]
    for file, its in zip(files, sizes, strict=True):
        rest = hashlib.sha256(bytes(its % BLOCK)).digest()[:DIGEST] if its % BLOCK else b""
        (made / f"{file}.blocks").write_bytes(whole * (its // BLOCK) + rest)
    about = {"vocab_size": VOCABULARY[width], "eod_id": 0, "files": {"train": files}}
    (made / "tokens.json").write_text(json.dumps(about))
    store = BlobStore(open_container(StoreConfig.model_validate(store_of())), folder)
    small = store.publish(made, kind="tokens", inputs=(), provenance=Provenance(name=made.name))
    left = [FileEntry(path=f"{file}.bin", size=its, sha256="0" * 64) for file, its in zip(files, sizes, strict=True)]
    left += [FileEntry(path=f"{file}.idx", size=34, sha256="0" * 64) for file in files]
    versions = small.provenance.blob_versions | {entry.path: "snapshot:2026-11-29T00:00:00.0000000Z" for entry in left}
    whole_ = small.model_copy(
        update={
            "content": small.content.model_copy(update={"files": (*small.content.files, *left)}),
            "provenance": small.provenance.model_copy(update={"blob_versions": versions}),
        }
    )
    store.container.put(layout.folder_of(whole_) + layout.MANIFEST, manifest_bytes(whole_), new=True)
    return whole_.ref


def store_of() -> dict:
    sys.path.append(str(ROOT / "tests" / "support"))
    import azurite

    uri = f"az://{azurite.ACCOUNT}/{CONTAINER}/bench"
    return {"uri": uri, "credential": "connection_string", "secret": f"env:{SECRET}"}


class service:  # noqa: N801
    """Azurite, and before it what answers ranges of `.bin` files with zeros."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self):
        store = store_of()
        import azurite
        from azure.storage.blob import BlobServiceClient
        from blob_relay import Relay, Request, Response

        class Zeros(Relay):
            def answer(self, request: Request) -> Response:
                asked = request.asked_bytes
                if request.method != "GET" or not request.place[1].endswith(".bin") or not asked:
                    return self.upstream.ask(request)
                first = int(request.header("x-ms-range").removeprefix("bytes=").partition("-")[0])
                told = {
                    "Content-Type": "application/octet-stream",
                    "Content-Range": f"bytes {first}-{first + asked - 1}/{FILE}",
                    "ETag": '"0x1"',
                    "Last-Modified": "Sun, 29 Nov 2026 00:00:00 GMT",
                    "x-ms-blob-type": "BlockBlob",
                    "x-ms-version": "2021-12-02",
                    "Accept-Ranges": "bytes",
                }
                return Response(206, tuple(told.items()), bytes(asked))

        self.azurite = azurite.start(self.folder / "azurite")
        self.relay = Zeros(self.azurite)
        self.running = self.relay.running()
        relay = self.running.__enter__()
        relay.store, relay.azurite = store, self.azurite
        BlobServiceClient.from_connection_string(self.azurite.connection_string).create_container(CONTAINER)
        return relay

    def __exit__(self, *_: object) -> None:
        self.running.__exit__(None, None, None)
        self.azurite.stop()


def table(rows: list[dict]) -> list[str]:
    lines = [f"{'':28}{'tokens':>8}{'bytes':>6}{'seconds':>9}{'bring':>7}{'open':>7}{'batches':>9}{'MB used':>9}{'read/used':>11}"]
    for row in rows:
        limit = row["seconds"] > MOST_SECONDS if row["what"] == "first batch" else row["ratio"] > MOST_RATIO
        lines.append(
            f"{row['what']:28}{row['length']:8}{row['width']:6}{row['seconds']:9.2f}{row['bring']:7.2f}{row['open']:7.2f}"
            f"{row['batches']:9.2f}{row['used'] / 1e6:9.2f}{row['ratio']:11.2f}{'  over the limit' if limit else ''}"
        )
    return lines


if __name__ == "__main__":
    main()
