"""The profile as ranks of a job: together, killed in the middle, with data that cannot be read on; and its memory."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from waiting import limit

from tasks.config.data import ValidationConfig
from tasks.data.corpus.inputs import find_shards
from tasks.data.corpus.parts import divide

SHARDS, DOCUMENTS = 6, 250


def text(number):
    words = " ".join(f"value_{number * step % 9973} = compute({step * number})" for step in range(1, 150))
    return f"# document {number}\ndef function_{number}():\n    {words}\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 8 MB, of several units; every 10th document is a copy of the one before."""
    folder = tmp_path_factory.mktemp("corpus") / "dataset"
    folder.mkdir()
    for shard in range(SHARDS):
        numbers = range(shard * DOCUMENTS, (shard + 1) * DOCUMENTS)
        lines = (json.dumps({"text": text(number - (number % 10 == 9))}) + "\n" for number in numbers)
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return folder


def job(folder, dataset, **further):
    folder.mkdir()
    validation = ValidationConfig().model_dump(mode="json")
    settings = {"validation": validation, "heldout_fraction": 0.02, "benchmarks": [], "threads": 1, **further}
    (folder / "config.json").write_text(json.dumps({"settings": settings, "inputs": {"dataset": str(dataset)}}))
    return folder


def start(folder, rank=0, world=1):
    environment = {**os.environ, "HEADWAY_JOB": str(folder), "RANK": str(rank), "WORLD_SIZE": str(world)}
    return subprocess.Popen([sys.executable, "-m", "tasks.jobs.profile"], env=environment)


def finished(folder, world=1):
    ranks = [start(folder, rank, world) for rank in range(world)]
    try:
        assert [rank.wait(timeout=limit(120)) for rank in reversed(ranks)] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    return told(folder)


def told(folder):
    """All that a profile says, but how long it took."""
    out = folder / "out" / "profile"
    columns = json.loads((out / "columns.json").read_text())
    assert json.loads((folder / "result.json").read_text())["metrics"]["documents"] == columns["documents"]
    assert not (folder / "parts").exists()
    kept = {name: value for name, value in columns.items() if name not in ("seconds", "speed")}
    return kept, (out / "shards.json").read_text(), pq.read_table(out / "documents.parquet")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    return finished(job(tmp_path_factory.mktemp("whole") / "job", corpus))


def test_a_rank_finds_every_copy(whole):
    columns, _, table = whole
    assert columns["documents"] == table.num_rows == SHARDS * DOCUMENTS
    copies = [row for row in range(table.num_rows) if row % 10 == 9]
    assert columns["exact"] == len(copies)
    assert {row: first for row, first in enumerate(table["exact_of"].to_pylist()) if first >= 0} == {
        row: row - 1 for row in copies
    }


def test_two_ranks_write_the_same_profile(corpus, whole, tmp_path):
    assert finished(job(tmp_path / "job", corpus), world=2) == whole


def test_a_killed_rank_goes_on_with_the_rest(corpus, whole, tmp_path):
    folder = job(tmp_path / "job", corpus)
    running = start(folder)
    deadline = time.monotonic() + limit(60)
    while not (kept := list((folder / "parts").glob("unit-*/receipt.json"))):
        assert running.poll() is None, "it ended before it could be killed: make the corpus larger"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    kept = list((folder / "parts").glob("unit-*/receipt.json"))
    assert 0 < len(kept) < len(divide(tuple(find_shards([corpus])))), "all units were done: make the corpus larger"
    written = {path: path.stat().st_ino for path in kept}
    again = start(folder)
    while again.poll() is None:
        for path, identity in written.items():
            try:
                assert path.stat().st_ino == identity, "a unit with a receipt was measured again"
            except FileNotFoundError:
                break  # merged, and cleaned up
        time.sleep(0.02)
    assert again.returncode == 0
    assert told(folder) == whole


@pytest.fixture(scope="module")
def repetitive(tmp_path_factory):
    """15,000 short documents, of which a third are copies of others, half of those with another last word."""
    drawn = random.Random(1)
    folder = tmp_path_factory.mktemp("repetitive") / "dataset"
    folder.mkdir()
    documents: list[list[str]] = []
    for number in range(15_000):
        fresh = [f"w{drawn.randrange(5000)}" for _ in range(30)]
        copied = [*drawn.choice(documents)[:-1], fresh[0]] if number % 6 == 5 else []
        documents.append(copied or (drawn.choice(documents) if number % 6 == 2 and documents else fresh))
    for shard in range(6):
        lines = (json.dumps({"text": " ".join(words)}) + "\n" for words in documents[shard * 2500 : (shard + 1) * 2500])
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def linked(repetitive, tmp_path_factory):
    known = finished(job(tmp_path_factory.mktemp("linked") / "job", repetitive))
    assert known[0]["exact"] > 2000 and known[0]["near"] > 2000
    return known


