"""One sweep: limits at the sizes that matter, its curve, correctness, transport, rounds."""

import pytest
from made_measurements import BARE, CPU, GPU, complete, config, curve, found, names, quiet, rank, sweep, together

from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, Row
from tasks.qualification.sweeps import size

pytestmark = pytest.mark.unit

SWEEPS = config("collectives")


def of_all(*sweeps, nodes=4, sku=GPU):
    return complete(judge(quiet(nodes, sweeps), sku, SWEEPS))


def of_curve(*tops, in_place=(), sku=BARE, smallest=1 << 20):
    """Reasons of a curve of these rates."""
    rows = [
        Row(bytes=smallest << n, busbw=float(top), busbw_in_place=float(in_place[n] if in_place else top))
        for n, top in enumerate(tops)
    ]
    return of_all(sweep("all", names(4), rows=tuple(rows)), sku=sku).reasons


def test_sound_sweeps_are_healthy():
    seen = of_all(sweep("all", names(4)), *(sweep("node", (name,)) for name in names(4)))
    assert (seen.verdict, seen.together) == ("healthy", (names(4),))


@pytest.mark.parametrize(("top", "verdict"), [(451.0, "healthy"), (449.0, "degraded"), (399.0, "failed")])
def test_all_machines_together_are_judged_at_the_size_that_matters(top, verdict):
    seen = of_all(sweep("all", names(4), top))
    assert seen.verdict == verdict
    assert all(reason.nodes == names(4) for reason in seen.reasons)


def test_a_slow_machine_by_itself_is_that_machines_fault():
    seen = of_all(sweep("all", names(2)), sweep("node", ("node00",), 459.0), sweep("node", ("node01",)), nodes=2)
    assert found(seen) == {"node00": ["all_reduce busbw at 1 GiB"]}


def test_an_average_over_a_sweep_says_nothing():
    """Many small sizes drag the average down, and the last row alone hides a collapse before it."""
    rows = curve(475.0, smallest=8, count=28)
    assert sum(row.busbw for row in rows) / len(rows) < 460
    assert of_all(sweep("all", names(4), rows=rows)).verdict == "healthy"


def test_all_rows_from_the_size_on_must_reach_it():
    rows = (*curve(475.0), Row(bytes=2 << 30, busbw=380.0), Row(bytes=4 << 30, busbw=475.0))
    (reason,) = of_all(sweep("all", names(4), rows=rows)).reasons
    assert (reason.check, reason.measured, reason.limit) == ("all_reduce busbw at 2 GiB", 380.0, ">= 400")


def test_the_mean_of_in_place_and_out_of_place_is_judged():
    rows = (Row(bytes=1 << 30, busbw=398.0, busbw_in_place=402.0),)
    assert of_all(sweep("all", names(4), rows=rows)).reasons[0].verdict == "degraded"


def test_smaller_messages_than_the_limits_prove_nothing_unless_they_reach_it_already():
    assert of_all(sweep("all", names(4), rows=curve(475.0, count=8))).verdict == "healthy"
    (reason,) = of_all(sweep("all", names(4), rows=curve(440.0, count=8))).reasons
    assert (reason.verdict, reason.limit) == ("unknown", ">= 450.0 from 1 GiB on")


def test_messages_a_little_smaller_and_far_too_slow_fail():
    (reason,) = of_all(sweep("all", names(4), rows=curve(100.0, count=8))).reasons
    assert (reason.verdict, reason.limit, reason.said) == ("failed", ">= 400", "already at 128 MiB")
    (reason,) = of_all(sweep("all", names(4), rows=curve(100.0, count=5))).reasons
    assert reason.verdict == "unknown"


def test_limits_of_exactly_so_many_machines_win():
    more = {"scope": "all", "nodes": 4, "bytes": 1 << 30, "fail": 300.0, "source": "page"}
    sku = GPU.model_validate({**GPU.model_dump(), "collectives": [*GPU.model_dump()["collectives"], more]})
    assert of_all(sweep("all", names(4), 350.0), sku=sku).verdict == "healthy"
    assert of_all(sweep("all", names(3), 350.0), nodes=3, sku=sku).verdict == "failed"


def test_wrong_elements_fail_in_any_sweep_and_any_round():
    wrong = sweep("all", names(4), rows=curve(475.0, wrong=1), round=0)
    (reason,) = of_all(wrong, sweep("all", names(4), round=1)).reasons
    assert (reason.verdict, reason.check, reason.limit) == ("failed", "all_reduce wrong elements", "= 0")
    assert found(of_all(sweep("all", names(4)), sweep("node", ("node02",), rows=curve(475.0, wrong=3))), "failed") == {
        "node02": ["all_reduce wrong elements"]
    }
    assert of_all(sweep("all", names(4), rows=curve(475.0, wrong=None))).verdict == "healthy"
    in_place = (*curve(475.0), Row(bytes=2 << 30, busbw=475.0, wrong=0, wrong_in_place=2))
    assert of_all(sweep("all", names(4), rows=in_place)).verdict == "failed"


