"""Faults 1 to 26 of training and its checkpoints: which test shows what happens then, and the kills themselves.

The numbers are those of docs/training.md, "Faults". Kills are seeded, on real ranks and writers; with torchrun, and with
everything of the job at once, for hours: `headway rehearse --hours`.
"""

import ast
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from training_runs import (
    STEPS,
    all_lines,
    content,
    error,
    last_lines,
    numbers,
    said_by,
    steps_of_checkpoints,
    write_job,
)
from waiting import limit

from tasks.common import process
from tasks.jobs.checkpoint.files import digest, manifests

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[4]
KILLS = 10
STEP_SECONDS = 0.06
"""Of a step that SLOW makes slow."""
HELD = STEPS - 2
SLOW = """
import os, time
from pathlib import Path
from tasks.jobs.train import Training
plain, landed = Training._advance, Path(os.environ["HEADWAY_JOB"]) / "landed"
def advance(self):
    time.sleep({seconds})
    while self.step >= {held} and not landed.exists():
        time.sleep(0.01)
    return plain(self)
Training._advance = advance
"""
"""Steps take their time, and those after `held` wait for the file `landed`, so that no run is over before its last kill."""
HERE, TRAINING, SAFETY = (
    f"integration/tasks/jobs/training/test_{name}.py" for name in ("training_faults", "training", "training_safety")
)
CHECKPOINT, PROTOCOL = (
    f"integration/tasks/jobs/checkpoint/test_{name}.py" for name in ("checkpoint", "checkpoint_protocol")
)
HANG = "integration/tasks/compute/test_hang.py"
FAULTS = {
    1: ("a rank is killed in a step", TRAINING, "a_killed_run_goes_on_bit_for_bit"),
    2: ("all ranks are killed", HERE, "ten_kills_change_no_number"),
    3: ("killed in a phase of saving", HERE, "a_writer_that_dies_in_any_phase_leaves_a_whole_checkpoint"),
    4: ("many kills at random times", HERE, "ten_kills_change_no_number"),
    5: ("SIGTERM, or an eviction notice", SAFETY, "an_eviction_notice_is_a_committed_checkpoint_in_time"),
    6: ("eviction without a notice", HERE, "without_a_notice_at_most_one_interval_is_done_again"),
    7: (
        "a rank is stopped",
        HANG,
        "a_stopped_rank_is_found_ended_and_the_job_goes_on_in_a_new_submission",
    ),
    8: (
        "alive without progress",
        HANG,
        "a_rank_that_holds_the_gil_is_found_by_missing_progress_and_the_job_goes_on_in_a_new_submission",
    ),
    9: ("a straggler", SAFETY, "a_straggler_is_named_and_not_killed"),
    10: ("another number of ranks", TRAINING, "an_elastic_job_goes_on_with_another_number_of_ranks"),
    11: ("the same crash again and again", HERE, "a_crash_at_the_same_step_ends_after_three_starts_without_progress"),
    12: ("NaN, or a spike", SAFETY, "a_rollback_goes_one_checkpoint_back_and_leaves_the_batches_out"),
    13: ("a shard is cut", CHECKPOINT, "a_bad_checkpoint_is_quarantined_and_the_one_before_is_taken"),
    14: ("a bit is flipped", TRAINING, "a_flipped_byte_costs_one_checkpoint_and_no_bit"),
    15: ("the manifest is edited", CHECKPOINT, "a_bad_checkpoint_is_quarantined_and_the_one_before_is_taken"),
    16: ("the manifest is missing", CHECKPOINT, "without_its_manifest_a_checkpoint_does_not_exist"),
    17: ("LATEST is wrong", CHECKPOINT, "latest_decides_nothing"),
    18: ("all checkpoints are bad", TRAINING, "when_all_are_bad_the_job_stops"),
    19: ("another configuration", TRAINING, "another_configuration_is_refused_with_what_differs"),
    20: (
        "an old manifest is put to a newer step",
        PROTOCOL,
        "an_old_checkpoint_that_is_put_to_a_newer_step_is_refused",
    ),
    21: ("two trainers of one run", CHECKPOINT, "a_stale_attempt_may_not_commit"),
    22: ("the disk is full", PROTOCOL, "a_save_that_finds_no_room_leaves_its_room_to_the_next_and_the_old_ones_alone"),
    23: ("storage is slow", TRAINING, "what_is_due_while_a_save_runs_is_skipped_and_counted_but_never_the_last"),
    24: ("deletion while one resumes", PROTOCOL, "what_a_newer_attempt_goes_on_from_is_not_deleted_by_an_older_one"),
    25: ("a delete fails", CHECKPOINT, "a_delete_that_fails_is_said_and_stops_nothing"),
    26: ("a pickle in a checkpoint", HERE, "a_pickle_that_takes_a_shards_place_is_never_loaded"),
}


