"""The cluster by itself: measured anew every time, judged, and left for a retraining run to reuse."""

import json
from pathlib import Path

import pytest
import yaml

QUICK = ("-c", "tiny", "--set", "benchmark.seconds=0.2", "--set", "benchmark.min_of_peers=0",
         "--set", "benchmark.checks=[compute, collectives]")  # fmt: skip


def too_fast(folder):
    """Hardware that no machine of this century is."""
    limit = {"unit": "TFLOP/s", "fail": 1e6, "source": "test"}
    sku = {"name": "fast", "vendor": "cpu", "sources": {"test": {"what": "a test", "date": "2026-11-22"}}}
    (folder / "fast.yaml").write_text(yaml.safe_dump({**sku, "limits": {"matmul_fp32": limit}}))
    return folder / "fast.yaml"


@pytest.mark.long
def test_it_is_measured_anew_every_time_and_a_retraining_reuses_it(home, done):
    first, second = home.ok("qualify", *QUICK), home.ok("qualify", *QUICK)
    assert first.statuses() == second.statuses() == {"benchmark": "ran"}
    assert second.stage("benchmark")["job"]["submissions"] == first.stage("benchmark")["job"]["submissions"] + 1
    assert first.said["qualification"]["ref"] != second.said["qualification"]["ref"]
    assert second.said["qualification"]["matmul_gflops_per_rank"] > 0
    assert second.said["verdict"] in ("healthy", "degraded") and second.said["sku"] == "local-cpu"
    (machine,) = second.said["nodes"]
    assert second.said["usable"] == [machine["name"]] and machine["rates"]
    page = Path(second.said["page"])
    assert page.name == "qualification.html" and machine["name"] in page.read_text()
    ran = home.ok("retrain", *QUICK, "--to", "benchmark")
    assert ran.statuses()["benchmark"] == "reused"
    assert ran.stage("benchmark")["outputs"] == second.stage("benchmark")["outputs"]
    history = home.ok("qualify", "--history", machine["name"]).said["history"]
    newest = [one for one in history if one["qualification"] == second.said["qualification"]["ref"]]
    assert newest[0]["rates"] == machine["rates"] and len(history) >= 2
    assert any((home.path / "mlflow").rglob("qualification.html"))  # the page, beside the run


@pytest.mark.long
def test_a_failed_qualification_stops_a_retraining_before_it_submits_anything(home, done):
    fast = too_fast(home.path.parent)
    before = {path.name for path in home.path.glob("jobs/*")}
    ran = home.run("retrain", *QUICK, "--set", f"benchmark.sku={fast}", "--set", "training.seed=99")
    assert ran.code == 3 and ran.said["error"]["stage"] == "benchmark", ran.stderr
    statuses = ran.statuses()
    assert statuses["benchmark"] == "gate_closed" and statuses["plan"] == statuses["train"] == "not_run"
    made = {path.name for path in home.path.glob("jobs/*")} - before
    assert made and not [name for name in made if name.startswith("train")]
    check = ran.said["error"]["checks"][0]
    assert "machines that qualified" in {each["name"] for each in ran.said["error"]["checks"]} and check["limit"]
    report = (home.path.parent / ran.said["report"]).read_text()
    assert "matmul_fp32" in report
    alone = home.run("qualify", *QUICK, "--set", f"benchmark.sku={fast}")
    assert alone.code == 3 and alone.said["verdict"] == "failed", alone.stderr
    (machine,) = alone.said["nodes"]
    reason = next(reason for reason in machine["reasons"] if reason["check"] == "matmul_fp32")
    assert {"measured", "unit", "limit", "source"} <= reason.keys() and machine["verdict"] == "failed"
    assert json.dumps(alone.said["pairs"])
