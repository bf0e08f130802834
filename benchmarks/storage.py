"""How fast artifacts go to a Blob store and come back, beside the SDK with its defaults; and how fast a store is verified.

    python -m benchmarks.storage [--megabytes 1000] [--repeats 3] [--files 100000] [--gigabytes 10] [--rows upload,download,...]

Against Azurite on the same machine, which the tests install (tests/support/azurite.py) and which shares its processors, in one
run. Ours hashes end to end: sha256 of what is read, MD5 of each block that the service checks, sha256 of what comes back. The
SDK's `upload_blob` and `download_blob().readinto` check nothing. Each measurement is a process of its own, repeats are
interleaved, figures are medians; seconds are without imports, memory is the process's peak. MB are 10^6 bytes. Run by `make
bench`, with less of everything.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.scratch import scratch

ROOT = Path(__file__).parents[1]
CONTAINER, SECRET = "bench", "HEADWAY_BENCH_CONNECTION"
ROWS = ("upload", "download", "verify", "files", "large")
SMALL_FILE_BYTES = 2000


def main() -> None:
    given = arguments()
    if given.do:
        print(json.dumps(child(given.do, given.folder, given.number)))
        return
    rows = given.rows.split(",")
    with scratch(given.scratch) as folder, service(folder):
        said = {row: RUN[row](folder, given) for row in ROWS if row in rows}
    print(json.dumps({"load": os.getloadavg(), "processors": os.cpu_count(), **said}, indent=1))
    print("\n".join(table(said)), file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--scratch", type=Path, help="where files are made: three times --gigabytes must fit")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", help=argparse.SUPPRESS)
    return parser.parse_args()


class service:  # noqa: N801
    """Azurite with an empty container, and a home whose store it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        sys.path.append(str(ROOT / "tests" / "support"))
        import azurite
        from azure.storage.blob import BlobServiceClient

        self.azurite = azurite.start(self.folder / "azurite")
        os.environ[SECRET] = self.azurite.connection_string
        BlobServiceClient.from_connection_string(self.azurite.connection_string).create_container(CONTAINER)
        uri = f"az://{azurite.ACCOUNT}/{CONTAINER}/bench"
        store = {"uri": uri, "credential": "connection_string", "secret": f"env:{SECRET}"}
        (self.folder / "stores.yaml").write_text(yaml.safe_dump({"use": "cloud", "stores": {"cloud": store}}))

    def __exit__(self, *_: object) -> None:
        self.azurite.stop()


def upload(folder: Path, given: argparse.Namespace) -> dict:
    """One file up: ours, and the SDK's defaults."""
    source = make(folder / "upload", given.megabytes)
    rows = interleaved(("publish", "upload_blob"), source, given.repeats)
    return compared(rows, given.megabytes, ours="publish", theirs="upload_blob")


def download(folder: Path, given: argparse.Namespace) -> dict:
    """The file down again, to disk: ours, and the SDK's defaults."""
    source = folder / "upload" if (folder / "upload").exists() else make(folder / "upload", given.megabytes)
    run("publish", source, 0)
    rows = interleaved(("fetch", "readinto"), source, given.repeats)
    return compared(rows, given.megabytes, ours="fetch", theirs="readinto")


def verify(folder: Path, given: argparse.Namespace) -> dict:
    """Every byte of an artifact of a local store."""
    source = make(folder / "verify", given.megabytes)
    rows = [run("verify", source, number) for number in range(given.repeats)]
    shutil.rmtree(source)
    row = middle(rows)
    return {**row, "megabytes_per_second_and_core": given.megabytes / row["processors"]}


def files(folder: Path, given: argparse.Namespace) -> dict:
    """An artifact of many small files."""
    source, dice = folder / "files", random.Random(2)
    for number in range(given.files):
        path = source / f"{number // 1000:03d}" / f"{number:06d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dice.randbytes(SMALL_FILE_BYTES))
    row, again = run("publish", source, 0), run("republish", source, 0)
    shutil.rmtree(source)
    return {"files": given.files, **row, "again": again, "files_per_second": given.files / row["seconds"]}


def large(folder: Path, given: argparse.Namespace) -> dict:
    """One large file, up and down; the memory of it must not grow with the file."""
    megabytes = int(given.gigabytes * 1000)
    source = make(folder / "large", megabytes)
    up, down = run("publish", source, 0), run("fetch", source, 0)
    shutil.rmtree(source)
    return {"megabytes": megabytes, "up": up, "down": down}


RUN = {"upload": upload, "download": download, "verify": verify, "files": files, "large": large}


def make(folder: Path, megabytes: int) -> Path:
    """A folder with one file of random bytes."""
    dice = random.Random(megabytes)
    folder.mkdir()
    with open(folder / "data.bin", "wb") as file:
        for _ in range(megabytes):
            file.write(dice.randbytes(1_000_000))
    return folder


