"""A baseline from measurements: what it says, what it is refused for, and that it judges only what comes after it."""

from datetime import UTC, datetime

import pytest

from tasks.config.base import digest
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import load_sku
from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, Probe, RankReport, Row, Sweep
from tasks.qualification.record import collectives, limits, record

pytestmark = pytest.mark.unit

CPU = load_sku("local-cpu")
CONFIG = BenchmarkConfig(checks=("compute", "collectives"))
MB = 10**6
SLOWER = Probe(check="matmul_fp32", measured=0.06, unit="TFLOP/s", peers=0.3)


def rank(number, tflops, *, cpus=4.0, **probe):
    return RankReport(
        rank=number,
        local_rank=0,
        node=f"n{number}",
        host=f"h{number}",
        probes=(
            Probe(check="matmul_fp32", measured=tflops, unit="TFLOP/s", peers=1.0, **probe),
            Probe(check="cpu_count", measured=cpus),
            Probe(check="memory_gib", measured=15.0 + number, unit="GiB"),
        ),
        done=("compute", "collectives"),
    )


def sweep(*busbw, wrong=0, round=0, status="measured", scope="all", nodes=("n0", "n1")):
    rows = [
        Row(bytes=size * MB, microseconds=1.0, algbw=rate, busbw=rate, wrong=wrong)
        for size, rate in zip((1, 4, 16), busbw, strict=False)
    ]
    return Sweep(
        collective="all_reduce", scope=scope, nodes=nodes, ranks=2, backend="gloo", tool="torch", rows=tuple(rows),
        transport=("tcp/lo",), round=round, status=status,
    )  # fmt: skip


def run(a=0.06, b=0.05, *, ranks=None, sweeps=None, **change):
    fields = {
        "nodes": ("n0", "n1"),
        "expected_nodes": 2,
        "ranks_per_node": 1,
        "ranks": (rank(0, a), rank(1, b)) if ranks is None else ranks,
        "sweeps": (sweep(0.2, 1.0, 0.8),) if sweeps is None else sweeps,
    }
    return Measurement.model_validate(fields | change)


def recorded(folder, *runs, name="mine", based_on=CPU, **options):
    return load_sku(str(record(name, runs, based_on=based_on, folder=folder, **options)))


def test_the_median_of_several_runs_with_margins_host_count_date_and_version(tmp_path):
    found = recorded(tmp_path, run(0.06, 0.05), run(0.07, 0.05), run(0.08, 0.064))
    limit = found.limits["matmul_fp32"]
    assert (limit.norm, limit.warn, limit.fail, limit.source) == (0.062, 0.0465, 0.031, "recorded")
    source = found.sources["recorded"]
    assert source.date == datetime.now(UTC).date()
    assert "median of 3 run(s) on 2 machine(s), based on local-cpu" in source.what
    assert "Headway 0." in source.what and "warn is 0.75" in source.what and "fail 0.5" in source.what
    assert (found.limits["cpu_count"].better, found.limits["cpu_count"].fail) == ("equal", 4.0)
    assert (found.limits["memory_gib"].norm, found.limits["memory_gib"].fail) == (15.0, 14.55)
    assert (found.name, found.vendor, found.based_on) == ("mine", "cpu", "")


def test_earlier_runs_count_where_they_are_sound_and_of_the_same_machines(tmp_path):
    earlier = [
        run(0.07, 0.05),
        run(0.08, 0.064),
        run(0.9, 0.9, error="cut off"),
        run(ranks=(rank(0, 0.9, cpus=8.0), rank(1, 0.9, cpus=8.0))),
    ]
    found = recorded(tmp_path, run(0.06, 0.05), earlier=earlier)
    assert found.limits["matmul_fp32"].norm == 0.062 and found.limits["cpu_count"].fail == 4.0
    assert "median of 3 run(s) on 2 machine(s)" in found.sources["recorded"].what


