"""Machines as recorded, looked at before a run: what is well is not flagged, and what is broken is seen and named."""

import shutil
from dataclasses import replace

import pytest
from machine_material import A100, V100, RecordedMachine, bench_of, load_sku, nvlink, report_of

from tasks.hardware.files import known_skus
from tasks.jobs.qualify import health
from tasks.jobs.qualify.machine import Machine
from tasks.qualification.limits import of_probe
from tasks.qualification.remaining import HEALTH

FELL_OFF = "NVRM: Xid (PCI:0002:00:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    return RecordedMachine(tmp_path / "machine", monkeypatch)


def looked(recorded, *only, sku="nd96isr_h100_v5", seconds=30.0, **config):
    """What a qualification notes of the machine, by check; of all looks, or only of those at some checks."""
    bench = bench_of(recorded.folder / "job", sku, **config)
    machine = recorded.machine(rules=replace(Machine().rules, command_seconds=seconds))
    if not only:
        health.measure(bench, machine)
    for one in health.LOOKS:
        if set(only) & set(one.checks) and bench.sku.vendor in one.vendors:
            bench.note(*health.guarded(one, bench, machine))
    found = {}
    for probe in report_of(recorded.folder / "job").probes:
        found.setdefault(probe.check, []).append(probe)
    return found


def verdicts(found, check, *, sku="nd96isr_h100_v5"):
    """What the judge says of a check."""
    hardware = load_sku(sku)
    return [reason.verdict for probe in found.get(check, ()) for reason in of_probe("n0", probe, hardware)]


def values(found, check):
    return [probe.measured for probe in found[check]]


def test_a_sound_h100_machine_has_every_check_and_no_reason(recorded):
    found = looked(recorded.nd_h100())
    assert set(found) == {
        "time_skew", "memory_gib", "cpu_count", "scratch_free", "nvme_count", "ib_ports_active", "ib_rate", "link_flaps", "sriov",
        "gpu_count", "xid", "gpu_smi", "ecc", "throttle", "sm_clock", "memory_clock", "persistence", "rows", "nvlink_down",
    }  # fmt: skip
    assert {check: verdicts(found, check) for check in found if verdicts(found, check)} == {}
    assert values(found, "gpu_count") == [8.0]
    assert values(found, "nvme_count") == [8.0]
    assert values(found, "memory_gib") == [pytest.approx(1870.2, abs=0.1)]
    assert values(found, "ib_rate") == [400.0] * 8
    assert values(found, "sm_clock") == [1980.0] * 8
    assert {probe.status for probes in found.values() for probe in probes} == {"measured", "skipped"}


def test_a_gpu_that_fell_off_the_bus_is_missed_and_its_xid_named(recorded):
    machine = recorded.nd_h100()
    machine.change(
        gpus=[],
        ends=15,
        says="Unable to determine the device handle for GPU0002:00:00.0: Unknown Error",
    )
    machine.log(f"[{89000.5:.6f}] {FELL_OFF}")
    found = looked(machine, "gpu_count", "gpu_smi", "xid")
    (xid,) = found["xid"]
    assert (xid.measured, xid.finding, xid.where) == (79.0, "fail", "GPU 0002:00:00")
    assert "restart the machine" in xid.remedy
    assert verdicts(found, "gpu_smi") == ["failed"]
    assert "fallen off the bus" in found["gpu_smi"][0].said
    assert verdicts(found, "gpu_count") == ["unknown"]


def test_seven_gpus_of_eight_fail_even_when_nvidia_smi_ends_well(recorded):
    machine = recorded.nd_h100()
    machine.change(gpus=machine.gpus[:7], lost="Unable to determine the device handle for gpu 0008:00:00.0")
    found = looked(machine, "gpu_count")
    assert values(found, "gpu_count") == [7.0]
    assert verdicts(found, "gpu_count") == ["failed"]
    assert "0008:00:00.0" in found["gpu_count"][0].said