@pytest.mark.parametrize("number", sorted(FAULTS))
def test_every_fault_has_its_test(number):
    _, path, name = FAULTS[number]
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert f"test_{name}" in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_no_fault_is_left_out_and_the_page_names_them_alike():
    assert sorted(FAULTS) == list(range(1, 27))
    page = (TESTS.parent / "docs" / "training.md").read_text(encoding="utf-8").partition("## Faults")[2]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert {int(number[2:]): name for number, name, _ in rows} == {number: one[0] for number, one in FAULTS.items()}


# --- kills ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(forks, tokens, tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("jobs") / "unbroken", tokens)
    assert forks(job) == [0, 0], said_by(job)
    return job


def pid_of(job, rank, attempt):
    """Of a rank of this start, once it is there."""
    while True:
        found = process.read_json(job / "ranks" / f"{rank}.json")
        if found and found["attempt"] == attempt:
            return found["pid"]
        time.sleep(0.001)


def command(pid):
    """Empty of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def writers_of(pid):
    return [below for below in process.descendants(pid) if "checkpoint_writer" in command(below)]


def kill(*pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def kill_at(job, what, *, steps, later, attempt):
    """Wait until this start wrote so many steps more, and `later` seconds into what follows; then kill.

    Returns whether there was somebody to kill.
    """
    ranks = [pid_of(job, rank, attempt) for rank in (0, 1)]
    wanted = min(max(last_lines(job), default=0) + steps, HELD)
    while max(last_lines(job), default=0) < wanted and process.process_started(ranks[0]):
        time.sleep(0.005)
    time.sleep(later)
    victims = {"rank": ranks[1:], "first rank": ranks[:1], "ranks": ranks, "writer": writers_of(ranks[0])[:1]}[what]
    hit = any(process.process_started(pid) for pid in victims)
    kill(*victims)
    return hit


def end_the_others(job, attempt):
    """As torchrun does: a rank that still waits for one that is gone is killed too."""
    ranks, deadline = [pid_of(job, rank, attempt) for rank in (0, 1)], time.monotonic() + 3
    while any(map(process.process_started, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(*filter(process.process_started, ranks))


def kill_until_it_ends(job, dice, kills, attempt):
    """Of one start: writers, which it lives on without, and at last a rank or both."""
    over = False
    try:
        while len(kills) < KILLS and not over:
            what, steps = dice.choice(("rank", "first rank", "ranks", "writer")), dice.randrange(0, 3)
            if kill_at(job, what, steps=steps, later=dice.random() * STEP_SECONDS, attempt=attempt):
                kills.append((what, attempt))
                over = what != "writer"
        if over:
            end_the_others(job, attempt)
    finally:  # whatever failed here, the ranks must not wait for it
        if not over or len(kills) == KILLS:
            (job / "landed").touch()


@pytest.mark.integration
@pytest.mark.parametrize("seed", [9, *(pytest.param(n, marks=pytest.mark.soak) for n in range(100, 119))])
def test_ten_kills_change_no_number(unbroken, forks, tokens, tmp_path, seed):
    """`kill -9` of a rank, of both, or of the process that writes checkpoints, in starts of one run that goes on each time."""
    dice, job, kills, attempt = random.Random(seed), write_job(tmp_path / "job", tokens), [], 0
    slow = SLOW.format(seconds=STEP_SECONDS, held=HELD)
    while not (job / "result.json").exists():
        attempt += 1
        codes = forks.beside(
            job, lambda a=attempt: kill_until_it_ends(job, dice, kills, a), attempt=attempt, fault=slow
        )
        assert attempt <= KILLS + 1, (codes, said_by(job))
    assert numbers(job) == numbers(unbroken)
    assert content(job / "out") == content(unbroken / "out")
    there = map(command, (int(place.name) for place in Path("/proc").glob("[0-9]*")))
    assert not [said for said in there if "checkpoint_writer" in said and str(job) in said], (
        "a writer outlives its rank"
    )
    assert len(kills) == KILLS


DIES = """
import os, signal, sys
if "checkpoint_writer" in " ".join(sys.orig_argv) and "--multiprocessing" not in " ".join(sys.orig_argv):
    left = [int(os.environ["DIES_AT"])]
    def watch(name, arguments):
        if name in ("open", "os.link", "os.remove", "os.rename", "os.mkdir") and "/checkpoints" in str(arguments[:2]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
"""
PHASES = (3, 8, 13, 18)
"""Of some thirty accesses to files that two checkpoints take: the shard, the receipt, the manifest, LATEST, the deletion."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "access", [pytest.param(n, marks=[] if n in PHASES else pytest.mark.soak) for n in range(1, 41)]
)
def test_a_writer_that_dies_in_any_phase_leaves_a_whole_checkpoint(unbroken, forks, tokens, tmp_path, access):
    """Its every access to a checkpoint's files is a phase: killed in the middle of one, what is resumed from is whole."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DIES)
    job = write_job(tmp_path / "job", tokens)
    site = f"import os\nos.environ['PYTHONPATH'] = {str(tmp_path / 'site')!r}\nos.environ['DIES_AT'] = '{access}'"
    ended = forks(job, fault=site)
    if 0 not in ended:
        assert not (job / "result.json").exists()
        assert forks(job, attempt=2) == [0, 0], said_by(job)
    assert numbers(job) == numbers(unbroken)
    assert content(job / "out") == content(unbroken / "out")


INTERVAL = 4


@pytest.mark.integration
def test_without_a_notice_at_most_one_interval_is_done_again(forks, tokens, tmp_path):
    """Where steps are slow enough that a save is committed well within an interval, which the files' own times say."""
    for pause in (0.1, 0.5, 2.0):  # a busy machine writes slowly
        job = write_job(tmp_path / f"every {pause} s", tokens, every=INTERVAL)
        evicted(forks, job, pause=pause, at=4 * INTERVAL + random.Random(6).randrange(INTERVAL))
        if max(commits := seconds_to_commit(job)) < 0.5 * INTERVAL * pause:
            break
    else:
        pytest.fail(f"no save was committed within half an interval of {INTERVAL * pause} s, but after {commits} s")
    done, kept = max(last_lines(job)), max(steps_of_checkpoints(job))
    assert done - kept <= INTERVAL
    assert forks(job, attempt=2) == [0, 0], said_by(job)
    again = [line for line in all_lines(job) if line["attempt"] == 2]
    assert again[0]["step"] == kept + 1 and len(all_lines(job)) == STEPS + done - kept


