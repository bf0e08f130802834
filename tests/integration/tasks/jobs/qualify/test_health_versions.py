"""What runs on a machine, and which machine it is: from recorded files, and a metadata service that wants its header."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from machine_material import RecordedMachine, bench_of, load_sku, report_of

from tasks.formats import azure_machine
from tasks.jobs.qualify import health
from tasks.qualification.judge import unlike_image

COMPUTE = {
    "vmSize": "Standard_ND96isr_H100_v5",
    "vmId": "11111111-2222-3333-4444-555555555555",
    "name": "ndv5-7",
    "resourceId": "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/ndv5-7",
    "storageProfile": {
        "imageReference": {
            "publisher": "microsoft-dsvm",
            "offer": "ubuntu-hpc",
            "sku": "2404",
            "version": "24.04.2026072901",
        }
    },
}
COMPONENTS = {"NVIDIA": "580.173.02", "CUDA": "13.0.88", "NCCL": "2.30.4-1", "HPCX": "2.25.1", "DOCA": "3.2.3"}


class Metadata(BaseHTTPRequestHandler):
    """IMDS: it refuses a request without its header, and of another version."""

    def do_GET(self):
        known = self.headers.get("Metadata") == "true" and self.path == health.IMDS_PATH
        body = json.dumps(COMPUTE if known else {"error": "Bad request"}).encode()
        self.send_response(200 if known else 400)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def imds():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    machine = RecordedMachine(tmp_path / "machine", monkeypatch)
    machine.file("sys/class/dmi/id/chassis_asset_tag", azure_machine.AZURE_ASSET_TAG)
    record = b"PhysicalHostName".ljust(512, b"\0") + b"BLZ1234567".ljust(2048, b"\0")
    machine.file("var/lib/hyperv/.kvp_pool_3", "")
    (machine.root / "var/lib/hyperv/.kvp_pool_3").write_bytes(b"HostName".ljust(2560, b"\0") + record)
    machine.file(health.COMPONENTS, json.dumps(COMPONENTS))
    machine.file("proc/sys/kernel/osrelease", "6.8.0-1021-azure")
    machine.command("nvidia-smi", "echo 580.173.02")
    return machine


def noted(recorded, imds):
    health.note(bench_of(recorded.folder / "job"), recorded.machine(imds=imds))
    return report_of(recorded.folder / "job")


def reasons(report):
    sku = load_sku("nd96isr_h100_v5")
    return [(reason.check, reason.measured) for reason in unlike_image("n0", report.versions, sku)]


def test_an_azure_machine_says_its_image_its_components_and_its_host(recorded, imds):
    report = noted(recorded, imds)
    assert report.versions["image"] == "microsoft-dsvm:ubuntu-hpc:2404:24.04.2026072901"
    assert {name: report.versions[name] for name in ("driver", "cuda", "nccl", "mpi", "kernel", "os")} == {
        "driver": "580.173.02",
        "cuda": "13.0.88",
        "nccl": "2.30.4-1",
        "mpi": "2.25.1",
        "kernel": "6.8.0-1021-azure",
        "os": "ubuntu 22.04",
    }
    assert report.versions["torch"]
    assert report.machine == {
        "vm_size": "Standard_ND96isr_H100_v5",
        "vm_id": COMPUTE["vmId"],
        "vm_name": "ndv5-7",
        "resource_id": COMPUTE["resourceId"],
        "physical_host": "BLZ1234567",
    }
    assert reasons(report) == []


def test_a_driver_that_was_exchanged_is_seen_although_the_image_says_its_own(recorded, imds):
    recorded.file("sys/module/nvidia/version", "575.57.08")
    assert reasons(noted(recorded, imds)) == [("version_driver", "575.57.08")]


def test_in_a_container_versions_are_not_compared_with_the_machines_image(recorded, imds):
    (recorded.root / health.COMPONENTS).unlink()
    recorded.file("usr/local/cuda/version.json", '{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}}')
    recorded.file("usr/lib/x86_64-linux-gnu/libnccl.so.2.26.2", "")
    recorded.command("mpirun", "echo 'mpirun (Open MPI) 4.1.7a1'")
    recorded.command("ofed_info", "echo 'MLNX_OFED_LINUX-24.10-0.7.0.0:'")
    report = noted(recorded, imds)
    assert [report.versions[name] for name in ("cuda", "nccl", "mpi")] == ["12.8.1", "2.26.2", "4.1.7a1"]
    assert report.versions["ofed"] == "MLNX_OFED_LINUX-24.10-0.7.0.0"
    assert "without its component_versions.txt" in report.versions["image"]
    assert reasons(report) == []


def test_elsewhere_nobody_is_asked_and_what_nobody_knows_is_not_said(recorded, imds):
    recorded.file("sys/class/dmi/id/chassis_asset_tag", "No Asset Tag")
    recorded.file(health.COMPONENTS, "not JSON")
    (recorded.root / "var/lib/hyperv/.kvp_pool_3").unlink()
    (recorded.bin / "nvidia-smi").unlink()
    report = noted(recorded, imds)
    assert report.machine == {}
    assert "cuda" not in report.versions
    assert report.versions["image"] == "ubuntu 22.04"


def test_a_metadata_service_that_does_not_answer_costs_a_moment_and_no_more(recorded):
    assert noted(recorded, "http://127.0.0.1:9").machine == {"physical_host": "BLZ1234567"}