@pytest.mark.parametrize(
    ("code", "at", "finding"),
    [(79, 89000.0, "fail"), (94, 89000.0, "warn"), (95, 89000.0, "fail"), (79, 60000.0, "warn"), (13, 89000.0, None)],
)
def test_xids_fail_by_the_list_and_only_while_they_are_new(recorded, code, at, finding):
    machine = recorded.nd_h100()
    machine.log(f"[{at:.6f}] {FELL_OFF.replace('79', str(code))}")
    (xid,) = looked(machine, "xid")["xid"]
    assert (xid.measured, xid.finding) == (float(code), finding)


def test_a_storm_of_xids_is_said_once_a_gpu_and_code(recorded):
    machine = recorded.nd_h100()
    contained = FELL_OFF.replace("79", "94")
    machine.log(*(f"[{88000 + n}.5] {line}" for n in range(300) for line in (FELL_OFF, contained)))
    found = looked(machine, "xid")["xid"]
    assert [(probe.measured, probe.finding) for probe in found] == [(79.0, "fail"), (94.0, "warn")]
    assert found[0].said.startswith("300 times, last 0.5 h ago: ")


def test_xids_of_before_yesterday_are_nobodys(recorded):
    machine = recorded.nd_h100()
    machine.log(f"[{100.0:.6f}] {FELL_OFF}")
    assert values(looked(machine, "xid"), "xid") == [0.0]


REFUSED = "echo 'dmesg: read kernel buffer failed: Operation not permitted'; exit 1"
OTHER = "2026-09-21T14:00:00.5+00:00 n0 kernel: [ 1.5] usb 1-1: new device"


@pytest.mark.parametrize("dmesg", [REFUSED, "exit 0"])
def test_without_dmesg_the_machines_log_is_read_and_without_both_it_is_unknown(recorded, dmesg):
    machine = recorded.nd_h100()
    machine.command("dmesg", dmesg)
    found = looked(machine, "xid")
    assert (found["xid"][0].status, verdicts(found, "xid")) == ("missing", ["unknown"])
    assert ("Operation not permitted" if dmesg == REFUSED else "says nothing") in found["xid"][0].said
    assert "--cap-add SYSLOG" in found["xid"][0].remedy
    machine.file("var/log/syslog", "2026-09-21T14:00:00.5+00:00 n0 cron[1]: a log in which no kernel speaks")
    assert looked(machine, "xid")["xid"][0].status == "missing"
    machine.file("var/log/syslog.1", OTHER)
    assert values(looked(machine, "xid"), "xid") == [0.0]
    machine.file("var/log/syslog.1", f"2026-09-21T14:00:00.5+00:00 n0 kernel: [ 1.5] {FELL_OFF}")
    assert values(looked(machine, "xid"), "xid") == [79.0]


@pytest.mark.parametrize(
    ("fields", "check", "finding", "count"),
    [
        ({"ecc__errors__uncorrected__volatile__sram": "1"}, "ecc", "fail", 1.0),
        ({"ecc__errors__uncorrected__aggregate__sram": "2"}, "ecc", "fail", 2.0),
        ({"ecc__errors__corrected__volatile__dram": "20000001"}, "ecc", "fail", 20000001.0),
        ({"ecc__errors__uncorrected__volatile__dram": "3"}, "ecc", "warn", 3.0),
        ({"clocks_event_reasons__active": "0x0000000000000040"}, "throttle", "warn", 1.0),
        ({"gpu_recovery_action": "Drain and Reset"}, "gpu_smi", "fail", "ended with 0"),
        ({"persistence_mode": "Disabled"}, "persistence", "warn", "Disabled"),
    ],
)
def test_what_nvidia_smi_says_of_one_gpu_is_found_there(recorded, fields, check, finding, count):
    machine = recorded.nd_h100()
    machine.gpu(3, **fields)
    (probe,) = [probe for probe in looked(machine, "gpu_smi")[check] if probe.finding]
    assert (probe.finding, probe.measured) == (finding, count)
    assert "GPU 3 (00000004:00:00.0)" in f"{probe.where} {probe.said}"
    assert probe.remedy or check in ("ecc", "throttle")


def test_what_a_gpu_does_not_say_is_not_read_as_no_error(recorded):
    machine = recorded.nd_h100()
    silent = {field.replace(".", "__"): "[N/A]" for field in machine.gpus[0] if field.startswith("ecc.")}
    machine.gpu(6, **silent, clocks_event_reasons__active="[N/A]")
    found = looked(machine, "gpu_smi")
    for check in ("ecc", "throttle"):
        assert [(probe.status, probe.where) for probe in found[check]] == [("missing", "GPU 6 (00000007:00:00.0)")]
        assert verdicts(found, check) == ["unknown"]


