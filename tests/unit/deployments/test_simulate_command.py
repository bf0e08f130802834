"""`headway simulate`, as a user types it: the table, JSON, a case, a picture, and every mistake by name."""

import json
import struct

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app

pytestmark = pytest.mark.unit

CASE = """
name: llama 2 70b
network: {layers: 80, hidden: 8192, heads: 64, kv_heads: 8, ffn: 28672, gated: true, vocab: 32000, tied: false}
sequence: 4096
cluster: {sku: Standard_ND96isr_H100_v5, gpus: 512}
batch: {global: 1024}
"""
QUICK = ("--days", "5", "--runs", "3")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))


def headway(*words):
    ran = CliRunner().invoke(app, ["simulate", *map(str, words)], catch_exceptions=True)
    if ran.exception and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.stdout


def said(*words):
    return json.loads(headway(*words, "--json"))["simulation"]


def test_the_table_says_what_was_asked_and_what_became_of_it():
    page = headway("--gpus", 16384, *QUICK)
    assert page.startswith("16,384 GPUs in 2,048 machines and ")
    for words in (
        "fails most",
        "GPU-hours a failure",
        "20,000",
        "by formula",
        "restarting",
        "Daly's optimum",
        "best interval",
    ):
        assert words in page
    assert "give --stall-seconds" in page


def test_the_shares_of_all_time_sum_to_one_and_rates_are_in_order():
    found = said("--gpus", 4096, *QUICK)
    for level in ("low", "mid", "high"):
        band = found["bands"][level]
        assert sum(band["shares"].values()) == pytest.approx(1.0)
        assert band["goodput"]["p5"] <= band["goodput"]["p50"] <= band["goodput"]["p95"]
        assert band["goodput"]["p50"] == pytest.approx(band["expected"], abs=0.05)
        hours = found["gpu_hours_per_interruption"][level]
        assert band["mean_seconds"] == pytest.approx(hours * 3600 / 4096)
    assert found["goodput"]["low"] < found["goodput"]["mid"] < found["goodput"]["high"]
    assert len(found["sweep"]) == 9 and found["best_interval_seconds"] > 0
    assert (found["machines"], found["days"], found["seed"], found["bands"]["low"]["runs"]) == (512, 5.0, 0, 3)


def test_the_same_seed_says_the_same_and_another_does_not():
    words = ("--gpus", 4096, *QUICK, "--seed")
    assert said(*words, 3) == said(*words, 3) != said(*words, 4)


def test_a_case_gives_network_cluster_and_checkpoint(tmp_path):
    """68.98 G parameters of Llama 2 70B, 14 bytes each."""
    path = tmp_path / "case.yaml"
    path.write_text(CASE)
    found = said("--case", path, *QUICK)
    assert (found["gpus"], found["machines"]) == (512, 64)
    assert found["checkpoint"]["gib"] == pytest.approx(68.98e9 * 14 / 2**30, rel=0.002)
    assert found["checkpoint"]["write_seconds"] > 60 > found["checkpoint"]["stall_seconds"]
    assert any("Blob" in warning for warning in found["warnings"])
    lustre = said("--case", path, *QUICK, "--storage", "lustre-500")
    assert lustre["checkpoint"]["write_seconds"] != found["checkpoint"]["write_seconds"]


def test_what_was_measured_comes_before_what_is_known():
    words = ("--gpu", "H100", "--gpus", 64, "--checkpoint-gib", 900, *QUICK)
    known, given = said(*words), said(*words, "--stall-seconds", 2, "--write-seconds", 33, "--restart-seconds", 77)
    assert known["checkpoint"]["stall_seconds"] > 6
    assert given["checkpoint"] == {"gib": 900, "stall_seconds": 2, "write_seconds": 33}
    assert given["recovery"]["restart_seconds"] == 77
    fixed = said(*words, "--interval-seconds", 1234)
    assert fixed["interval_seconds"] == 1234 and fixed["interval_reason"] == "given"


def test_one_rate_three_times_differs_by_nothing():
    found = said("--gpus", 1024, *QUICK, "--mtbf-gpu-hours", 8100, 8100, 8100)["bands"]
    assert found["low"] == found["mid"] == found["high"]
    assert found["mid"]["mean_seconds"] / 3600 == pytest.approx(7.9, abs=0.02)


