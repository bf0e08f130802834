"""Health checks of a machine while a real job runs on it, with an nvidia-smi and a dmesg that say what the test wants."""

import json
import os
import socket
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from tasks.common import process
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.config.cluster import ClusterConfig, WatchConfig
from tasks.formats import gpu_health
from tasks.jobs.node import probes
from tasks.jobs.node.probes import Probes, ports

RULES = gpu_health.read_rules(probes.RULES.read_text())
HEALTHY = "0, 00000001:00:00.0, 0x0000000000000004, 0, 0, 0, 0, [N/A]"
FELL_OFF = "NVRM: Xid (PCI:0002:00:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
SMI = f"""#!/bin/sh
if [ -e "$STAND/off-the-bus" ]; then echo "Unable to determine the device handle for GPU0: Unknown Error"; exit 15; fi
case "$1" in
*remapped*) echo "00000001:00:00.0, 0, 0, 0" ;;
*) cat "$STAND/gpus" 2>/dev/null || echo "{HEALTHY}" ;;
esac
"""
DMESG = """#!/bin/sh
echo "[    0.000000] Linux version 6.8.0-1021-azure"
cat "$STAND/log" 2>/dev/null || true
"""
PATIENT = WatchConfig(probe_seconds=0.2, grace_seconds=60)
STEPS = """
import json, os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    done = rank.folder / "checkpoint"
    for step in range(int(done.read_text()) if done.exists() else 0, 2000):
        rank.metrics(step=step)
        done.write_text(str(step))
        if step == rank.settings["breaks_at"]:
            with open(os.environ["STAND"] + "/log", "w") as log:
                log.write(f"[{time.monotonic():.6f}] " + rank.settings["says"])
            open(os.environ["STAND"] + "/" + rank.settings["touches"], "w").close()
        if step == rank.settings.get("fails_at"):
            raise OSError("CUDA error: unspecified launch failure")
        if step == rank.settings.get("ends_when_broken_at"):
            while not (rank.folder / "nodes" / "0" / "health.jsonl").exists():
                time.sleep(0.001)
            return {"step": step}
        if step == rank.settings.get("ends_at"):
            return {"step": step}
        time.sleep(0.05)

if __name__ == "__main__":
    sys.exit(main(run))
"""


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def stand(tmp_path, monkeypatch):
    """A machine with a GPU that is well, until `log`, `gpus` or `off-the-bus` in this folder say otherwise."""
    executable(tmp_path / "bin" / "nvidia-smi", SMI)
    executable(tmp_path / "bin" / "dmesg", DMESG)
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND", str(tmp_path))
    yield tmp_path
    process.stop(tmp_path / "job")


def steps(stand, **settings):
    plain = {"breaks_at": 20, "says": FELL_OFF, "touches": "off-the-bus"}
    return Job(
        name="steps",
        token="b" * 32,
        program=str(stand / "steps.py"),
        module=False,
        settings=plain | settings,
        inputs={},
        watch=WatchConfig(probe_seconds=0.2, grace_seconds=1),
    )


def ended(stand, job):
    """Run a job on the real local backend until it has ended; its last state."""
    backend = open_backend(ClusterConfig())
    handle = backend.submit(job, stand / "job")
    return until(lambda: state if (state := backend.states([(handle, stand / "job")])[0]).over else None)


def warnings(stand):
    path = stand / "job" / "nodes" / "0" / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_gpu_that_falls_off_the_bus_at_a_step_ends_the_attempt_and_names_the_machine(stand):
    state = ended(stand, steps(stand))
    name = socket.gethostname()
    said = process.read_json(stand / "job" / "errors" / f"node-{name}.json")
    assert (said["class"], said["nodes"], said["type"], said["attempt"]) == ("node", [name], "HealthCheckFailed", 1)
    assert "Xid 79 of GPU 0002:00:00" in said["message"]
    assert (state.state, state.attempts) == ("ended", 1)
    assert state.code != 0
    last = [json.loads(line)["step"] for line in (stand / "job" / "metrics.jsonl").read_text().splitlines()][-1]
    assert 20 <= last < 199


def test_a_result_of_a_machine_that_is_known_to_be_broken_does_not_count(stand):
    """It is written well within the grace of a job that is stopped."""
    state = ended(stand, steps(stand, ends_when_broken_at=20).model_copy(update={"watch": PATIENT}))
    assert (state.state, state.attempts) == ("ended", 1)
    assert state.code != 0
    assert not (stand / "job" / "result.json").exists()
    (said,) = [process.read_json(path) for path in (stand / "job" / "errors").glob("node-*.json")]
    assert (said["class"], said["type"]) == ("node", "HealthCheckFailed")