def test_idle_and_the_power_cap_are_no_throttling(recorded):
    machine = recorded.nd_h100()
    machine.gpu(0, clocks_event_reasons__active="0x0000000000000005")
    assert values(looked(machine, "gpu_smi"), "throttle") == [0.0]


@pytest.mark.parametrize(("what", "value"), [("pending", "1"), ("failure", "Yes"), ("uncorrectable", "513")])
def test_rows_that_cannot_be_remapped_fail(recorded, what, value):
    machine = recorded.nd_h100()
    rows = [{"gpu_bus_id": "00000001:00:00.0", "remapped_rows.uncorrectable": "0", "remapped_rows.pending": "0"}]
    rows[0] |= {"remapped_rows.failure": "0", f"remapped_rows.{what}": value}
    machine.change(**{"remapped-rows": rows})
    (probe,) = looked(machine, "rows")["rows"]
    assert (probe.finding, probe.where) == ("fail", "GPU 00000001:00:00.0")


def test_inactive_nvlinks_are_counted(recorded):
    machine = recorded.nd_h100()
    machine.change(nvlink=nvlink("NVIDIA H100 80GB HBM3", [18, 18, 16, 18, 18, 18, 18, 18]))
    found = looked(machine, "nvlink_down")
    assert (values(found, "nvlink_down"), found["nvlink_down"][0].where) == ([2.0], "GPU 2")
    assert verdicts(found, "nvlink_down") == ["failed"]
    all_down = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\nNVML: Unable to retrieve NVLink information as all links are inActive"
    machine.change(nvlink=all_down)
    assert verdicts(looked(machine, "nvlink_down"), "nvlink_down") == ["failed"]
    machine.change(nvlink="")
    assert verdicts(looked(machine, "nvlink_down"), "nvlink_down") == ["unknown"]


def test_a_port_that_is_down_one_at_half_rate_and_links_that_flap(recorded):
    machine = recorded.nd_h100()
    machine.port("mlx5_ib3", state="1: DOWN", physical="2: Polling", rate="10 Gb/sec (4X SDR)")
    machine.port("mlx5_ib5", rate="200 Gb/sec (4X HDR)", downed=7)
    machine.port("mlx5_ib7", downed=1)
    machine.log(*(f"[{80000 + n}.5] mlx5_core 0101:00:00.0 mlx5_ib6: Link down" for n in range(3)))
    found = looked(machine, "ib_rate", "link_flaps")
    assert (values(found, "ib_ports_active"), verdicts(found, "ib_ports_active")) == ([7.0], ["failed"])
    assert "mlx5_ib3:1 is DOWN" in found["ib_ports_active"][0].said
    slow = {probe.where: probe.measured for probe in found["ib_rate"] if probe.measured != 400.0}
    assert (slow, verdicts(found, "ib_rate")) == ({"mlx5_ib3:1": 0.0, "mlx5_ib5:1": 200.0}, ["failed", "failed"])
    assert {probe.where: probe.measured for probe in found["link_flaps"]} == {
        "mlx5_ib5:1": 7.0,
        "mlx5_ib6": 3.0,
        "mlx5_ib7:1": 1.0,
    }
    assert sorted(verdicts(found, "link_flaps")) == ["degraded", "degraded", "failed"]


def test_a_start_of_the_machine_takes_all_links_down_and_is_no_flap(recorded):
    machine = recorded.nd_h100()
    for number in range(8):
        machine.port(f"mlx5_ib{number}", downed=2)
    assert values(looked(machine, "link_flaps"), "link_flaps") == [0.0]


def test_a_machine_that_lost_all_its_ports_has_failed(recorded):
    machine = recorded.nd_h100()
    shutil.rmtree(machine.root / "sys/class/infiniband")
    found = looked(machine, "ib_rate")
    assert verdicts(found, "ib_ports_active") == verdicts(found, "ib_rate") == ["failed"]


