"""What nvidia-smi, the kernel log and the links say, judged by the shipped rules."""

from pathlib import Path

import pytest

import tasks.hardware
from tasks.formats import gpu_health
from tasks.formats.gpu_health import GPU_FIELDS, ROW_FIELDS, Port

pytestmark = pytest.mark.unit

RULES = gpu_health.read_rules((Path(tasks.hardware.__file__).parent / "health.json").read_text())
FELL_OFF = "[ 3606.832215] NVRM: Xid (PCI:0002:00:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
GSP = "[ 3606.832215] NVRM: Xid (PCI:0002:00:00): 119, pid=67769, name=nvidia-smi, Timeout waiting for RPC from GSP1!"
CONTAINED = "[ 4000.1] NVRM: Xid (PCI:0001:00:00): 94, pid=12, name=python, Contained: CE User Channel (0x9)"


def found(log, since=0.0):
    return [(one.level, one.message) for one in gpu_health.xid_findings(gpu_health.xids(log, since=since), RULES)]


def gpu(**said):
    healthy = dict(
        zip(GPU_FIELDS, ("3", "00000001:00:00.0", "0x0000000000000004", "0", "0", "0", "0", "No"), strict=True)
    )
    return gpu_health.gpu_findings(healthy | {key.replace("__", "."): value for key, value in said.items()}, RULES)


