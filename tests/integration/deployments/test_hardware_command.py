"""`headway hardware`, as a user types it: all kinds of machines, one in full, files of one's own, and what cannot be read."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli.cluster import qualify
from deployments.cli.main import app
from tasks.config.base import digest
from tasks.config.flows import QualifyConfig
from tasks.hardware.sku import load_sku
from tasks.qualification.measured import Measurement, Probe, RankReport
from tasks.storage import open_store
from tasks.storage.manifest import Provenance


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of one's own files, in a home of its own."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "hardware"
    folder.mkdir(parents=True)
    return folder


def headway(*words):
    ran = CliRunner().invoke(app, ["hardware", *words], catch_exceptions=True)
    if ran.exception and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.stdout


def said(*words):
    return json.loads(headway(*words, "--json"))["hardware"]


def test_all_of_them_in_a_table_and_as_json(own):
    lines = headway().splitlines()
    assert re.match(r"name +gpus +GB each +bf16 peak +achievable +InfiniBand", lines[0])
    h100 = next(line for line in lines if line.startswith("Standard_ND96isr_H100_v5 "))
    assert re.search(r"8 NVIDIA H100 SXM5 80GB +80 +989 +794.5 +8 x 400 Gbit/s +>= 460 GB/s at 16 GiB +shipped$", h100)
    rows = {row["name"]: row for row in said()}
    assert len(rows) == len(lines) - 1 and not any(row["problem"] or row["own"] for row in rows.values())
    nvl = rows["Standard_NC40ads_H100_v5"]
    assert (nvl["gpu_memory_gb"], nvl["peak_bf16_tflops"], nvl["infiniband_ports"]) == (94, 835, 0)


def test_one_in_full_with_the_file_and_every_source(own):
    page = headway("standard_nd96isr_h200_v5")
    assert page.startswith("Standard_ND96isr_H200_v5\n")
    assert re.search(r"tasks/hardware/nd96isr_h200_v5.yaml, on top of nd96isr_h100_v5$", page, re.M)
    assert re.search(
        r"peer_to_peer +higher +396.4 +351.75 +335 +GB/s +\[aznhc, norm links, warn aznhc_warns\] in one", page
    )
    assert re.search(r"all_reduce +all 2 +16 GiB +485.572 +461.3 +437 +\[margin, norm azcluster\]", page)
    assert re.search(r"NCCL_TOPO_FILE +/opt/microsoft/ndv5-topo.xml", page)
    cited = set(re.findall(r"\[(\w+)[\],]|(?:norm|warn) (\w+)[\],]", page.partition("\nSources\n")[0]))
    listed = set(re.findall(r"^  \[(\w+)\]", page.partition("\nSources\n")[2], re.M))
    assert {key for pair in cited for key in pair if key} == listed


def test_one_as_json_is_what_runs_are_judged_by(own):
    found = said("ND96asr_v4")
    ours = load_sku("nd96asr_v4").model_dump(mode="json")
    assert {key: found[key] for key in ours} == ours
    assert found["digest"] == digest(ours) and found["file"].endswith("/nd96asr_v4.yaml")


def test_a_file_of_ones_own_and_one_that_cannot_be_read(own):
    mine = {"name": "local-cpu", "based_on": "local-cpu", "aliases": ["bench"]}
    (own / "local-cpu.yaml").write_text(yaml.safe_dump(mine))
    (own / "broken.yaml").write_text("name: broken\nvendors: nvidia\n")
    rows = {row["name"]: row for row in said()}
    assert rows["local-cpu"]["own"] and rows["local-cpu"]["file"] == str(own / "local-cpu.yaml")
    assert "vendors: there is no such key; did you mean vendor?" in rows["broken"]["problem"]
    assert re.search(rf"^broken +cannot be read: .*{own / 'broken.yaml'}", headway(), re.M)
    assert headway("bench").startswith("local-cpu, also bench\n")
    with pytest.raises(ValueError, match="vendors: there is no such key"):
        headway("broken")


def publish(own, folder, tflops, created, **verdict):
    probes = (Probe(check="matmul_fp32", measured=tflops, unit="TFLOP/s", peers=1.0),)
    rank = RankReport(rank=0, local_rank=0, node="n0", host="h0", probes=probes, done=("compute",))
    measured = Measurement(nodes=("n0",), expected_nodes=1, ranks_per_node=1, ranks=(rank,))
    folder.mkdir()
    page = {"measured": measured.model_dump(mode="json"), "verdict": verdict}
    (folder / "qualification.json").write_text(json.dumps(page))
    at = Provenance(name="bench-cluster", created=created.isoformat(timespec="seconds"))
    open_store(own.parent).publish(folder, kind="qualification", inputs=(), provenance=at)


def test_a_recorded_baseline_is_the_median_of_healthy_runs_by_the_same_hardware(own, tmp_path):
    by = {"sku": "local-cpu", "sku_digest": digest(load_sku("local-cpu").model_dump(mode="json")), "verdict": "healthy"}
    newest_first = [
        (0.05, {**by, "verdict": "degraded"}),
        (0.92, {**by, "sku_digest": "0" * 64}),
        (0.91, {**by, "verdict": "degraded"}),
        *[(0.04 + n / 1000, by) for n in range(10)],
        (0.90, by),  # before the last ten
    ]
    for age, (tflops, verdict) in enumerate(newest_first):
        created = datetime.now(UTC) - timedelta(hours=age)
        publish(own, tmp_path / str(age), tflops, created, **verdict)
    qualify._record(QualifyConfig.model_validate({"cluster": {"name": "bench-cluster"}}), "bench", False)
    found = load_sku("bench", own)
    assert found.limits["matmul_fp32"].norm == 0.045
    assert "median of 11 run(s)" in found.sources["recorded"].what


def test_a_recorded_qualification_is_shown_and_its_name_is_refused_before_another_run(own, tmp_path):
    probes = (Probe(check="matmul_fp32", measured=0.05, unit="TFLOP/s", peers=1.0),)
    rank = RankReport(rank=0, local_rank=0, node="n0", host="h0", probes=probes, done=("compute",))
    measured = Measurement(nodes=("n0",), expected_nodes=1, ranks_per_node=1, ranks=(rank,))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "qualification.json").write_text(json.dumps({"measured": measured.model_dump(mode="json")}))
    at = Provenance(name="bench-cluster", created="2026-11-22T10:00:00+00:00")
    open_store(own.parent).publish(tmp_path / "made", kind="qualification", inputs=(), provenance=at)
    settings = QualifyConfig.model_validate({"cluster": {"name": "bench-cluster"}})
    qualify._record(settings, "bench", False)
    assert re.search(r"matmul_fp32 +higher +0.05 +0.0375 +0.025 +TFLOP/s +\[recorded\]", headway("bench"))
    assert said("bench")["file"] == str(own / "bench.yaml")
    with pytest.raises(ValueError, match="bench.yaml has this name"):
        qualify._preflight(settings, "Bench", False)
    qualify._preflight(settings, "Bench", True)


def test_a_size_of_which_nothing_is_known(own):
    with pytest.raises(ValueError, match="'Standard_D4s_v5': nothing is known of it; known are local-cpu, .*H100_v5"):
        headway("Standard_D4s_v5")