def test_without_a_log_the_ports_counters_alone_say_of_flaps(recorded):
    machine = recorded.nd_h100()
    machine.command("dmesg", "exit 1")
    machine.port("mlx5_ib2", downed=5)
    (probe,) = looked(machine, "link_flaps")["link_flaps"]
    assert (probe.where, probe.measured) == ("mlx5_ib2:1", 5.0)
    assert "by the ports' counters alone" in probe.said
    shutil.rmtree(machine.root / "sys/class/infiniband")
    assert looked(machine, "link_flaps")["link_flaps"][0].status == "missing"


def test_lost_carriers_in_the_machines_log_are_flaps(recorded):
    machine = recorded.nd_h100()
    machine.file(
        "var/log/syslog",
        "\n".join(f"2026-09-21T13:00:0{n}Z n0 systemd-networkd[9]: ib0: Lost carrier" for n in range(6)),
    )
    assert {probe.where: probe.measured for probe in looked(machine, "link_flaps")["link_flaps"]} == {"ib0": 6.0}


def test_seven_disks_of_eight_fail_and_remote_ones_do_not_count(recorded):
    machine = recorded.nd_h100()
    (machine.root / "sys/class/nvme/nvme4/model").write_text("MSFT NVMe Accelerator v1.0\n")
    found = looked(machine, "nvme_count")
    assert (values(found, "nvme_count"), verdicts(found, "nvme_count")) == ([7.0], ["failed"])


def test_accelerated_networking_that_is_off_or_down_warns(recorded):
    machine = recorded.nd_h100()
    (machine.root / "sys/class/net/enP27939s1/operstate").write_text("down\n")
    (probe,) = looked(machine, "sriov")["sriov"]
    assert (probe.measured, probe.finding, probe.where) == (0.0, "warn", "eth0")
    (machine.root / "sys/class/net/enP27939s1/address").write_text("00:0d:3a:ff:ff:ff\n")
    (probe,) = looked(machine, "sriov")["sriov"]
    assert probe.said == "no virtual function"


def test_a_command_that_hangs_is_timed_out_and_one_that_is_not_there_missing(recorded):
    machine = recorded.nd_h100()
    machine.change(hangs=True)
    found = looked(machine, "gpu_count", "gpu_smi", "rows", "nvlink_down", seconds=0.5)
    for check in ("gpu_count", "gpu_smi", "rows", "nvlink_down"):
        assert (found[check][0].status, verdicts(found, check)) == ("timed out", ["unknown"])
    (machine.bin / "nvidia-smi").unlink()
    found = looked(machine, "gpu_count", "gpu_smi", "rows", "nvlink_down")
    assert (found["gpu_smi"][0].status, verdicts(found, "gpu_smi")) == ("missing", ["unknown"])
    assert found["gpu_smi"][0].said == "there is no nvidia-smi"


def test_a100_clocks_below_their_maximum_are_warned_of_and_set_where_it_is_asked_for(recorded):
    machine = recorded.nvidia(A100, links=12, rate="25 GB/s")
    found = looked(machine, "gpu_smi", sku="nd96asr_v4")
    assert (values(found, "sm_clock"), verdicts(found, "sm_clock", sku="nd96asr_v4")) == (
        [1095.0] * 8,
        ["degraded"] * 8,
    )
    assert found["sm_clock"][3].remedy.startswith("Run `sudo nvidia-smi -i 3 -ac 1215,1410`")
    assert found["gpu_smi"][0].finding is None  # its driver does not know gpu_recovery_action
    found = looked(machine, "gpu_smi", sku="nd96asr_v4", set_clocks=True)
    assert (values(found, "sm_clock"), verdicts(found, "sm_clock", sku="nd96asr_v4")) == ([1410.0] * 8, [])
    assert 'set_clocks set it: Applications clocks set to "(MEM 1215, SM 1410)"' in found["sm_clock"][0].said
    assert [gpu["clocks.applications.graphics"] for gpu in machine.gpus] == ["1410"] * 8


def test_a_clock_that_one_gpu_does_not_tell_is_unknown_and_not_passed(recorded):
    machine = recorded.nvidia(A100, links=12, rate="25 GB/s")
    machine.gpu(6, clocks__max__memory="[N/A]")
    probes = looked(machine, "gpu_smi", sku="nd96asr_v4")["memory_clock"]
    assert [probe.status for probe in probes] == [*["measured"] * 6, "missing", "measured"]
    assert verdicts({"memory_clock": probes}, "memory_clock", sku="nd96asr_v4") == ["unknown"]