def interleaved(ways: tuple[str, ...], source: Path, repeats: int) -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {way: [] for way in ways}
    for number in range(repeats):
        for way in ways:
            rows[way].append(run(way, source, number))
    return rows


def compared(rows: dict[str, list[dict]], megabytes: int, *, ours: str, theirs: str) -> dict:
    said = {way: middle(measured) for way, measured in rows.items()}
    for row in said.values():
        row["megabytes_per_second"] = megabytes / row["seconds"]
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(rows[ours], rows[theirs], strict=True)]
    return {**said, "ratio": said[theirs]["seconds"] / said[ours]["seconds"], "ratios": ratios}


def middle(rows: list[dict]) -> dict:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def run(way: str, source: Path, number: int) -> dict:
    """One measurement, by a process of its own."""
    words = ["--do", way, "--folder", str(source), "--number", str(number)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.storage", *words], stdout=subprocess.PIPE, cwd=ROOT, check=True
    )
    return json.loads(done.stdout)


def child(way: str, source: Path, number: str) -> dict:
    """Do it once, and say how long it took, what it took of the processors, and how much memory it held at most."""
    work = WAYS[way](source, number)
    began, before = time.perf_counter(), os.times()
    work()
    took, after = time.perf_counter() - began, os.times()
    processors = after.user + after.system - before.user - before.system
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"seconds": took, "processors": processors, "peak_megabytes": peak}


def publish(source: Path, number: str):
    from tasks.storage.manifest import Provenance

    store = opened(source.parent)
    provenance = Provenance(name=f"{source.name}-{number}")
    return lambda: store.publish(source, kind="dataset", inputs=(), provenance=provenance)


def fetch(source: Path, number: str):
    """From a home where nothing was fetched yet."""
    home = Path(tempfile.mkdtemp(dir=source.parent, prefix="home-"))
    shutil.copy(source.parent / "stores.yaml", home)
    store = opened(home)
    manifest = next(store.manifests("dataset", f"{source.name}-0"))

    def work() -> None:
        store.fetch(manifest)
        shutil.rmtree(home)

    return work


def upload_blob(source: Path, number: str):
    blob = client().get_blob_client(f"default/{source.name}-{number}")

    def work() -> None:
        with open(source / "data.bin", "rb") as file:
            blob.upload_blob(file, overwrite=True)

    return work


def readinto(source: Path, number: str):
    blob = client().get_blob_client("default/download")
    if not blob.exists():
        with open(source / "data.bin", "rb") as file:
            blob.upload_blob(file, max_concurrency=4)
    target = source.parent / f"default-{number}"

    def work() -> None:
        with open(target, "wb") as file:
            blob.download_blob().readinto(file)
        target.unlink()

    return work


def verify_local(source: Path, number: str):
    from tasks.storage.local import LocalStore
    from tasks.storage.manifest import Provenance

    store = LocalStore(source.parent / "local")
    manifest = store.publish(source, kind="dataset", inputs=(), provenance=Provenance(name="verify"))

    def work() -> None:
        assert store.verify(manifest) == []

    return work


def opened(home: Path):
    from tasks.storage import open_named

    store = open_named(home, "cloud")
    store.list("warm")
    return store


def client():
    from azure.storage.blob import BlobServiceClient

    return BlobServiceClient.from_connection_string(os.environ[SECRET]).get_container_client(CONTAINER)


WAYS = {
    "publish": publish,
    "republish": publish,
    "fetch": fetch,
    "upload_blob": upload_blob,
    "readinto": readinto,
    "verify": verify_local,
}


def table(said: dict) -> list[str]:
    lines = []
    for row, ours, theirs in (("upload", "publish", "upload_blob"), ("download", "fetch", "readinto")):
        if row in said:
            a, b = said[row][ours], said[row][theirs]
            lines.append(
                f"{row:<10}{a['megabytes_per_second']:7.0f} MB/s with hashes, {b['megabytes_per_second']:5.0f} MB/s of {theirs}: "
                f"{said[row]['ratio']:.2f}x; {a['peak_megabytes']:.0f} MB of memory against {b['peak_megabytes']:.0f}"
            )
    if "verify" in said:
        lines.append(f"verify    {said['verify']['megabytes_per_second_and_core']:7.0f} MB/s a core")
    if "files" in said:
        row = said["files"]
        lines.append(
            f"{row['files']} files in {row['seconds']:.0f} s, {row['peak_megabytes']:.0f} MB of memory; "
            f"again {row['again']['seconds']:.0f} s"
        )
    if "large" in said:
        row = said["large"]
        lines.append(
            f"{row['megabytes']} MB up in {row['up']['seconds']:.0f} s with {row['up']['peak_megabytes']:.0f} MB of memory, "
            f"down in {row['down']['seconds']:.0f} s with {row['down']['peak_megabytes']:.0f} MB"
        )
    return lines


if __name__ == "__main__":
    main()