def test_an_attempt_that_failed_is_looked_into_before_it_is_tried_again(stand):
    job = steps(stand, fails_at=20, touches="nothing")
    job = job.model_copy(update={"watch": WatchConfig(probe_seconds=600, grace_seconds=1)})
    state = ended(stand, job)
    assert state.attempts == 1
    (said,) = [process.read_json(path) for path in (stand / "job" / "errors").glob("node-*.json")]
    assert "Xid 79" in said["message"]
    assert said["remedy"] == RULES.xid_remedy["79"]


def test_warnings_are_kept_and_the_job_goes_on(stand):
    contained = FELL_OFF.replace("79", "94").replace("GPU has fallen off the bus", "Contained")
    (stand / "gpus").write_text("0, 00000001:00:00.0, 0x0000000000000048, 0, 0, 0, 0, [N/A]\n")
    state = ended(stand, steps(stand, says=contained, touches="nothing", ends_at=160))
    assert state.code == 0
    assert sorted(warning["check"] for warning in warnings(stand)) == ["throttle", "xid"]
    assert all(warning["level"] == "warn" for warning in warnings(stand))


def test_errors_from_before_the_job_are_not_the_jobs(stand):
    (stand / "log").write_text(f"[{time.monotonic() - 60:.6f}] {FELL_OFF}\n")
    assert ended(stand, steps(stand, breaks_at=-1, ends_at=5)).code == 0


@pytest.fixture
def look(tmp_path, monkeypatch):
    """What the checks see on a machine whose PATH has only the given commands."""

    def looked(gpus=1, **commands):
        for name, text in commands.items():
            executable(tmp_path / "bin" / name.replace("_", "-"), text)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
        job = {"watch": {"probe_seconds": 60}, "gpus_per_node": gpus}
        rules = replace(RULES, command_seconds=3.0)
        eyes = Probes(tmp_path / "nodes" / "0", job, name="n0", submission=1, rules=rules)
        eyes.start()
        eyes.look_once_more(lambda: None)
        return eyes.found

    yield looked


def test_an_nvidia_smi_that_hangs_is_a_finding_and_delays_nobody(look):
    found = look(nvidia_smi="#!/bin/sh\nexec /bin/sleep 30\n", dmesg="#!/bin/sh\nexit 0\n")
    assert found["class"] == "node"
    assert "nvidia-smi gave no answer within 3 s" in found["message"]


def test_what_cannot_be_looked_at_is_said_once_and_is_no_fault(look, capfd):
    refused = "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted'; exit 1\n"
    assert look(dmesg=refused) is None
    said = capfd.readouterr().out.splitlines()
    assert sorted(said) == [
        "n0: health checks could not look at GPUs: there is no nvidia-smi",
        "n0: health checks could not look at the kernel log: dmesg: read kernel buffer failed: Operation not permitted",
    ]


def test_a_machine_without_a_driver_is_a_fault_only_of_a_job_that_needs_gpus(look):
    absent = (
        '#!/bin/sh\necho "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9\n'
    )
    assert look(gpus=0, nvidia_smi=absent) is None
    assert "the driver is not loaded" in look(gpus=1, nvidia_smi=absent)["message"]


def test_fields_that_an_older_driver_does_not_know_are_left_out(look, capfd):
    older = """#!/bin/sh
for field in clocks_event_reasons.active ecc.errors.corrected.volatile.sram ecc.errors.uncorrected.volatile.sram; do
  case "$1" in *"$field"*) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;; esac
done
case "$1" in
*remapped*) echo "00000001:00:00.0, 0, 1, 0" ;;
*) echo "0, 00000001:00:00.0, 0x0, 0, 0, No" ;;
esac
"""
    found = look(nvidia_smi=older)
    assert found["message"] == "machine n0: GPU 00000001:00:00.0: a row of its memory waits to be remapped"
    assert "ecc.errors.uncorrected.volatile.sram: this nvidia-smi does not know it" in capfd.readouterr().out


def test_ports_are_read_as_the_kernel_shows_them(tmp_path):
    port = tmp_path / "mlx5_ib0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}.items():
        (port / name).write_text(text + "\n")
    (port / "counters" / "link_downed").write_text("2\n")
    assert ports(tmp_path) == {"mlx5_ib0:1": gpu_health.Port(True, "ACTIVE", "400 Gb/sec (4X NDR)", 2)}
    assert ports(Path(sys.prefix) / "nowhere") == {}