def test_hardware_of_which_nothing_is_known_has_its_own_maximum(recorded):
    found = looked(recorded.nvidia(A100, gpus=1, links=12), "gpu_smi", sku="local-gpu")
    assert [(p.measured, p.finding) for p in found["sm_clock"]] == [(1095.0, "warn")]
    assert [(p.measured, p.finding) for p in found["memory_clock"]] == [(1215.0, None)]


def test_clocks_that_cannot_be_set_or_do_not_hold_are_said(recorded):
    machine = recorded.nvidia(A100, gpus=1, links=12)
    machine.change(no_rights=True)
    found = looked(machine, "gpu_smi", sku="nd96asr_v4", set_clocks=True)
    assert (values(found, "sm_clock"), verdicts(found, "sm_clock", sku="nd96asr_v4")) == ([1095.0], ["degraded"])
    assert "did not hold: there are no rights: " in found["sm_clock"][0].said
    assert "give the job the right" in found["sm_clock"][0].remedy
    machine.change(no_rights=False, forgets=True)
    assert (
        "did not hold: Applications clocks set"
        in looked(machine, "gpu_smi", sku="nd96asr_v4", set_clocks=True)["sm_clock"][0].said
    )


def test_clocks_are_set_by_sudo_where_it_asks_for_nothing(recorded):
    machine = recorded.nvidia(A100, gpus=1, links=12)
    machine.change(no_rights=True)
    machine.command("sudo", 'shift; SUDO=1 exec "$@"')
    assert values(looked(machine, "gpu_smi", sku="nd96asr_v4", set_clocks=True), "sm_clock") == [1410.0]


def test_a_driver_without_application_clocks_says_its_maximum(recorded):
    machine = recorded.nvidia(A100, gpus=1, links=12)
    machine.gpu(0, clocks__applications__graphics="[Requested functionality has been deprecated]")
    probe = looked(machine, "gpu_smi", sku="nd96asr_v4")["sm_clock"][0]
    assert (probe.measured, probe.finding) == (1410.0, None)
    assert "no application clocks" in probe.said


def test_v100_with_a_full_table_of_retired_pages_fails_and_one_that_waits_warns(recorded):
    machine = recorded.nvidia(V100, links=6, rate="25.781 GB/s")
    machine.gpu(1, retired_pages__pending="Yes")
    machine.gpu(
        2, retired_pages__pending="Yes", retired_pages__single_bit_ecc__count="60", retired_pages__double_bit__count="3"
    )
    found = looked(machine, "gpu_smi", sku="nd96asr_v4")
    assert sorted((probe.where[:5], probe.finding, probe.measured) for probe in found["rows"] if probe.finding) == [
        ("GPU 1", "warn", 1.0),
        ("GPU 2", "fail", 63.0),
        ("GPU 2", "warn", 1.0),
    ]
    assert values(found, "throttle") == [0.0]


def test_a_machine_without_gpus_says_only_what_it_has(recorded):
    found = looked(recorded, sku="local-cpu")
    assert set(found) == {"memory_gib", "cpu_count", "scratch_free", "time_skew"}
    assert values(found, "cpu_count") == [96.0]


LOOKED_AT = {
    "memory_gib",
    "cpu_count",
    "time_skew",
    "scratch_free",
    "nvme_count",
    "ib_ports_active",
    "ib_rate",
    "link_flaps",
}
OF_GPUS = LOOKED_AT | {"gpu_count", "gpu_smi", "ecc", "throttle", "sm_clock", "memory_clock"}
BY_VENDOR = {"cpu": LOOKED_AT, "amd": OF_GPUS, "nvidia": OF_GPUS | {"xid", "rows", "persistence", "nvlink_down"}}


@pytest.mark.parametrize("name", known_skus())
def test_no_hardware_asks_for_what_nobody_looks_at(name):
    sku = load_sku(name)
    assert set(sku.limits) & set(HEALTH) <= BY_VENDOR[sku.vendor]
