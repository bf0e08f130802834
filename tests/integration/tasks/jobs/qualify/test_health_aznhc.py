"""Azure's node health checks as a qualification runs them: their script, their container, their log, their silence."""

import os

import pytest
from machine_material import RecordedMachine, bench_of, load_sku, report_of

from tasks.jobs.qualify import health
from tasks.qualification.limits import of_probe

META = """------ VM Meta Data ------
VM NAME: ndv5-7
VM HOST NAME: ndv5-7
VM ID: 11111111-2222-3333-4444-555555555555
VM SKU: standard_nd96isr_h100_v5
PHYSICAL HOST NAME: BLZ1234567
Kernel Version: 6.8.0-1021-azure"""
PASSED = "SUCCESS:  nhc:  Health check passed:  check_gpu_count: Expected 8 and found 8"
SLOW = (
    "ERROR:  nhc:  Health check failed:  check_nccl_allreduce: NCCL allreduce, BUS BW (expected >=460.0 GB/s, but measured "
    "412.3 GB/s). FaultCode: NHC2010"
)
UNSUPPORTED = "The vm SKU 'standard_nc24ads_t4_v3' is currently not supported by Azure health checks."


def log(*results, code):
    return "\n".join(("Azure Healthcheck log", META, *results, f"Health checks completed with exit code: {code}."))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A sound machine with bash, env and a sudo that asks for nothing."""
    machine = RecordedMachine(tmp_path / "machine", monkeypatch).nd_h100()
    for name in ("bash", "env", "cat", "sleep"):
        machine.command(name, f'exec /usr/bin/env PATH="$PATH" {"/bin/" + name if name != "env" else ""} "$@"')
    machine.command("sudo", f'echo "$@" >> {machine.folder}/sudo.log; shift; [ "$1" = true ] && exit 0; exec "$@"')
    return machine


def script(machine, text, *, code=0, then=""):
    """run-health-checks.sh, which leaves this log where it is told to, and ends with a code."""
    said = machine.file("said.log", text)
    checks = machine.file(
        health.SCRIPT, f'echo "$@" > {machine.folder}/arguments\ncat {said} > "$5"\n{then}\nexit {code}'
    )
    checks.chmod(0o755)


def looked(machine, **config):
    health.measure(bench_of(machine.folder / "job", **config), machine.machine())
    return report_of(machine.folder / "job").probes


def azure(probes):
    return [probe for probe in probes if probe.check == "aznhc"]


def verdicts(probes):
    sku = load_sku("nd96isr_h100_v5")
    return [reason.verdict for probe in probes for reason in of_probe("n0", probe, sku)]


def test_all_checks_are_run_and_a_sound_log_is_said(recorded):
    script(recorded, log(PASSED, code=0))
    (probe,) = azure(looked(recorded))
    assert (probe.status, probe.measured, probe.finding) == ("measured", "1 passed", None)
    assert (recorded.folder / "arguments").read_text().split()[:4] == ["-a", "-t", "500", "-o"]
    (kept,) = (recorded.folder / "job/out/health").iterdir()
    assert "PHYSICAL HOST NAME: BLZ1234567" in kept.read_text()


def test_a_failed_check_has_its_fault_code_and_figure(recorded):
    script(recorded, log(PASSED, SLOW, code=1), code=1)
    probes = looked(recorded)
    found = next(probe for probe in azure(probes) if probe.finding == "fail")
    assert (found.where, found.measured, found.unit) == ("check_nccl_allreduce", 412.3, "GB/s")
    assert "NHC2010 ManualInvestigation" in found.source
    assert verdicts(azure(probes)) == ["failed"]


def test_throttling_that_azure_only_warns_of_fails_and_our_own_look_sees_xid_94(recorded):
    recorded.log("[ 89000.5] NVRM: Xid (PCI:0001:00:00): 94, pid=12, name=python, Contained: CE User Channel (0x9)")
    script(recorded, log(PASSED, "Warning: GPU 3 throttled, reason=0x0000000000000040", code=0))
    probes = looked(recorded)
    assert [(p.where, p.finding) for p in probes if p.check == "throttle" and p.finding] == [("GPU 3", "fail")]
    assert [(p.measured, p.finding) for p in probes if p.check == "xid"] == [(94.0, "warn")]


@pytest.mark.parametrize(
    ("text", "status"), [(UNSUPPORTED, "missing"), ("", "failed"), (META, "failed"), (log(code=0), "missing")]
)
def test_what_ends_with_0_and_looked_at_nothing_is_unknown(recorded, text, status):
    script(recorded, text)
    (probe,) = azure(looked(recorded))
    assert (probe.status, verdicts([probe])) == (status, ["unknown"])


def test_checks_that_hang_are_timed_out_and_their_container_is_ended(recorded):
    recorded.command("docker", f'echo "$@" >> {recorded.folder}/docker.log')
    script(recorded, META, then="sleep 30")
    (probe,) = azure(looked(recorded, aznhc_seconds=0.5))
    assert (probe.status, verdicts([probe])) == ("timed out", ["unknown"])
    assert (recorded.folder / "docker.log").read_text() == "kill aznhc\n"


def test_without_rights_they_are_skipped_and_our_own_looks_count(recorded, monkeypatch):
    script(recorded, log(SLOW, code=1))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    recorded.command("sudo", "echo 'sudo: a password is required' >&2; exit 1")
    (probe,) = azure(looked(recorded))
    assert (probe.status, verdicts([probe])) == ("skipped", [])
    recorded.command("sudo", 'shift; [ "$1" = true ] && exit 0; exec "$@"')
    assert verdicts(azure(looked(recorded))) == ["failed"]


def test_never_and_not_installed_say_nothing(recorded):
    assert azure(looked(recorded)) == []
    script(recorded, log(SLOW, code=1))
    assert azure(looked(recorded, aznhc="never")) == []


def test_the_container_alone_is_run_with_the_kernels_log_and_all_gpus(recorded):
    said = recorded.file("said.log", log(PASSED, code=0))
    recorded.file("var/log/syslog", "2026-09-21T14:00:00.5+00:00 n0 kernel: [ 1.5] usb 1-1: new")
    recorded.command(
        "docker",
        f"""if [ "$1" = image ]; then echo sha256:1; exit 0; fi
echo "$@" > {recorded.folder}/docker.log
for part; do case "$part" in *:/azure-nhc/output) cat {said} > "${{part%%:*}}/aznhc.log" ;; esac; done""",
    )
    (probe,) = azure(looked(recorded))
    assert probe.measured == "1 passed"
    ran = (recorded.folder / "docker.log").read_text()
    for part in ("--rm", "--privileged", "--gpus all", "NHC_ARGS=-a", ":/azure-nhc/syslog", "aznhc-nv bash -c"):
        assert part in ran


def test_enroots_image_is_run_where_there_is_no_docker(recorded):
    said = recorded.file("said.log", log(PASSED, code=0))
    recorded.command(
        "enroot",
        f"""if [ "$1" = list ]; then echo pytorch; echo aznhc-nv; exit 0; fi
for part; do case "$part" in *:/azure-nhc/output) cat {said} > "${{part%%:*}}/aznhc.log" ;; esac; done""",
    )
    (probe,) = azure(looked(recorded))
    assert probe.measured == "1 passed"


def test_where_the_machine_is_the_container_its_entry_point_is_run(recorded):
    said = recorded.file("said.log", log(PASSED, SLOW, code=1))
    recorded.file(health.INSIDE, f'[ "$NHC_ARGS" = -a ] && cat {said}; exit 1')
    assert verdicts(azure(looked(recorded))) == ["failed"]
