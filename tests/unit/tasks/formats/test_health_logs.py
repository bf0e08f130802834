"""Logs of AzNHC and of trainings by Megatron, in every form that they have."""

from pathlib import Path

import pytest

from tasks.formats.aznhc import is_aznhc, read_aznhc
from tasks.formats.training_logs import iterations_of, read_megatron
from tasks.qualification.aznhc_findings import fault_of, impact_of, probes_of

pytestmark = pytest.mark.unit

LOGS = Path(__file__).parents[3] / "support" / "logs"


def nhc(name):
    return read_aznhc((LOGS / name).read_text())


def probes(name):
    return [probe for run in nhc(name) for probe in probes_of(run)]


def training(name):
    return read_megatron((LOGS / name).read_text())


def test_a_healthy_run_of_aznhc():
    (run,) = nhc("aznhc_healthy.log")
    assert (run.host, run.about["sku"], run.about["physical_host"]) == (
        "vm-01",
        "standard_nd96isr_h100_v5",
        "BLAPrdGPC012345",
    )
    assert (run.exit_code, len(run.passed), run.failed) == (0, 5, ())
    (probe,) = probes_of(run)
    assert (probe.check, probe.status, probe.finding) == ("aznhc", "measured", None)


def test_a_failed_check_has_its_fault_and_figures_in_bytes():
    allreduce, write, whole = probes("aznhc_failed.log")
    assert (allreduce.where, allreduce.measured, allreduce.limit, allreduce.unit, allreduce.finding) == (
        "check_nccl_allreduce",
        301.2,
        ">= 460",
        "GB/s",
        "fail",
    )
    assert "NHC2010 ManualInvestigation" in allreduce.source
    assert (write.measured, write.limit) == (pytest.approx(101.2 / 8), ">= 47.5")
    assert whole.status == "measured"


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("aznhc_unsupported.log", "missing", "AzNHC has no checks for standard_nd96is_b300_v7"),
        ("aznhc_no_end.log", "failed", "the log has no exit code"),
        ("aznhc_setup.log", "failed", "SKU nd96isr_h100_v5 is not supported for this test"),
        ("aznhc_timed_out.log", "timed out", "Script timed out"),
    ],
)
def test_what_did_not_look_has_no_value(name, status, said):
    found = [probe for probe in probes(name) if probe.status != "measured"]
    assert [(probe.status, probe.measured, probe.finding) for probe in found] == [(status, None, None)]
    assert said in found[0].said


def test_exit_zero_without_a_check_is_no_pass():
    text = "------ VM Meta Data ------\nVM HOST NAME: vm-9\nHealth checks completed with exit code: 0.\n"
    (probe,) = probes_of(read_aznhc(text)[0])
    assert probe.status == "missing"
    (probe,) = probes_of(read_aznhc(text.replace("code: 0", "code: 1"))[0])
    assert (probe.status, "names no check that failed" in probe.said) == ("failed", True)


def test_throttling_by_heat_fails_though_aznhc_only_warns():
    heat, near, clocks, _ = sorted(probes("aznhc_warned.log"), key=lambda probe: (probe.finding or "z", probe.check))
    assert (heat.check, heat.where, heat.measured, heat.finding) == (
        "throttle",
        "GPU 2",
        "software thermal slowdown",
        "fail",
    )
    assert (near.check, near.where, near.finding) == ("aznhc", "check_gpu_bw", "warn")
    assert (clocks.where, clocks.finding) == ("GPU 5", "warn")


def test_a_log_that_is_written_on_has_several_runs():
    before, after = nhc("aznhc_repaired.log")
    assert [fault_of(result) for result in before.failed] == ["NHC2009 HpcMissingGpu"]
    assert (before.failed[0].measured, before.failed[0].limit) == (7.0, 8.0)
    assert (after.exit_code, after.failed) == (0, ())


def test_a_summary_of_many_machines():
    found = {run.host: run for run in nhc("distributed.health.log")}
    assert [run.summary for run in found.values()] == ["healthy", *["failed"] * 3, "no results", "failed", "failed"]
    assert fault_of(found["mynode-066"].failed[0]) == "NHC2001 HpcGenericFailure"
    assert found["mynode-079"].failed[0].measured == 20.7377
    assert fault_of(found["mynode-084"].failed[0]) == ""
    (silent,) = probes_of(found["mynode-108"])
    assert silent.status == "missing"