def test_the_best_round_counts():
    slow, fast = sweep("all", names(4), 200.0), sweep("all", names(4), 475.0, round=1)
    assert of_all(slow, fast).verdict == of_all(fast, slow).verdict == "healthy"
    tcp = slow.model_copy(update={"transport": ("NET/Socket",)})
    assert of_all(tcp, fast).verdict == "healthy"
    assert of_all(slow, fast.model_copy(update={"transport": ("NET/Socket",)})).verdict == "failed"
    lost = sweep("all", names(4), rows=(), status="timed out")
    assert of_all(lost, fast).verdict == "healthy"


@pytest.mark.parametrize("status", ["timed out", "failed", "missing", "measured"])
def test_a_sweep_without_rows_is_unknown(status):
    seen = of_all(sweep("all", names(4), rows=(), status=status))
    assert (seen.verdict, [r.verdict for r in seen.reasons]) == ("unknown", ["unknown"])
    assert (
        of_all(sweep("all", names(4)), sweep("all", names(4), rows=(), collective="alltoall", status="skipped")).verdict
        == "healthy"
    )


def test_machines_in_no_sweep_with_others_are_unknown():
    assert found(of_all(sweep("all", names(3)))) == {"node03": ["collectives"]}
    assert set(found(of_all())) == set(names(4))


@pytest.mark.parametrize(
    ("scope", "nodes", "used", "verdict"),
    [
        ("all", 4, ("NET/IB", "P2P", "SHM"), "healthy"),
        ("all", 4, ("NET/IB/GDR",), "healthy"),
        ("all", 4, ("NET/Socket", "P2P"), "failed"),
        ("all", 4, ("NET/IB", "NET/Socket"), "failed"),
        ("all", 4, ("P2P",), "failed"),
        ("all", 4, (), "unknown"),
        ("node", 1, ("P2P/CUMEM", "NVLS"), "healthy"),
        ("node", 1, ("SHM",), "failed"),
        ("node", 1, ("P2P", "SHM"), "failed"),
    ],
)
def test_the_transport_is_the_hardwares(scope, nodes, used, verdict):
    sweeps = [sweep("all", names(4)), sweep(scope, names(nodes), transport=used)]
    seen = of_all(*(sweeps if nodes == 1 else sweeps[1:]))
    assert seen.verdict == verdict
    for checks in found(seen).values():
        assert checks == ["all_reduce transport"]


def test_the_transport_must_be_with_gpudirect_where_the_file_says_so():
    sku = GPU.model_validate({**GPU.model_dump(), "transports": {"all": ("NET/IB/GDR",)}})
    assert of_all(sweep("all", names(4), transport=("NET/IB",)), sku=sku).verdict == "failed"


def test_logs_without_nccls_own_lines_are_judged_by_their_figures_alone():
    for top, verdict, checks in ((475.0, "healthy", []), (300.0, "failed", ["all_reduce busbw at 1 GiB"])):
        logs = Measurement(sweeps=(sweep("all", names(2), top, transport=()),))
        seen = judge(logs, GPU, SWEEPS)
        assert (seen.verdict, found(seen).get("", [])) == (verdict, checks)
        ours = of_all(*logs.sweeps, nodes=2)
        assert (ours.verdict, "all_reduce transport" in found(ours, "unknown")[""]) == ("unknown", True)


def test_a_transports_source_is_cited():
    sku = GPU.model_validate({**GPU.model_dump(), "section_sources": {"transports": "page"}})
    for used, verdict in (("NET/Socket",), "failed"), ((), "unknown"):
        (reason,) = of_all(sweep("all", names(4), transport=used), sku=sku).reasons
        assert (reason.verdict, reason.source) == (verdict, "gpu: a vendor's page, 2026-11-21")


def test_a_collapse_at_one_size_is_seen():
    (reason,) = of_curve(100, 200, 300, 150, 380, 390)
    assert (reason.verdict, reason.check, reason.measured) == ("degraded", "all_reduce busbw at 8 MiB", 150.0)
    assert [r.verdict for r in of_curve(100, 200, 300, 60, 380, 390)] == ["failed"]
    assert [r.verdict for r in of_curve(100, 200, 300, 60, 70, 390)] == ["failed"]
    assert [r.check for r in of_curve(100, 200, 300, 390, 200)] == ["all_reduce busbw at 16 MiB"]


