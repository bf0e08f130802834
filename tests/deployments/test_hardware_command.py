"""`headway hardware`, as a user types it: all kinds of machines, one in full, files of one's own, and what cannot be read."""

import json
import re

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from tasks.hardware.sku import load_sku
from tasks.settings import digest


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
    assert "vendors: there is no such key (it says 'nvidia')" in rows["broken"]["problem"]
    assert re.search(rf"^broken +cannot be read: .*{own / 'broken.yaml'}", headway(), re.M)
    assert headway("bench").startswith("local-cpu, also bench\n")
    with pytest.raises(ValueError, match="vendors: there is no such key"):
        headway("broken")


def test_a_size_of_which_nothing_is_known(own):
    with pytest.raises(ValueError, match="'Standard_D4s_v5': nothing is known of it; known are local-cpu, .*H100_v5"):
        headway("Standard_D4s_v5")