def test_it_holds_for_the_sizes_that_it_was_recorded_on(tmp_path):
    size = {"machine": {"vm_size": "Standard_D4s_v5"}}
    ranks = [rank(0, 0.06).model_copy(update=size), rank(1, 0.05)]
    assert recorded(tmp_path, run(ranks=ranks)).sizes == ("Standard_D4s_v5",)
    assert recorded(tmp_path, run(), name="plain").sizes == ()


def test_a_spread_widens_the_margins_and_the_recorded_runs_are_sound_by_it(tmp_path):
    runs = [run(0.10, 0.09), run(0.10, 0.05), run(0.11, 0.10)]
    found = recorded(tmp_path, *runs)
    assert (found.limits["matmul_fp32"].norm, found.limits["matmul_fp32"].warn) == (0.1, 0.049)
    loose = CONFIG.model_copy(update={"min_of_peers": 0.1})
    assert {judge(each, found, loose).verdict for each in runs} == {"healthy"}


def test_bus_bandwidth_is_limited_where_it_is_bound_and_no_higher_than_larger_messages_keep(tmp_path):
    found = recorded(tmp_path, run(sweeps=(sweep(0.1, 0.9, 0.7), sweep(0.2, 1.0, 0.8, round=1))))
    mine = {c.bytes: c for c in found.collectives if c.source == "recorded"}
    assert {size // MB: (c.scope, c.nodes, c.norm, c.warn, c.fail) for size, c in mine.items()} == {
        4: ("all", 2, 1.0, 0.6, 0.4),
        16: ("all", 2, 0.8, 0.6, 0.4),
        1: ("all", 2, 0.2, None, None),
    }
    assert CPU.collectives[0] in found.collectives


def test_what_judged_them_stays_where_it_is_sharper(tmp_path):
    limits = {**CPU.limits, "matmul_fp32": CPU.limits["matmul_fp32"].model_copy(update={"fail": 0.049})}
    strict = CPU.model_copy(update={"limits": limits})
    assert recorded(tmp_path, run(), based_on=strict).limits["matmul_fp32"] == limits["matmul_fp32"]


def test_what_was_recorded_earlier_keeps_its_own_source(tmp_path):
    first = recorded(tmp_path, run(0.2, 0.2), name="first")
    second = recorded(tmp_path, run(0.15, 0.15, sweeps=(sweep(0.3, 1.5, 1.2),)), name="second", based_on=first)
    assert second.limits["matmul_fp32"] == first.limits["matmul_fp32"]
    assert second.sources["recorded"] == first.sources["recorded"]
    assert "based on first" in second.sources["recorded_2"].what
    assert {c.source for c in second.collectives} == {"floor", "recorded_2"}


def test_it_judges_what_comes_after_it_and_not_the_run_that_was_recorded(tmp_path):
    first = run(0.06, 0.06)
    before = judge(first, CPU, CONFIG)
    found = recorded(tmp_path, first)
    assert judge(first, CPU, CONFIG) == before and before.verdict == "healthy"
    assert before.sku_digest == digest(CPU.model_dump(mode="json")) != digest(found.model_dump(mode="json"))
    later = run(0.028, 0.028)
    assert judge(later, CPU, CONFIG).verdict == "healthy"
    assert judge(later, found, CONFIG).verdict == "failed"


def test_a_name_that_is_taken_is_replaced_only_when_told(tmp_path):
    path = record("mine", [run()], based_on=CPU, folder=tmp_path)
    text = path.read_text()
    with pytest.raises(ValueError, match=f"{path} has this name; choose another one, or replace it"):
        record("Mine", [run(0.2, 0.2)], based_on=CPU, folder=tmp_path)
    with pytest.raises(ValueError, match="local-cpu.yaml has this name"):
        record("local-cpu", [run()], based_on=CPU, folder=tmp_path)
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]
    assert record("mine", [run(0.2, 0.2)], based_on=CPU, folder=tmp_path, replace=True) == path
    assert load_sku("mine", tmp_path).limits["matmul_fp32"].norm == 0.2
    assert load_sku("mine", tmp_path).name == "mine"