@pytest.mark.parametrize("world", [*(pytest.param(few, marks=pytest.mark.long) for few in (2, 3)), 9])
def test_ranks_that_share_the_ranges_of_hashes_find_what_one_finds(repetitive, linked, tmp_path, world):
    """9 ranks are more than there are ranges."""
    folder = job(tmp_path / "job", repetitive)
    assert finished(folder, world=world) == linked


def test_where_machines_share_no_folder_the_first_one_goes_through_all_ranges(repetitive, linked, tmp_path):
    """Its folder is the only one in which links appear; the other rank ends when its units are measured."""
    folder = job(tmp_path / "job", repetitive, shared_folder=False)
    other = start(folder, 1, 2)
    assert other.wait(limit(60)) == 0 and not list(folder.glob("parts/links-*/*"))
    assert finished(folder, world=2) == linked


def test_a_rank_that_is_killed_while_it_links_goes_on_with_the_rest(repetitive, linked, tmp_path):
    folder = job(tmp_path / "job", repetitive)
    running = start(folder)
    deadline = time.monotonic() + limit(60)
    while not (kept := list(folder.glob("parts/links-*/near-*.npz"))):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    kept = {path: path.stat().st_ino for path in folder.glob("parts/links-*/*.npz")}
    assert not (folder / "out" / "profile").exists(), "it ended before it could be killed: make the corpus larger"
    ranks = [start(folder, rank, 2) for rank in range(2)]  # with another number of ranks
    while any(rank.poll() is None for rank in ranks):
        for path, identity in kept.items():
            try:
                assert path.stat().st_ino == identity, "a range that was done was gone through again"
            except FileNotFoundError:
                break  # merged, and cleaned up
        time.sleep(0.005)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told(folder) == linked


def test_a_profile_that_is_there_is_not_made_again(corpus, whole, tmp_path):
    folder = job(tmp_path / "job", corpus)
    finished(folder)
    before = (folder / "out" / "profile" / "columns.json").stat().st_mtime_ns
    (folder / "result.json").unlink()  # as if the rank had been killed before it wrote it
    assert finished(folder) == whole
    assert (folder / "out" / "profile" / "columns.json").stat().st_mtime_ns == before


def test_a_shard_that_is_cut_off_ends_the_job_and_leaves_no_profile(corpus, tmp_path):
    import gzip

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl.gz").write_bytes(gzip.compress((corpus / "0.jsonl").read_bytes())[:-500])
    folder = job(tmp_path / "job", tmp_path / "data")
    assert start(folder).wait(limit(60)) == 1
    said = json.loads((folder / "errors" / "rank-0.json").read_text())
    assert said["class"] == "user" and "a.jsonl.gz" in said["message"]
    assert not (folder / "out" / "profile").exists() and not (folder / "result.json").exists()


def test_an_empty_corpus_has_a_profile(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(b"")
    columns, shards, table = finished(job(tmp_path / "job", tmp_path / "data"))
    assert (columns["documents"], table.num_rows, len(json.loads(shards))) == (0, 0, 1)


def test_memory_does_not_grow_with_the_corpus(corpus, tmp_path):
    small, large = (peak(tmp_path / str(times), corpus, times) for times in (1, 5))
    assert large < small + 15, f"{small:.0f} MB for 7 MB of text, {large:.0f} MB for five times as much"


MEASURED = """
import sys
from pathlib import Path
from tasks.data.corpus.profile import profile
from tasks.config.data import ValidationConfig
profile([sys.argv[1]], ValidationConfig(), Path(sys.argv[2]), heldout_fraction=0.02, unit_bytes=2 << 20)
"""


def peak(folder, corpus, times):
    """Megabytes that a profile needs of a corpus that is the small one some times over."""
    (folder / "data").mkdir(parents=True)
    for copy in range(times):
        for path in corpus.iterdir():
            (folder / "data" / f"{copy}-{path.name}").write_bytes(
                path.read_bytes().replace(b"value_", b"value%d_" % copy)
            )
    process = subprocess.Popen([sys.executable, "-c", MEASURED, str(folder / "data"), str(folder / "profile")])
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_maxrss / 1024