def evicted(forks, job, *, pause, at):
    """A run whose ranks are both killed in the middle of the step after `at`."""

    def evict():
        pids = [pid_of(job, rank, 1) for rank in (0, 1)]
        while max(last_lines(job), default=0) < at:
            time.sleep(0.001)
        time.sleep(0.5 * pause)
        kill(*pids)

    assert 0 not in forks.beside(job, evict, fault=SLOW.format(seconds=pause, held=STEPS))


def seconds_to_commit(job):
    """From the record of a step to the manifest of its checkpoint, of those that are kept."""
    recorded = {step: line["time"] for step, line in last_lines(job).items()}
    return [path.stat().st_mtime - recorded[int(path.parts[-3][5:])] for path in manifests(job / "checkpoints")]


@pytest.mark.integration
def test_a_crash_at_the_same_step_ends_after_three_starts_without_progress(tokens, tmp_path):
    """The small parent's rule, with the shipped launcher: progress is a new LATEST, and there is none after step 0."""
    crash = """
import sys
from tasks.jobs.node.runtime import main
def run(rank):
    rank.metrics(step=1, loss=1.0)
    raise RuntimeError("always at step 2")
if __name__ == "__main__":
    sys.exit(main(run))
"""
    (tmp_path / "crashing").mkdir()
    (tmp_path / "crashing" / "__init__.py").touch()
    (tmp_path / "crashing" / "program.py").write_text(crash)
    job = write_job(tmp_path / "job", tokens)
    environment = {"HEADWAY_JOB": str(job), "PYTHONPATH": f"{tmp_path}:{TESTS.parent}"}
    argv = [os.sys.executable, "-m", "crashing.program"]
    process.start(
        job, process.ProcessSpec(argv=argv, env=environment, restarts=2, progress="checkpoints/LATEST", fatal="errors")
    )
    deadline = time.monotonic() + limit(120)
    while not (job / "exit.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads((job / "exit.json").read_text())["attempts"] == 3
    assert error(job)["message"] == "always at step 2" and len(all_lines(job)) == 3


class Payload:
    """What a pickle can do to whoever loads it."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.mark.integration
def test_a_pickle_that_takes_a_shards_place_is_never_loaded(unbroken, forks, tmp_path):
    """Also where manifest and hashes were made to fit it."""
    job, mark = Path(shutil.copytree(unbroken, tmp_path / "job")), tmp_path / "loaded"
    shutil.rmtree(job / "out")
    for manifest in (job / "checkpoints").glob("*/*/manifest.json"):
        shard = next(manifest.parent.glob("shard-0*"))
        shard.write_bytes(pickle.dumps(Payload(mark)))
        told = json.loads(manifest.read_text())
        entry = next(entry for entry in told["files"] if entry["path"] == shard.name)
        entry.update(size=shard.stat().st_size, sha256=hashlib.sha256(shard.read_bytes()).hexdigest())
        entry.pop("blocks", None)
        del told["sha256"]
        manifest.write_text(json.dumps({**told, "sha256": digest(told)}))
    assert 0 not in forks(job, attempt=2)
    assert not mark.exists() and error(job)["class"] == "integrity", error(job)
