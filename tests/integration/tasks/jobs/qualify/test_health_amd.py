"""A machine with AMD's GPUs as recorded, and what is broken in it."""

import pytest
from machine_material import RecordedMachine, bench_of, report_of

from tasks.formats import smi
from tasks.jobs.qualify import health, soak

UNCORRECTED = "[ 89000.5] amdgpu 0000:1b:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block"
SCLK = "0: 132Mhz *\n1: 2100Mhz"


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A Standard_ND96isr_MI300X_v5, with Hyper-V's own card before AMD's."""
    machine = RecordedMachine(tmp_path / "machine", monkeypatch)
    machine.tool("rocm-smi")
    machine.tool("amd-smi")
    machine.says({"cards": 8})
    machine.file("sys/class/drm/card0/device/vendor", "0x1414")
    for number in range(1, 9):
        place = f"sys/class/drm/card{number}/device"
        said = {"vendor": "0x1002", "pp_dpm_sclk": SCLK, "pp_dpm_mclk": "0: 900Mhz\n1: 1300Mhz *"}
        said |= {"power_dpm_force_performance_level": "auto", "ras/umc_err_count": "ue: 0\nce: 3"}
        for name, text in {**said, "ras/gfx_err_count": "ue: 0\nce: 0\nde: 0"}.items():
            machine.file(f"{place}/{name}", text)
    return machine


def looked(machine):
    health.measure(bench_of(machine.folder / "job", "nd96isr_mi300x_v5"), machine.machine())
    found = {}
    for probe in report_of(machine.folder / "job").probes:
        found.setdefault(probe.check, []).append(probe)
    return found


def findings(found):
    return {
        check: [p.finding for p in probes if p.finding]
        for check, probes in found.items()
        if any(p.finding for p in probes)
    }


def test_a_sound_machine_has_eight_gpus_their_counters_and_clocks(recorded):
    found = looked(recorded)
    assert findings(found) == {}
    assert [probe.measured for probe in found["gpu_count"]] == [8.0]
    assert next((probe.where, probe.measured, probe.said) for probe in found["ecc"]) == ("GPU 0", 0.0, "3 corrected")
    assert len(found["ecc"]) == 8
    assert {probe.measured for probe in found["sm_clock"]} == {2100.0}
    assert {probe.measured for probe in found["memory_clock"]} == {1300.0}
    assert [probe.measured for probe in found["throttle"]] == [0.0]
    assert "xid" not in found


def test_what_is_broken_is_found_on_its_gpu(recorded):
    recorded.file("sys/class/drm/card5/device/ras/umc_err_count", "ue: 1\nce: 9")
    recorded.file("sys/class/drm/card7/device/power_dpm_force_performance_level", "perf_determinism")
    recorded.change(throttle=["UNTHROTTLED"] * 7 + ["THROTTLED"])
    recorded.log(UNCORRECTED)
    found = looked(recorded)
    assert findings(found) == {
        "ecc": ["fail", "fail"],
        "sm_clock": ["warn"],
        "memory_clock": ["warn"],
        "throttle": ["warn"],
    }
    assert [probe.where for probe in found["ecc"] if probe.finding] == ["GPU 4", "GPU 0000:1b:00.0"]
    assert soak.amd(recorded.machine()) == {"GPU 7": "THROTTLED"}


def test_what_is_not_there_is_missing(recorded):
    for name in ("rocm-smi", "amd-smi"):
        (recorded.bin / name).unlink()
    (recorded.root / "sys/class/drm/card1/device/ras/umc_err_count").unlink()
    (recorded.root / "sys/class/drm/card1/device/ras/gfx_err_count").unlink()
    found = looked(recorded)
    assert [found[check][0].status for check in ("gpu_count", "gpu_smi", "throttle")] == ["missing"] * 3
    assert [probe.status for probe in found["ecc"]] == ["missing", *["measured"] * 7]


def test_tools_that_say_no_json_are_not_read_as_no_gpus():
    assert smi.cards('{"card0": {}, "card1": {}, "system": {}}') == 2
    assert smi.cards('[{"gpu": 0}, {"gpu": 1}]') == smi.cards('{"gpu_data": [{"gpu": 0}, {"gpu": 1}]}') == 2
    with pytest.raises(ValueError, match="no JSON"):
        smi.cards("ERROR: No AMD GPUs specified")
    assert smi.errors({"aca_umc": "ue: 2\nce: 0\n"}) == (2, 0)
