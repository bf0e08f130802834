"""Machines that share no folder: their mirrors keep a job folder in step through a real Azurite, whatever is killed meanwhile."""

import gzip
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import azurite
import pytest
from azure.storage.blob import generate_container_sas
from azurite import ACCOUNT
from blob_relay import Relay
from support import python_path
from waiting import limit

from tasks.common.errors import IntegrityError
from tasks.common.process import locked, read_json, write_json
from tasks.jobs.node.mirror import Mirror, Where, environment, where_we_are
from tasks.jobs.node.runtime import Rank
from tasks.jobs.qualify.storage import through
from tasks.storage.blob import folder
from tasks.storage.blob.client import open_container
from tasks.storage.blob.folder import SEGMENT, BlobFolder
from tasks.storage.blob.transfer import check_stored, upload
from tasks.storage.manifest import FileEntry
from tasks.storage.settings import StoreConfig

ROOT = Path(__file__).parents[5]
SECRET = "HEADWAY_TEST_CONNECTION"
NODE = """
import json, os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["HEADWAY_NODE_RANK"]
def wait(path):
    while not (folder / path).exists():
        time.sleep(0.02)
def put(path, text):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / ("." + path.replace("/", "-"))).write_text(text)
    os.replace(folder / ("." + path.replace("/", "-")), folder / path)
exec(json.loads((folder / "config.json").read_text())["settings"]["code"][rank])
"""
MIRROR = """# fork: commands
import runpy
import tempfile
tempfile.tempdir = None  # what the process that was forked had is not this one's TMPDIR
runpy.run_module("tasks.jobs.node.mirror", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    with azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as running:
        yield running


@pytest.fixture
def store(blobs, monkeypatch):
    """A store of its own."""
    from azure.storage.blob import BlobServiceClient

    container = f"c{uuid.uuid4().hex[:20]}"
    BlobServiceClient.from_connection_string(blobs.connection_string).create_container(container)
    monkeypatch.setenv(SECRET, blobs.connection_string)
    return StoreConfig(uri=f"az://{ACCOUNT}/{container}/p", credential="connection_string", secret=f"env:{SECRET}")


@pytest.fixture
def launcher(store, tmp_path):
    """The launcher's side: the folder of a job whose nodes run some code each."""
    here = tmp_path / "launcher"
    side = BlobFolder(open_container(store), "jobs/one", here, theirs=True)

    def send(submission=1, scratch=None, **code):
        job = {"submission": submission, "inputs": {}, "artifacts": {}, "program": "{folder}/x", "ranks_per_node": 1}
        job["scratch"] = scratch
        write_json(here / "job.json", job)
        write_json(here / "config.json", {"inputs": {}, "settings": {"code": {k[1:]: v for k, v in code.items()}}})
        side.push(settled=True)
        return side

    return send


