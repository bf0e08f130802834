"""GPUs that are throttled while they compute, and what is looked at meanwhile."""

import time

import pytest
from machine_material import H100, RecordedMachine, bench_of, report_of
from waiting import limit

from tasks.jobs.qualify import soak
from tasks.jobs.qualify.soak import watched


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "EVERY_SECONDS", 0.02)
    return RecordedMachine(tmp_path / "machine", monkeypatch).nvidia(H100, gpus=2)


def noted(recorded, *, looks=2):
    """What is noted of throttling during a soak that lasts until there were so many looks, or none can be."""
    with watched(bench_of(recorded.folder / "job"), "soak", recorded.machine()) as watch:
        deadline = time.monotonic() + limit(20)
        while watch.looks < looks and not watch.unseen and time.monotonic() < deadline:
            time.sleep(0.02)
    return [probe for probe in report_of(recorded.folder / "job").probes if probe.check == "throttle"]


@pytest.mark.parametrize(
    ("reasons", "word"), [("0x40", "hardware thermal slowdown"), ("0x20", "software thermal slowdown")]
)
def test_heat_under_load_is_a_failure_and_names_the_gpu(recorded, reasons, word):
    recorded.gpu(1, clocks_event_reasons__active=reasons)
    (probe,) = noted(recorded)
    assert (probe.finding, probe.where) == ("fail", "GPU 1 (00000002:00:00.0)")
    assert word in probe.said
    assert "looks during soak" in probe.said


def test_idle_application_clocks_and_the_power_cap_are_none(recorded):
    recorded.gpu(0, clocks_event_reasons__active="0x0000000000000007")
    (probe,) = noted(recorded)
    assert (probe.finding, probe.measured) == (None, 0.0)


def test_a_moment_of_it_warns():
    watch = soak.Watch(None, None)
    watch.looks, watch.times["GPU 0"], watch.why["GPU 0"] = 30, 3, "hardware power brake"
    assert [probe.finding for probe in watch.probes("soak")] == ["warn"]
    watch.times["GPU 0"] = 4
    assert [probe.finding for probe in watch.probes("soak")] == ["fail"]


def test_a_tool_that_is_not_there_or_hangs_is_said_once(recorded):
    (recorded.bin / "nvidia-smi").unlink()
    (probe,) = noted(recorded)
    assert (probe.status, probe.said) == ("missing", "there is no nvidia-smi")


def test_groups_that_load_nothing_are_not_watched(recorded):
    with watched(bench_of(recorded.folder / "job"), "storage", recorded.machine()) as watch:
        assert watch is None
    assert report_of(recorded.folder / "job").probes == ()
