"""Machines by themselves: the hardware's file, findings, what is missing, versions, history."""

import datetime
import random

import pytest
from made_measurements import BARE, CPU, GPU, ONLY, complete, config, found, names, quiet, rank, rates, sweep, together

from tasks.qualification.judge import Past, judge
from tasks.qualification.measured import Measurement, Probe, TrainingPoint
from tasks.qualification.verdicts import NodeVerdict

pytestmark = pytest.mark.unit

COMPUTE = config(*ONLY)


def one(*probes, sku=GPU, settings=COMPUTE, **fields):
    return complete(judge(together([rank(0, "node00", *probes, **fields)]), sku, settings)).nodes[0]


MATMUL = Probe(check="matmul_bf16", measured=769.0, unit="TFLOP/s")


def test_a_sound_machine_is_healthy_and_its_rates_are_recorded():
    node = one(MATMUL, Probe(check="gpu_count", measured=8.0), Probe(check="never_heard_of", measured=3.0))
    assert (node.verdict, node.reasons, node.rates) == ("healthy", (), {"matmul_bf16": 769.0})


@pytest.mark.parametrize(
    ("measured", "verdict", "limit"),
    [
        (741.0, "healthy", ""),
        (739.0, "degraded", ">= 740"),
        (714.0, "failed", ">= 715"),
        ("lots", "unknown", ">= 740.0"),
    ],
)
def test_a_rate_under_its_limit_is_named_with_both_numbers(measured, verdict, limit):
    node = one(MATMUL.model_copy(update={"measured": measured, "where": "GPU 3"}))
    assert node.verdict == verdict
    assert [(r.measured, r.limit, r.where) for r in node.reasons] == ([(measured, limit, "GPU 3")] if limit else [])


@pytest.mark.parametrize(
    ("check", "measured", "verdict"),
    [
        ("time_skew", 0.5, "healthy"),
        ("time_skew", 2.0, "degraded"),
        ("time_skew", 9.0, "failed"),
        ("gpu_count", 7.0, "failed"),
        ("gpu_count", "8", "healthy"),
        ("gpu_count", None, "unknown"),
        ("matmul_bf16", float("inf"), "unknown"),
    ],
)
def test_limits_in_other_directions(check, measured, verdict):
    assert one(MATMUL, Probe(check=check, measured=measured)).verdict == verdict


def test_a_norm_alone_judges_nothing_but_silence():
    sku = GPU.model_validate({**GPU.model_dump(), "limits": {"ib_rate": {"norm": 400.0, "source": "page"}}})
    assert one(Probe(check="ib_rate", measured=100.0), sku=sku, done=ONLY).verdict == "healthy"
    (reason,) = one(Probe(check="ib_rate", measured=None), sku=sku).reasons
    assert (reason.verdict, reason.limit) == ("unknown", ">= 400.0")


def test_a_warnings_source_may_be_another():
    limit = {"norm": 10.0, "warn": 9.0, "fail": 8.0, "source": "page", "warn_source": "own"}
    sources = {**GPU.model_dump()["sources"], "own": {"what": "our own choice", "date": "2026-11-22"}}
    sku = GPU.model_validate({**GPU.model_dump(), "sources": sources, "limits": {"matmul_bf16": limit}})
    found = [one(Probe(check="matmul_bf16", measured=rate), sku=sku).reasons[0].source for rate in (8.5, 7.0)]
    assert found == ["gpu: our own choice, 2026-11-22", "gpu: a vendor's page, 2026-11-21"]


def test_a_source_is_cited_with_its_date():
    (reason,) = one(MATMUL.model_copy(update={"measured": 700.0})).reasons
    assert reason.source == "gpu: a vendor's page, 2026-11-21"
    assert "node00: matmul_bf16 is failed: 700 TFLOP/s, limit >= 715" in reason.sentence


def test_a_finding_is_a_verdict_with_its_own_source():
    xid = Probe(
        check="xid",
        where="GPU 3",
        measured="Xid 95",
        finding="fail",
        said="NVRM: Xid 95",
        source="NVIDIA's Xid catalogue",
    )
    flaps = Probe(check="link_flaps", measured=6.0, finding="warn", said="lost carrier")
    node = one(MATMUL, xid, flaps)
    assert [(r.check, r.verdict, r.source) for r in node.reasons] == [
        ("xid", "failed", "NVIDIA's Xid catalogue"),
        ("link_flaps", "degraded", "the machine's own link_flaps"),
    ]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [("missing", "unknown"), ("timed out", "unknown"), ("failed", "unknown"), ("skipped", "healthy")],
)
def test_what_could_not_look_is_unknown(status, verdict):
    assert one(MATMUL, Probe(check="gpu_smi", status=status)).verdict == verdict