@pytest.fixture
def start(store, tmp_path):
    """Starts the mirror of a node, on a disk of its own."""
    running = []
    (tmp_path / "node.py").write_text(NODE)

    def do(rank, disk, *more):
        (tmp_path / disk).mkdir(exist_ok=True)
        told = [
            "--store",
            store.uri,
            "--prefix",
            "jobs/one",
            "--credential",
            store.credential,
            "--secret",
            store.secret,
        ]
        place = {"NODE_RANK": str(rank), "MASTER_ADDR": "10.0.0.1", "AZ_BATCH_NODE_ID": f"vm{rank}", "WORLD_SIZE": "2"}
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                MIRROR,
                *told,
                *more,
                "--",
                sys.executable,
                str(tmp_path / "node.py"),
                "{folder}",
            ],
            env={**os.environ, "PYTHONPATH": python_path(ROOT), "TMPDIR": str(tmp_path / disk), **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield do
    for process in running:
        process.kill()


def ended(*processes):
    return [process.wait(limit(60)) for process in processes]


def test_two_machines_and_their_launcher_see_one_folder(launcher, start, tmp_path):
    leader = """
put("attempt.json", "1"); wait("nodes/1/node.json"); put("metrics.jsonl", "a\\n")
place = "checkpoints/step-1/attempt-1"
wait(f"{place}/receipt-1.json"); assert not (folder / place / "shard-1.safetensors").exists()
put(f"{place}/manifest.json", "{}"); wait("nodes/1/done"); put("result.json", "{}")
(folder / "out").mkdir(); put("out/made", json.loads((folder / "job.json").read_text())["program"])
assert not (folder / "logs/rank-1.log").exists() and "WORLD_SIZE" not in os.environ
"""
    follower = """
wait("attempt.json"); put("nodes/1/node.json", os.environ["HEADWAY_LEADER"] + os.environ["HEADWAY_NODE_NAME"])
place = "checkpoints/step-1/attempt-1"
put("logs/rank-1.log", "hello"); put(f"{place}/shard-1.safetensors", "x" * (9 << 20)); put(f"{place}/receipt-1.json", "{}")
wait(f"{place}/manifest.json"); put("nodes/1/done", "")
"""
    side = launcher(_0=leader, _1=follower)
    nodes = start(0, "a"), start(1, "b")
    here = side.local
    while not (here / "metrics.jsonl").exists():
        side.pull()
        assert all(node.poll() in (None, 0) for node in nodes), nodes[0].stderr.read()
        time.sleep(0.1)
    assert ended(*nodes) == [0, 0]
    side.pull()
    assert (here / "nodes/1/node.json").read_text() == "10.0.0.1vm1"
    assert (here / "out/made").read_text() == str(tmp_path / "a/headway/one/x")
    assert (here / "result.json").exists() and (here / "logs/rank-1.log").read_text() == "hello"
    assert read_json(here / "job.json")["program"] == "{folder}/x", "what the launcher wrote stays as it was"
    assert (here / "checkpoints/step-1/attempt-1/shard-1.safetensors").stat().st_size == 9 << 20


def test_parts_come_to_the_leader_alone_and_go_when_it_removes_them(launcher, start, tmp_path):
    leader = """
import shutil
wait("parts/unit-1/receipt.json")
sizes = {path.name: path.stat().st_size for path in (folder / "parts/unit-1").iterdir()}
assert sizes == {"rows.bin": 9 << 20, "findings.jsonl": (2 << 20) + 7, "words.bin": 3, "receipt.json": 2}, sizes
shutil.rmtree(folder / "parts"); put("nodes/0/done", ""); put("result.json", "{}")
"""
    follower = """
put("parts/unit-1/rows.bin", "r" * (9 << 20)); put("parts/unit-1/findings.jsonl", "f" * ((2 << 20) + 7))
put("parts/unit-1/words.bin", "www"); put("parts/unit-1/receipt.json", "{}"); wait("nodes/0/done")
assert (folder / "parts/unit-1/words.bin").exists(), "what a machine made stays with it"
"""
    side = launcher(_0=leader, _1=follower)
    nodes = start(0, "a"), start(1, "b")
    assert ended(*nodes) == [0, 0]
    assert not [*side.container.listing("jobs/one/parts/")]


@pytest.fixture
def machines(launcher, blobs, store, tmp_path, monkeypatch):
    """Mirrors in this process, by rank, through a relay; and what they asked the store for."""
    launcher()
    with Relay(blobs).running() as relay:
        monkeypatch.setenv(SECRET, relay.endpoint.connection_string)

        def begin(rank, disk):
            mirror = Mirror(store, "jobs/one", Where(rank, f"vm{rank}", "vm0"), tmp_path / disk)
            mirror.begin()
            return mirror

        yield begin, relay.log


def make_parts(mirror, numbers):
    for number in numbers:
        place = mirror.local / f"parts/unit-{number:06d}"
        place.mkdir(parents=True)
        (place / "rows.bin").write_text(str(number))


def parts_of(mirror):
    return sorted(int(path.parent.name[5:]) for path in mirror.local.glob("parts/*/rows.bin"))


def test_a_step_costs_by_the_parts_that_changed_not_by_those_that_are_there(machines, monkeypatch):
    monkeypatch.setattr(folder, "PAGE", 10)
    begin, log = machines
    leader, follower = begin(0, "a"), begin(1, "b")

    def requests(count):
        """Of a step of both after so many parts were made, once both have seen that there are many."""
        make_parts(follower, range(len(parts_of(follower)), len(parts_of(follower)) + count))
        follower.parts.send(settled=True)
        since = len(log)
        follower.step()
        leader.step()
        return [request for request in log[since:] if "parts/" not in request.place[1] or "comp" in request.query]

    few = requests(3)
    assert parts_of(leader) == [0, 1, 2]
    for _ in range(3):
        requests(40)
    many = requests(3)
    assert parts_of(leader) == list(range(126))
    lists = [request for request in many if request.query.get("comp") == "list"]
    assert lists and all("parts/" not in request.query["prefix"] for request in lists)
    assert len(many) <= len(few) + 2 * 6, "a listing of each folder instead of one of all"


def test_parts_that_were_sent_and_not_announced_come_when_their_machine_begins_again(machines, store, tmp_path):
    begin, _ = machines
    leader = begin(0, "a")
    killed = BlobFolder(open_container(store), "jobs/one", tmp_path / "killed", only="parts/")
    (tmp_path / "killed/parts/unit-000007").mkdir(parents=True)
    (tmp_path / "killed/parts/unit-000007/rows.bin").write_text("7")
    killed.push(settled=True)
    leader.step()
    assert parts_of(leader) == [], "nobody said so"
    begin(1, "b").step()
    leader.step()
    assert parts_of(leader) == [7]


def test_parts_that_are_made_again_or_removed_are_so_for_the_leader(machines):
    begin, _ = machines
    leader, follower = begin(0, "a"), begin(1, "b")
    make_parts(follower, [1, 2])

    def both():
        follower.parts.send(settled=True)
        follower.step()
        leader.step()
        return {number: (leader.local / f"parts/unit-{number:06d}/rows.bin").read_text() for number in parts_of(leader)}

    assert both() == {1: "1", 2: "2"}
    (follower.local / "parts/unit-000001/rows.bin").write_text("again")
    (follower.local / "parts/unit-000002/rows.bin").unlink()
    assert both() == {1: "again"}


def test_a_machine_that_is_taken_away_is_gone_on_from_on_another_disk(launcher, start):
    code = """
done = folder / "metrics.jsonl"
if not done.exists():
    put("metrics.jsonl", "1\\n"); put("checkpoints/LATEST", "1"); put("result.json", "{}")
    put("nodes/0/exit.json", '{"code": 5}')
    time.sleep(600)
assert (folder / "checkpoints/LATEST").read_text() == "1"
assert not (folder / "result.json").exists() and not (folder / "nodes/0/exit.json").exists()
with open(done, "a") as file: file.write("2\\n")
(folder / "checkpoints/LATEST").unlink()
"""
    side = launcher(_0=code)
    first = start(0, "a")
    while not side.has("nodes/0/exit.json"):
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    assert ended(start(0, "b")) == [0]
    side.pull()
    assert (side.local / "metrics.jsonl").read_text() == "1\n2\n"
    assert not side.has("checkpoints/LATEST"), "what a machine deletes is deleted there"
    assert not side.has("nodes/0/exit.json"), "how it ended before means nothing"


def test_a_newer_submission_has_the_folder_and_the_older_one_leaves_it_alone(launcher, start):
    side = launcher(_0='put("progress.json", "old"); time.sleep(600)')
    old = start(0, "a")
    while not side.has("progress.json"):
        time.sleep(0.05)
    launcher(2, _0="")
    assert ended(old) == [76]
    side.pull()
    assert read_json(side.local / "job.json")["submission"] == 2


def test_nothing_of_an_older_submission_is_sent(launcher, store, tmp_path):
    side = launcher(_0="")
    mirror = Mirror(store, "jobs/one", Where(0, "vm0", "10.0.0.1"), tmp_path)
    mirror.begin()
    (mirror.local / "progress.json").write_text("1")
    mirror.step()
    assert side.has("progress.json")
    launcher(2, _0="")
    for name in ("late.json", "result.json"):
        (mirror.local / name).write_text("{}")
    mirror.step()
    mirror.finish()
    assert mirror.fenced() and not side.has("late.json") and not side.has("result.json")


def test_being_asked_to_stop_reaches_the_program_and_its_last_words_arrive(launcher, start):
    code = """
import signal
def stop(*_):
    put("nodes/0/exit.json", json.dumps({"code": 143})); sys.exit(1)
signal.signal(signal.SIGTERM, stop); put("progress.json", ""); time.sleep(600)
"""
    side = launcher(_0=code)
    node = start(0, "a")
    while not side.has("progress.json"):
        time.sleep(0.05)
    node.terminate()
    assert ended(node) == [143]
    assert side.has("nodes/0/exit.json")


def test_a_machine_that_cannot_begin_says_why_in_the_folder(launcher, start, store):
    side = launcher(_0="")
    job = read_json(side.local / "job.json")
    write_json(side.local / "job.json", {**job, "artifacts": {"tokens": f"tokens/gone@{'0' * 64}"}})
    side.push(settled=True)
    assert ended(start(1, "a")) == [1]
    side.pull()
    report = read_json(side.local / "errors/rank-1.json")
    assert "tokens/gone" in report["message"] and report["nodes"] == ["vm1"]


def test_jobs_that_share_a_machine_have_a_folder_each_and_one_that_was_killed_leaves_none(launcher, start, tmp_path):
    side = launcher(_0='put("progress.json", ""); time.sleep(600)')
    disk, root = tmp_path / "a", tmp_path / "a" / f"headway-{os.getuid()}"
    first = start(0, "a", "--base", str(disk), "--own", "one")
    while not side.has("progress.json"):
        time.sleep(0.05)
    assert (root / "one" / "one" / "progress.json").is_file()
    first.kill()
    first.wait()
    launcher(2, _0="")
    with locked(root / "two.lock"):
        (root / "two").mkdir()
        assert ended(start(0, "a", "--base", str(disk), "--own", "three")) == [0]
    assert sorted(path.name for path in root.iterdir()) == ["two", "two.lock"]


def test_a_submission_that_two_jobs_of_the_scheduler_start_is_run_by_the_first(launcher, start):
    side = launcher(_0='put("out/made", "")')
    assert ended(start(0, "a", "--claim", "slurm-1.json", "7")) == [0]
    second = start(0, "b", "--claim", "slurm-1.json", "8")
    assert ended(second) == [122] and "another job runs this submission: 7; 8 ends" in second.stderr.read()
    assert side.read("slurm-1.json") == b"7" and side.has("nodes/0/output.json")


def test_a_machine_with_a_folder_of_its_own_looks_at_the_store_first(launcher, start, tmp_path):
    launcher(_0='put("out/made", "")')
    nowhere = f"az://{ACCOUNT}/nowhere"
    refused = start(0, "a", "--base", str(tmp_path / "a"), "--own", "one", "--jobs", nowhere)
    assert ended(refused) == [120] and nowhere in refused.stderr.read()


def test_a_log_that_grows_is_sent_in_segments_and_a_shorter_one_whole(store, tmp_path):
    container = open_container(store)
    one, two = (BlobFolder(container, "jobs/log", tmp_path / name) for name in "ab")
    log = tmp_path / "a" / "logs" / "rank-0.log"
    log.parent.mkdir(parents=True)
    (tmp_path / "b").mkdir()
    log.write_bytes(os.urandom(SEGMENT * 2 + 10))
    one.push()
    two.pull()
    before = {blob.name: blob.etag for blob in container.listing("jobs/log/")}
    with open(log, "ab") as file:
        file.write(b"more")
    one.push()
    two.pull()
    assert (tmp_path / "b" / "logs" / "rank-0.log").read_bytes() == log.read_bytes()
    after = {blob.name: blob.etag for blob in container.listing("jobs/log/")}
    assert [name for name in after if after[name] != before[name]] == ["jobs/log/logs/rank-0.log@000002"]
    log.write_bytes(b"short")
    one.push()
    two.pull()
    assert (tmp_path / "b" / "logs" / "rank-0.log").read_bytes() == b"short"
    assert [blob.name for blob in container.listing("jobs/log/")] == ["jobs/log/logs/rank-0.log"]


def test_neither_side_overwrites_what_the_other_changed(store, tmp_path):
    container = open_container(store)
    one, two = (BlobFolder(container, "jobs/both", tmp_path / name) for name in "ab")
    for side in (one, two):
        side.local.mkdir()
    (one.local / "said.json").write_text("1")
    one.push()
    two.pull()
    (one.local / "said.json").write_text("11")
    (two.local / "said.json").write_text("222")
    one.push()
    two.pull()
    assert (two.local / "said.json").read_text() == "222", "what is newer here stays"
    two.push()
    one.pull()
    assert (one.local / "said.json").read_text() == "222"
    (one.local / "said.json").unlink()
    one.push()
    two.pull()
    assert not (two.local / "said.json").exists()


@pytest.mark.parametrize("name", ["../../policy.yaml", "/policy.yaml", "a\nb"])
def test_a_blob_whose_name_leads_out_of_the_folder_brings_nothing(store, blobs, tmp_path, name):
    """Clients take the dots out of an address; whoever writes it by hand does not."""
    container = open_container(store)
    sas = generate_container_sas(
        ACCOUNT,
        store.uri.split("/")[3],
        account_key=azurite.KEY,
        permission="w",
        expiry=datetime.now(UTC) + timedelta(days=1),
    )
    for blob in ("jobs/one/good", f"jobs/one/{name}"):
        address = f"{container.blob('').url.rstrip('/')}/{quote(blob, safe='')}?{sas}"
        asked = urllib.request.Request(address, b"theirs", {"x-ms-blob-type": "BlockBlob"}, method="PUT")
        urllib.request.urlopen(asked).close()
    assert f"jobs/one/{name}" in [blob.name for blob in container.listing("jobs/")]
    container.put("policy.yaml", b"theirs")  # where an address with dots in it ends
    (tmp_path / "policy.yaml").write_text("ours")
    side = BlobFolder(container, "jobs/one", tmp_path / "jobs" / "one", theirs=True)
    for look in (side.pull, lambda: side.ignore_what_lies_there(lambda _: True)):
        with pytest.raises(IntegrityError) as refused:
            look()
        assert repr(name) in refused.value.message
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["policy.yaml"]
    assert (tmp_path / "policy.yaml").read_text() == "ours"


def test_a_name_with_an_at_in_it_is_a_file_of_its_own(store, tmp_path):
    container = open_container(store)
    one, two = (BlobFolder(container, "jobs/at", tmp_path / name) for name in "ab")
    names = ["out/model", "out/model@1.bin", "rank-0.log", "rank-0.log@new.jsonl"]
    for name in names:
        (one.local / name).parent.mkdir(parents=True, exist_ok=True)
        (one.local / name).write_text(name)
    one.push()
    two.pull()
    assert {name: (two.local / name).read_text() for name in names} == {name: name for name in names}


def test_what_tells_of_others_waits_for_a_large_file_that_still_grows(store, tmp_path):
    side = BlobFolder(open_container(store), "jobs/large", tmp_path)
    place = tmp_path / "checkpoints" / "step-1"
    place.mkdir(parents=True)
    (place / "shard-0").write_bytes(b"x" * (9 << 20))
    (place / "manifest.json").write_text("{}")
    side.push()
    assert not side.has("checkpoints/step-1/shard-0") and not side.has("checkpoints/step-1/manifest.json")
    side.push()
    assert side.has("checkpoints/step-1/shard-0") and side.has("checkpoints/step-1/manifest.json")


def test_a_manifest_waits_for_a_large_file_below_its_folder(store, tmp_path):
    """What another engine wrote lies in folders of its own."""
    side = BlobFolder(open_container(store), "jobs/below", tmp_path)
    (tmp_path / "step-1" / "own" / "tag").mkdir(parents=True)
    (tmp_path / "step-1" / "own" / "tag" / "state.pt").write_bytes(b"x" * (9 << 20))
    (tmp_path / "step-1" / "receipt-0.json").write_text("{}")
    (tmp_path / "step-1" / "beside.json").write_text("{}")
    side.push()
    assert side.has("step-1/beside.json") and not side.has("step-1/receipt-0.json")
    side.push()
    assert side.has("step-1/own/tag/state.pt") and side.has("step-1/receipt-0.json")


def test_the_place_is_read_from_either_distribution():
    mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
        "AZ_BATCH_NODE_ID": "vm3",
        "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5",
        "PMIX_X": "1",
    }
    where = where_we_are(mpi)
    assert (where.rank, where.leader, where.name) == (3, "10.0.0.4", "vm3")
    told = environment(where, mpi)
    assert told["HEADWAY_MPI_HOSTS"] == "10.0.0.4,10.0.0.5"
    assert told["HEADWAY_NODE_RANK"] == "3" and "PMIX_X" not in told and "OMPI_COMM_WORLD_RANK" not in told
    assert where_we_are({"NODE_RANK": "1", "MASTER_ADDR": "a"}).rank == 1
    assert where_we_are({}).leader == "127.0.0.1"


