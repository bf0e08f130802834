"""What machines say, in every form that they say it in: NVLinks, clocks, log files, rates, key-value pairs."""

import datetime

import pytest

from tasks.formats import azure_machine, gpu_health, smi
from tasks.formats.azure_machine import Interface
from tasks.formats.smi import Links

DOWN = "GPU 1: NVIDIA A100 80GB PCIe (UUID: GPU-2)\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
MIXED = (
    "GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-1)\n\t Link 0: 25.781 GB/s\n\t Link 1: 25.781 GB/s\n"
    "GPU 1: Tesla V100-SXM2-32GB (UUID: GPU-2)\n\t Link 0: 25.781 GB/s\n\t Link 1: <inactive>\n"
)
NOW = datetime.datetime(2026, 1, 1, 0, 10, tzinfo=datetime.UTC).timestamp()


def test_nvlinks_by_gpu():
    assert smi.links(MIXED) == {"0": Links(2, 0), "1": Links(1, 1)}
    assert smi.down(smi.links(MIXED)) == {"0": 0, "1": 1}
    assert smi.links(DOWN) == {"1": Links(0, 0, all_down=True)}
    assert smi.down(smi.links(DOWN)) == {"1": 1}
    assert smi.down(smi.links(MIXED.split("GPU 1")[0] + DOWN)) == {"0": 0, "1": 2}
    assert smi.links("") == smi.links("NVIDIA-SMI has failed") == {}


def test_a_gpu_that_lists_fewer_links_than_the_others_has_lost_them():
    assert smi.down(smi.links(MIXED.replace("\t Link 1: <inactive>\n", ""))) == {"0": 0, "1": 1}


def test_gpus_are_listed_and_lost_ones_are_not():
    said = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n"
        "Unable to determine the device handle for gpu 0002:00:00.0: Unknown Error\n"
        "GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-3)\n"
    )
    assert smi.listed(said) == 2
    assert smi.listed("No devices were found") == 0


def test_fields_without_a_value_say_nothing():
    for text in ("[N/A]", "[Not Supported]", "[Requested functionality has been deprecated]", "", None):
        assert smi.number(text) is None
    assert smi.clocks({"clocks.max.graphics": "[N/A]"}, "graphics") is None
    assert [smi.recovery({"gpu_recovery_action": text}) for text in ("None", "[N/A]", "Reboot")] == ["", "", "Reboot"]


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("2026-01-01T00:09:00.500000+00:00 n0 kernel: [ 3606.832215] NVRM: Xid (PCI:0002:00:00): 79, gone", 540.5),
        ("2026-01-01T01:09:00.5+01:00 n0 kernel: NVRM: Xid (PCI:0002:00:00): 79, gone", 540.5),
    ],
)
def test_log_files_have_the_clock_of_the_kernels_log(line, seconds):
    (found,) = gpu_health.xids(gpu_health.as_dmesg(line, now=NOW, uptime=600.0), since=0.0)
    assert (found.seconds, found.code) == (seconds, 79)


def test_log_files_of_the_old_form_have_no_year_and_local_time():
    at = datetime.datetime.fromtimestamp(NOW - 660)  # the year before, by ten minutes at most
    line = f"{at:%b %e %H:%M:%S} n0 systemd-networkd[9]: ib0: Lost carrier"
    assert gpu_health.flaps(gpu_health.as_dmesg(line, now=NOW, uptime=900.0), since=0.0) == {"ib0": 1}


def test_what_was_logged_before_the_machine_started_is_left_out():
    line = "2026-01-01T00:05:00Z n0 kernel: NVRM: Xid (PCI:0002:00:00): 79, gone"
    assert gpu_health.as_dmesg(line, now=NOW, uptime=60.0) == ""
    assert gpu_health.as_dmesg("no log\n\x00\xff\nFeb 30 99:00:00 n0 x", now=NOW, uptime=60.0) == ""


def test_rates_and_flaps_of_links():
    assert [azure_machine.rate(text) for text in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "")] == [
        400.0,
        2.5,
        None,
    ]
    assert azure_machine.per_day(6, 3600.0) == 6.0
    assert azure_machine.per_day(6, 3 * azure_machine.DAY) == 2.0


def test_the_virtual_function_has_the_address_of_hyper_vs_interface():
    eth0, other = Interface("eth0", "hv_netvsc", "aa", "up"), Interface("enP1s1", "mlx5_core", "aa", "up")
    ib0 = Interface("ib0", "mlx5_core", "bb", "up")
    assert azure_machine.behind([eth0, other, ib0]) == [(eth0, other)]
    assert azure_machine.behind([eth0, ib0]) == [(eth0, None)]
    assert azure_machine.behind([ib0, Interface("lo", "", "aa", "unknown")]) == []


def test_what_an_azure_machine_says_of_itself():
    record = b"PhysicalHostName".ljust(512, b"\0") + b"BLZ1".ljust(2048, b"\0")
    assert azure_machine.key_values(record + record[:100]) == {"PhysicalHostName": "BLZ1"}
    assert (
        azure_machine.urn({"storageProfile": {"imageReference": {"id": "/subscriptions/x", "publisher": ""}}})
        == "/subscriptions/x"
    )
    assert azure_machine.urn({}) == ""
    assert azure_machine.os_release('NAME=x\nID="almalinux"\nVERSION_ID="8.10"') == "almalinux 8.10"
    with pytest.raises(ValueError, match="no JSON object"):
        azure_machine.components("[]")