def test_what_is_missing_says_what_to_install():
    node = one(
        MATMUL,
        Probe(check="xid", status="missing"),
        Probe(check="ecc", status="missing"),
        Probe(check="matmul_fp8", status="timed out"),
    )
    remedies = {reason.check: reason.remedy for reason in node.reasons}
    assert "dmesg" in remedies["xid"]
    assert "nvidia-smi" in remedies["ecc"]
    assert "benchmark.check_seconds" in remedies["matmul_fp8"]


def test_a_group_that_did_not_finish_is_unknown():
    assert found(judge(together([rank(0, "node00", MATMUL, done=())]), GPU, COMPUTE)) == {"node00": ["compute"]}


def test_all_ranks_of_a_machine_must_finish():
    ranks = [rank(n, "node00", MATMUL, done=done) for n, done in enumerate((ONLY, ()))]
    assert found(judge(together(ranks, ranks_per_node=2), GPU, COMPUTE)) == {"node00": ["compute"]}


def test_a_limit_that_nobody_measured_is_unknown():
    assert [r.check for r in one(settings=config("compute"), done=("compute",)).reasons] == ["compute"]
    node = one(settings=config("health"), done=("health",))
    assert [r.check for r in node.reasons] == ["gpu_count", "time_skew"]


def test_a_missing_rank_is_unknown():
    seen = complete(judge(together([rank(0, "node00", MATMUL)], ranks_per_node=2), GPU, COMPUTE))
    assert found(seen, "unknown") == {"node00": ["ranks"]}


def test_machines_that_never_reported_have_a_verdict_each():
    seen = complete(judge(rates(1.0, 1.0, expected_nodes=4, error="node02 did not answer"), BARE, COMPUTE))
    assert [(n.name, n.verdict) for n in seen.nodes][2:] == [
        ("machine 3 of 4", "unknown"),
        ("machine 4 of 4", "unknown"),
    ]
    seen = judge(rates(1.0, 1.0, expected_nodes=3), BARE, config(*ONLY, nodes=("node00", "node01", "node77")))
    assert found(seen) == {"node77": ["result"]}
    assert seen.verdict == "unknown"


def test_nothing_is_unknown():
    for empty in (Measurement(), Measurement(expected_nodes=2, error="the job could not start")):
        seen = complete(judge(empty, GPU, COMPUTE))
        assert seen.verdict == "unknown"
        assert "measurement" in [r.check for r in seen.reasons]


def test_a_job_that_ended_early_is_unknown_though_its_ranks_are_fine():
    seen = complete(judge(rates(1.0, 1.0, 1.0, error="killed"), BARE, COMPUTE))
    assert (seen.verdict, found(seen)) == ("unknown", {"": ["job"]})


def test_the_machines_with_other_versions_are_named():
    versions = ("2.21", "2.21", "2.19")
    ranks = [rank(n, f"node0{n}", versions={"nccl": v, "driver": "550"}) for n, v in enumerate(versions)]
    seen = complete(judge(together(ranks), BARE, config("collectives"))).nodes
    assert [[r.check for r in node.reasons if r.verdict == "degraded"] for node in seen] == [[], [], ["version_nccl"]]
    (reason,) = (r for r in seen[2].reasons if r.check == "version_nccl")
    assert (reason.measured, reason.limit, reason.said) == ("2.19", "= 2.21", "machines have 2.19 on 1, 2.21 on 2")


@pytest.mark.parametrize(
    ("change", "size", "degraded"),
    [
        ({"name": "nd96isr_h100_v5"}, "Standard_ND96isr_H100_v5", False),
        ({"name": "nd96isr_h100_v5"}, "Standard_ND96isr_H200_v5", True),
        ({"name": "nd96isr_h100_v5"}, "", False),
        ({"name": "mine", "aliases": ("ND96isr_H200_v5",)}, "Standard_ND96isr_H200_v5", False),
        ({"name": "mine", "sizes": ("Standard_ND96isr_H200_v5",)}, "Standard_ND96isr_H200_v5", False),
        ({"name": "mine", "vendor": "cpu"}, "Standard_D4s_v5", False),
        ({"name": "local-gpu"}, "Standard_NC24ads_A100_v4", False),
    ],
)
def test_a_machine_of_another_size_than_it_is_judged_as(change, size, degraded):
    sku = GPU.model_copy(update=change)
    node = one(MATMUL, sku=sku, machine={"vm_size": size} if size else {})
    assert [(r.check, r.measured, r.limit) for r in node.reasons] == (
        [("vm_size", size, f"= {sku.name}")] if degraded else []
    )
    assert all("benchmark.sku" in reason.remedy for reason in node.reasons)


