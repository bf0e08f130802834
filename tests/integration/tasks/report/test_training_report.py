"""What the report of a run shows of its training, from the folder of the job."""

import json
import struct

import pytest
from html_page import Page

from tasks.report.data import RunReport
from tasks.report.page import MOST_POINTS, draw_training, read_training, render_page

HASH = "0123456789abcdef" * 4
METRICS = {"tokens_per_second_per_rank": 8123.4, "tflops_per_rank": 0.0123, "mfu": 0.412, "data_share": 0.004}
SECONDS = {"useful": 90.0, "stalled": 4.0, "lost": 1.0, "starting": 3.0, "restarting": 1.0, "idle": 1.0}
CHARTS = ("Shares of a step: compute", "Tokens a second", "Bits per byte of held-out text", "What the time of training")


def record(step, **more):
    parts = {"data_seconds": 0.01, "compute_seconds": 0.6, "communication_seconds": 0.3, "checkpoint_seconds": 0.0}
    told = {"step": step, "attempt": 1, "time": 1000.0 + step, "loss": 5 / step, "step_seconds": 1.0, **parts}
    return {**told, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1000.0, **more}


def job_folder(folder, *, steps=200, of="a test"):
    """What a training of so many steps left behind, a killed attempt among it."""
    records = [record(20), *(record(step, attempt=2) for step in range(1, steps + 1))]
    for at in range(50, steps + 1, 50):
        records[at]["heldout_bits_per_byte"] = 2.0 - at / 1000
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    time = {"seconds": SECONDS, "causes": {}, "flops_convention": "megatron", "peak": {"tflops": 989.0, "of": of}}
    (folder / "result.json").write_text(json.dumps({"time": {**time, "memory_gib": 1.5}}))
    keys = ("step", "loss", "learning_rate", "grad_norm")
    log = [json.dumps({key: each[key] for key in keys}) for each in records[1:]]
    (folder / "training_log.jsonl").write_text("\n".join(log))
    return folder


def page_of(folder):
    fixed = {"title": "retrain", "status": "completed", "started": "2026-11-22T10:04:11Z", "seconds": 754.2}
    job = {"id": "train-1", "folder": str(folder)}
    stages = [{"name": "train", "status": "ran", "seconds": 1.0, "metrics": METRICS, "job": job}]
    loss = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    made_of = {"dataset": f"dataset/tiny@{HASH}", "config_digest": HASH, "config": {}}
    told = {"stages": stages, "loss": loss, "training": read_training(folder)}
    return render_page(RunReport.model_validate({**fixed, **made_of, **told}))


def charts(text):
    return [found["aria-label"] for name, found in Page(text).elements if name == "svg" and "aria-label" in found]


def test_it_tells_how_fast_it_was_and_where_the_time_went(tmp_path):
    text = page_of(job_folder(tmp_path / "job"))
    said = Page(text).text
    for words in ("8,123", "0.0123", "41.2%", "0.4%", "FLOPs as megatron counts them", "against 989 TFLOP/s: a test"):
        assert words in said
    assert [next((one for one in charts(text) if one.startswith(begin)), "") for begin in CHARTS] == charts(text)[3:]
    assert "compute 60.0%, communication 30.0%, data 1.0%, checkpoint 0.0%, rest 9.0%" in charts(text)[3]
    assert "useful steps 90.0%, 1 min 30 s" in charts(text)[6]


def test_steps_that_were_done_again_count_once_and_many_are_drawn_as_few(tmp_path):
    told = read_training(job_folder(tmp_path / "job", steps=1000))
    assert len(told["steps"]) <= MOST_POINTS and told["steps"][-1]["step"] == 1000
    assert {point["step_seconds"] for point in told["steps"]} == {1.0}
    assert len(told["heldout"]) == 20


def test_hostile_words_stay_words(tmp_path):
    text = page_of(job_folder(tmp_path / "job", of="<script>alert(1)</script>"))
    assert "<script>" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize("gone", ["metrics.jsonl", "result.json"])
def test_a_folder_that_is_not_whole_leaves_its_part_out(tmp_path, gone):
    folder = job_folder(tmp_path / "job")
    (folder / gone).unlink()
    assert read_training(folder) is None
    assert len(charts(page_of(folder))) == 3
    assert draw_training(folder, folder / "training_log.jsonl") is None


def test_a_program_without_times_leaves_its_part_out(tmp_path):
    folder = job_folder(tmp_path / "job")
    (folder / "metrics.jsonl").write_text('{"step": 1, "speed": 2.0, "time": 1.0, "attempt": 1}\n')
    assert read_training(folder) is None


def test_the_picture_for_mlflow_is_a_png(tmp_path):
    folder = job_folder(tmp_path / "job")
    path = draw_training(folder, folder / "training_log.jsonl")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1200, 720)
    assert draw_training(folder, folder / "gone.jsonl") is None