def test_the_way_to_the_store_is_measured_by_a_blob_that_is_gone_afterwards(store, start, launcher, tmp_path):
    launcher(_0='put("metrics.jsonl", os.environ["HEADWAY_STORE"] + "\\n")')
    assert ended(start(0, "disk")) == [0]
    told = (tmp_path / "disk/headway/one/metrics.jsonl").read_text()
    assert StoreConfig.model_validate_json(told) == store
    before = [found.name for found in open_container(store).listing("")]
    (tmp_path / "job").mkdir()
    rank = Rank(tmp_path / "job", 0, 1, 1, settings={}, inputs={}, output=tmp_path)
    moved = through(told, rank, bytes=20 << 20)
    assert moved.bytes == 24 << 20 and moved.write_rate > 0 and moved.read_rate > 0 and "blob" in moved.how
    assert [found.name for found in open_container(store).listing("")] == before
    assert list((tmp_path / "job").iterdir()) == []


def test_the_folder_lies_on_the_disk_that_the_job_asks_for(launcher, start, tmp_path):
    disk = tmp_path / "nvme"
    disk.mkdir()
    said = 'job = json.loads((folder / "job.json").read_text()); put("out/said.json", json.dumps([str(folder), job["scratch"]]))'
    side = launcher(scratch={"path": str(disk), "size_gib": 0.01, "beeond": False}, n0=said)
    assert start(0, "root").wait(limit(60)) == 0
    side.pull()
    assert read_json(side.local / "out/said.json") == [str(disk / "headway" / "one"), None]