def test_spot_machines_are_evicted():
    calm = said("--gpus", 64, *QUICK)
    spot = said("--gpus", 64, *QUICK, "--spot", "5-10")
    assert spot["goodput"]["mid"] < calm["goodput"]["mid"] - 0.05
    assert spot["bands"]["low"]["mean_seconds"] < spot["bands"]["high"]["mean_seconds"]
    elastic = said("--gpus", 64, *QUICK, "--spot", "5-10", "--elastic")
    assert elastic["bands"]["mid"]["shares"]["waiting"] < spot["bands"]["mid"]["shares"]["waiting"]
    assert any("eviction class" in warning for warning in said("--gpus", 64, *QUICK, "--spot", "unknown")["warnings"])


def test_too_few_spares_are_told_with_how_many_would_do():
    few = said("--gpus", 16384, *QUICK, "--spares", 0)
    (note,) = [warning for warning in few["warnings"] if "waited" in warning]
    enough = said("--gpus", 16384, *QUICK)
    assert f"with {enough['spares']} spare ones" in note
    assert not any("waited" in warning for warning in enough["warnings"])


def test_a_picture_is_a_png(tmp_path):
    path = tmp_path / "simulated.png"
    assert f"picture: {path}" in headway("--gpus", 4096, *QUICK, "--picture", path)
    head = path.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:24])
    assert head.startswith(b"\x89PNG") and width > 1000 and height > 400


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "give --gpus"),
        ("--gpus 0", "--gpus 0"),
        ("--gpus -8", "--gpus -8"),
        ("--gpus 99999999999", "1,000,000"),
        ("--gpus 8 --days nan", "days nan"),
        ("--gpus 8 --days 0", "days 0"),
        ("--gpus 8 --days -3", "days -3"),
        ("--gpus 8 --days 1e9", "at most 3,650"),
        ("--gpus 8 --mtbf-gpu-hours 3 2 1", "smallest first"),
        ("--gpus 8 --mtbf-gpu-hours nan 2 3", "smallest first"),
        ("--gpus 8 --interval-seconds soon", "or auto"),
        ("--gpus 8 --interval-seconds 0", "--interval-seconds 0"),
        ("--gpus 8 --interval-seconds nan", "--interval-seconds nan"),
        ("--gpus 8 --checkpoint-gib -1", "--checkpoint-gib -1"),
        ("--gpus 8 --stall-seconds nan", "stall_seconds nan"),
        ("--gpus 8 --restart-seconds -1", "restart_seconds -1"),
        ("--gpus 8 --spot 7", "5-10"),
        ("--gpus 8 --spares -1", "spares -1"),
        ("--gpus 8 --elastic --fewest 9", "9 machines, of 1"),
        ("--gpus 8 --repair-hours inf", "--repair-hours inf"),
        ("--gpus 8 --shape 0", "shape 0"),
        ("--gpus 8 --runs 0", "runs 0"),
        ("--gpus 8 --runs 100000000", "at most 10,000"),
        ("--gpus 8 --seed -1", "seed -1"),
        ("--gpus 8 --gpu K80", "K80"),
        ("--gpus 8 --gpu H100 --sku x", "one of the two"),
        ("--gpus 8 --storage floppy", "lustre-125"),
        ("--case /nope.yaml", "no such file"),
        ("--gpus 8 --picture /nope/a.png", "no folder"),
    ],
)
def test_mistakes_are_named_before_anything_is_played(words, named):
    with pytest.raises(ValueError, match=named):
        headway(*words.split())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "0 cases"),
        ("- 1\n- 2", "case 1"),
        ("network: [", "case.yaml"),
        (f"{CASE}---{CASE}", "2 cases; simulate takes"),
        (CASE.replace("layers: 80", "layers: 0"), "network.layers"),
        (CASE + "colour: red\n", "colour"),
        (CASE.replace("gpus: 512", "gpus: 512, nodes: 3"), "cluster"),
    ],
)
def test_cases_that_are_none(tmp_path, text, named):
    path = tmp_path / "case.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        headway("--case", path)