def test_versions_that_no_majority_has_name_all():
    ranks = [rank(n, f"node0{n}", Probe(check="version_mpi", measured=v)) for n, v in enumerate(("4.1", "5.0"))]
    seen = complete(judge(together(ranks), BARE, COMPUTE))
    assert found(seen) == {"node00": ["version_mpi"], "node01": ["version_mpi"]}
    assert seen.verdict == "degraded"


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        ({"driver": "550.1", "nccl": "2.21.5", "torch": "2.9"}, []),
        ({"driver": "535.1", "nccl": "2.21.5"}, ["version_driver"]),
        ({"driver": "535.1", "image": "somebody's own"}, []),
        ({"driver": "535.1", "image": "azhpc:22.04"}, ["version_driver"]),
    ],
)
def test_versions_are_those_of_the_image(versions, wrong):
    assert [r.check for r in one(MATMUL, versions=versions).reasons] == wrong


def test_training_is_judged_by_its_limits_and_by_its_scaling():
    limits = {
        "training_tflops": {"warn": 400.0, "fail": 300.0, "source": "page"},
        "scaling_efficiency": {"warn": 0.9, "fail": 0.8, "source": "page"},
    }
    sku = GPU.model_validate({**GPU.model_dump(), "limits": limits})
    point = {"engine": "torch", "step_seconds": 1.0, "convention": "megatron"}
    points = (
        TrainingPoint(nodes=("node00",), ranks=8, tflops_per_rank=410.0, **point),
        TrainingPoint(nodes=("node00", "node01"), ranks=16, tflops_per_rank=310.0, **point),
        TrainingPoint(nodes=("node02",), ranks=8, status="timed out", **point),
    )
    ranks = [rank(n, f"node0{n}", done=("training",)) for n in range(3)]
    seen = complete(judge(together(ranks, training=points), sku, config("training")))
    assert found(seen) == {"": ["scaling_efficiency", "training_tflops"], "node02": ["training_tflops"]}
    assert [(r.verdict, r.nodes) for r in seen.reasons] == [
        ("failed", ("node00", "node01")),
        ("degraded", ("node00", "node01")),
    ]
    assert found(complete(judge(together(ranks), sku, config("training")))) == {"": ["training"]}


def past(*verdicts, name="node00"):
    start = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
    return [Past(time=start + datetime.timedelta(days=n), verdict=v) for n, v in enumerate(verdicts)]


def test_a_warning_that_stays_fails():
    now = together([rank(0, "node00", MATMUL.model_copy(update={"measured": 739.0}))])
    warned = judge(now, GPU, COMPUTE).nodes[0]
    assert warned.verdict == "degraded"
    assert judge(now, GPU, COMPUTE, past(warned)).nodes[0].verdict == "degraded"
    seen = complete(judge(now, GPU, COMPUTE, past(warned, warned)))
    assert seen.nodes[0].verdict == "failed"
    assert "matmul_bf16 in its past" in found(seen)["node00"]
    well = NodeVerdict(name="node00", verdict="healthy")
    assert judge(now, GPU, COMPUTE, past(warned, warned, well)).nodes[0].verdict == "degraded"
    assert judge(now, GPU, COMPUTE, past(well, warned, warned)).nodes[0].verdict == "failed"
    others = [
        p.model_copy(update={"verdict": warned.model_copy(update={"name": "node09"})}) for p in past(warned, warned)
    ]
    assert judge(now, GPU, COMPUTE, others).nodes[0].verdict == "degraded"


def test_failures_that_come_and_go_leave_a_doubt():
    failed, well = (NodeVerdict(name="node00", verdict=verdict) for verdict in ("failed", "healthy"))
    now = together([rank(0, "node00", MATMUL)])
    assert judge(now, GPU, COMPUTE, past(failed, well, well)).verdict == "healthy"
    seen = complete(judge(now, GPU, COMPUTE, past(failed, well, failed)))
    assert (seen.verdict, found(seen)) == ("degraded", {"node00": ["failures in its past"]})