@pytest.mark.parametrize(
    ("path", "gib", "message", "remedy"),
    [
        ("gone", 1, "there is no folder .*/gone on this machine", "Set cluster.scratch.path to a folder of a disk"),
        ("", 1e9, "GiB free, the job needs 1e\\+09 GiB", "Set cluster.scratch.size_gib to less"),
    ],
)
def test_a_disk_that_is_not_there_or_too_small_is_the_jobs_error(launcher, start, tmp_path, path, gib, message, remedy):
    side = launcher(scratch={"path": str(tmp_path / path), "size_gib": gib, "beeond": False}, n0="")
    assert start(0, "root").wait(limit(60)) == 6
    side.pull()
    error = read_json(side.local / "errors/rank-0.json")
    assert error["class"] == "missing" and re.search(message, error["message"]) and error["remedy"].startswith(remedy)


def test_a_disk_that_is_only_wanted_is_done_without(launcher, start, tmp_path):
    said = 'put("out/said.json", json.dumps(str(folder)))'
    side = launcher(
        scratch={"path": str(tmp_path / "none"), "size_gib": 1, "beeond": False, "required": False}, n0=said
    )
    assert start(0, "root").wait(limit(60)) == 0
    side.pull()
    assert read_json(side.local / "out/said.json").endswith("/headway/one")


