"""The cluster by itself: measured anew every time, judged, and left for a retraining run to reuse."""

QUICK = ("-c", "tiny", "--set", "benchmark.seconds=0.3", "--set", "benchmark.min_of_peers=0")


def test_it_is_measured_anew_every_time_and_a_retraining_reuses_it(home, done):
    first, second = home.ok("qualify", *QUICK), home.ok("qualify", *QUICK)
    assert first.statuses() == second.statuses() == {"benchmark": "ran"}
    assert second.stage("benchmark")["job"]["submissions"] == first.stage("benchmark")["job"]["submissions"] + 1
    assert first.said["qualification"]["ref"] != second.said["qualification"]["ref"]
    assert second.said["qualification"]["matmul_gflops_per_rank"] > 0
    ran = home.ok("retrain", *QUICK, "--to", "benchmark")
    assert ran.statuses()["benchmark"] == "reused"
    assert ran.stage("benchmark")["outputs"] == second.stage("benchmark")["outputs"]


def test_a_slow_cluster_closes_the_gate(home, done):
    path = home.path.parent / "fast.json"
    path.write_text(
        '{"name": "fast", "source": "test", "matmul_gflops_per_rank": 1e9, "allreduce_gigabytes_per_second": 1e9}'
    )
    ran = home.run("qualify", *QUICK, "--set", f"benchmark.baseline={path}")
    assert ran.code == 3 and ran.statuses() == {"benchmark": "gate_closed"}, ran.stderr
    assert ran.said["error"]["stage"] == "benchmark"