@pytest.mark.parametrize(
    ("sku", "rate", "verdict"),
    [(BARE, 95.0, "healthy"), (BARE, 85.0, "degraded"), (CPU, 40.0, "healthy"), (CPU, 15.0, "degraded")],
)
def test_a_rate_that_the_machine_once_had(sku, rate, verdict):
    before = [
        NodeVerdict(name="node00", verdict="healthy", rates={"matmul_bf16": value}) for value in (99.0, 100.0, 101.0)
    ]
    seen = complete(judge(rates(rate), sku, COMPUTE, past(*before)))
    assert seen.verdict == verdict
    assert judge(rates(rate), sku, COMPUTE, past(before[0])).verdict == "healthy"


def test_a_past_of_nothing_is_no_figure_to_compare_with():
    before = [NodeVerdict(name="node00", verdict="healthy", rates={"matmul_bf16": 0.0})] * 3
    assert judge(rates(-1.0), BARE, COMPUTE, past(*before)).verdict == "healthy"


def test_order_is_nothing_and_a_second_judgement_is_the_first():
    sweeps = [
        sweep("all", ("node00", "node01", "node02"), 300.0),
        sweep("node", ("node01",), 100.0),
        sweep("pair", ("node01", "node00"), 20.0),
    ]
    ranks = [
        rank(
            n,
            f"node{n % 3:02}",
            MATMUL.model_copy(update={"measured": 700.0 + n, "where": f"GPU {n}"}),
            versions={"nccl": str(n % 2)},
        )
        for n in range(9)
    ]
    measured = together(ranks, sweeps, ranks_per_node=3)
    first = complete(judge(measured, GPU, config()))
    for seed in range(10):
        dice = random.Random(seed)
        mixed = measured.model_copy(
            update={
                key: tuple(dice.sample(getattr(measured, key), len(getattr(measured, key))))
                for key in ("nodes", "ranks", "sweeps")
            }
        )
        assert judge(mixed, GPU, config()) == first
    assert judge(measured, GPU, config()).model_dump_json() == first.model_dump_json()


def test_logs_of_a_cluster_that_ran_no_job_of_ours_need_no_ranks():
    logs = Measurement(sweeps=(sweep("node", ("node00",), transport=()),))
    assert judge(logs, GPU, config()).verdict == "healthy"
    assert judge(quiet(1, logs.sweeps), GPU, config("collectives")).verdict == "unknown"


@pytest.mark.parametrize("measured", [None, "lots", float("nan")])
def test_a_rate_without_a_number_is_unknown_where_there_is_no_limit_too(measured):
    (reason,) = one(MATMUL, Probe(check="device_to_host", measured=measured, where="GPU 3")).reasons
    assert (reason.verdict, reason.where, reason.measured) == ("unknown", "GPU 3", None)
    assert one(MATMUL, Probe(check="gpu_smi", measured=measured)).verdict == "healthy"


@pytest.mark.parametrize(
    ("check", "verdict"), [("version_driver", "degraded"), ("sm_clock", "degraded"), ("ecc", "failed")]
)
def test_what_somebody_set_up_does_not_wear_out(check, verdict):
    """The third warning in a row is a fault; a size, a driver or a clock stays as it is until somebody changes it."""
    probe = Probe(check=check, measured=1.0, finding="warn", said="odd")
    now = together([rank(0, "node00", probe, machine={"vm_size": "Standard_ND40rs_v2"})])
    warned = judge(now, BARE, COMPUTE).nodes[0]
    assert [(r.check, r.verdict) for r in warned.reasons] == [(c, "degraded") for c in sorted([check, "vm_size"])]
    third = complete(judge(now, BARE, COMPUTE, past(warned, warned))).nodes[0]
    assert third.verdict == verdict
    assert [r.check for r in third.reasons if r.verdict == "failed"] == (
        [f"{check} in its past"] if verdict == "failed" else []
    )


def test_a_training_that_reached_no_number_is_unknown():
    ranks = [rank(n, name, done=("training",)) for n, name in enumerate(names(3))]
    points = [
        TrainingPoint(nodes=(name,), ranks=1, tflops_per_rank=odd)
        for name, odd in zip(names(3), (5.0, float("nan"), float("inf")), strict=True)
    ]
    seen = complete(judge(together(ranks, training=points), BARE, config("training")))
    assert found(seen, "unknown") == {"node01": ["training_tflops"], "node02": ["training_tflops"]}
    assert seen.nodes[1].reasons[0].said == "no throughput"