def test_with_a_key_only_files_of_who_has_it_come(store, tmp_path):
    """Whoever may write to the container cannot have a file taken for one of the job's, new or changed."""
    container = open_container(store)
    ours = BlobFolder(container, "jobs/one", tmp_path / "ours", key=b"secret")
    texts = {"out/model.bin": "weights", "metrics.jsonl": "{}\n" * (SEGMENT // 3 + 1), "large.bin": "x" * (9 << 20)}
    for name, text in texts.items():
        (tmp_path / "ours" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ours" / name).write_text(text)
    ours.push(settled=True)
    theirs = BlobFolder(container, "jobs/one", tmp_path / "theirs", theirs=True, key=b"secret")
    theirs.pull()
    assert {name: (tmp_path / "theirs" / name).read_text() for name in texts} == texts
    known = container.head("jobs/one/out/model.bin").metadata
    for name, data, metadata in (
        ("out/model.bin", b"poison", {}),
        ("out/model.bin", b"poison", {"code": known["code"]}),
        ("out/another.bin", b"weights", {"code": known["code"]}),
        ("large.bin", b"y" * (9 << 20), {}),
        ("metrics.jsonl@000001", b"{}", {"code": known["code"]}),
    ):
        container.put(f"jobs/one/{name}", data, metadata=metadata)
        with pytest.raises(IntegrityError, match=f"jobs/one/{name} is not from the job .*: its code is"):
            theirs.pull(lambda each, name=name: each == name.partition("@")[0])
        ours_again = tmp_path / "ours" / name.partition("@")[0]
        container.remove(f"jobs/one/{name}")
        if ours_again.exists():
            ours_again.touch()
            ours.push(settled=True)
            theirs.pull()
    assert {name: (tmp_path / "theirs" / name).read_text() for name in texts} == texts
    assert not (tmp_path / "theirs/out/another.bin").exists()


def test_other_bytes_with_the_metadata_of_those_that_were_there_are_refused(store, tmp_path):
    container = open_container(store)
    ours = BlobFolder(container, "jobs/one", tmp_path / "ours", key=b"secret")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/large.bin").write_bytes(b"x" * (9 << 20))
    ours.push(settled=True)
    known = container.head("jobs/one/large.bin").metadata
    (tmp_path / "y").write_bytes(b"y" * (9 << 20))
    upload(container, "jobs/one/large.bin", tmp_path / "y", lambda _: known)
    with pytest.raises(
        IntegrityError, match=r"large\.bin is not from the job .*: its bytes are not those of its sha256"
    ):
        BlobFolder(container, "jobs/one", tmp_path / "theirs", theirs=True, key=b"secret").pull(
            lambda name: name == "large.bin"
        )
    assert not (tmp_path / "theirs/large.bin").exists()
    # Without a byte, as it may be by the time that its size is asked for.
    container.put("jobs/one/large.bin", b"", metadata=known)
    empty = FileEntry(path="large.bin", size=0, sha256=known["sha256"])
    assert check_stored(container, "jobs/one/large.bin", empty, "").problem == "sha256"


@pytest.mark.parametrize(
    ("name", "data", "metadata"),
    [
        ("small.bin", b"x", {"code": "\u00e9" * 8}),
        ("result.json/below/it", b"x", {}),
        (f"{'d' * 300}/small.bin", b"x", {}),
        ("grows.log", b"x" * (SEGMENT + 1), {}),
    ],
    ids=["code that is not ASCII", "below a file", "name that no file system has", "segment that is too long"],
)
def test_whatever_somebody_writes_is_refused_in_words(store, tmp_path, name, data, metadata):
    container = open_container(store)
    ours = BlobFolder(container, "jobs/one", tmp_path / "ours", key=b"secret")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/result.json").write_text("{}")
    ours.push(settled=True)
    theirs = BlobFolder(container, "jobs/one", tmp_path / "theirs", theirs=True, key=b"secret")
    theirs.pull()
    container.put(f"jobs/one/{name}", data, metadata=metadata)
    with pytest.raises(IntegrityError, match="is not from the job"):
        theirs.pull()
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["result.json"]


def test_a_small_blob_is_taken_as_it_lies_there(store):
    """Somebody may say that its bytes are packed: unpacked, a few of them may be more than memory."""
    from azure.storage.blob import ContentSettings

    container = open_container(store)
    data = gzip.compress(bytes(1 << 20))
    container.blob("packed").upload_blob(data, content_settings=ContentSettings(content_encoding="gzip"))
    assert container.get("packed").data == data


def test_a_node_begins_with_nothing_that_somebody_else_wrote(store, start, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_FOLDER_KEY", "secret")
    here = tmp_path / "launcher"
    job = {"submission": 1, "inputs": {}, "artifacts": {}, "program": "x", "ranks_per_node": 1, "scratch": None}
    write_json(here / "job.json", job)
    said = 'put("out/said.json", json.dumps(os.environ.get("HEADWAY_FOLDER_KEY")))'
    write_json(here / "config.json", {"inputs": {}, "settings": {"code": {"0": said}}})
    BlobFolder(open_container(store), "jobs/one", here).push(settled=True)
    process = start(0, "a")
    assert process.wait(limit(60)) == 5 and "jobs/one/job.json is not from the job" in process.stderr.read()
    ours = BlobFolder(open_container(store), "jobs/one", here, theirs=True, key=b"secret")
    ours.push(settled=True)
    assert start(0, "a").wait(limit(60)) == 0
    ours.pull(lambda name: name.startswith("out/"))
    assert read_json(here / "out/said.json") is None, "no program has the key"


def test_the_nodes_of_a_ray_cluster_have_a_token_of_the_job(store, start, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_FOLDER_KEY", "secret")
    here = tmp_path / "launcher"
    job = {"submission": 1, "inputs": {}, "artifacts": {}, "program": "x", "ranks_per_node": 1, "scratch": None}
    told = "put('out/' + rank, json.dumps([os.environ['RAY_AUTH_MODE'], os.environ['RAY_AUTH_TOKEN']]))"
    write_json(here / "job.json", job)
    write_json(here / "config.json", {"inputs": {}, "settings": {"code": {"0": told, "1": told}}})
    write_json(here / "ray.json", {"pin": "headway-node-rank"})
    side = BlobFolder(open_container(store), "jobs/one", here, theirs=True, key=b"secret")
    side.push(settled=True)
    assert [start(rank, f"d{rank}").wait(limit(60)) for rank in (0, 1)] == [0, 0]
    side.pull(lambda name: name.startswith("out/"))
    one, two = (read_json(here / "out" / rank) for rank in "01")
    assert one == two and one[0] == "token" and len(one[1]) == 64