def test_what_sound_curves_do_is_no_collapse():
    assert of_curve(200, 300, 364, 318, 316, 322) == ()
    assert of_curve(10, 100, 90, 110, 300, 280, 470) == ()
    assert of_curve(5, 50, 1, 60, 70, smallest=1 << 10) == ()


def test_rows_of_one_size_that_disagree_are_erratic():
    tops = (100, 200, 300, 400, 450, 470)
    (reason,) = of_curve(*tops, in_place=(100, 200, 300, 250, 450, 470))
    assert (reason.verdict, reason.measured) == ("degraded", 250 / 400)
    (reason,) = of_curve(*tops, in_place=(100, 120, 300, 250, 450, 300))
    assert (reason.verdict, reason.said) == ("failed", "erratic: 3 of 6 sizes disagree")
    assert of_curve(*tops, in_place=(90, 180, 270, 350, 420, 440)) == ()


def test_a_curve_that_steps_back_again_and_again():
    (reason,) = of_curve(300, 230, 300, 235, 300)
    assert (reason.check, reason.measured) == ("all_reduce busbw over sizes", 2.0)


def test_a_busy_cpu_is_no_fault():
    """Rows of gloo's all_reduce between busy ranks jump by a factor of three; only gross collapses are told, and none fails."""
    assert of_curve(0.9, 0.4, 1.2, 0.5, 0.45, in_place=(0.4, 0.8, 0.6, 0.4, 0.9), sku=CPU) == ()
    assert [r.verdict for r in of_curve(0.9, 0.1, 1.2, 1.1, 1.0, sku=CPU)] == ["degraded"]


def test_sizes_in_words():
    assert [size(n) for n in (1 << 30, 3 << 20, 4096, 16_000_000)] == ["1 GiB", "3 MiB", "4 KiB", "16 MB"]


def test_machines_whose_ranks_were_in_no_sweep_of_their_own_are_unknown():
    whole, own = sweep("all", names(3)), [sweep("node", (name,)) for name in names(3)]
    seen = complete(judge(quiet(3, (whole, *own[:2]), ranks_per_node=1), GPU, SWEEPS))
    assert seen.verdict == "healthy"
    eight = [rank(n, names(3)[n // 8], local_rank=n % 8) for n in range(24)]
    seen = complete(judge(together(eight, (whole, *own[:2]), ranks_per_node=8), GPU, SWEEPS))
    assert found(seen) == {"node02": ["collectives"]}
    assert seen.nodes[2].reasons[0].limit == "a sweep within the machine"
    assert judge(together(eight, (whole, *own), ranks_per_node=8), GPU, SWEEPS).verdict == "healthy"


def with_norms():
    """What sound hardware reaches at small messages, and what it must reach at one size only."""
    small = [{"scope": "all", "bytes": 1 << n, "norm": 400.0, "source": "page"} for n in (20, 27)]
    return GPU.model_validate({**GPU.model_dump(), "collectives": [*GPU.model_dump()["collectives"], *small]})


def test_a_norm_alone_clears_no_sweep():
    """Where messages of the size that the limit is for are missing, a smaller one's norm does not stand in for it."""
    slow = of_all(sweep("all", names(4), rows=curve(5.0, count=10)), sku=with_norms())
    assert found(slow, "failed") == {"": ["all_reduce busbw at 512 MiB"]}
    tiny = of_all(sweep("all", names(4), rows=curve(5.0, count=1)), sku=with_norms())
    assert (tiny.verdict, [r.verdict for r in tiny.reasons]) == ("unknown", ["unknown"])
    only = GPU.model_validate({**GPU.model_dump(), "collectives": with_norms().model_dump()["collectives"][2:]})
    assert of_all(sweep("all", names(4), rows=curve(5.0)), sku=only).verdict == "healthy"


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("sku", [BARE, GPU, CPU])
def test_a_bandwidth_that_is_no_number_was_not_measured(odd, sku):
    """A test that took no time prints inf. Neither is healthy, nor the measure of the others."""
    rows = (*curve(475.0)[:-1], Row(bytes=1 << 30, busbw=odd, busbw_in_place=odd))
    seen = of_all(sweep("all", names(4), rows=rows), sku=sku)
    assert (seen.verdict, [r.said for r in seen.reasons]) == ("unknown", ["no bandwidth"])
    one = [sweep("node", (name,), rows=rows if name == "node01" else curve(475.0)) for name in names(4)]
    assert found(of_all(sweep("all", names(4)), *one, sku=sku)) == {"node01": ["all_reduce busbw"]}
    half = (*curve(475.0)[:-1], Row(bytes=1 << 30, busbw=odd, busbw_in_place=475.0))
    assert of_all(sweep("all", names(4), rows=half), sku=sku).verdict == "healthy"
