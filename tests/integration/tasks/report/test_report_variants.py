"""The variants of an export on the page of its run."""

from html_page import Page

from tasks.report.data import RunReport
from tasks.report.page import render_page

PLAIN = {
    "title": "Retrain code",
    "status": "completed",
    "started": "2026-11-21T10:04:11Z",
    "seconds": 7.0,
    "dataset": "dataset/code@" + "a" * 64,
    "config_digest": "b" * 64,
    "config": {},
}
STAGE = {
    "name": "export",
    "status": "ran",
    "seconds": 3.0,
    "key": "k",
    "inputs": [],
    "outputs": [],
    "checks": [],
    "job": None,
}
METRICS = {
    **{"onnx_bytes": 4_000_000.0, "bits_per_byte": 1.5, "loss": 0.0},
    **{"tokens_per_second_onnx": 300.0, "tokens_per_second_torch": 200.0},
    **{"int8.onnx_bytes": 1_500_000.0, "int8.bits_per_byte": 1.51, "int8.loss": 0.0067},
    **{"int8.tokens_per_second_onnx": 500.0, "int8.tokens_per_second_torch": 200.0},
}
VARIANTS = {
    "limit": 0.02,
    "variants": {"int8": {"passed": True}, "bf16": {"passed": False, "why": "<it> does not run here"}},
}


def page(**parts):
    stage = {**STAGE, "metrics": METRICS}
    return Page(render_page(RunReport.model_validate({**PLAIN, "stages": [stage], **parts})))


def test_variants_stand_beside_the_model_with_size_loss_and_speed():
    shown = page(variants=VARIANTS)
    assert "a variant may lose 2" in shown.text
    assert "fp32, the model 4.0 1.5 +0.00% 300 1.50 times served" in shown.text
    assert "int8 1.5 1.51 +0.67% 500 2.50 times kept" in shown.text
    assert "bf16 left out: <it> does not run here" in shown.text


def test_a_run_without_variants_has_no_such_section():
    assert "Variants" not in page().text