def test_an_xid_of_the_list_is_a_fault_and_names_the_gpu():
    assert found(FELL_OFF) == [
        ("fail", "Xid 79 of GPU 0002:00:00: pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    ]
    assert found(GSP)[0][0] == "fail"


@pytest.mark.parametrize("code", [48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 95, 119, 120])
def test_every_xid_of_aznhc_is_a_fault(code):
    assert found(FELL_OFF.replace("79", str(code)))[0][0] == "fail"


@pytest.mark.parametrize("code", [13, 31, 43, 45, 94])
def test_what_a_program_causes_or_the_gpu_contained_is_a_warning(code):
    assert found(CONTAINED.replace("94", str(code)))[0][0] == "warn"


def test_errors_from_before_are_not_this_jobs():
    assert found(f"{FELL_OFF}\n{CONTAINED}", since=3700) == [
        ("warn", "Xid 94 of GPU 0001:00:00: pid=12, name=python, Contained: CE User Channel (0x9)")
    ]


def test_lines_that_are_no_kernel_log_say_nothing():
    assert (
        found("dmesg: read kernel buffer failed: Operation not permitted\n\x00\xff NVRM: Xid\n[ abc] NVRM: Xid (x): y")
        == []
    )


@pytest.mark.parametrize(
    ("code", "said", "level"),
    [
        (15, "", "fail"),
        (10, "", "fail"),
        (255, "Unknown Error", "fail"),
        (-6, "", "fail"),
        (0, "Unable to determine the device handle for GPU 0002:00:00.0: GPU is lost.  Reboot the system", "fail"),
        (4, "Insufficient Permissions", "warn"),
        (12, "NVML Shared Library couldn't be found", "warn"),
    ],
)
def test_how_nvidia_smi_ends(code, said, level):
    finding = gpu_health.smi_finding(code, said, RULES)
    assert finding.level == level
    assert str(code) in finding.message


def test_an_nvidia_smi_that_ends_well_says_nothing():
    assert gpu_health.smi_finding(0, "0, 00000001:00:00.0, 0x0", RULES) is None


def test_a_healthy_gpu_has_no_finding_and_what_it_does_not_have_counts_for_nothing():
    assert gpu() == []
    assert gpu(ecc__errors__uncorrected__volatile__sram="[N/A]", retired_pages__pending="[N/A]") == []


def test_ecc_errors_over_the_limit_are_a_fault():
    assert [f.level for f in gpu(ecc__errors__uncorrected__volatile__sram="1")] == ["fail"]
    assert [f.level for f in gpu(ecc__errors__corrected__volatile__sram="10000")] == []
    assert [f.level for f in gpu(ecc__errors__corrected__volatile__sram="10001")] == ["fail"]
    assert [f.level for f in gpu(ecc__errors__uncorrected__volatile__dram="2")] == ["warn"]


def test_throttling_warns_and_idle_and_power_cap_do_not():
    assert gpu(clocks_event_reasons__active="0x0000000000000005") == []
    (warned,) = gpu(clocks_event_reasons__active="0x0000000000000048")
    assert warned.level == "warn"
    assert "hardware slowdown, hardware thermal slowdown" in warned.message


def test_rows_that_wait_for_a_remap_or_could_not_be_are_faults():
    (row,) = gpu_health.rows("00000001:00:00.0, 1, Yes, No\n", ROW_FIELDS)
    assert [f.level for f in gpu_health.row_findings(row)] == ["fail"]
    assert gpu_health.row_findings(row | {"remapped_rows.pending": "0"}) == []
    assert (
        "could not"
        in gpu_health.row_findings(row | {"remapped_rows.pending": "No", "remapped_rows.failure": "1"})[0].message
    )


def test_a_field_that_the_driver_does_not_know_is_recognised():
    said = 'Field "clocks_event_reasons.active" is not a valid field to query.\n\n'
    assert gpu_health.unknown_field(said) == "clocks_event_reasons.active"
    assert gpu_health.unknown_field("0, 1, 2") is None


def test_a_link_that_flaps_is_a_fault_and_one_drop_a_warning():
    down = "[ {}.5] mlx5_core 0101:00:00.0 mlx5_ib3: Link down"
    log = "\n".join(down.format(100 + n) for n in range(5))
    assert [f.level for f in gpu_health.flap_findings(log, RULES, since=0)] == ["fail"]
    assert [f.level for f in gpu_health.flap_findings(log, RULES, since=104)] == ["warn"]
    lost = "[ 7.0] systemd-networkd[9]: ib0: Lost carrier"
    assert "ib0" in gpu_health.flap_findings(lost, RULES, since=0)[0].message
    assert gpu_health.flap_findings("[ 7.0] virtio_net eth0: link becomes ready", RULES, since=0) == []


def test_ports_are_compared_with_what_they_were():
    up = gpu_health.port_of(
        {"state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "400 Gb/sec (4X NDR)", "link_downed": "3"}
    )
    down = gpu_health.port_of({"state": "1: DOWN\n", "phys_state": "2: Polling\n"})
    assert up == Port(True, "ACTIVE", "400 Gb/sec (4X NDR)", 3)
    assert gpu_health.port_findings({"mlx5_ib0:1": up}, {"mlx5_ib0:1": up}, RULES) == []
    assert gpu_health.port_findings({"mlx5_an0:1": down}, {"mlx5_an0:1": down}, RULES) == []
    (lost,) = gpu_health.port_findings({"mlx5_ib0:1": up}, {"mlx5_ib0:1": down}, RULES)
    assert (lost.level, lost.message) == ("fail", "port mlx5_ib0:1 is DOWN, it was ACTIVE")
    assert gpu_health.port_findings({"mlx5_ib0:1": up}, {}, RULES)[0].level == "fail"
    flapped = Port(True, "ACTIVE", "", 8)
    assert gpu_health.port_findings({"mlx5_ib0:1": up}, {"mlx5_ib0:1": flapped}, RULES)[0].level == "fail"


def test_who_the_kernel_killed_for_memory():
    log = (
        "[ 12.5] Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:2kB\n"
        "[ 13.5] Out of memory: Killed process 99 (pt_main_thread) total-vm:1kB"
    )
    assert gpu_health.killed_for_memory(log, since=0) == {4711: "python", 99: "pt_main_thread"}
    assert gpu_health.killed_for_memory(log, since=13) == {99: "pt_main_thread"}
