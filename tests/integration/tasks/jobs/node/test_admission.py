"""Whether a machine may join an elastic job: who is asked to measure itself, what comes of it, and what of it is kept."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from elastic_material import admission, elastic_job, training
from waiting import limit

from tasks.common.process import boot_id, descendants, read_json, write_json
from tasks.compute.job import write_folder
from tasks.jobs.node import admission as module
from tasks.jobs.node.admission import Refused, admitted

ROOT = Path(__file__).parents[5]
CONFIG = training(steps=5)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "job"


@pytest.fixture
def no_torch(tmp_path, monkeypatch):
    """A machine whose torch is broken: whatever measures dies at its first import."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{ROOT}")


def job(folder, proven=("n1",), **changes):
    made = elastic_job(Path("tokens"), CONFIG, admission=admission(proven, **changes))
    write_folder(made, folder)
    return read_json(folder / "job.json")


def asked(job, folder, name, *, meanwhile=lambda: True):
    return admitted(job, folder, name=name, meanwhile=meanwhile)


def test_who_qualified_before_the_job_or_runs_a_job_without_admission_joins_as_it_is(folder, no_torch):
    assert asked(job(folder), folder, "n1")
    plain = elastic_job(Path("tokens"), CONFIG)
    assert asked(plain.model_dump(mode="json"), folder, "n2")
    assert not (folder / "qualified").exists()


def test_a_machine_that_cannot_be_measured_does_not_join(folder, no_torch):
    with pytest.raises(Refused) as refused:
        asked(job(folder), folder, "n2")
    report = refused.value.report
    assert report["class"] == "node" and "machine n2 did not qualify" in report["message"]
    assert str(folder / "qualified" / "n2") in report["remedy"]
    verdict = read_json(folder / "qualified" / "n2" / "verdict.json")
    assert (verdict["passed"], verdict["verdict"], verdict["nodes"][0]["verdict"]) == (False, "unknown", "unknown")


@pytest.mark.parametrize("changes", [{"boot_id": "another"}, {"time": 0.0}, {"passed": False, "submission": 0}])
def test_a_verdict_of_another_boot_too_old_or_bad_in_an_earlier_submission_is_made_anew(folder, monkeypatch, changes):
    """By a measurement that is over at once here; the test above has a real one."""
    made, place = job(folder), folder / "qualified" / "n2" / "verdict.json"
    kept = {"passed": True, "why": "", "boot_id": boot_id(), "time": time.time(), "submission": 1}

    def measure(argv, **_):
        assert argv[1:] == ["-m", "tasks.jobs.node.admission", str(folder), "n2"]
        write_json(place, {**kept, "passed": False, "why": "measured anew"})
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=measure, DEVNULL=None))
    write_json(place, kept)
    assert asked(made, folder, "n2")
    write_json(place, {**kept, **changes})
    with pytest.raises(Refused, match="measured anew"):
        asked(made, folder, "n2")


def test_a_bad_verdict_holds_for_its_submission(folder):
    kept = {"passed": False, "why": "n2: xid", "boot_id": boot_id(), "time": time.time(), "submission": 1}
    made = job(folder)
    write_json(folder / "qualified" / "n2" / "verdict.json", kept)
    with pytest.raises(Refused, match="n2 did not qualify, and the job continues without it: n2: xid"):
        asked(made, folder, "n2")


def test_a_measurement_ends_when_nobody_waits_for_the_machine(folder):
    looks = iter([True, True, False])
    began = time.monotonic()
    assert not asked(job(folder), folder, "n2", meanwhile=lambda: next(looks))
    assert time.monotonic() - began < limit(30)
    assert not any(b"admission" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid()))
    assert not (folder / "qualified" / "n2" / "verdict.json").exists()


@pytest.mark.long
def test_a_sound_machine_of_two_ranks_joins_and_one_below_a_limit_does_not(folder):
    made = {**job(folder), "ranks_per_node": 2}
    write_json(folder / "job.json", made)
    assert asked(made, folder, "n2")
    assert read_json(folder / "qualified" / "n2" / "verdict.json")["passed"]
    assert list((folder / "qualified" / "n2" / "out" / "sweeps").glob("all_reduce-node-*")), "its ranks together, too"
    made["admission"]["settings"]["sku"]["limits"]["matmul_fp32"]["fail"] = 1e6
    write_json(folder / "job.json", made)
    with pytest.raises(Refused, match="matmul_fp32 is failed"):
        asked(made, folder, "n3")
    assert read_json(folder / "qualified" / "n3" / "verdict.json")["nodes"][0]["verdict"] == "failed"
