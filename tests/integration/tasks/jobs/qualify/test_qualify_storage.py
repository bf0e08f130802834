"""Rates of storage: what is written is measured on the disk, told truly, and gone afterwards, whatever happens."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench_stand import ROOT, bench, measured, probes

from tasks.jobs.qualify import storage
from tasks.jobs.qualify import storage as disk
from tasks.storage.settings import StoreConfig

CHECKS = {
    "scratch_write", "scratch_read", "scratch_files_written", "scratch_files_read",
    "store_write", "store_read", "checkpoint_seconds",
}  # fmt: skip


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_machine_says_all_rates_and_nothing_is_left(tmp_path, monkeypatch):
    job, scratch = tmp_path / "job", tmp_path / "scratch"
    job.mkdir(), scratch.mkdir()
    monkeypatch.setenv("HEADWAY_SCRATCH", str(scratch))
    storage.measure(bench(job, seconds=0.1))
    found = {probe.check: probe for probe in measured(job).ranks[0].probes}
    assert set(found) == CHECKS
    assert all(probe.status == "measured" and probe.measured > 0 and probe.said for probe in found.values())
    assert str(scratch) in found["scratch_write"].said and "64 MiB a machine" in found["store_write"].said
    assert files_below(scratch) == [] and files_below(job) == ["out/ranks/0.json"]


def test_without_scratch_it_is_the_disk_of_the_jobs_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWAY_SCRATCH", raising=False)
    storage.measure(bench(tmp_path, seconds=0.05))
    assert str(tmp_path) in probes(measured(tmp_path), "scratch_write")[0].said


@pytest.mark.parametrize("direct", [disk.DIRECT, 0], ids=["direct", "cached"])
def test_what_was_moved_is_what_was_asked_for(tmp_path, monkeypatch, direct):
    """macOS has no O_DIRECT, and some file systems refuse it."""
    monkeypatch.setattr(disk, "DIRECT", direct)
    moved = disk.large_files(tmp_path, bytes=40 << 20, seconds=30, streams=2)
    assert moved.bytes == 48 << 20  # three blocks of 8 MiB each
    assert ("O_DIRECT" in moved.how) == bool(direct)
    assert list(tmp_path.iterdir()) == []


def test_time_that_is_over_ends_the_writing(tmp_path):
    moved = disk.large_files(tmp_path, bytes=1 << 40, seconds=0.05, streams=1)
    assert disk.BLOCK <= moved.bytes < 8 << 30
    assert disk.small_files(tmp_path, count=10**9, seconds=0.05).number < 10**6


def test_nothing_is_left_when_the_process_is_killed(tmp_path):
    program = (
        "from pathlib import Path; import sys; from tasks.jobs.qualify import storage as disk; print('ready', flush=True);"
        f"disk.large_files(Path({str(tmp_path)!r}), bytes=1 << 34, seconds=60, streams=2)"
    )
    writing = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writing.stdout.readline() == "ready\n"
    deleted = 0
    while not deleted:
        assert writing.poll() is None
        files = [str(path.readlink()) for path in Path(f"/proc/{writing.pid}/fd").iterdir() if path.is_symlink()]
        deleted = sum(name.startswith(str(tmp_path)) and name.endswith("(deleted)") for name in files)
    writing.send_signal(signal.SIGKILL)
    writing.wait()
    assert files_below(tmp_path) == []


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path):
    """A limit on the size of files stands for the full disk; the rank's own report is small enough."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        storage.measure(bench(tmp_path, seconds=0.1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = {probe.check: probe for probe in measured(tmp_path).ranks[0].probes}
    failed = {check for check in found if found[check].status == "failed"}
    assert failed == {check for check in CHECKS if "files" not in check}
    assert found["store_write"].measured is None and "too large" in found["store_write"].said
    assert files_below(tmp_path) == ["out/ranks/0.json"]


def test_time_of_the_group_that_is_over_is_no_rate(tmp_path):
    storage.measure(bench(tmp_path, check_seconds=1e-9))
    assert {probe.status for probe in measured(tmp_path).ranks[0].probes} == {"timed out"}


def test_the_checkpoint_to_come_is_reckoned_from_what_was_written():
    """70 billion parameters are 840 GB; 4 GB were written in 2 s."""
    probe = storage.checkpoint(70_000_000_000, disk.Moved(4 * 10**9, 2e9, 1e9, "somehow"))
    assert probe.measured == pytest.approx(420, rel=1e-4)
    assert "840 GB" in probe.said and "4 GB at 2 GB/s" in probe.said


def test_a_store_that_cannot_be_reached_is_a_failure_in_words(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWAY_NOT_THERE", raising=False)
    store = StoreConfig(uri="az://account/container", credential="connection_string", secret="env:HEADWAY_NOT_THERE")
    monkeypatch.setenv("HEADWAY_STORE", store.model_dump_json())
    storage.measure(bench(tmp_path, seconds=0.05))
    found = probes(measured(tmp_path), "checkpoint_seconds")[0]
    assert (found.status, found.said) == ("failed", "HEADWAY_NOT_THERE is not set")