@pytest.mark.parametrize("label", ["3: ", "[1,3]<stdout>:", "[pod/gpu-0] "])
def test_what_a_launcher_writes_first_is_no_part_of_a_line(label):
    plain = (LOGS / "aznhc_healthy.log").read_text()
    text = "".join(f"{label}{line}\n" for line in plain.splitlines())
    assert is_aznhc(text)
    assert read_aznhc(text) == read_aznhc(plain)
    assert is_aznhc(f"{label}vm-01 | Healthy\n")
    other = text.replace(label, label.replace("3", "4").replace("gpu-0", "gpu-1")).replace("vm-01", "vm-02")
    assert [(run.host, len(run.passed)) for run in read_aznhc(text + other)] == [("vm-01", 5), ("vm-02", 5)]


def test_a_summary_keeps_machines_of_which_it_says_something_new():
    runs = {run.host: run for run in read_aznhc("vm-01 | Healthy\nvm-02 | Ailing\nvm-03 |\n")}
    assert [(run.host, run.summary) for run in runs.values()] == [("vm-01", "healthy"), ("vm-02", ""), ("vm-03", "")]
    assert [probe.status for name in ("vm-02", "vm-03") for probe in probes_of(runs[name])] == ["failed", "failed"]


def test_figures_of_a_summary_are_in_bytes():
    (run,) = nhc("distributed.debug.log")
    figures = {(reading.check, reading.where): reading.measured for reading in run.readings}
    assert figures["host_to_device", "GPU 0"] == 41
    assert figures["ib_write_bw", "mlx5_ib0"] == pytest.approx(390.98 / 8)
    assert figures["all_reduce", "bus BW"] == 477.873
    assert figures["all_reduce_ib_loopback", "IB loopback"] == 46.3965


def test_every_fault_has_azures_category():
    assert impact_of("NHC2016") == "Resource.Hpc.Unhealthy.NvLink"
    assert impact_of("NHCNA") == ""


def test_other_texts_are_not_aznhcs():
    assert not is_aznhc("a | b\nname | value\nmodel | 3\n")
    assert not is_aznhc((LOGS / "new.log").read_text())


def test_a_training_is_read_and_its_first_iterations_do_not_count():
    run = training("megatron.log")
    assert (run.tool, run.world, len(run.iterations), run.complete) == ("megatron", 1024, 8, True)
    assert (run.seconds, run.tflops) == (pytest.approx(139.544), 449.6)
    assert (run.done, run.saving, run.saved, run.killed) == (True, False, True, ())
    assert run.iterations[0].loss == 2.12038


def test_every_field_and_stamp_of_a_line():
    first, second = training("megatron_sample.log").iterations
    assert (first.seconds, first.tflops, first.loss, first.grad_norm) == (270.1254, 449.6, 2.12038, 14.218)
    assert (second.number, second.total, second.seconds, second.nan) == (5, 25000, 139.87, 0)


def test_a_window_of_skipped_iterations_has_no_loss():
    (only,) = training("megatron_skipped.log").iterations
    assert (only.loss, only.skipped, only.tflops, only.loss_scale) == (None, 10, None, 8388608.0)


def test_megatron_deepspeed_by_its_machine_in_seconds_and_milliseconds():
    run = training("deepspeed.log")
    assert (run.tool, run.hosts, run.tflops) == ("megatron-deepspeed", ("vm-07-14",), pytest.approx(150.565))
    assert run.iterations[-1].seconds == pytest.approx(74.4949)
    assert run.iterations[-1].samples_per_second == 27.492
    assert training("deepspeed_seconds.log").iterations[-1].seconds == pytest.approx(74.5)


def test_throughput_now_and_the_runs_own_average():
    assert (training("primus.log").iterations[-1].tflops, training("primus.log").iterations[-1].tflops_average) == (
        492.6,
        492.9,
    )
    new = training("primus_new.log").iterations[-1]
    assert (new.tflops, new.tflops_average, new.tokens_per_second) == (496.3, 496.1, 9640.7)


def test_lines_that_are_glued_are_two():
    assert [one.number for one in training("megatron_glued.log").iterations] == [20, 21]
    assert list(iterations_of("iteration without a number | x")) == []


def test_a_run_killed_while_it_saves_is_seen_though_all_iterations_are_there():
    run = training("deepspeed_killed.log")
    assert (run.complete, run.done, run.saving, run.saved) == (True, True, True, False)
    assert "sigkill_handler" in run.killed[0]


def test_a_loss_that_is_no_number_is_counted():
    text = (LOGS / "megatron.log").read_text().replace("lm loss: 2.120380E+00", "lm loss: NAN", 3)
    assert read_megatron(text).lost == 3
    assert read_megatron("no training") is None