@pytest.mark.parametrize("name", ["", "_mine", "a/b", "../x", "a.yaml", "a\nb"])
def test_a_name_that_is_no_file_name(tmp_path, name):
    with pytest.raises(ValueError, match="a name has letters"):
        record(name, [run()], based_on=CPU, folder=tmp_path)


REFUSED = {
    "1 of 2 machines have a result": run(nodes=("n0",), ranks=(rank(0, 0.06),)),
    "1 of 2 ranks have a result": run(ranks=(rank(0, 0.06),)),
    "the job died": run(error="the job died"),
    "n1: matmul_fp32 is timed out: after 60 s": run(
        ranks=(rank(0, 0.06), rank(1, 0.06, status="timed out", said="after 60 s"))
    ),
    "all_reduce of n0, n1: no row": run(sweeps=(sweep(),)),
    "all_reduce of n0, n1": run(sweeps=(sweep(1.0, status="failed"),)),
    "was failed: .*matmul_fp32": run(0.003, 0.003),
    "was (failed|unknown): .*against its peers": run(
        ranks=(rank(0, 0.06), rank(1, 0.06).model_copy(update={"probes": (SLOWER,)}))
    ),
    "was failed: .*wrong": run(sweeps=(sweep(1.0, 1.0, 1.0, wrong=3),)),
    "machines differ in cpu_count: 2, 4": run(ranks=(rank(0, 0.06), rank(1, 0.06, cpus=2.0))),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_sound_is_refused(tmp_path, why):
    with pytest.raises(ValueError, match=why):
        record("mine", [run(), REFUSED[why]], based_on=CPU, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_judged_as_the_run_was(tmp_path):
    uneven = (rank(0, 0.06), rank(1, 0.06).model_copy(update={"probes": (SLOWER,)}))
    with pytest.raises(ValueError, match="against its peers"):
        record("mine", [run(ranks=uneven)], based_on=CPU, folder=tmp_path)
    loose = BenchmarkConfig(min_of_peers=0.2, nodes=("n0", "n1", "n2"))
    assert record("mine", [run(ranks=uneven)], based_on=CPU, folder=tmp_path, config=loose).is_file()


def test_fewer_runs_than_asked_for(tmp_path):
    for runs, at_least in (([], 1), ([run()], 3)):
        with pytest.raises(ValueError, match=f"{len(runs)} run.s. are there, and at least {at_least} needed"):
            record("mine", runs, based_on=CPU, folder=tmp_path, at_least=at_least)


def test_a_gpu_size_keeps_what_is_published_of_it():
    ours = load_sku("nd96isr_h100_v5")
    rows = [Row(bytes=size, busbw=busbw) for size, busbw in ((2**29, 455.0), (2**30, 465.0), (2**34, 478.0))]
    measured = sweep(scope="node", nodes=("n0",)).model_copy(update={"rows": tuple(rows)})
    kept = list(collectives([run(ranks=(), sweeps=(measured,))], ours, source="size"))
    assert set(ours.collectives) < set(kept)
    (added,) = set(kept) - set(ours.collectives)
    assert (added.bytes, added.norm, added.warn, added.fail) == (2**29, 455.0, 432.2, 409.5)
    assert dict(limits([run(ranks=())], ours, source="size")) == {}


def test_the_best_counts_where_a_rank_measured_again(tmp_path):
    again = Probe(check="matmul_fp32", measured=0.09, unit="TFLOP/s", peers=1.0)
    ranks = tuple(one.model_copy(update={"probes": (*one.probes, again)}) for one in (rank(0, 0.06), rank(1, 0.07)))
    assert recorded(tmp_path, run(ranks=ranks)).limits["matmul_fp32"].norm == 0.09
